"""The bootstrap provider against real objects: what Cluster API's contract asks for, once a Machine owns a config."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.conditions import is_true
from slurmlet.operators.provisioning.bootstrap.bootstrap_controller import BootstrapController
from tests.contract.control_plane import ControlPlane
from tests.contract.provisioning_kinds import CLUSTER_API
from tests.contract.provisioning_site import KEY, Site, b64, run, site
from tests.contract.test_provisioning_injection import Told

Obj = dict[str, Any]
API = "bootstrap.cluster.x-k8s.io/v1alpha1"
_numbers = itertools.count()


class Rig:
    def __init__(self, place: Site, told: Told) -> None:
        self.place, self.client, self.told = place, place.client, told
        self.root = f"/apis/{API}/namespaces/{place.home}"

    async def cluster(self, name: str = "alpha", **spec: Any) -> None:
        await self._core("Cluster", name, spec)

    async def machine(self, name: str, cluster: str = "alpha") -> Obj:
        return await self._core("Machine", name, {"clusterName": cluster})

    async def config(
        self,
        name: str,
        spec: Obj,
        kind: str = "SlurmWorkerConfig",
        machine: str = "",
        cluster: str = "alpha",
    ) -> None:
        """As Cluster API clones it from a template, with its Machine as owner."""
        metadata: Obj = {"name": name}
        if machine:
            uid = (await self.machine(machine, cluster))["metadata"]["uid"]
            owner = {"apiVersion": f"{CLUSTER_API}/v1beta2", "kind": "Machine", "name": machine, "uid": uid}
            metadata["ownerReferences"] = [owner]
        body = {"apiVersion": API, "kind": kind, "metadata": metadata, "spec": spec}
        await self.client.create(f"{self.root}/{kind.lower()}s", body)

    async def get(self, name: str, plural: str = "slurmworkerconfigs") -> Obj:
        return await self.client.get(f"{self.root}/{plural}/{name}")

    async def until(self, name: str, true: Callable[[Obj], bool], plural: str = "slurmworkerconfigs") -> Obj:
        while not true(found := await self.get(name, plural)):
            await asyncio.sleep(0.05)
        return found

    async def secret(self, name: str) -> Obj | None:
        try:
            return await self.client.get(f"/api/v1/namespaces/{self.place.home}/secrets/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def _core(self, kind: str, name: str, spec: Obj) -> Obj:
        body = {
            "apiVersion": f"{CLUSTER_API}/v1beta2",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        path = f"/apis/{CLUSTER_API}/v1beta2/namespaces/{self.place.home}/{kind.lower()}s"
        return await self.client.create(path, body)


def scene(
    plane: ControlPlane, scenario: Callable[[Rig], Awaitable[None]], kind: str = "SlurmWorkerConfig"
) -> None:
    async def go(client: ApiClient) -> None:
        place = await site(client, plane, f"boot-{next(_numbers)}")
        told, (lookup, workload) = Told(), place.lookup()
        task = asyncio.create_task(BootstrapController(client, told, lookup, kind).run())  # type: ignore[arg-type]
        try:
            await scenario(Rig(place, told))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await workload.close()

    run(plane, go)


def condition(config: Obj, type_: str = "Ready") -> Obj:
    found = (config.get("status") or {}).get("conditions") or ()
    return next((one for one in found if one["type"] == type_), {})


def test_a_config_gets_its_secret_once_a_machine_owns_it(api_plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.cluster()
        await rig.config("early", {})
        await rig.until("early", lambda found: condition(found).get("reason") == "WaitingForMachine")
        assert await rig.secret("early") is None
        await rig.config("w-0", {"commands": ["echo 1"]}, machine="m-0")
        config = await rig.until("w-0", lambda found: is_true(found, "Ready"))
        status = config["status"]
        # Contracts v1beta2 and v1beta1.
        assert (status["initialization"], status["ready"]) == ({"dataSecretCreated": True}, True)
        secret = await rig.secret(status["dataSecretName"])
        assert secret is not None
        assert secret["metadata"]["labels"] == {"cluster.x-k8s.io/cluster-name": "alpha"}
        (owner,) = secret["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (config["metadata"]["uid"], True)
        assert list(secret["data"]) == ["value"]
        text = base64.b64decode(secret["data"]["value"]).decode()
        assert "-N m-0" in text
        # A machine may have read it: later changes of the config are for the next one.
        await rig.client.patch(f"{rig.root}/slurmworkerconfigs/w-0", {"spec": {"commands": ["echo 2"]}})
        await rig.until(
            "w-0", lambda found: found["status"]["observedGeneration"] == found["metadata"]["generation"]
        )
        assert await rig.secret("w-0") == secret

    scene(api_plane, scenario)


def test_a_paused_cluster_gets_nothing_and_a_foreign_secret_is_left_alone(api_plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.cluster(paused=True)
        await rig.config("w-0", {}, machine="m-0")
        await rig.until("w-0", lambda found: is_true(found, "Paused"))
        assert await rig.secret("w-0") is None
        path = f"/apis/{CLUSTER_API}/v1beta2/namespaces/{rig.place.home}/clusters/alpha"
        await rig.client.patch(path, {"spec": {"paused": False}})
        await rig.place.secret(rig.place.home, "w-1", value="mine")
        await rig.config("w-1", {}, machine="m-1")
        await rig.until("w-1", lambda found: condition(found).get("reason") == "SecretTaken")
        secret = await rig.secret("w-1")
        assert secret is not None
        assert secret["data"] == {"value": b64("mine")}

    scene(api_plane, scenario)


def test_what_is_missing_is_said_and_made_up_for(api_plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.cluster()
        await rig.config("w-0", {"slurmCluster": "hpc"}, machine="m-0")
        failed = await rig.until("w-0", lambda found: condition(found).get("status") == "False")
        assert "hpc" in condition(failed)["message"]
        await rig.place.kubeconfig()
        await rig.place.slurm_cluster("hpc", {"namespace": rig.place.slurm})
        await rig.until("w-0", lambda found: condition(found)["reason"] == "StatefulSetBroken")
        await rig.place.controller()
        await rig.until("w-0", lambda found: is_true(found, "Ready"))
        secret = await rig.secret("w-0")
        assert secret is not None
        text = base64.b64decode(secret["data"]["value"]).decode()
        assert "conf_server=192.0.2.7:6817" in text
        assert b64(KEY) in text
        # Configs of other tests are seen too.
        assert any(kind == "Warning" and "StatefulSet: " in text for kind, _, text in rig.told.events)

    scene(api_plane, scenario)


def test_the_thesis_kind_with_a_file_from_a_secret(api_plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.cluster()
        await rig.place.secret(rig.place.home, "munge", key=b"\0\1")
        file = {"path": "/etc/munge/munge.key", "contentFrom": {"secret": {"name": "munge", "key": "key"}}}
        spec = {"files": [file], "commands": ["slurmd -Z"]}
        await rig.config("v-0", spec, kind="VirtualKubeletConfig", machine="m-0")
        await rig.until("v-0", lambda found: is_true(found, "Ready"), "virtualkubeletconfigs")
        secret = await rig.secret("v-0")
        assert secret is not None
        assert b64(b"\0\1") in base64.b64decode(secret["data"]["value"]).decode()

    scene(api_plane, scenario, "VirtualKubeletConfig")


def test_a_cloud_worker_waits_for_the_name_that_power_saving_gives_its_machine(
    api_plane: ControlPlane,
) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.cluster()
        await rig.config("w-0", {"slurmd": {"cloud": True, "confServer": "ctl"}}, machine="m-0")
        await rig.until("w-0", lambda found: condition(found).get("reason") == "WaitingForNodeName")
        assert await rig.secret("w-0") is None
        path = f"/apis/{CLUSTER_API}/v1beta2/namespaces/{rig.place.home}/machines/m-0"
        await rig.client.patch(path, {"metadata": {"annotations": {"slurmlet.io/slurm-node": "cloud7"}}})
        await rig.until("w-0", lambda found: is_true(found, "Ready"))
        secret = await rig.secret("w-0")
        assert secret is not None
        text = base64.b64decode(secret["data"]["value"]).decode()
        assert "-N cloud7" in text
        assert "-Z" not in text, "a CLOUD node is in slurm.conf"

    scene(api_plane, scenario)
