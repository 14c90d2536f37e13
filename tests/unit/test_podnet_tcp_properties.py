"""Packets of a pod's network by properties: checksums, fragments, segments, and two ends of TCP over a bad line."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slurmlet.podnet.slow import fragments, packets, tcp_endpoint, tcp_segments
from slurmlet.podnet.slow.tcp_endpoint import Events, TcpEnd
from tests.unit.test_podnet_packets import is_right

ADDRESSES = st.integers(0, 2**32 - 1)
PORTS = st.integers(0, 2**16 - 1)
WORDS = st.integers(0, 2**32 - 1)
HERE, POD = (0x0A600001, 443), (0x0AF40007, 40000)
PROTOCOLS = st.sampled_from((packets.ICMP, packets.TCP, packets.UDP, 33, 47, 132))


@st.composite
def ip_packets(draw: st.DrawFn, max_body: int = 200, fragment: bool = True) -> bytes:
    """IPv4 packets as head() lets them pass: right in themselves, with options, perhaps a fragment, anything inside."""
    options = draw(st.binary(max_size=40).map(lambda raw: raw[: len(raw) & ~3]))
    body = draw(st.binary(min_size=8, max_size=max_body))
    flags = draw(st.sampled_from((0, packets.DONT, packets.MORE, 3, packets.MORE | 5))) if fragment else 0
    header = packets.IP.pack(
        0x40 | (20 + len(options)) // 4,
        0,
        20 + len(options) + len(body),
        draw(PORTS),
        flags,
        64,
        draw(PROTOCOLS),
        0,
        draw(ADDRESSES),
        draw(ADDRESSES),
    )
    made = bytearray(header + options)
    made[10:12] = packets.checksum(made).to_bytes(2, "big")
    return bytes(made) + body


@given(st.binary(max_size=120) | ip_packets())
def test_any_bytes_are_a_packet_or_none(raw: bytes) -> None:
    found = packets.head(raw)
    if found is None:
        return
    assert 20 <= found.start <= len(raw)
    tcp_segments.parse(raw, found.start)
    packets.echo_reply(raw)
    told = packets.unreachable(raw, packets.HOST)
    assert told is None or (is_right(told) and packets.head(told) is not None)


@given(ADDRESSES, PORTS, ADDRESSES, PORTS, st.binary(max_size=300), PORTS)
def test_a_datagram_is_read_as_it_was_built(
    source: int, source_port: int, destination: int, port: int, payload: bytes, identification: int
) -> None:
    made = packets.udp(source, source_port, destination, port, payload, identification)
    found = packets.head(made)
    assert found == packets.Head(packets.UDP, source, destination, source_port, port, 20, False)
    assert packets.payload(made, 20) == payload
    assert is_right(made)


@given(
    ADDRESSES, PORTS, ADDRESSES, PORTS, WORDS, WORDS, st.integers(0, 31), PORTS,
    st.none() | st.tuples(PORTS, st.none() | st.integers(0, 14)), st.binary(max_size=300),
)  # fmt: skip
def test_a_segment_is_read_as_it_was_built(
    source: int, source_port: int, destination: int, port: int, sequence: int, acknowledged: int, flags: int,
    window: int, syn: tuple[int, int | None] | None, data: bytes,
) -> None:  # fmt: skip
    flags = flags | tcp_segments.SYN if syn else flags & ~tcp_segments.SYN
    options = tcp_segments.syn_options(*syn) if syn else b""
    made = tcp_segments.build(
        (source, source_port), (destination, port), sequence, acknowledged, flags, window, options, data
    )
    found = packets.head(made)
    assert found == packets.Head(packets.TCP, source, destination, source_port, port, 20, False)
    assert is_right(made)
    segment = tcp_segments.parse(made, 20)
    assert segment is not None
    assert segment[:5] == (sequence, acknowledged, flags, window, data)
    if syn:
        assert (segment.mss, segment.scale) == (max(64, syn[0]), syn[1])
    answer = tcp_segments.reset_for(segment, (destination, port), (source, source_port))
    assert is_right(answer)


@given(ip_packets(), st.none() | ADDRESSES, st.none() | PORTS, st.none() | ADDRESSES, st.none() | PORTS)
def test_a_rewritten_packet_stays_right(
    raw: bytes, source: int | None, source_port: int | None, destination: int | None, port: int | None
) -> None:
    before = packets.head(raw)
    assume(before is not None)
    assert before is not None
    packet = bytearray(raw)
    packets.rewrite(packet, source, source_port, destination, port)
    after = packets.head(packet)
    assert after is not None
    assert len(packet) == len(raw)
    assert after.source == (before.source if source is None else source)
    assert after.destination == (before.destination if destination is None else destination)
    # The sum over addresses and transport is what it was: right stays right, wrong stays wrong.
    assert _residue(packet) == _residue(raw)
    assert packets.checksum(packet[: before.start]) == packets.checksum(raw[: before.start])


def _residue(packet: bytes | bytearray) -> int:
    """Of the transport's checksum, where the packet has one and we keep it."""
    start = (packet[0] & 15) * 4
    at = {packets.UDP: 6, packets.TCP: 16, packets.ICMP: 2}.get(packet[9])
    later_fragment = int.from_bytes(packet[6:8], "big") & packets.OFFSET
    if at is None or later_fragment or len(packet) < start + at + 2:
        return -1
    if packet[9] == packets.UDP and not any(packet[start + 6 : start + 8]):
        return -2
    pseudo = b"" if packet[9] == packets.ICMP else packet[12:20]
    return packets.checksum(bytes(pseudo) + bytes(packet[start:]))


@given(ip_packets(max_body=3000, fragment=False), st.integers(68, 1500), st.randoms(), st.booleans())
def test_fragments_in_any_order_make_the_packet_again(raw: bytes, mtu: int, order: Any, twice: bool) -> None:
    pieces = list(fragments.split(raw, mtu))
    assert all(len(piece) <= mtu for piece in pieces)
    if len(pieces) == 1:
        assert pieces == [raw]
        return
    order.shuffle(pieces)
    sent = [piece for piece in pieces for _ in range(1 + twice)]
    reassembler = fragments.Reassembler(lambda: 0.0)
    whole = [made for piece in sent if (made := reassembler.add(piece)) is not None]
    start = (raw[0] & 15) * 4
    assert [made[start:] for made in whole] == [raw[start:]]
    assert whole[0][12:start] == raw[12:start]
    assert packets.checksum(whole[0][:start]) == 0xFFFF


@given(st.lists(st.tuples(st.integers(0, 8191), st.booleans(), ip_packets(max_body=60)), max_size=40))
def test_hostile_fragments_are_held_in_bounds(pieces: list[tuple[int, bool, bytes]]) -> None:
    reassembler = fragments.Reassembler(lambda: 0.0)
    for offset, more, raw in pieces:
        piece = bytearray(raw)
        piece[6:8] = (offset | (packets.MORE if more else 0)).to_bytes(2, "big")
        # Few keys, so that they meet.
        piece[4:6], piece[9], piece[12:20] = b"\0\1", packets.UDP, bytes(8)
        whole = reassembler.add(bytes(piece))
        assert whole is None or packets.head(whole) is not None
    assert len(reassembler._held) <= 64


@given(st.integers(5, 15), st.integers(65400, 65535), st.booleans())
def test_the_largest_packets_are_made_again_or_dropped(words: int, total: int, backwards: bool) -> None:
    """Fragments can add up to more than an IPv4 packet can be, the more so with options before each."""
    start = words * 4
    pieces = []
    for at, size in ((0, 32000), (32000, total - 32000 - packets.IP_BYTES)):
        flags = (packets.MORE if at == 0 else 0) | at >> 3
        header = packets.IP.pack(0x40 | words, 0, start + size, 1, flags, 64, packets.UDP, 0, 1, 2)
        pieces.append(header + bytes(start - 20) + bytes(size))
    reassembler = fragments.Reassembler(lambda: 0.0)
    made = [reassembler.add(piece) for piece in (pieces[::-1] if backwards else pieces)]
    fits = start + total - packets.IP_BYTES <= 65535
    assert [whole is not None for whole in made] == [False, fits]


class Line:
    """A clock that only this test moves, and a line between two ends that loses, doubles and delays packets."""

    def __init__(self, faults: list[int]) -> None:
        self.now_s = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        # Each packet meets the next of these: 0 to 5 harmless. A line that is bad for ever carries nothing.
        self._faults = iter(faults)

    def soon(self, callback: Callable[[], None]) -> None:
        self.later(0, callback)

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + max(0.0, delay_s), next(self._order), callback))

    def carry(self, packet: bytes, deliver: Callable[[bytes], None]) -> None:
        fault = next(self._faults, 0)
        if fault == 6:
            return
        self.later(0.3 if fault == 7 else 0.001, lambda: deliver(packet))
        if fault == 8:
            self.later(0.002, lambda: deliver(packet))

    def run(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, callback = heapq.heappop(self._due)
            callback()


class Side(Events):
    """A program at one end: writes as there is room, takes what comes, ends when it has said all."""

    def __init__(self, line: Line, here: tcp_segments.Place, pod: tcp_segments.Place, says: bytes) -> None:
        self.end = TcpEnd(line, self._emit, here, pod, 1460, self)  # type: ignore[arg-type]
        self._line, self._says = line, says
        self.other: Side | None = None
        self.heard = b""
        self.happened: list[str] = []

    def _emit(self, packet: bytes) -> None:
        assert is_right(packet)
        self._line.carry(packet, self._deliver)

    def _deliver(self, packet: bytes) -> None:
        assert self.other is not None
        head = packets.head(packet)
        assert head is not None
        segment = tcp_segments.parse(packet, head.start)
        assert segment is not None
        if self.other.end.state == tcp_endpoint.DIALLING:
            if segment.flags == tcp_segments.SYN:
                self.other.end.take_syn(segment)
                self.other.end.accept()
            return
        if self.other.end.state != tcp_endpoint.OVER:
            self.other.end.segment(segment)
        elif not segment.flags & tcp_segments.RST:
            # A connection that is over is forgotten, and what still comes is for nobody.
            reset = tcp_segments.reset_for(segment, self.other.end.here, self.other.end.pod)
            self._line.carry(reset, self.other._deliver)

    def opened(self) -> None:
        self.happened.append("opened")
        self._write()

    def room(self) -> None:
        self._write()

    def _write(self) -> None:
        room = min(self.end.free_bytes, 5000)
        piece, self._says = self._says[:room], self._says[room:]
        if piece:
            self.end.write(piece)
        elif not self._says and not self.end._fin_wanted:
            self.end.finish()

    def data(self, data: bytes) -> None:
        self.heard += data
        self._line.later(0.01, lambda: self.end.consumed(len(data)))

    def finished(self) -> None:
        self.happened.append("finished")

    def closed(self) -> None:
        self.happened.append("closed")

    def over(self, refused: bool) -> None:
        self.happened.append("over")


@given(st.binary(max_size=20_000), st.binary(max_size=3000), st.lists(st.integers(0, 8), max_size=60))
def test_two_ends_hear_what_the_other_said_over_a_bad_line(
    says: bytes, answers: bytes, faults: list[int]
) -> None:
    line = Line(faults)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp_endpoint.time, "monotonic", lambda: line.now_s)
        client, server = Side(line, HERE, POD, says), Side(line, POD, HERE, answers)
        client.other, server.other = server, client
        client.end.connect()
        line.run(until_s=300)
    for side, expected in ((client, answers), (server, says)):
        assert side.heard == expected
        assert side.happened[:2] == ["opened", "finished"]
        assert side.end.state == tcp_endpoint.OVER
        assert len(side.happened) == 3
    # Whose last acknowledgement was lost may hear a reset in its place, but not both.
    assert "closed" in (client.happened[-1], server.happened[-1])
