from __future__ import annotations

import struct

import pytest

from slurmlet.gateway import dns_messages
from slurmlet.gateway.dns_messages import Malformed


def with_edns(question: bytes, size_bytes: int) -> bytes:
    counts = question[:10] + struct.pack(">H", 1)
    return counts + question[12:] + b"\0" + struct.pack(">HHIH", dns_messages.OPT, size_bytes, 0, 0)


def answer(question: bytes, *ips: bytes) -> bytes:
    head = question[:2] + b"\x81\x80" + struct.pack(">HHHH", 1, len(ips), 0, 0)
    records = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 5, 4) + ip for ip in ips)
    return head + question[12:] + records


def test_a_question_is_what_resolvers_send() -> None:
    assert dns_messages.query(7, "a.bc") == (
        b"\x00\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + b"\x01a\x02bc\x00" + b"\x00\x01\x00\x01"
    )


@pytest.mark.parametrize("name", ["", "a..b", "x" * 64, ".".join(["abcdefgh"] * 30)])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises((Malformed, UnicodeError)):
        dns_messages.query(1, name)


def test_names_of_the_cluster_are_known_in_any_case() -> None:
    domain = dns_messages.wire_name("cluster.local")
    assert dns_messages.asks_within(dns_messages.query(1, "web.default.SVC.Cluster.Local"), domain)
    assert not dns_messages.asks_within(dns_messages.query(1, "example.com"), domain)
    assert not dns_messages.asks_within(dns_messages.query(1, "cluster.local.example.com"), domain)


def test_addresses_of_an_answer() -> None:
    question = dns_messages.query(1, "web")
    assert dns_messages.addresses_of(answer(question, bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2]))) == [
        0x0A000001,
        0x0A000002,
    ]
    with pytest.raises(Malformed):
        dns_messages.addresses_of(answer(question, bytes(4))[:-3] + b"")


def test_an_answer_too_large_for_the_asker_sends_it_to_tcp() -> None:
    question = dns_messages.query(9, "web")
    large = answer(question, *[bytes([10, 0, 0, n]) for n in range(50)])
    assert dns_messages.udp_limit(question) == 512
    cut = dns_messages.for_udp(large, dns_messages.udp_limit(question))
    assert cut[2] & 0x02
    assert len(cut) == len(question)
    assert dns_messages.number_of(cut) == 9
    roomy = with_edns(question, 1232)
    assert dns_messages.for_udp(large, dns_messages.udp_limit(roomy)) == large


def test_a_failure_repeats_the_question_and_its_number() -> None:
    question = dns_messages.query(300, "web")
    failed = dns_messages.failure(with_edns(question, 1232), dns_messages.SERVFAIL)
    assert dns_messages.number_of(failed) == 300
    assert dns_messages.rcode(failed) == dns_messages.SERVFAIL
    assert not dns_messages.is_query(failed)
    assert failed[12:] == question[12:]


@pytest.mark.parametrize(
    "noise", [b"", b"\0" * 12, b"\0" * 5 + b"\x01" + b"\0" * 6 + b"\x3f", dns_messages.query(1, "a.b")[:-1]]
)
def test_noise_is_told_from_questions(noise: bytes) -> None:
    with pytest.raises((Malformed, struct.error)):
        dns_messages.asks_within(noise, b"\0")
