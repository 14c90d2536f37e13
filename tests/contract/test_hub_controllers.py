"""The hub's controllers against a real API server and the fake Slurm: what they write is taken, what they read is there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SlurmError
from slurmlet.base.files import write_json
from slurmlet.base.layout import ClusterFiles
from slurmlet.hub.agents import Agents
from slurmlet.hub.allocations.allocation_jobs import AllocationJobs
from slurmlet.hub.allocations.gang_controller import GangController
from slurmlet.hub.allocations.pool_controller import PoolController
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.nodes.allocation_node_controller import AllocationNodeController
from slurmlet.hub.nodes.partition_node_controller import PartitionNodeController
from slurmlet.hub.runner_credentials import RunnerAuthority
from slurmlet.hub.storage.claim_controller import ClaimController
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.events import EventRecorder
from slurmlet.model import claims, gangs
from slurmlet.model.partition_node import HubFacts
from slurmlet.slurm.fake import FakeSlurm
from tests.contract.control_plane import ControlPlane, all_closed

NODES, PODS = "/api/v1/nodes", "/api/v1/namespaces/default/pods"
FACTS = HubFacts("127.0.0.1", "login", 40123, "24.11.5", "v1.36.3", "0.1.0", "deadbeef")
_numbers = itertools.count()


class Link:
    """An agent's, who says yes to everything."""

    def __init__(self) -> None:
        self.alive = True
        self.hello = self.agent = {"host": "c1", "cpus": 4, "memory_mb": 4000, "job_id": "101"}

    async def tell(self, _message: Any) -> None: ...


class Rig:
    def __init__(self, plane: ControlPlane, client: ApiClient, root: Path) -> None:
        (root / "pki").symlink_to(plane.keys)
        self.settings = settings = Settings(
            files=ClusterFiles(root), cluster="default", cluster_id=f"feed{next(_numbers):04x}",
            kubernetes_version="v1.36.3", api_address="127.0.0.1", api_port=1, partitions=None, host="login",
            busy_poll_s=0.05, queued_poll_s=0.05, calm_poll_s=0.05, partition_poll_s=0.2, lease_renew_s=0.2,
        )  # fmt: skip
        self.client, self.slurm, self.agents = client, FakeSlurm(), Agents()
        self.events = EventRecorder(client, "login")
        self.watch = JobWatch(settings, self.slurm)
        self.nodes = PartitionNodeController(settings, client, self.slurm, self.events, FACTS)
        self.allocations = AllocationNodeController(
            settings, client, self.slurm, self.agents, self.watch, self.events, FACTS
        )
        jobs = AllocationJobs(settings, self.slurm, self.watch, RunnerAuthority(settings))
        shared = (settings, client, jobs, self.watch, self.agents, self.allocations, self.events)
        self.pool = PoolController(*shared, list)
        self.gangs = GangController(*shared, self.nodes.objects)
        self.claims = ClaimController(settings, client, self.events)

    async def exists(self, path: str) -> bool:
        try:
            await self.client.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def told(self, **fields: str) -> list[str]:
        selector = ",".join(f"{name.replace('_', '.')}={value}" for name, value in fields.items())
        found = await self.client.get("/api/v1/namespaces/default/events", fieldSelector=selector)
        return [f"{one['reason']}: {one['message']}" for one in found["items"]]

    def dial_in(self) -> list[str]:
        """Every job runs, and an agent of each of its hosts is there."""
        names = []
        for job in (*self.watch.pool_jobs(), *self.watch.gang_jobs().values()):
            self.slurm.start(job.job_id)
            hosts = (
                [f"{job.node}-{number}" for number in range(job.hosts)] if "gang-" in job.node else [job.node]
            )
            for host in hosts:
                agent = self.agents.expect(host, job.job_id)
                agent.link, agent.lost_s = Link(), None  # type: ignore[assignment]
                self.agents.node_changed(agent)
            names += hosts
        return names


async def until(true: Callable[[], Awaitable[Any]], timeout_s: float = 15.0) -> Any:
    async with asyncio.timeout(timeout_s):
        while not (found := await true()):
            await asyncio.sleep(0.05)
        return found


def run(
    plane: ControlPlane,
    root: Path,
    works: Callable[[Rig], list[Coroutine[Any, Any, None]]],
    scenario: Callable[[Rig], Awaitable[None]],
) -> None:
    async def go() -> None:
        async with all_closed(), asyncio.timeout(30), plane.client() as client:
            rig = Rig(plane, client, root)
            tasks = [asyncio.create_task(work) for work in (rig.events.run(), rig.watch.run(), *works(rig))]
            try:
                await scenario(rig)
                assert not [task for task in tasks if task.done()]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(go())


def test_a_partition_node_and_its_lease_come_back_when_somebody_deletes_them(
    api_plane: ControlPlane, tmp_path: Path
) -> None:
    async def scenario(rig: Rig) -> None:
        await until(lambda: rig.exists(f"{NODES}/batch"))
        lease = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/batch"
        first = await until(lambda: _found(rig, lease))
        node = await rig.client.get(f"{NODES}/batch")
        assert first["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]

        async def renewed() -> bool:
            return bool((await rig.client.get(lease))["spec"]["renewTime"] != first["spec"]["renewTime"])

        await until(renewed)
        await rig.client.delete(f"{NODES}/batch", {})

        async def another() -> bool:
            found = await _found(rig, f"{NODES}/batch")
            return found is not None and found["metadata"]["uid"] != node["metadata"]["uid"]

        await until(another)
        rig.slurm.listed_partitions = []
        await until(lambda: _absent(rig, f"{NODES}/batch"))

    run(api_plane, tmp_path, lambda rig: [rig.nodes.run(), rig.nodes.watch()], scenario)


async def _found(rig: Rig, path: str) -> Any:
    return await rig.client.get(path) if await rig.exists(path) else None


async def _absent(rig: Rig, path: str) -> bool:
    return not await rig.exists(path)


def test_a_pool_grows_serves_shrinks_and_says_what_slurm_refuses(
    api_plane: ControlPlane, tmp_path: Path
) -> None:
    async def scenario(rig: Rig) -> None:
        def refuse() -> None:
            raise SlurmError("sbatch failed (1): Invalid qos specification", said="Invalid qos specification")

        rig.slurm.hooks["submit"] = refuse
        write_json(rig.settings.files.pool, {"least": 1, "most": 1})
        (message,) = await until(lambda: rig.told(involvedObject_kind="Pool", reason="PoolRefused"))
        assert "Invalid qos specification" in message
        del rig.slurm.hooks["submit"]
        write_json(rig.settings.files.pool, {"least": 1, "most": 1, "options": [["qos", "normal"]]})

        async def jobs() -> Any:
            return rig.watch.pool_jobs()

        await until(jobs)
        (name,) = rig.dial_in()
        await asyncio.wait_for(rig.allocations.until_ready({name}), 10)
        assert (await rig.client.get(f"{NODES}/{name}"))["metadata"]["labels"][
            "slurmlet.io/kind"
        ] == "allocation"
        write_json(rig.settings.files.pool, {"least": 0, "most": 0})

        async def cordoned() -> bool:
            return bool((await rig.client.get(f"{NODES}/{name}"))["spec"].get("unschedulable"))

        await until(cordoned)
        await rig.client.delete(f"{NODES}/{name}", {})

    run(api_plane, tmp_path, lambda rig: [rig.allocations.run(), rig.pool.run()], scenario)


def test_a_gang_is_held_until_its_nodes_are_ready(api_plane: ControlPlane, tmp_path: Path) -> None:
    def pod(name: str) -> dict[str, Any]:
        marks = {gangs.GANG: "team", gangs.SIZE_ANNOTATION: "2"}
        return {
            "metadata": {"name": name, "labels": {gangs.GANG: "team"}, "annotations": marks},
            "spec": {
                "schedulingGates": [{"name": gangs.GANG}],
                "containers": [{"name": "c", "image": "x"}],
                "automountServiceAccountToken": False,
            },
        }

    async def scenario(rig: Rig) -> None:
        accounts = "/api/v1/namespaces/default/serviceaccounts"
        if not await rig.exists(f"{accounts}/default"):
            await rig.client.create(accounts, {"metadata": {"name": "default"}})
        for name in ("a", "b"):
            await rig.client.create(PODS, pod(name))

        async def jobs() -> Any:
            return rig.watch.gang_jobs()

        await until(jobs)
        held = await rig.client.get(f"{PODS}/a")
        assert held["spec"]["schedulingGates"]
        names = rig.dial_in()

        async def free() -> bool:
            pods = [await rig.client.get(f"{PODS}/{name}") for name in ("a", "b")]
            return all(not one["spec"].get("schedulingGates") for one in pods)

        await until(free)
        assert all(rig.allocations.is_ready(name) for name in names)
        assert await until(lambda: rig.told(involvedObject_name="a", reason="GangSubmitted"))
        for name in ("a", "b"):
            await rig.client.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 0})
        for name in names:
            await rig.client.delete(f"{NODES}/{name}", {})

    run(api_plane, tmp_path, lambda rig: [rig.allocations.run(), rig.gangs.run()], scenario)


def test_a_claim_becomes_a_directory_and_the_volume_takes_it_away(
    api_plane: ControlPlane, tmp_path: Path
) -> None:
    own, volumes = "/api/v1/namespaces/default/persistentvolumeclaims", "/api/v1/persistentvolumes"

    async def scenario(rig: Rig) -> None:
        claim = {
            "metadata": {
                "name": "data",
                "annotations": {"volume.kubernetes.io/storage-provisioner": claims.PROVISIONER},
            },
            "spec": {
                "storageClassName": "shared",
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        made = await rig.client.create(own, claim)
        path = f"{volumes}/pvc-{made['metadata']['uid']}"
        await until(lambda: rig.exists(path))
        directory = tmp_path / "volumes" / path.rpartition("/")[2]
        assert directory.is_dir()
        assert await until(lambda: rig.told(involvedObject_name="data", reason="ProvisioningSucceeded"))
        # What the controller manager would do.
        await rig.client.delete(f"{own}/data", {})
        await rig.client.patch(f"{own}/data", {"metadata": {"finalizers": None}})
        await rig.client.patch(f"{path}/status", {"status": {"phase": "Released"}})

        async def ours_is_off() -> bool:
            found = await _found(rig, path)
            return found is None or claims.FINALIZER not in (found["metadata"].get("finalizers") or ())

        await until(ours_is_off)
        assert not directory.exists()

    run(api_plane, tmp_path, lambda rig: [rig.claims.run()], scenario)
