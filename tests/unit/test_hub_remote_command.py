"""Clients of exec and attach, in each form they speak, against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from slurmlet.hub.kubelet import spdy
from slurmlet.hub.kubelet.exec import exec_status
from slurmlet.hub.kubelet.remote_command import Wants, accept, wants
from slurmlet.protocol import wire

WITHIN_S = 5
EVERYTHING = "?input=1&output=1&error=1"


class Runner:
    """Stands for a runner's stream: keeps what it is sent, and says what it got when the input is over."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.input_over = asyncio.Event()

    async def send(self, channel: int, data: bytes) -> None:
        self.sent.append((channel, data))
        if channel == wire.END:
            self.input_over.set()


async def _command(request: web.Request, runner: Runner) -> web.StreamResponse:
    """A command that writes to both outputs, reads its input to the end and exits with 3."""
    client = await accept(request, wants(request.query))
    feeding = asyncio.create_task(client.feed(runner))  # type: ignore[arg-type]
    await client.send(wire.STDOUT, b"out")
    await client.send(wire.STDERR, b"err")
    await asyncio.wait_for(runner.input_over.wait(), WITHIN_S)
    await client.finish(exec_status({"exit_code": 3}))
    await client.close()
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    return client.response


def serve(play: Callable[[int, Runner], Awaitable[None]]) -> None:
    async def main() -> None:
        runner = Runner()

        async def handle(request: web.Request) -> web.StreamResponse:
            return await _command(request, runner)

        app = web.Application()
        for method in ("GET", "POST"):
            app.router.add_route(method, "/", handle)
        server = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await server.setup()
        site = web.TCPSite(server, "127.0.0.1", 0)
        await site.start()
        try:
            port = server.addresses[0][1]
            await asyncio.wait_for(play(port, runner), 4 * WITHIN_S)
        finally:
            await server.cleanup()

    asyncio.run(main())


class SpdyPeer:
    """An old client: asks for the upgrade, then opens its streams one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._encoder, self._decoder = spdy.Encoder(), spdy.Decoder()
        self._waiting: list[spdy.Frame] = []

    @classmethod
    async def ask(cls, port: int, query: str, *protocols: str) -> tuple[SpdyPeer, str]:
        """The peer and the head of the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        lines = [
            f"POST /{query} HTTP/1.1",
            "Host: x",
            "Connection: Upgrade",
            "Upgrade: SPDY/3.1",
            "Content-Length: 0",
        ]
        lines += [f"X-Stream-Protocol-Version: {name}" for name in protocols]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        return cls(reader, writer), (await reader.readuntil(b"\r\n\r\n")).decode()

    def send(self, *frames: spdy.Frame) -> None:
        self._writer.write(b"".join(self._encoder.encode(frame) for frame in frames))

    async def heard(self) -> spdy.Frame | None:
        while not self._waiting:
            data = await asyncio.wait_for(self._reader.read(65536), WITHIN_S)
            if not data:
                return None
            self._waiting += self._decoder.feed(data)
        return self._waiting.pop(0)

    async def open(self, *kinds: str) -> None:
        for n, kind in enumerate(kinds):
            self.send(spdy.SynStream(2 * n + 1, {"StreamType": kind}))
            assert await self.heard() == spdy.SynReply(2 * n + 1, {})

    async def all_heard(self) -> tuple[dict[int, bytes], set[int]]:
        """What came on each stream until the server said goodbye, and which streams it closed."""
        texts: dict[int, bytes] = {}
        closed = set()
        while not isinstance(frame := await self.heard(), spdy.GoAway):
            assert isinstance(frame, spdy.Data), frame
            texts[frame.stream] = texts.get(frame.stream, b"") + frame.data
            if frame.fin:
                closed.add(frame.stream)
        await self.close()
        return texts, closed

    async def close(self) -> None:
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)


STREAMS = ("error", "stdin", "stdout", "stderr")


@pytest.mark.parametrize("version", ["v5.", "v4.", "v3.", "v2.", ""])
def test_spdy_in_every_version(version: str) -> None:
    async def play(port: int, runner: Runner) -> None:
        peer, head = await SpdyPeer.ask(port, EVERYTHING, f"{version}channel.k8s.io")
        assert head.startswith("HTTP/1.1 101 ")
        assert f"X-Stream-Protocol-Version: {version}channel.k8s.io\r\n" in head
        assert "Upgrade: SPDY/3.1\r\n" in head
        await peer.open(*STREAMS)
        peer.send(spdy.Data(3, b"some "), spdy.Data(3, b"input"), spdy.Data(3, b"", fin=True))
        texts, closed = await peer.all_heard()
        assert (texts[5], texts[7], closed) == (b"out", b"err", {1, 3, 5, 7})
        assert b"".join(data for channel, data in runner.sent if channel == wire.STDIN) == b"some input"
        if version in ("v5.", "v4."):
            assert json.loads(texts[1])["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]
        else:
            assert texts[1] == b"command terminated with non-zero exit code: exit status 3"

    serve(play)


def test_the_first_protocol_that_both_know_is_taken() -> None:
    async def play(port: int, _: Runner) -> None:
        peer, head = await SpdyPeer.ask(
            port, EVERYTHING, "v9.channel.k8s.io, v4.channel.k8s.io", "channel.k8s.io"
        )
        assert "X-Stream-Protocol-Version: v4.channel.k8s.io\r\n" in head
        await peer.open(*STREAMS)
        peer.send(spdy.Data(3, b"", fin=True))
        await peer.all_heard()

    serve(play)


@pytest.mark.parametrize(
    ("protocols", "answer"),
    [((), "HTTP/1.1 400 "), (("v9.channel.k8s.io",), "HTTP/1.1 403 ")],
    ids=["none", "an unknown one"],
)
def test_without_a_common_protocol_there_is_no_upgrade(protocols: tuple[str, ...], answer: str) -> None:
    async def play(port: int, _: Runner) -> None:
        peer, head = await SpdyPeer.ask(port, EVERYTHING, *protocols)
        await peer.close()
        assert head.startswith(answer)
        assert ("X-Accepted-Stream-Protocol-Versions: v4.channel.k8s.io" in head) == bool(protocols)

    serve(play)


def test_nothing_starts_before_all_streams_are_there() -> None:
    async def play(port: int, runner: Runner) -> None:
        peer, _ = await SpdyPeer.ask(port, "?input=1&output=1&tty=1", "v4.channel.k8s.io")
        await peer.open("error", "stdin", "stdout")
        peer.send(spdy.Data(3, b"early"))
        await asyncio.sleep(0.1)
        assert runner.sent == []
        peer.send(spdy.SynStream(7, {"streamtype": "resize"}))
        assert await peer.heard() == spdy.SynReply(7, {})
        # Two sizes, cut in the middle of the first.
        peer.send(spdy.Data(7, b'{"Width":80,'), spdy.Data(7, b'"Height":24}\n{"Width":132,"Height":40}\n'))
        await asyncio.sleep(0.1)
        sizes = [json.loads(data) for channel, data in runner.sent if channel == wire.RESIZE]
        assert sizes == [{"Width": 80, "Height": 24}, {"Width": 132, "Height": 40}]
        peer.send(spdy.Data(3, b"", fin=True))
        texts, _ = await peer.all_heard()
        assert texts[5] == b"out"

    serve(play)


def test_a_stream_of_no_known_kind_is_refused() -> None:
    async def play(port: int, _: Runner) -> None:
        peer, _head = await SpdyPeer.ask(port, EVERYTHING, "v4.channel.k8s.io")
        peer.send(spdy.SynStream(1, {"streamtype": "video"}))
        assert await peer.heard() == spdy.RstStream(1, spdy.REFUSED_STREAM)
        await peer.close()

    serve(play)


def test_the_last_words_arrive_though_the_client_goes_on_sending() -> None:
    async def play(port: int, _: Runner) -> None:
        peer, _head = await SpdyPeer.ask(port, EVERYTHING, "v4.channel.k8s.io")
        await peer.open(*STREAMS)
        peer.send(spdy.Data(3, b"", fin=True))
        await asyncio.sleep(0.05)
        peer.send(*(spdy.Data(3, b"x" * 65000) for _ in range(30)))
        texts, closed = await peer.all_heard()
        assert json.loads(texts[1])["status"] == "Failure"
        assert closed == {1, 3, 5, 7}

    serve(play)


@pytest.mark.parametrize("protocol", ["v5.channel.k8s.io", "v4.channel.k8s.io", "channel.k8s.io"])
def test_websockets_with_bytes(protocol: str) -> None:
    async def play(port: int, runner: Runner) -> None:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}/{EVERYTHING}"
            async with session.ws_connect(url, protocols=(protocol,)) as socket:
                assert socket.protocol == protocol
                assert await socket.receive_bytes() == b"\x01out"
                assert await socket.receive_bytes() == b"\x02err"
                await socket.send_bytes(b"\x00input")
                await socket.send_bytes(b"\x04" + b'{"Width":1,"Height":2}')
                await socket.send_bytes(b"\xff\x00")
                status = await socket.receive_bytes()
        assert runner.sent == [
            (wire.STDIN, b"input"),
            (wire.RESIZE, b'{"Width":1,"Height":2}'),
            (wire.END, b"\x00"),
        ]
        assert status[0] == wire.STATUS
        assert (status[1:2] == b"{") == (protocol != "channel.k8s.io")

    serve(play)


@pytest.mark.parametrize("protocol", ["v4.base64.channel.k8s.io", "base64.channel.k8s.io"])
def test_websockets_with_text(protocol: str) -> None:
    async def play(port: int, runner: Runner) -> None:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}/{EVERYTHING}"
            async with session.ws_connect(url, protocols=(protocol,)) as socket:
                assert await socket.receive_str() == "1" + base64.b64encode(b"out").decode()
                await socket.send_str("0" + base64.b64encode(b"\x00\xff").decode())
                await socket.send_str("0not base64!")
        # Without a way to say "end of input" such a client can only leave.
        await asyncio.sleep(0.1)
        assert runner.sent == [(wire.STDIN, b"\x00\xff")]

    serve(play)


def test_a_plain_request_is_told_what_to_ask_for() -> None:
    async def play(port: int, _: Runner) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/{EVERYTHING}") as answer:
                assert (answer.status, "unable to upgrade" in await answer.text()) == (400, True)

    serve(play)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"input": "1", "output": "1", "tty": "1", "error": "1"}, Wants(True, True, False, True)),
        ({"stdin": "true", "stdout": "true", "stderr": "true"}, Wants(True, True, True, False)),
        ({"output": "1", "input": "0", "tty": "false"}, Wants(False, True, False, False)),
    ],
)
def test_what_is_asked_for(query: dict[str, str], expected: Any) -> None:
    assert wants(query) == expected


def test_nothing_asked_for_is_a_mistake() -> None:
    with pytest.raises(web.HTTPBadRequest):
        wants({"tty": "1"})
