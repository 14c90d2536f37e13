"""`kubectl port-forward` between a client that speaks SPDY and a runner: pairs of streams, halves closed, errors told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slurmlet.hub.kubelet import port_forward, spdy
from slurmlet.protocol import wire
from tests.unit.fakes import RunnerStream
from tests.unit.virtual_time import run_virtually


class Client:
    """The client and its connection; the runner behind the hub is `runners`, one stream for each connection."""

    def __init__(self) -> None:
        self._encoder, self._decoder = spdy.Encoder(), spdy.Decoder()
        self._to_hub: asyncio.Queue[bytes] = asyncio.Queue()
        self.heard: list[spdy.Frame] = []
        self.runners: list[RunnerStream] = []
        self.asked: list[Any] = []
        self.linked = True
        metadata = {"name": "p", "namespace": "ns", "uid": "u-1"}
        worker: Any = SimpleNamespace(linked=self._linked, state=SimpleNamespace(pod={"metadata": metadata}))
        self.forwarding = port_forward._Forwarding(worker, self)
        self.serving = asyncio.create_task(self.forwarding.serve())

    async def _linked(self, _timeout_s: float) -> Any:
        return SimpleNamespace(open=self._open) if self.linked else None

    async def _open(self, message: Callable[[int], Any]) -> RunnerStream:
        self.asked.append(message(7))
        self.runners.append(RunnerStream())
        return self.runners[-1]

    # The transport.

    async def read(self) -> bytes:
        return await self._to_hub.get()

    async def write(self, data: bytes) -> None:
        self.heard += self._decoder.feed(data)

    # The client.

    async def send(self, *frames: spdy.Frame) -> None:
        for frame in frames:
            self._to_hub.put_nowait(self._encoder.encode(frame))
        await asyncio.sleep(0.1)

    async def connect(self, port: str = "80", request: str = "0", first: int = 1) -> None:
        headers = {"port": port, **({"requestid": request} if request else {})}
        await self.send(
            spdy.SynStream(first, {**headers, "streamtype": "error"}),
            spdy.SynStream(first + 2, {**headers, "streamtype": "data"}),
        )

    def said(self, stream: int) -> bytes:
        return b"".join(one.data for one in self.heard if isinstance(one, spdy.Data) and one.stream == stream)

    def finished(self, stream: int) -> bool:
        return any(isinstance(one, spdy.Data) and one.stream == stream and one.fin for one in self.heard)

    def refused(self, stream: int) -> bool:
        return spdy.RstStream(stream, spdy.REFUSED_STREAM) in self.heard

    async def hang_up(self) -> None:
        self._to_hub.put_nowait(b"")
        await self.serving


def run(scenario: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        client = Client()
        await scenario(client)
        await client.hang_up()
        assert client.forwarding._pairs == {}
        assert client.forwarding._connections == set()

    run_virtually(main())


def test_bytes_go_both_ways_and_either_half_ends_on_its_own() -> None:
    async def scenario(client: Client) -> None:
        await client.connect("8080")
        assert client.asked == [{"type": "open", "stream": 7, "what": "forward", "port": 8080}]
        (runner,) = client.runners
        await client.send(spdy.Data(3, b"question"), spdy.Data(3, b"", fin=True))
        assert runner.sent == [(wire.STDIN, b"question"), (wire.END, bytes((wire.STDIN,)))]
        runner.says(wire.STDOUT, b"answer")
        runner.says(wire.END, bytes((wire.STDOUT,)))
        await asyncio.sleep(0.1)
        assert client.said(3) == b"answer"
        assert client.finished(3)
        assert client.finished(1)
        assert client.said(1) == b""
        assert runner.closed

    run(scenario)


def test_a_port_that_cannot_be_reached_is_told_on_the_error_stream() -> None:
    async def scenario(client: Client) -> None:
        await client.connect()
        client.runners[0].says(wire.STATUS, json.dumps({"error": "connection refused"}).encode())
        await asyncio.sleep(0.1)
        assert client.said(1) == b"error forwarding port 80 to pod p_ns, uid u-1: connection refused"
        assert client.finished(3)

    run(scenario)


def test_a_runner_that_is_not_there_is_told_on_the_error_stream() -> None:
    async def scenario(client: Client) -> None:
        client.linked = False
        await client.connect()
        assert client.said(1).endswith(b"the pod's runner is not connected")

    run(scenario)


def test_several_connections_at_once() -> None:
    async def scenario(client: Client) -> None:
        await client.connect("80", "0", 1)
        await client.connect("81", "1", 5)
        assert [one["port"] for one in client.asked] == [80, 81]
        client.runners[1].says(wire.STDOUT, b"second")
        await asyncio.sleep(0.1)
        assert (client.said(3), client.said(7)) == (b"", b"second")

    run(scenario)


def test_old_clients_name_no_request() -> None:
    async def scenario(client: Client) -> None:
        await client.connect(request="")
        assert len(client.runners) == 1

    run(scenario)


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "x", "8" * 5000])
def test_what_is_no_port_is_refused_and_the_connection_goes_on(port: str) -> None:
    async def scenario(client: Client) -> None:
        await client.connect(port)
        assert client.refused(1)
        assert client.refused(3)
        await client.connect("80", "1", 5)
        assert len(client.runners) == 1

    run(scenario)


def test_a_stream_of_another_kind_and_one_too_many_are_refused() -> None:
    async def scenario(client: Client) -> None:
        headers = {"port": "80", "requestid": "0"}
        await client.send(
            spdy.SynStream(1, {**headers, "streamtype": "stdin"}),
            spdy.SynStream(3, {**headers, "streamtype": "error"}),
            spdy.SynStream(5, {**headers, "streamtype": "error"}),
        )
        assert client.refused(1)
        assert client.refused(5)
        assert not client.refused(3)

    run(scenario)


def test_half_a_pair_is_not_waited_for_without_end() -> None:
    async def scenario(client: Client) -> None:
        await client.send(spdy.SynStream(1, {"port": "80", "requestid": "0", "streamtype": "error"}))
        await asyncio.sleep(60)
        assert b"timed out waiting for streams" in client.said(1)
        assert client.runners == []

    run(scenario)


def test_a_client_that_resets_a_connection_closes_it_at_the_runner() -> None:
    async def scenario(client: Client) -> None:
        await client.connect()
        await client.send(spdy.RstStream(3, spdy.CANCEL))
        assert client.runners[0].closed

    run(scenario)


def test_a_client_that_hangs_up_closes_all_at_the_runner() -> None:
    async def main() -> None:
        client = Client()
        await client.connect("80", "0", 1)
        await client.connect("81", "1", 5)
        await client.hang_up()
        assert [runner.closed for runner in client.runners] == [True, True]

    run_virtually(main())


def test_a_runner_that_goes_in_the_middle_ends_the_connection_and_no_other() -> None:
    async def scenario(client: Client) -> None:
        await client.connect("80", "0", 1)
        await client.connect("81", "1", 5)
        client.runners[0].lost = True
        await client.send(spdy.Data(3, b"x"))
        client.runners[0].end()
        await asyncio.sleep(0.1)
        client.runners[1].says(wire.STDOUT, b"lives")
        await asyncio.sleep(0.1)
        assert client.said(7) == b"lives"

    run(scenario)
