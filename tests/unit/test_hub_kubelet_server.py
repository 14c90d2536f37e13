"""The kubelet's API as the API server asks it: over TLS, with a certificate, for pods whose runners a test plays."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from slurmlet.controlplane import pki
from slurmlet.controlplane.pki import Leaf
from slurmlet.hub.hub_metrics import Counts
from slurmlet.hub.kubelet.kubelet_server import API_SERVER, KubeletServer
from slurmlet.hub.kubelet.kubelet_stats import StatServer
from slurmlet.hub.runner_links import LinkLost
from slurmlet.model.usage_samples import ContainerSample, Measured, PodSample
from slurmlet.protocol import wire
from tests.unit.fakes import RunnerStream
from tests.unit.hub_making import make_job, make_settings
from tests.unit.loopback import until
from tests.unit.reports import pod_report

STARTED = "2026-01-01T00:00:00Z"
LEAVES = [
    Leaf("hub-server", "hub-ca", "hub", server=True, dns=("hub.slurmlet",), addresses=("127.0.0.1",)),
    Leaf("kubelet-client", "hub-ca", API_SERVER, client=True),
    Leaf("stranger", "hub-ca", "slurmlet:pod:u-1", client=True),
]
WEBSOCKET = "v4.channel.k8s.io"
Test = Callable[["Hub"], Coroutine[Any, Any, None]]


class Worker:
    """A pod with one container `c`, and its runner's link."""

    def __init__(self, name: str, node: str = "batch", state: str = "running") -> None:
        metadata = {"name": name, "namespace": "ns", "uid": f"u-{name}"}
        spec = {"containers": [{"name": "c", "image": "busybox"}], "nodeName": node}
        self.state: Any = SimpleNamespace(
            pod={"metadata": metadata, "spec": spec, "status": {"phase": "Running", "startTime": STARTED}},
            report=pod_report({"c": {"state": state}}), uid=f"u-{name}", node=node, live_link=self, runner_done=False,
            terminal=False, began_before=True,
        )  # fmt: skip
        self.alive = True
        self.lost = False
        self.asked: list[Any] = []
        self.streams: list[RunnerStream] = []
        # What the runner says as soon as a stream is opened; None: the end of the stream.
        self.script: list[tuple[int, bytes] | None] = []

    async def linked(self, _timeout_s: float) -> Any:
        return self.state.live_link

    async def open(self, message: Callable[[int], Any]) -> RunnerStream:
        if self.lost:
            raise LinkLost
        self.asked.append(message(7))
        stream = RunnerStream()
        self.streams.append(stream)
        for each in self.script:
            if each is None:
                stream.end()
            else:
                stream.says(*each)
        return stream


class Usage:
    async def look(self, states: Any, *, space: bool = False) -> dict[str, Measured]:
        now = PodSample(1767225610.0, (ContainerSample("c", STARTED, 5.0, 1 << 20, 1 << 20, 1),))
        return {state.uid: Measured(now) for state in states}

    def other_cpu_s(self, _node: str, _measured: Any) -> float:
        return 2.0

    def silent(self, _states: Any) -> int:
        return 1


class Hub:
    def __init__(self, root: Path) -> None:
        self.settings = make_settings(root)
        pki.ensure(self.settings.files.pki, LEAVES)
        self.workers = [Worker("a"), Worker("b", node="short")]
        node = {"metadata": {"name": "batch", "creationTimestamp": STARTED}}
        partition = SimpleNamespace(memory_mb=64 << 10)
        nodes = SimpleNamespace(
            partition_of=lambda name: partition if name == "batch" else None, objects=lambda: [node],
            made_at=lambda name: STARTED if name == "batch" else "",
        )  # fmt: skip
        watch = SimpleNamespace(all_jobs=lambda: {"7": make_job("7"), "8": make_job("8", state="PENDING")})
        stats = StatServer(self, nodes, Usage(), watch, Counts())  # type: ignore[arg-type]
        self._server = KubeletServer(self.settings, self, stats, self._refresh)  # type: ignore[arg-type]
        self.url = ""
        self.refreshed = 0

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers)

    async def _refresh(self) -> None:
        self.refreshed += 1

    def named(self, namespace: str, name: str) -> Worker | None:
        return next(
            (each for each in self.workers if (namespace, f"u-{name}") == ("ns", each.state.uid)), None
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        runner = await self._server.start(0)
        self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()

    def client(self, name: str = "kubelet-client") -> aiohttp.ClientSession:
        keys = self.settings.files.pki
        context = ssl.create_default_context(cafile=str(keys / "hub-ca.crt"))
        context.load_cert_chain(str(keys / f"{name}.crt"), str(keys / f"{name}.key"))
        return aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(ssl=context))

    async def get(self, path: str, node: str = "", client: str = "kubelet-client") -> tuple[int, str]:
        headers = {"X-Forwarded-Uri": f"/api/v1/nodes/{node}/proxy{path}"} if node else {}
        async with self.client(client) as session, session.get(path, headers=headers) as answer:
            return answer.status, await answer.text()

    @asynccontextmanager
    async def command(self, path: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        async with self.client() as session, session.ws_connect(path, protocols=[WEBSOCKET]) as socket:
            yield socket


def served(test: Test) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        async def main() -> None:
            hub = Hub(tmp_path)
            async with hub.running():
                await test(hub)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def heard(socket: aiohttp.ClientWebSocketResponse) -> list[tuple[int, bytes]]:
    """All that a client is told, to the end: (channel, bytes)."""
    return [(message.data[0], message.data[1:]) async for message in socket if message.data]


def status(code: int) -> tuple[int, bytes]:
    return wire.STATUS, json.dumps({"exit_code": code}).encode()


@served
async def test_nobody_but_the_api_server_is_let_in(hub: Hub) -> None:
    assert await hub.get("/healthz") == (200, "ok")
    assert await hub.get("/healthz", client="stranger") == (403, "only the API server may ask\n")
    assert (await hub.get("/containerLogs/ns/a/c", client="stranger"))[0] == 403
    assert hub.workers[0].asked == []


@served
async def test_logs_come_from_the_runner_as_they_were_asked_for(hub: Hub) -> None:
    hub.workers[0].script = [(wire.STDOUT, b"one\n"), (wire.STDOUT, b"two\n"), None]
    assert await hub.get("/containerLogs/ns/a/c?tailLines=2&timestamps=true") == (200, "one\ntwo\n")
    (asked,) = hub.workers[0].asked
    assert (asked["what"], asked["container"]) == ("logs", "c")
    assert (asked["tail_lines"], asked["timestamps"], asked["follow"]) == (2, True, False)
    assert hub.workers[0].streams[0].closed


@served
async def test_what_has_no_logs_is_told_in_the_kubelets_words(hub: Hub) -> None:
    assert await hub.get("/containerLogs/ns/nobody/c") == (404, 'pod "nobody" not found\n')
    assert await hub.get("/containerLogs/ns/a/x") == (404, 'container "x" not found in pod "a"\n')
    hub.workers[0].script = [(wire.STATUS, b'{"error": "no such time"}'), None]
    assert await hub.get("/containerLogs/ns/a/c") == (400, "no such time")


@served
async def test_an_error_after_the_first_lines_ends_the_answer(hub: Hub) -> None:
    hub.workers[0].script = [(wire.STDOUT, b"one\n"), (wire.STATUS, b'{"error": "the disk is gone"}'), None]
    assert await hub.get("/containerLogs/ns/a/c") == (200, "one\n")


@served
async def test_logs_of_a_runner_that_is_gone_come_from_its_files(hub: Hub) -> None:
    worker = hub.workers[0]
    worker.state.runner_done, worker.state.live_link = True, None
    assert await hub.get("/containerLogs/ns/a/c") == (400, 'no log of container "c" is left')
    directory = hub.settings.files.pod(worker.state.uid).logs / "c"
    directory.mkdir(parents=True)
    (directory / "0.log").write_text("2026-01-01T00:00:00.000000000Z stdout F kept\n")
    assert await hub.get("/containerLogs/ns/a/c") == (200, "kept\n")
    # A link that breaks just then is as good as none.
    worker.state.live_link, worker.lost = worker, True
    assert await hub.get("/containerLogs/ns/a/c") == (200, "kept\n")


@served
async def test_a_command_gets_its_input_and_gives_its_output_and_exit_code(hub: Hub) -> None:
    worker = hub.workers[0]
    worker.script = [(wire.STDOUT, b"out"), (wire.STDERR, b"err")]
    async with hub.command("/exec/ns/a/c?command=sh&command=-c&input=1&output=1&error=1") as socket:
        await socket.send_bytes(bytes((wire.STDIN,)) + b"in")
        assert await socket.receive_bytes() == bytes((wire.STDOUT,)) + b"out"
        assert await socket.receive_bytes() == bytes((wire.STDERR,)) + b"err"
        await until(lambda: (wire.STDIN, b"in") in worker.streams[0].sent, 60)
        worker.streams[0].says(*status(3))
        ((channel, told),) = await heard(socket)
    assert channel == wire.STATUS
    assert json.loads(told)["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]
    (asked,) = worker.asked
    assert (asked["what"], asked["command"], asked["tty"]) == ("exec", ["sh", "-c"], False)
    assert (asked["stdin"], asked["stdout"], asked["stderr"]) == (True, True, True)
    assert worker.streams[0].closed


@pytest.mark.parametrize(
    ("tty", "channel", "ending"), [(False, wire.STDERR, b"\n"), (True, wire.STDOUT, b"\r\n")]
)
def test_a_program_that_is_not_there_is_said_where_people_look(
    tmp_path: Path, tty: bool, channel: int, ending: bytes
) -> None:
    async def test(hub: Hub) -> None:
        told = json.dumps({"exit_code": 127, "error": "no-such: not found"}).encode()
        hub.workers[0].script = [(wire.STATUS, told)]
        flags = f"output=1&tty={int(tty)}&error={int(not tty)}"
        async with hub.command(f"/exec/ns/a/c?command=no-such&{flags}") as socket:
            words, last = await heard(socket)
        assert words == (channel, b"no-such: not found" + ending)
        assert json.loads(last[1])["reason"] == "NonZeroExitCode"

    served(test)(tmp_path)


@served
async def test_a_runner_that_is_lost_is_told_to_the_client(hub: Hub) -> None:
    worker = hub.workers[0]
    worker.script = [(wire.STDOUT, b"out"), None]
    async with hub.command("/exec/ns/a/c?command=sh&output=1") as socket:
        *_, last = await heard(socket)
    assert "connection to the pod's runner was lost" in json.loads(last[1])["message"]
    worker.lost = True
    async with hub.command("/exec/ns/a/c?command=sh&output=1") as socket:
        (only,) = await heard(socket)
    assert json.loads(only[1])["reason"] == "InternalError"


@served
async def test_a_client_that_leaves_closes_the_runners_stream(hub: Hub) -> None:
    async with hub.command("/attach/ns/a/c?input=1&output=1") as socket:
        await socket.send_bytes(bytes((wire.STDIN,)) + b"in")
    worker = hub.workers[0]
    await until(lambda: worker.streams and worker.streams[0].closed, 60)
    assert worker.asked[0]["what"] == "attach"


@served
async def test_what_cannot_be_commanded_is_refused_before_the_upgrade(hub: Hub) -> None:
    worker = hub.workers[0]
    assert (await hub.get("/exec/ns/nobody/c?command=sh&output=1"))[0] == 404
    assert "container not found" in (await hub.get("/exec/ns/a/x?command=sh&output=1"))[1]
    assert (await hub.get("/exec/ns/a/c?command=sh"))[0] == 400
    assert (await hub.get("/exec/ns/a/c?command=sh&output=1"))[0] == 400
    worker.state.live_link = None
    assert (await hub.get("/exec/ns/a/c?command=sh&output=1"))[0] == 503
    worker.state.report = pod_report({"c": {"state": "terminated"}})
    assert (await hub.get("/attach/ns/a/c?output=1"))[0] == 404


@served
async def test_pods_are_those_of_the_node_that_is_asked_about(hub: Hub) -> None:
    async def names(path: str, node: str = "") -> list[str]:
        code, text = await hub.get(path, node)
        assert code == 200
        return [each["metadata"]["name"] for each in json.loads(text)["items"]]

    assert await names("/pods") == ["a", "b"]
    assert await names("/pods", "short") == ["b"]
    assert await names("/runningpods/") == ["a", "b"]
    hub.workers[0].state.report = pod_report({"c": {"state": "terminated"}})
    hub.workers[1].state.live_link = None
    assert await names("/runningpods/") == []


@served
async def test_usage_is_told_as_a_summary_and_as_metrics(hub: Hub) -> None:
    _, text = await hub.get("/stats/summary", "batch")
    told = json.loads(text)
    assert told["node"]["nodeName"] == "batch"
    assert [each["podRef"]["name"] for each in told["pods"]] == ["a"]
    _, text = await hub.get("/stats/summary?only_cpu_and_memory=true")
    assert len(json.loads(text)["pods"]) == 2
    _, text = await hub.get("/metrics/resource", "batch")
    assert 'container_cpu_usage_seconds_total{container="c",namespace="ns",pod="a"}' in text.replace(
        ", ", ","
    )
    assert 'pod="b"' not in text


@served
async def test_the_hubs_own_metrics(hub: Hub) -> None:
    hub.workers[1].state.report = pod_report({"c": {"state": "terminated"}})
    _, text = await hub.get("/metrics")
    for line in (
        'kubelet_node_name{node="batch"} 1', 'slurmlet_pods{phase="Running"} 2', "slurmlet_runner_links 2",
        "kubelet_running_pods 1", 'kubelet_running_containers{container_state="exited"} 1',
        'slurmlet_jobs{state="PENDING"} 1', 'slurmlet_jobs{state="RUNNING"} 1',
    ):  # fmt: skip
        assert line in text
    _, text = await hub.get("/metrics", "short")
    assert 'kubelet_node_name{node="short"} 1' in text
    assert "slurmlet_runner_links 1" in text
