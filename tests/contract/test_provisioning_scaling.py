"""The Scaling Webhook and its controller at a real API server: called, missed, dry-run, and with mistakes."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.webhook import WebhookServer
from slurmlet.operators.provisioning.scaling_webhook import PATH, STATUS, MirrorController, ScalingWebhook
from slurmlet.operators.provisioning.stored_certificates import Called, StoredCertificates
from tests.contract.control_plane import ControlPlane
from tests.contract.provisioning_kinds import CLUSTER_API
from tests.contract.provisioning_manifests import webhook_configuration
from tests.contract.provisioning_site import Site, run, site
from tests.contract.test_provisioning_injection import Told

Obj = dict[str, Any]
_numbers = itertools.count()


class Rig:
    def __init__(self, place: Site, told: Told) -> None:
        self.place, self.client, self.told = place, place.client, told
        self.deployments = f"/apis/apps/v1/namespaces/{place.home}/deployments"
        self.machines = f"/apis/{CLUSTER_API}/v1beta2/namespaces/{place.home}/machinedeployments"
        self.config = f"/api/v1/namespaces/{place.home}/configmaps"

    async def deployment(self, name: str, replicas: int = 0) -> None:
        labels = {"app": name}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
        spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
        await self.client.create(self.deployments, {"metadata": {"name": name}, "spec": spec})

    async def machine_deployment(self, name: str, replicas: int = 0) -> None:
        body = {
            "apiVersion": f"{CLUSTER_API}/v1beta2",
            "kind": "MachineDeployment",
            "metadata": {"name": name},
            "spec": {"replicas": replicas},
        }
        await self.client.create(self.machines, body)

    async def map(self, mirrors: Any) -> None:
        body = {
            "metadata": {"name": "scaling-webhook-configmap"},
            "data": {"mirrors": mirrors if isinstance(mirrors, str) else json.dumps(mirrors)},
        }
        try:
            await self.client.create(self.config, body)
        except ApiError as error:
            if error.status != 409:
                raise
            await self.client.patch(f"{self.config}/scaling-webhook-configmap", {"data": body["data"]})

    async def scale(self, name: str, replicas: int, path: str = "") -> None:
        await self.client.patch(f"{path or self.deployments}/{name}/scale", {"spec": {"replicas": replicas}})

    async def machines_are(self, name: str, replicas: int) -> None:
        while (await self.client.get(f"{self.machines}/{name}"))["spec"]["replicas"] != replicas:
            await asyncio.sleep(0.05)

    async def status(self) -> str:
        found = await self.client.get(f"{self.config}/scaling-webhook-configmap")
        return str((found["metadata"].get("annotations") or {}).get(STATUS, ""))


@asynccontextmanager
async def running(*works: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def scene(plane: ControlPlane, scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def go(client: ApiClient) -> None:
        place = await site(client, plane, f"scale-{next(_numbers)}")
        await scenario(Rig(place, Told()))

    run(plane, go)


def mirror(name: str, *targets: str, **more: Any) -> Obj:
    return {"deployment": {"name": name}, "targets": [{"name": one} for one in targets], **more}


def test_targets_follow_their_mirror_also_after_missed_calls(api_plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.deployment("mirror", 2)
        await rig.deployment("other", 5)
        for name in ("a", "b", "alone"):
            await rig.machine_deployment(name, 1)
        await rig.map([mirror("mirror", "a", "b")])
        made = MirrorController(rig.client, rig.told, rig.place.home)  # type: ignore[arg-type]
        # All this happened while nobody was there.
        async with running(made.run()):
            await rig.machines_are("a", 2)
            await rig.machines_are("b", 2)
            await rig.scale("mirror", 4)
            await rig.machines_are("a", 4)
            # A direct edit, past the subresource.
            await rig.client.patch(f"{rig.deployments}/mirror", {"spec": {"replicas": 1}})
            await rig.machines_are("b", 1)
            # A target that is not there: nothing changes, not even for those that are.
            await rig.map([mirror("mirror", "a", "gone")])
            await rig.scale("mirror", 3)
            while not any(one[1] == "UnknownTarget" for one in rig.told.events):
                await asyncio.sleep(0.05)
            assert (await rig.client.get(f"{rig.machines}/a"))["spec"]["replicas"] == 1
            await rig.map("- [")
            while "data.mirrors is not YAML" not in await rig.status():
                await asyncio.sleep(0.05)
            await rig.map([mirror("mirror", "a", "b")])
            await rig.machines_are("a", 3)
            assert await rig.status() == "Ready"
        assert (await rig.client.get(f"{rig.machines}/alone"))["spec"]["replicas"] == 1

    scene(api_plane, scenario)


def test_what_cannot_be_carried_out_is_refused_and_dry_runs_change_nothing(api_plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.deployment("mirror")
        await rig.deployment("other")
        await rig.machine_deployment("a")
        label = rig.place.home
        kind, name = "validatingwebhookconfigurations", f"scaling-{label}"
        certificates = StoredCertificates(rig.client, label, ["127.0.0.1"], [Called(kind, name, PATH)])
        await certificates.prepare()
        webhook = ScalingWebhook(rig.client, label)
        server = WebhookServer({PATH: webhook.review}, tokens=lambda: certificates.tokens)
        port = await server.start("127.0.0.1", 0, certificates.context)
        body = webhook_configuration(
            "slurmlet-provision-scaling", name, f"https://127.0.0.1:{port}{PATH}", label
        )
        await rig.client.create(f"/apis/admissionregistration.k8s.io/v1/{kind}", body)
        try:
            async with running(certificates.keep(), certificates.follow()):
                # Once the caBundle is there, a map that cannot be read refuses its mirror; the server takes a moment.
                await rig.map("- [")
                while True:
                    try:
                        await rig.scale("other", 1)
                        await rig.scale("mirror", 1)
                    except ApiError as error:
                        if "data.mirrors is not YAML" in error.message:
                            break
                    await asyncio.sleep(0.1)
                await rig.map([mirror("mirror", "a")])
                await rig.scale("mirror", 2)
                await rig.map([mirror("mirror", "a", "gone")])
                with pytest.raises(ApiError, match=r"target MachineDeployment \S+/gone is not there"):
                    await rig.scale("mirror", 3)
                await rig.scale("other", 3)
                await rig.map([mirror("mirror", "a")])
                await rig.client._request(
                    "PATCH",
                    f"{rig.deployments}/mirror/scale",
                    query={"dryRun": "All"},
                    body={"spec": {"replicas": 7}},
                    content_type="application/merge-patch+json",
                )
                worker_set = {
                    "apiVersion": "slurmlet.io/v1alpha1",
                    "kind": "WorkerSet",
                    "metadata": {"name": "ws"},
                    "spec": {
                        "slurmCluster": "hpc",
                        "scaleTargetRef": {
                            "apiVersion": f"{CLUSTER_API}/v1beta2",
                            "kind": "MachineDeployment",
                            "name": "a",
                        },
                        "partitions": ["x"],
                        "shape": {"cpus": 1, "memoryMB": 1},
                        "max": 1,
                    },
                }
                await rig.client.create(
                    f"/apis/slurmlet.io/v1alpha1/namespaces/{label}/workersets", worker_set
                )
                with pytest.raises(ApiError, match="is scaled by WorkerSet ws"):
                    await rig.scale("mirror", 4)
        finally:
            await rig.client.delete(f"/apis/admissionregistration.k8s.io/v1/{kind}/{name}", {})
            await server.stop()
        assert (await rig.client.get(f"{rig.machines}/a"))["spec"]["replicas"] == 0

    scene(api_plane, scenario)
