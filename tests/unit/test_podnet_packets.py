"""Headers and checksums against packets that a Linux kernel sent out of a pod's device."""

from __future__ import annotations

import os
import struct

import pytest

from slurmlet.podnet.addresses import number
from slurmlet.podnet.slow import fragments, packets

POD, OTHER, SERVICE = number("10.244.0.7"), number("10.244.0.8"), number("10.96.0.10")
DATAGRAM = bytes.fromhex("4500002102814000401122e70af400070a60000a9c400035000d0a2868656c6c6f")
SYN = bytes.fromhex(
    "4500003c5ba740004006c9b90af400070a600001d48e01bb782b644d00000000a002ffa2187e0000"
    "0204ffa20402080adc4f917f000000000103030a"
)
ECHO = bytes.fromhex("45000024eb6a4000400139780af400070af400080800cd561e9800010001020304050607")
HEADS = [
    (DATAGRAM, packets.Head(17, POD, SERVICE, 40000, 53, 20, False)),
    (SYN, packets.Head(6, POD, number("10.96.0.1"), 54414, 443, 20, False)),
    (ECHO, packets.Head(1, POD, OTHER, 0x1E98, 0x1E98, 20, False)),
]


def is_right(packet: bytes) -> bool:
    """All checksums of a packet, counted word by word as the standards say."""
    start = (packet[0] & 15) * 4
    body = packet[start:]
    if not _sums_up(packet[:start]):
        return False
    if packet[9] == packets.ICMP:
        return _sums_up(body)
    if packet[9] == packets.UDP and body[6:8] == b"\0\0":
        return True
    return _sums_up(packet[12:20] + struct.pack(">HH", packet[9], len(body)) + body)


def _sums_up(data: bytes) -> bool:
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total == 0xFFFF


@pytest.mark.parametrize(("packet", "head"), HEADS)
def test_reads_what_a_kernel_wrote(packet: bytes, head: packets.Head) -> None:
    assert packets.head(packet) == head
    assert is_right(packet)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        DATAGRAM[:19],
        b"\x60" + DATAGRAM[1:],
        b"\x44" + DATAGRAM[1:],
        b"\x4f" + DATAGRAM[1:],
        DATAGRAM[:-1],
    ],
)
def test_refuses_what_is_no_whole_packet(broken: bytes) -> None:
    assert packets.head(broken) is None


@pytest.mark.parametrize("packet", [DATAGRAM, SYN, ECHO])
@pytest.mark.parametrize("ip", [OTHER, 0, 0xFFFFFFFF, POD])
@pytest.mark.parametrize("port", [0, 1, 8080, 0xFFFF])
def test_rewriting_keeps_checksums_right(packet: bytes, ip: int, port: int) -> None:
    changed = bytearray(packet)
    packets.rewrite(changed, ip, port, ip, port)
    head = packets.head(changed)
    assert head is not None
    assert head[1:5] == (ip, ip, port, port)
    assert is_right(bytes(changed))


def test_rewriting_there_and_back_changes_nothing() -> None:
    for packet in (DATAGRAM, SYN, ECHO):
        changed = bytearray(packet)
        packets.rewrite(changed, destination=OTHER, source_port=1)
        assert changed != packet
        before = packets.head(packet)
        assert before is not None
        packets.rewrite(changed, destination=before.destination, source_port=before.source_port)
        assert changed == packet


def test_a_datagram_without_a_checksum_stays_without() -> None:
    changed = bytearray(packets.udp(POD, 1, OTHER, 2, b"x"))
    packets.rewrite(changed, destination=SERVICE, port=53)
    assert changed[26:28] == b"\0\0"
    assert is_right(bytes(changed))


@pytest.mark.parametrize("size", [0, 1, 2, 1471, 65507])
def test_builds_datagrams(size: int) -> None:
    payload = os.urandom(size)
    made = packets.udp(POD, 40000, OTHER, 53, payload)
    assert packets.head(made) == packets.Head(17, POD, OTHER, 40000, 53, 20, False)
    assert packets.payload(made, 20) == payload
    assert is_right(made)


@pytest.mark.parametrize("length", [0, 7, 14])
def test_a_datagram_that_lies_about_its_length_carries_nothing(length: int) -> None:
    lying = DATAGRAM[:24] + struct.pack(">H", length) + DATAGRAM[26:]
    assert packets.payload(lying, 20) is None


@pytest.mark.parametrize("code", [packets.HOST, packets.PORT, packets.PROHIBITED])
def test_an_error_quotes_what_it_is_about(code: int) -> None:
    told = packets.unreachable(DATAGRAM, code)
    assert told is not None
    assert is_right(told)
    assert packets.head(told) == packets.Head(1, SERVICE, POD, 0, 0, 20, False)
    assert tuple(told[20:22]) == (3, code)
    assert packets.quoted(told, 20) == packets.head(DATAGRAM)


def test_an_error_is_short_whatever_it_is_about() -> None:
    told = packets.unreachable(packets.udp(POD, 1, OTHER, 2, bytes(60000)), packets.PORT)
    assert told is not None
    assert len(told) <= 576
    quoted = packets.quoted(told, 20)
    assert quoted is not None
    assert (quoted.source_port, quoted.port) == (1, 2)


def test_nobody_is_told_of_an_error_or_of_a_later_fragment() -> None:
    told = packets.unreachable(DATAGRAM, packets.PORT)
    assert told is not None
    assert packets.unreachable(told, packets.PORT) is None
    later = list(fragments.split(packets.udp(POD, 1, OTHER, 2, bytes(3000), 7), 1500))[1]
    assert packets.unreachable(later, packets.PORT) is None


def test_a_quotation_is_rewritten_with_the_error_around_it() -> None:
    told = packets.unreachable(DATAGRAM, packets.PORT)
    assert told is not None
    changed = bytearray(told)
    packets.rewrite_quoted(changed, destination=OTHER, port=9000, source_port=7)
    quoted = packets.quoted(changed, 20)
    assert quoted is not None
    assert (quoted.source_port, quoted.destination, quoted.port) == (7, OTHER, 9000)
    assert is_right(bytes(changed))


def test_answers_an_echo() -> None:
    reply = packets.echo_reply(ECHO)
    assert reply is not None
    assert is_right(reply)
    assert packets.head(reply) == packets.Head(1, OTHER, POD, 0x1E98, 0x1E98, 20, False)
    assert reply[24:] == ECHO[24:]
    assert reply[20] == 0
    assert packets.echo_reply(reply) is None
    assert packets.echo_reply(DATAGRAM) is None


class TestFragments:
    whole = packets.udp(POD, 40000, OTHER, 9000, os.urandom(5000), identification=77)

    def pieces(self, mtu: int = 1500) -> list[bytes]:
        return list(fragments.split(self.whole, mtu))

    def test_a_packet_that_fits_stays_as_it_is(self) -> None:
        assert list(fragments.split(self.whole, len(self.whole))) == [self.whole]

    def test_pieces_fit_and_are_right(self) -> None:
        pieces = self.pieces()
        assert len(pieces) == 4
        assert all(len(piece) <= 1500 and _sums_up(piece[:20]) for piece in pieces)
        heads = [packets.head(piece) for piece in pieces]
        assert all(head is not None and head.fragment for head in heads)
        assert [head.port for head in heads if head is not None] == [9000, 0, 0, 0]

    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [0, 0, 1, 2, 3]])
    def test_put_together_in_any_order(self, order: list[int]) -> None:
        together = fragments.Reassembler()
        pieces = self.pieces()
        answers = [together.add(pieces[number]) for number in order]
        assert answers[:-1] == [None] * (len(order) - 1)
        assert answers[-1] == self.whole

    def test_pieces_of_two_packets_stay_apart(self) -> None:
        together = fragments.Reassembler()
        other = packets.udp(POD, 1, OTHER, 2, os.urandom(2000), identification=78)
        first, second = list(fragments.split(other, 1500))
        mine = self.pieces()
        assert [together.add(piece) for piece in (first, *mine[:3])] == [None] * 4
        assert together.add(second) == other
        assert together.add(mine[3]) == self.whole

    def test_what_never_ends_is_let_go(self) -> None:
        now = [0.0]
        together = fragments.Reassembler(clock=lambda: now[0])
        pieces = self.pieces()
        together.add(pieces[0])
        now[0] = 60.0
        together.add(next(iter(fragments.split(packets.udp(POD, 1, OTHER, 2, bytes(2000), 9), 1500))))
        assert together.dropped == 1
        assert [together.add(piece) for piece in pieces[1:]] == [None] * 3

    def test_holds_no_more_than_it_may(self) -> None:
        together = fragments.Reassembler()
        for identification in range(1, 1001):
            together.add(
                next(iter(fragments.split(packets.udp(POD, 1, OTHER, 2, bytes(2000), identification), 1500)))
            )
        assert together.dropped > 900

    def test_a_packet_larger_than_there_can_be_is_refused(self) -> None:
        together = fragments.Reassembler()
        piece = bytearray(self.pieces()[-1])
        piece[6:8] = (0x1FFF).to_bytes(2, "big")
        assert together.add(bytes(piece)) is None
        assert together.dropped == 1
