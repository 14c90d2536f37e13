"""Nodes and their leases as written to a scripted API server."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slurmlet.hub.nodes import partition_node_controller
from slurmlet.hub.nodes.partition_node_controller import PartitionNodeController
from slurmlet.images.image_store import Image
from slurmlet.kube.events import EventRecorder
from slurmlet.model.partition_node import HubFacts
from slurmlet.model.slurm_values import Partition
from slurmlet.slurm.fake import FakeSlurm, away
from tests.unit.hub_making import make_settings
from tests.unit.loopback import Api, api_server, make_keys, until

NODES = "/api/v1/nodes"
EVENTS = "/api/v1/namespaces/default/events"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
BATCH = Partition("batch", True, True, "infinite", 3, 3, 48, 16, 18000, 6000, 0)
SHORT = replace(BATCH, name="short", default=False)
FACTS = HubFacts("10.0.0.1", "login", 40123, "24.11.5", "v1.36.3", "0.1.0", "deadbeef")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def node(name: str, *taints: str) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "5"}
    return {
        "metadata": metadata,
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
    }


class Rig:
    """What is written, and a server that answers with whole objects as the real one does."""

    def __init__(self, api: Api) -> None:
        self.api, self.slurm = api, FakeSlurm()
        self.slurm.listed_partitions = [BATCH]
        self.taints: tuple[str, ...] = ()
        self.present = False
        api.on("GET", NODES, {"metadata": {"resourceVersion": "5"}, "items": []})
        api.on("POST", NODES, self._make)
        api.on("POST", LEASES, self._make)
        api.on("PATCH", "*", self._change)

    async def _make(self, request: web.Request) -> web.Response:
        name = (await request.json())["metadata"]["name"]
        if self.present:
            return web.json_response({"message": "already exists"}, status=409)
        return web.json_response(node(name, *self.taints), status=201)

    async def _change(self, request: web.Request) -> web.Response:
        name = request.path.removesuffix("/status").rpartition("/")[2]
        return web.json_response(node(name, *self.taints))

    def patches(self, path: str) -> list[Any]:
        return [body for _, body in self.api.seen("PATCH", path)]


def kept(
    keys: Path,
    scenario: Callable[[Rig, PartitionNodeController], Awaitable[None]],
    begin: Callable[[Rig], None] = lambda _: None,
    images: Callable[[], list[Image]] = list,
    quiet: bool = False,
    **changes: object,
) -> None:
    async def run() -> None:
        settings = make_settings(keys.parent, **{"partition_poll_s": 0.02, "lease_renew_s": 0.02, **changes})
        async with api_server(keys) as api:
            rig = Rig(api)
            begin(rig)
            recorder = EventRecorder(api.client, "login")
            keeper = PartitionNodeController(
                settings, api.client, rig.slurm, recorder, FACTS, images, lambda: quiet
            )
            writer = asyncio.create_task(recorder.run())
            task = asyncio.create_task(keeper.run())
            try:
                await scenario(rig, keeper)
                assert not task.done()
            finally:
                for one in (task, writer):
                    one.cancel()
                await asyncio.gather(task, writer, return_exceptions=True)

    asyncio.run(run())


def test_a_partition_becomes_a_node_with_a_status_and_a_lease(keys: Path) -> None:
    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: len(rig.patches(f"{LEASES}/batch")) >= 2)
        ((_, made),) = rig.api.seen("POST", NODES)
        assert made["metadata"]["labels"]["slurmlet.io/partition"] == "batch"
        (status,) = rig.patches(f"{NODES}/batch/status")
        assert status["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] == 40123
        ((_, lease),) = rig.api.seen("POST", LEASES)
        assert lease["spec"]["holderIdentity"] == "batch"
        times = [one["spec"]["renewTime"] for one in rig.patches(f"{LEASES}/batch")]
        assert times == sorted(set(times)), "each renewal is later than the one before"
        assert keeper.partition_of("batch") == BATCH
        assert keeper.partition_of("other") is None

    kept(keys, scenario)


def test_a_node_and_a_lease_that_are_there_already_are_taken_over(keys: Path) -> None:
    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: rig.patches(f"{LEASES}/batch"))
        (change,) = rig.patches(f"{NODES}/batch")
        assert set(change) == {"metadata"}, "taints stay as people set them"
        assert len(rig.patches(f"{NODES}/batch/status")) == 1

    def begin(rig: Rig) -> None:
        rig.present = True

    kept(keys, scenario, begin)


def test_the_taint_of_a_new_node_is_taken_off_and_others_stay(keys: Path) -> None:
    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: rig.patches(f"{NODES}/batch"))
        change = rig.patches(f"{NODES}/batch")[0]
        assert change["spec"] == {"taints": [{"key": "mine", "effect": "NoSchedule"}]}

    def begin(rig: Rig) -> None:
        rig.taints = ("node.kubernetes.io/not-ready", "mine")

    kept(keys, scenario, begin)


@pytest.mark.parametrize("configured", [True, False])
def test_taints_that_once_ranked_nodes_go_where_the_scheduler_is_configured(
    keys: Path, configured: bool
) -> None:
    old = {"key": "slurmlet.io/pool-0", "effect": "PreferNoSchedule"}
    mine = {"key": "mine", "effect": "PreferNoSchedule"}

    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: len(rig.patches(f"{LEASES}/batch")) >= 2)
        written = [one["spec"]["taints"] for one in rig.patches(f"{NODES}/batch") if "spec" in one]
        assert written == ([[mine]] if configured else [])

    def begin(rig: Rig) -> None:
        async def change(_: web.Request) -> web.Response:
            return web.json_response({**node("batch"), "spec": {"taints": [old, mine]}})

        rig.api.on("PATCH", f"{NODES}/batch/status", change)
        config = make_settings(keys.parent).files.scheduler_config
        config.parent.mkdir(parents=True, exist_ok=True)
        config.unlink(missing_ok=True)
        if configured:
            config.write_text("{}")

    kept(keys, scenario, begin)


def test_the_label_follows_slurms_default_partition(keys: Path) -> None:
    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: len(rig.patches(f"{NODES}/short/status")) == 1)
        rig.present = True
        rig.slurm.listed_partitions = [replace(BATCH, default=False), replace(SHORT, default=True)]
        await until(
            lambda: all(len(rig.patches(f"{NODES}/{name}/status")) == 2 for name in ("batch", "short"))
        )
        labels = {
            name: rig.patches(f"{NODES}/{name}")[-1]["metadata"]["labels"]["slurmlet.io/default-partition"]
            for name in ("batch", "short")
        }
        assert labels == {"batch": "false", "short": "true"}

    def begin(rig: Rig) -> None:
        rig.slurm.listed_partitions = [BATCH, SHORT]

    kept(keys, scenario, begin)


def test_a_node_that_is_not_ready_keeps_its_taint(keys: Path) -> None:
    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: rig.patches(f"{NODES}/batch/status"))
        await until(lambda: len(rig.api.seen("GET", NODES)) >= 2)
        assert rig.patches(f"{NODES}/batch") == []

    def begin(rig: Rig) -> None:
        rig.taints = ("node.kubernetes.io/not-ready",)
        rig.slurm.listed_partitions = [replace(BATCH, up=False)]

    kept(keys, scenario, begin)


def test_only_chosen_partitions_become_nodes(keys: Path) -> None:
    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: rig.patches(f"{NODES}/short/status"))
        assert [body["metadata"]["name"] for _, body in rig.api.seen("POST", NODES)] == ["short"]
        assert keeper.partition_of("batch") is None

    def begin(rig: Rig) -> None:
        rig.slurm.listed_partitions = [BATCH, SHORT]

    kept(keys, scenario, begin, partitions=frozenset({"short"}))


def test_nodes_of_partitions_that_are_gone_are_removed_and_no_others(keys: Path) -> None:
    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: rig.api.seen("DELETE", f"{NODES}/old"))
        assert rig.api.seen("DELETE", f"{NODES}/batch") == []
        asked = {query.get("labelSelector") for query, _ in rig.api.seen("GET", NODES)}
        assert asked == {"slurmlet.io/kind=partition"}, "nodes that are not ours are not even looked at"

    def begin(rig: Rig) -> None:
        rig.api.on(
            "GET", NODES, {"metadata": {"resourceVersion": "5"}, "items": [node("batch"), node("old")]}
        )
        rig.api.on("DELETE", f"{NODES}/old", {})

    kept(keys, scenario, begin)


def test_an_unchanged_partition_is_not_written_again(keys: Path) -> None:
    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: len(rig.api.seen("GET", NODES)) >= 3)
        assert len(rig.patches(f"{NODES}/batch/status")) == 1
        rig.slurm.listed_partitions = [replace(BATCH, nodes_usable=0)]
        await until(lambda: len(rig.patches(f"{NODES}/batch/status")) == 2)

    kept(keys, scenario)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ValueError("a bug")])
def test_leases_are_renewed_while_the_home_fails_and_it_is_told(keys: Path, error: Exception) -> None:
    calls = 0

    def failing() -> list[Image]:
        nonlocal calls
        calls += 1
        if 1 < calls < 5:
            raise error
        return []

    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: calls >= 2, 5)
        before = len(rig.patches(f"{LEASES}/batch"))
        await until(lambda: rig.api.seen("POST", EVENTS), 5)
        assert len(rig.patches(f"{LEASES}/batch")) >= before
        event = rig.api.seen("POST", EVENTS)[0][1]
        assert (event["involvedObject"]["name"], event["reason"]) == ("batch", "PartitionsNotKnown")
        assert str(error) in event["message"]
        await until(lambda: calls >= 6, 5)
        before = len(rig.patches(f"{LEASES}/batch"))
        await until(lambda: len(rig.patches(f"{LEASES}/batch")) > before + 1, 5)

    kept(keys, scenario, images=failing)


def test_a_slurm_that_is_away_costs_no_lease(keys: Path) -> None:
    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: rig.patches(f"{LEASES}/batch"))
        rig.slurm.hooks["partitions"] = away
        await asyncio.sleep(0.05)
        before = len(rig.patches(f"{LEASES}/batch"))
        await until(lambda: len(rig.patches(f"{LEASES}/batch")) > before + 2)

    kept(keys, scenario)


def counted_looks(rig: Rig) -> list[None]:
    looks: list[None] = []
    rig.slurm.hooks["partitions"] = lambda: looks.append(None)
    return looks


def test_somebody_who_asks_sees_partitions_as_they_are_also_at_rest(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_node_controller, "_REFRESH_S", 0.0)

    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        looks = counted_looks(rig)
        await until(lambda: rig.patches(f"{NODES}/batch/status"))
        rig.slurm.listed_partitions = [replace(BATCH, up=False, state="DOWN")]
        await until(lambda: len(rig.patches(f"{LEASES}/batch")) >= 3)
        assert len(looks) == 1, "at rest nobody looks"
        await keeper.refresh()
        assert len(looks) == 2
        conditions = rig.patches(f"{NODES}/batch/status")[-1]["status"]["conditions"]
        assert next(one["reason"] for one in conditions if one["type"] == "Ready") == "PartitionDown"

    kept(keys, scenario, quiet=True, calm_partition_poll_s=3600.0)


def test_many_who_ask_at_once_cost_slurm_one_look(keys: Path) -> None:
    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        looks = counted_looks(rig)
        await until(lambda: rig.patches(f"{NODES}/batch/status"))
        await asyncio.gather(*(keeper.refresh() for _ in range(20)))
        assert len(looks) == 1

    kept(keys, scenario, quiet=True, calm_partition_poll_s=3600.0)


def test_a_slurm_that_does_not_answer_is_not_asked_faster_by_somebody_who_asks(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_node_controller, "_REFRESH_S", 0.0)
    asked: list[None] = []

    def refuse() -> None:
        asked.append(None)
        away()

    def begin(rig: Rig) -> None:
        rig.slurm.hooks["partitions"] = refuse

    async def scenario(rig: Rig, keeper: PartitionNodeController) -> None:
        await until(lambda: asked)
        waiting = [asyncio.create_task(keeper.refresh()) for _ in range(20)]
        await asyncio.sleep(0)
        assert len(asked) == 1
        rig.slurm.hooks.clear()
        keeper._listing.add("Slurm")  # its back-off is over
        await asyncio.gather(*waiting)
        assert rig.patches(f"{NODES}/batch/status")

    kept(keys, scenario, begin, lease_renew_s=3600.0)
