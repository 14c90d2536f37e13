"""The operator of `slurmlet provision` against a real API server; Slurm is the fake, Cluster API a small stand-in."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.model.slurm_admin_values import DRAIN_REASON
from slurmlet.operators.provisioning import node_records, operator_process, power_saving, status_view
from slurmlet.operators.provisioning import worker_annotations as marks
from slurmlet.operators.provisioning.operator_settings import OperatorSettings
from slurmlet.operators.provisioning.provisioning_metrics import ProvisioningMetrics
from slurmlet.operators.provisioning.resource_definitions import custom_resource_definitions
from slurmlet.slurm.admin_fake import FakeAdmin
from slurmlet.slurm.fake import away
from tests.contract.control_plane import ControlPlane
from tests.contract.machine_controllers import MachineControllers
from tests.contract.provisioning_kinds import foreign_kinds, install

Obj = dict[str, Any]
NAMES = itertools.count(1)
Scenario = Callable[["Rig"], Awaitable[None]]


class Source:
    def __init__(self, admin: FakeAdmin) -> None:
        self._admin = admin

    async def admin(self, _: Any) -> FakeAdmin:
        return self._admin


class Rig:
    """One namespace with a SlurmCluster, a WorkerSet and a MachineDeployment `gpu`."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self.namespace = f"provision-{next(NAMES)}"
        self.root = f"/apis/slurmlet.io/v1alpha1/namespaces/{self.namespace}"
        self.slurm = FakeAdmin()
        self.slurm.now_s = time.time()
        self.metrics = ProvisioningMetrics()
        self.capi = MachineControllers(client, self.namespace, "gpu", self._boot, self.slurm.vanish)
        self.schedules = True
        self._operator: asyncio.Task[None] | None = None

    def _boot(self, name: str) -> None:
        self.slurm.register(name)

    async def prepare(self, **spec: Any) -> None:
        await self.client.create("/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        await self.client.create(
            f"{self.root}/slurmclusters",
            {"apiVersion": "slurmlet.io/v1alpha1", "kind": "SlurmCluster", "metadata": {"name": "lab"},
             "spec": {"connection": {"commands": {}}}},
        )  # fmt: skip
        await self.capi.make()
        await self.worker_set("gpu", **spec)

    async def worker_set(self, name: str, annotations: dict[str, str] | None = None, **spec: Any) -> None:
        asked = {
            "slurmCluster": "lab", "partitions": ["batch"], "shape": {"cpus": 4, "memoryMB": 8000}, "max": 4,
            "scaleInAfterSeconds": 0,
            "scaleTargetRef": {"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachineDeployment", "name": "gpu"},
        }  # fmt: skip
        metadata = {"name": name, "annotations": annotations or {}}
        obj = {
            "apiVersion": "slurmlet.io/v1alpha1",
            "kind": "WorkerSet",
            "metadata": metadata,
            "spec": {**asked, **spec},
        }
        await self.client.create(f"{self.root}/workersets", obj)

    def start_operator(self) -> None:
        settings = OperatorSettings(namespace=self.namespace, interval_s=0.2, identity="test")
        work = operator_process.lead(settings, self.client, Source(self.slurm), self.metrics)
        self._operator = asyncio.create_task(work, name="operator under test")

    async def stop_operator(self) -> None:
        running, self._operator = self._operator, None
        if running is not None:
            assert not running.done(), running.exception()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def schedule(self) -> None:
        """What slurmctld does all the time."""
        while True:
            if self.schedules:
                self.slurm.schedule()
            await asyncio.sleep(0.02)

    async def status(self, name: str = "gpu") -> Obj:
        found: Obj = (await self.client.get(f"{self.root}/workersets/{name}")).get("status") or {}
        return found

    async def condition(self, type_: str, name: str = "gpu") -> tuple[str, str, str]:
        listed = (await self.status(name)).get("conditions") or ()
        return next(
            ((one["status"], one["reason"], one["message"]) for one in listed if one["type"] == type_),
            ("", "", ""),
        )

    async def hooked(self, machine: str) -> None:
        async def is_so() -> bool:
            found = await self.client.get(f"{self.capi.machines_path}/{machine}")
            return marks.PRE_TERMINATE_HOOK in (found["metadata"].get("annotations") or {})

        await until(is_so)

    async def events(self) -> set[str]:
        listed = await self.client.get(f"/api/v1/namespaces/{self.namespace}/events")
        return {one["reason"] for one in listed["items"]}


async def until(true: Callable[[], Awaitable[Any]], limit_s: float = 40.0) -> Any:
    async with asyncio.timeout(limit_s):
        while not (found := await true()):
            await asyncio.sleep(0.05)
        return found


async def until_plain(true: Callable[[], Any]) -> Any:
    async def asked() -> Any:
        return true()

    return await until(asked)


@pytest.fixture(scope="module")
def plane(api_plane: ControlPlane) -> ControlPlane:
    async def prepare() -> None:
        async with api_plane.client() as client:
            await install(client, [*custom_resource_definitions(), *foreign_kinds()])

    asyncio.run(prepare())
    return api_plane


def run(plane: ControlPlane, scenario: Scenario, *, operator: bool = True, **spec: Any) -> None:
    async def go() -> None:
        async with asyncio.timeout(90), plane.client() as client:
            rig = Rig(client)
            await rig.prepare(**spec)
            tasks = [asyncio.create_task(work) for work in (rig.capi.run(), rig.schedule())]
            if operator:
                rig.start_operator()
            try:
                await scenario(rig)
                assert not [task.exception() for task in tasks if task.done()]
                assert rig.slurm.killed == [], "a job lost its node"
            finally:
                await rig.stop_operator()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        # Connections whose handshake was cut short with their task take a moment to close.
        await asyncio.sleep(0.1)

    asyncio.run(go())


async def circle(rig: Rig) -> None:
    """From zero workers: two jobs of one node, one of two; then nothing waits, and nothing is left."""
    jobs = [rig.slurm.submit(), rig.slurm.submit(), rig.slurm.submit(nodes_min=2)]
    await until_plain(lambda: all(rig.slurm.jobs[job].nodes for job in jobs))
    for job in jobs:
        rig.slurm.finish(job)

    async def empty() -> bool:
        return not rig.slurm.nodes and not await rig.capi.machines()

    await until(empty)


def test_workers_come_for_jobs_and_go_when_nothing_waits(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        await circle(rig)
        assert len(rig.capi.removed) == 4
        up = rig.capi.replica_changes[: rig.capi.replica_changes.index(4) + 1]
        down = rig.capi.replica_changes[len(up) - 1 :]
        assert up == sorted(up), "no step back on the way up"
        assert down == sorted(down, reverse=True), "no bounce on the way down"

        async def at_rest() -> bool:
            told = await rig.status()
            return (told.get("replicas"), told.get("desired"), told.get("busy"), told.get("waitingJobs")) == (
                0,
                0,
                0,
                0,
            )

        await until(at_rest)
        assert (await rig.condition("Ready"))[0] == "True"
        assert (await rig.status())["lastDecision"]["reason"]

        async def told() -> bool:
            return {"ScaledOut", "ScaledIn", "Draining", "SlurmDrain", "Detached"} - await rig.events() <= {
                "SlurmDrain"
            }

        await until(told)
        text = rig.metrics.exposition(leading=True)
        assert (
            f'slurmlet_provision_desired{{namespace="{rig.namespace}",slurm_cluster="lab",worker_set="gpu"}} 0'
            in text
        )
        assert 'act="ScaledOut"' in text

    run(plane, scenario)


def test_an_operator_that_is_killed_again_and_again_gets_there_all_the_same(plane: ControlPlane) -> None:
    """Cut off at whatever it does: once after each request that it makes, and in between."""

    async def scenario(rig: Rig) -> None:
        work = asyncio.create_task(circle(rig))
        for number in itertools.count(1):
            rig.start_operator()
            await asyncio.wait([work], timeout=0.08 + 0.07 * (number % 7))
            await rig.stop_operator()
            if work.done():
                break
        await work
        assert len(rig.capi.removed) == 4, "nothing was made twice"

    run(plane, scenario, operator=False)


def test_a_machine_deleted_by_hand_waits_for_its_job(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        job = rig.slurm.submit()
        await until_plain(lambda: rig.slurm.jobs[job].nodes)
        (node,) = rig.slurm.jobs[job].nodes

        await rig.hooked(node)
        await rig.client.delete(f"{rig.capi.machines_path}/{node}", {})
        await until_plain(lambda: rig.slurm.nodes[node].drain)
        assert rig.slurm.nodes[node].reason.startswith(DRAIN_REASON)
        assert node not in rig.capi.removed
        rig.slurm.finish(job)
        await until_plain(lambda: node in rig.capi.removed)
        assert node not in rig.slurm.nodes, "its record went first"

    run(plane, scenario)


def test_a_suspended_job_keeps_its_machine(plane: ControlPlane) -> None:
    """The node's own state says idle while a job is suspended there."""

    async def scenario(rig: Rig) -> None:
        job = rig.slurm.submit()
        await until_plain(lambda: rig.slurm.jobs[job].nodes)
        (node,) = rig.slurm.jobs[job].nodes
        await rig.hooked(node)
        rig.slurm.jobs[job] = replace(rig.slurm.jobs[job], state="SUSPENDED")
        rig.slurm.nodes[node] = replace(rig.slurm.nodes[node], state="IDLE", cpus_allocated=0)
        await rig.client.delete(f"{rig.capi.machines_path}/{node}", {})
        await until_plain(lambda: rig.slurm.nodes[node].drain)
        for _ in range(10):
            await asyncio.sleep(0.1)
            assert node in rig.slurm.nodes
        rig.slurm.finish(job)
        await until_plain(lambda: node not in rig.slurm.nodes)

    run(plane, scenario)


def test_nothing_is_changed_while_slurm_is_away(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        job = rig.slurm.submit()
        await until_plain(lambda: rig.slurm.jobs[job].nodes)
        (node,) = rig.slurm.jobs[job].nodes
        await rig.hooked(node)
        rig.slurm.hooks = dict.fromkeys(("queue", "workers", "drain", "resume", "delete"), away)

        async def unreachable() -> bool:
            return (await rig.condition("Ready"))[:2] == ("False", "SlurmUnreachable")

        await until(unreachable)
        before = list(rig.slurm.calls)
        await rig.client.delete(f"{rig.capi.machines_path}/{node}", {})
        rig.slurm.finish(job)
        rig.slurm.submit(nodes_min=3)

        async def held() -> bool:
            return "DetachFailed" in await rig.events()

        await until(held)
        assert (rig.slurm.calls, rig.capi.removed) == (before, [])
        cluster = await rig.client.get(f"{rig.root}/slurmclusters/lab")
        assert [one["status"] for one in cluster["status"]["conditions"] if one["type"] == "Reachable"] == [
            "False"
        ]
        rig.slurm.hooks = {}
        await until_plain(lambda: node in rig.capi.removed)

        async def again() -> bool:
            return (await rig.condition("Degraded"))[0] == "False"

        await until(again)

    run(plane, scenario)


def test_a_person_may_let_a_machine_go_while_slurm_is_away(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        await until_plain(lambda: rig.slurm.nodes)
        (node,) = rig.slurm.nodes
        await rig.hooked(node)
        rig.slurm.hooks = dict.fromkeys(("queue", "workers"), away)
        path = f"{rig.capi.machines_path}/{node}"
        await rig.client.patch(path, {"metadata": {"annotations": {marks.SKIP_DRAIN: "true"}}})
        await rig.client.delete(path, {})
        await until_plain(lambda: node in rig.capi.removed)

    run(plane, scenario, min=1)


def test_a_drain_of_a_person_is_left_alone(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        rig.slurm.submit()
        await until_plain(lambda: len(rig.slurm.nodes) == 1 and rig.slurm.nodes)
        (job,), (node,) = rig.slurm.jobs, rig.slurm.nodes
        await rig.slurm.drain(node, "bad memory, do not touch")
        rig.slurm.calls.clear()
        rig.slurm.finish(job)
        other = rig.slurm.submit()
        await until_plain(lambda: rig.slurm.jobs[other].nodes)
        rig.slurm.finish(other)
        await until_plain(lambda: len(rig.slurm.nodes) == 1)
        assert rig.slurm.nodes[node].reason == "bad memory, do not touch"
        assert not [call for call in rig.slurm.calls if call[1] == node]
        assert node not in rig.capi.removed

    run(plane, scenario)


def test_records_of_machines_that_are_gone_are_deleted_and_no_others(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_records, "GHOST_AFTER_S", 0.3)

    async def scenario(rig: Rig) -> None:
        for name in ("gpu-ghost", "gpu-drained", "gpu-static", "other-1", "gpu-answers"):
            rig.slurm.register(name)
        for name in ("gpu-ghost", "gpu-drained", "gpu-static", "other-1"):
            rig.slurm.vanish(name)
        await rig.slurm.drain("gpu-drained", "a person is looking into it")
        static = rig.slurm.nodes["gpu-static"]
        rig.slurm.nodes["gpu-static"] = replace(static, flags=static.flags - {"DYNAMIC_NORM"})
        rig.slurm.register(
            "gpu-left", flags=frozenset({"DYNAMIC_NORM", "DRAIN"}), partitions=frozenset({"x"})
        )
        reason = f"{DRAIN_REASON} scale-in of WorkerSet {rig.namespace}/deleted"
        rig.slurm.nodes["gpu-left"] = replace(rig.slurm.nodes["gpu-left"], reason=reason)
        rig.start_operator()
        await until_plain(lambda: "gpu-ghost" not in rig.slurm.nodes)
        await until_plain(lambda: not rig.slurm.nodes["gpu-left"].drain)
        await asyncio.sleep(0.6)
        assert set(rig.slurm.nodes) == {"gpu-drained", "gpu-static", "other-1", "gpu-answers", "gpu-left"}

    run(plane, scenario, operator=False)


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (
            {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Nothing", "name": "x"}},
            "TargetNotFound",
            "Nothing",
        ),
        (
            {"scaleTargetRef": {"apiVersion": "v1", "kind": "Secret", "name": "x"}},
            "TargetNotScalable",
            "/scale",
        ),
        (
            {
                "scaleTargetRef": {
                    "apiVersion": "cluster.x-k8s.io/v1beta2",
                    "kind": "MachineDeployment",
                    "name": "no",
                }
            },
            "TargetNotFound",
            "spec.scaleTargetRef",
        ),
        (
            {
                "slurmCluster": "elsewhere",
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "x"},
            },
            "SlurmClusterNotFound",
            "spec.slurmCluster",
        ),
    ],
)
def test_bad_input_is_told_and_changes_nothing(
    plane: ControlPlane, change: Obj, reason: str, words: str
) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.worker_set("bad", **change)

        async def told() -> bool:
            status, found, message = await rig.condition("Ready", "bad")
            return (status, found) == ("False", reason) and words in message

        await until(told)
        # The sound one beside it goes on.
        job = rig.slurm.submit()
        await until_plain(lambda: rig.slurm.jobs[job].nodes)

    run(plane, scenario)


def test_the_api_server_refuses_a_minimum_above_the_maximum(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(ApiError, match="min must not be greater than max"):
            await rig.worker_set("bad", min=5, max=4)

    run(plane, scenario, operator=False)


def test_a_paused_set_says_what_it_would_do(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        rig.slurm.submit()

        async def told() -> bool:
            said = ((await rig.status()).get("lastDecision") or {}).get("reason", "")
            return (await rig.condition("Ready"))[:2] == ("False", "Paused") and "would scale out" in said

        await until(told)
        assert await rig.capi.machines() == []

    run(plane, scenario, paused=True)


def test_a_job_over_its_partitions_limit_on_nodes_makes_no_machine(plane: ControlPlane) -> None:
    """To Slurm it looks as if nodes were missing."""

    async def scenario(rig: Rig) -> None:
        rig.slurm.limits = {"batch": 2}
        rig.slurm.submit(nodes_min=3, reason="PartitionNodeLimit")
        rig.slurm.submit(nodes_min=1)

        async def one_made() -> bool:
            return (await rig.status()).get("desired") == 1 and len(await rig.capi.machines()) == 1

        await until(one_made)

    run(plane, scenario)


def test_power_saving_makes_the_machines_that_slurm_asks_for_and_gives_them_names(
    plane: ControlPlane,
) -> None:
    async def scenario(rig: Rig) -> None:
        path = f"{rig.root}/workersets/gpu"
        await rig.client.patch(path, {"metadata": {"annotations": {marks.POWER_SAVING_NODES: "cloud[1-4]"}}})
        rig.start_operator()
        assert await power_saving.power(rig.client, rig.namespace, ["cloud2", "cloud3"], on=True)
        assert await power_saving.power(rig.client, rig.namespace, ["cloud3"], on=True) == [], (
            "repeated: nothing to do"
        )

        async def names() -> dict[str, str]:
            return {
                one["metadata"]["annotations"][marks.SLURM_NODE]: one["metadata"]["name"]
                for one in await rig.capi.machines()
                if marks.SLURM_NODE in (one["metadata"].get("annotations") or {})
                and not one["metadata"].get("deletionTimestamp")
            }

        async def two() -> bool:
            return set(await names()) == {"cloud2", "cloud3"}

        await until(two)
        kept = (await names())["cloud3"]
        await power_saving.power(rig.client, rig.namespace, ["cloud2"], on=False)

        async def one() -> bool:
            return await names() == {"cloud3": kept} and len(await rig.capi.machines()) == 1

        await until(one)

    run(plane, scenario, operator=False)


def test_nodes_that_no_set_stands_for_are_an_error(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(Exception, match="no WorkerSet stands for cloud9"):
            await power_saving.power(rig.client, rig.namespace, ["cloud9"], on=True)

    run(plane, scenario, operator=False)


def test_the_address_of_a_pod_worker_is_put_right_after_each_registration(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        labels = {"app": "slurmd"}
        template = {
            "metadata": {"labels": labels},
            "spec": {"containers": [{"name": "slurmd", "image": "x"}]},
        }
        await rig.client.create(
            f"/apis/apps/v1/namespaces/{rig.namespace}/statefulsets",
            {"metadata": {"name": "pods"},
             "spec": {"replicas": 1, "serviceName": "x", "selector": {"matchLabels": labels}, "template": template}},
        )  # fmt: skip
        await rig.client.create(
            f"/api/v1/namespaces/{rig.namespace}/serviceaccounts", {"metadata": {"name": "default"}}
        )
        pods = f"/api/v1/namespaces/{rig.namespace}/pods"
        await rig.client.create(
            pods, {"metadata": {"name": "pods-0", "labels": labels}, "spec": template["spec"]}
        )
        host = {"hostIP": "192.0.2.7", "hostIPs": [{"ip": "192.0.2.7"}]}
        status = {"podIP": "10.1.2.3", "podIPs": [{"ip": "10.1.2.3"}], **host}
        await rig.client.patch(f"{pods}/pods-0/status", {"status": status})
        target = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "pods"}
        await rig.worker_set("pods", scaleTargetRef=target, min=1)
        rig.slurm.register("pods-0")
        await until_plain(lambda: rig.slurm.nodes["pods-0"].address == "10.1.2.3")
        rig.slurm.register("pods-0")
        assert rig.slurm.nodes["pods-0"].address == "pods-0"
        await until_plain(lambda: rig.slurm.nodes["pods-0"].address == "10.1.2.3")
        path = f"{rig.root}/workersets/pods"
        await rig.client.patch(path, {"metadata": {"annotations": {marks.NODE_ADDRESS: "HostIP"}}})
        await until_plain(lambda: rig.slurm.nodes["pods-0"].address == "192.0.2.7")

    run(plane, scenario)


def test_status_and_plan_show_machines_beside_nodes_and_the_next_steps(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        rig.schedules = False
        rig.slurm.submit()
        rig.slurm.submit(held=True, reason="JobHeldUser")
        source = Source(rig.slurm)
        (plan,) = await status_view.read_plan(rig.client, source, time.time(), rig.namespace)
        assert plan.sets[0].acts == ("set replicas from 0 to 1",)
        assert any("held" in text for text in plan.ignored), plan
        rig.start_operator()
        await until_plain(lambda: rig.slurm.nodes)
        rig.schedules = True
        await until_plain(lambda: any(job.nodes for job in rig.slurm.jobs.values()))
        rig.slurm.register("stranger")
        (view,) = await status_view.read_status(rig.client, source, rig.namespace)
        rows = {row.node: row for row in view.machines}
        (name,) = [node for node in rows if node != "stranger"]
        assert (rows[name].machine, rows[name].state, len(rows[name].jobs)) == (name, "ALLOCATED", 1)
        assert (rows["stranger"].machine, rows["stranger"].state) == ("", "IDLE")
        assert view.waiting == {"JobHeldUser": 1}
        rig.slurm.hooks = {"queue": away}
        (view,) = await status_view.read_status(rig.client, source, rig.namespace)
        assert "Unable to contact" in view.problem
        assert view.sets[0].replicas == 1
        assert status_view.as_json([view])[0]["name"] == f"{rig.namespace}/lab"

    run(plane, scenario, operator=False)


def test_a_machine_deleted_while_it_boots_waits_for_its_node(plane: ControlPlane) -> None:
    """Else a job could be placed there in the moment in which its host is switched off."""

    async def scenario(rig: Rig) -> None:
        rig.capi.booting = False
        rig.slurm.submit()
        (machine,) = await until(rig.capi.machines)
        name = machine["metadata"]["name"]
        path = f"{rig.capi.machines_path}/{name}"
        await rig.hooked(name)
        await rig.client.patch(path, {"spec": {"bootstrap": {"dataSecretName": "made"}}})
        await rig.client.delete(path, {})

        async def waits() -> bool:
            return "WaitingForRegistration" in await rig.events()

        await until(waits)
        assert rig.capi.removed == []
        rig.slurm.register(name)
        await until_plain(
            lambda: name in rig.capi.removed or any(job.nodes for job in rig.slurm.jobs.values())
        )
        for job in [one.job_id for one in rig.slurm.jobs.values() if one.nodes == (name,)]:
            rig.slurm.finish(job)
        await until_plain(lambda: name in rig.capi.removed)

    run(plane, scenario)


def test_a_machine_of_a_cloud_node_leaves_it_ready_for_the_next_call(plane: ControlPlane) -> None:
    """Suspended by Slurm, or deleted by hand: the node must not stay drained."""

    async def scenario(rig: Rig) -> None:
        path = f"{rig.root}/workersets/gpu"
        await rig.client.patch(path, {"metadata": {"annotations": {marks.POWER_SAVING_NODES: "cloud[1-2]"}}})
        rig.start_operator()
        for name in ("cloud1", "cloud2"):
            rig.slurm.register(name, flags=frozenset({"CLOUD"}))
        await power_saving.power(rig.client, rig.namespace, ["cloud1", "cloud2"], on=True)

        async def machine_of(node: str) -> str:
            for one in await rig.capi.machines():
                annotations = one["metadata"].get("annotations") or {}
                if annotations.get(marks.SLURM_NODE) == node and marks.PRE_DRAIN_HOOK in annotations:
                    return str(one["metadata"]["name"])
            return ""

        first, second = await until(lambda: machine_of("cloud1")), await until(lambda: machine_of("cloud2"))
        await rig.slurm.power_down("cloud1")
        await power_saving.power(rig.client, rig.namespace, ["cloud1"], on=False)
        await until_plain(lambda: first in rig.capi.removed)
        assert not rig.slurm.nodes["cloud1"].drain
        await rig.client.delete(f"{rig.capi.machines_path}/{second}", {})
        await until_plain(lambda: second in rig.capi.removed)
        assert (rig.slurm.nodes["cloud2"].drain, rig.slurm.nodes["cloud2"].powered_down) == (False, True)

    run(plane, scenario, operator=False)


def test_of_two_sets_with_one_target_the_older_one_scales_it(plane: ControlPlane) -> None:
    async def scenario(rig: Rig) -> None:
        target = {"apiVersion": "cluster.x-k8s.io/v1beta1", "kind": "MachineDeployment", "name": "gpu"}
        await rig.worker_set("second", scaleTargetRef=target, min=3)

        async def told() -> bool:
            return (await rig.condition("Ready", "second"))[:2] == ("False", "TargetTaken")

        await until(told)
        job = rig.slurm.submit()
        await until_plain(lambda: rig.slurm.jobs[job].nodes)
        assert rig.capi.replica_changes == [0, 1]

    run(plane, scenario)
