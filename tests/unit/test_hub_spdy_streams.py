"""An SPDY connection from the server's side, against a peer that speaks in frames."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slurmlet.hub.kubelet import spdy, spdy_streams
from slurmlet.hub.kubelet.spdy_streams import Refused, SpdySession, SpdyStream, StreamReset

WITHIN_S = 5


class Peer:
    """The client: both directions as queues of bytes, cut as TCP might cut them."""

    def __init__(self, on_stream: Callable[[SpdyStream], None] | None = None) -> None:
        self.streams: list[SpdyStream] = []
        self._to_server: asyncio.Queue[bytes] = asyncio.Queue()
        self._from_server: asyncio.Queue[spdy.Frame] = asyncio.Queue()
        self._encoder, self._decoder = spdy.Encoder(), spdy.Decoder()
        self.taken = asyncio.Event()
        self.taken.set()
        self.read_bytes = 0
        self.session = SpdySession(self, on_stream or self.streams.append)
        self.serving = asyncio.create_task(self.session.serve())

    # The transport of the server.

    async def read(self) -> bytes:
        data = await self._to_server.get()
        self.read_bytes += len(data)
        return data

    async def write(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self._from_server.put_nowait(frame)
        await self.taken.wait()

    # The client.

    def send(self, *frames: spdy.Frame) -> None:
        data = b"".join(self._encoder.encode(frame) for frame in frames)
        for at in range(0, len(data), 1000):
            self._to_server.put_nowait(data[at : at + 1000])

    def send_raw(self, data: bytes) -> None:
        self._to_server.put_nowait(data)

    async def heard(self) -> spdy.Frame:
        return await asyncio.wait_for(self._from_server.get(), WITHIN_S)

    def nothing_heard(self) -> bool:
        return self._from_server.empty()

    async def open(self, number: int = 1, **headers: str) -> SpdyStream:
        self.send(spdy.SynStream(number, headers))
        assert await self.heard() == spdy.SynReply(number, {})
        return self.streams[-1]

    async def hang_up(self) -> None:
        self._to_server.put_nowait(b"")
        await asyncio.wait_for(self.serving, WITHIN_S)


def run(scenario: Callable[[Peer], Awaitable[Any]]) -> None:
    async def main() -> None:
        peer = Peer()
        await scenario(peer)
        if not peer.serving.done():
            await peer.hang_up()

    asyncio.run(main())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_bytes_both_ways_and_each_half_closed_on_its_own() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.open(StreamType="data", Port="80")
        assert stream.headers == {"streamtype": "data", "port": "80"}
        peer.send(spdy.Data(1, b"question"), spdy.Data(1, b"", fin=True))
        assert [await stream.receive(), await stream.receive(), await stream.receive()] == [
            b"question",
            None,
            None,
        ]
        await stream.send(b"answer")
        await stream.finish()
        assert [await peer.heard(), await peer.heard()] == [
            spdy.Data(1, b"answer"),
            spdy.Data(1, b"", fin=True),
        ]
        # Over in both directions: nothing is left to reset.
        await stream.reset()
        assert peer.nothing_heard()

    run(scenario)


def test_a_stream_may_be_closed_by_its_first_frame() -> None:
    async def scenario(peer: Peer) -> None:
        peer.send(spdy.SynStream(1, {}, fin=True))
        assert await peer.heard() == spdy.SynReply(1, {})
        assert await peer.streams[0].receive() is None

    run(scenario)


def test_large_data_is_cut_and_arrives_whole() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        data = bytes(range(256)) * 1000
        await stream.send(data)
        got = b""
        while len(got) < len(data):
            frame = await peer.heard()
            assert isinstance(frame, spdy.Data)
            got += frame.data
        assert got == data

    run(scenario)


def test_a_reset_wakes_readers_and_writers() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        reading = asyncio.create_task(stream.receive())
        await settle()
        peer.send(spdy.RstStream(1, spdy.CANCEL))
        with pytest.raises(StreamReset):
            await asyncio.wait_for(reading, WITHIN_S)
        with pytest.raises(StreamReset):
            await stream.send(b"too late")
        await stream.finish()
        await stream.reset()
        assert peer.nothing_heard()

    run(scenario)


def test_our_reset_tells_the_peer_once() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        await stream.reset()
        await stream.reset()
        assert await peer.heard() == spdy.RstStream(1, spdy.CANCEL)
        # Bytes that were under way are no mistake of the peer.
        peer.send(spdy.Data(1, b"late"), spdy.Ping(1))
        assert await peer.heard() == spdy.Ping(1)

    run(scenario)


def test_the_end_of_the_connection_ends_all_streams() -> None:
    async def scenario(peer: Peer) -> None:
        first, second = await peer.open(1), await peer.open(3)
        reading = asyncio.create_task(first.receive())
        await settle()
        await peer.hang_up()
        with pytest.raises(StreamReset):
            await reading
        with pytest.raises(StreamReset):
            await second.send(b"to nobody")

    run(scenario)


def test_pings_are_echoed_and_answers_to_ours_are_not() -> None:
    async def scenario(peer: Peer) -> None:
        peer.send(spdy.Ping(2), spdy.Ping(5))
        assert await peer.heard() == spdy.Ping(5)

    run(scenario)


@pytest.mark.parametrize("number", [2, 1], ids=["even", "used before"])
def test_a_stream_with_a_wrong_number_is_refused(number: int) -> None:
    async def scenario(peer: Peer) -> None:
        await peer.open(1)
        peer.send(spdy.SynStream(number, {}))
        assert await peer.heard() == spdy.RstStream(number, spdy.PROTOCOL_ERROR)
        assert len(peer.streams) == 1

    run(scenario)


def test_a_stream_nobody_wants_is_refused_and_the_rest_goes_on() -> None:
    async def main() -> None:
        taken: list[SpdyStream] = []

        def choosy(stream: SpdyStream) -> None:
            if "port" not in stream.headers:
                raise Refused("no port")
            taken.append(stream)

        peer = Peer(choosy)
        peer.send(spdy.SynStream(1, {}), spdy.Data(1, b"for nobody"), spdy.SynStream(3, {"port": "1"}))
        assert await peer.heard() == spdy.RstStream(1, spdy.REFUSED_STREAM)
        assert await peer.heard() == spdy.SynReply(3, {})
        assert [stream.number for stream in taken] == [3]
        await peer.hang_up()

    asyncio.run(main())


def test_data_of_a_stream_never_opened_is_refused() -> None:
    async def scenario(peer: Peer) -> None:
        peer.send(spdy.Data(9, b"?"))
        assert await peer.heard() == spdy.RstStream(9, spdy.INVALID_STREAM)

    run(scenario)


def test_a_broken_peer_is_told_and_left() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        peer.send_raw(bytes.fromhex("8002000600000004") + b"\0\0\0\1")
        assert await peer.heard() == spdy.GoAway(1, spdy.GOAWAY_PROTOCOL_ERROR)
        await asyncio.wait_for(peer.serving, WITHIN_S)
        with pytest.raises(StreamReset):
            await stream.receive()

    run(scenario)


def test_leaving_waits_until_the_peer_has_gone_and_drops_what_it_still_sends() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        await stream.send(b"last words")
        await stream.finish()
        leaving = asyncio.create_task(peer.session.leave(peer.serving))
        assert [await peer.heard() for _ in range(3)] == [
            spdy.Data(1, b"last words"),
            spdy.Data(1, b"", fin=True),
            spdy.GoAway(1, spdy.GOAWAY_OK),
        ]
        peer.send(*(spdy.Data(1, b"x" * 30000) for _ in range(20)), spdy.SynStream(3, {}))
        await settle()
        assert not leaving.done()
        await peer.hang_up()
        await asyncio.wait_for(leaving, WITHIN_S)
        assert peer.nothing_heard()

    run(scenario)


# Flow control.


def test_peers_that_keep_no_windows_get_all_and_no_updates() -> None:
    """As kubectl: it never sends WINDOW_UPDATE, so waiting for one would be for ever."""

    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        await asyncio.wait_for(stream.send(b"x" * (10 * spdy.INITIAL_WINDOW)), WITHIN_S)
        peer.send(*(spdy.Data(1, b"y" * 30000) for _ in range(10)))
        for _ in range(10):
            await stream.receive()
        while not peer.nothing_heard():
            assert isinstance(await peer.heard(), spdy.Data)

    run(scenario)


def test_windows_are_kept_with_a_peer_that_keeps_them() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        peer.send(spdy.Settings({spdy.SETTING_INITIAL_WINDOW: 1000}), spdy.Ping(1))
        assert await peer.heard() == spdy.Ping(1)
        sending = asyncio.create_task(stream.send(b"z" * 1500))
        assert await peer.heard() == spdy.Data(1, b"z" * 1000)
        await settle()
        assert peer.nothing_heard()
        peer.send(spdy.WindowUpdate(1, 200))
        assert await peer.heard() == spdy.Data(1, b"z" * 200)
        peer.send(spdy.WindowUpdate(1, 5000))
        assert await peer.heard() == spdy.Data(1, b"z" * 300)
        await asyncio.wait_for(sending, WITHIN_S)

    run(scenario)


def test_the_window_of_the_whole_connection_is_kept_too() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        peer.send(spdy.Settings({spdy.SETTING_INITIAL_WINDOW: 1 << 20}), spdy.Ping(1))
        assert await peer.heard() == spdy.Ping(1)
        sending = asyncio.create_task(stream.send(b"z" * (spdy.INITIAL_WINDOW + 10)))
        got = 0
        while got < spdy.INITIAL_WINDOW:
            frame = await peer.heard()
            assert isinstance(frame, spdy.Data)
            got += len(frame.data)
        await settle()
        assert peer.nothing_heard()
        peer.send(spdy.WindowUpdate(0, 10))
        assert await peer.heard() == spdy.Data(1, b"z" * 10)
        await asyncio.wait_for(sending, WITHIN_S)

    run(scenario)


def test_such_a_peer_gets_updates_as_its_bytes_are_taken() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        peer.send(spdy.Settings({spdy.SETTING_INITIAL_WINDOW: spdy.INITIAL_WINDOW}))
        half = spdy.INITIAL_WINDOW // 2
        peer.send(spdy.Data(1, b"a" * half), spdy.Data(1, b"b"))
        assert await stream.receive() == b"a" * half
        assert [await peer.heard(), await peer.heard()] == [
            spdy.WindowUpdate(0, half),
            spdy.WindowUpdate(1, half),
        ]
        assert await stream.receive() == b"b"
        assert peer.nothing_heard()

    run(scenario)


def test_nothing_more_is_read_while_too_much_lies_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spdy_streams, "_MAX_UNREAD_BYTES", 10_000)

    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        peer.send(*(spdy.Data(1, b"x" * 900) for _ in range(100)))
        await settle()
        before = peer.read_bytes
        assert 10_000 < before < 20_000
        for _ in range(100):
            assert await asyncio.wait_for(stream.receive(), WITHIN_S) == b"x" * 900
        assert peer.read_bytes > 90_000

    run(scenario)


def test_a_stream_given_up_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spdy_streams, "_MAX_UNREAD_BYTES", 10_000)

    async def scenario(peer: Peer) -> None:
        stuck, lively = await peer.open(1), await peer.open(3)
        peer.send(*(spdy.Data(1, b"x" * 900) for _ in range(30)), spdy.Data(3, b"here"))
        await settle()
        await stuck.reset()
        assert await asyncio.wait_for(lively.receive(), WITHIN_S) == b"here"

    run(scenario)


def test_a_writer_waits_for_a_peer_that_does_not_take() -> None:
    async def scenario(peer: Peer) -> None:
        stream = await peer.open()
        peer.taken.clear()
        sending = asyncio.create_task(stream.send(b"x" * 1_000_000))
        await settle()
        assert not sending.done()
        assert await peer.heard() == spdy.Data(1, b"x" * (32 << 10))
        assert peer.nothing_heard()
        peer.taken.set()
        await asyncio.wait_for(sending, WITHIN_S)

    run(scenario)
