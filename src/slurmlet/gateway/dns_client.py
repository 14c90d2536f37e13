"""Questions to CoreDNS, over connections that are kept: whoever asks gets one answer, or None when nobody knew in time.

CoreDNS answers the questions of one connection one after the other. So names of the cluster, answered from memory, have a
connection of their own, and names outside, which may wait for the site's servers, are spread over others.
A question that CoreDNS took with it when it died is asked again of the next one.
"""

from __future__ import annotations

import os
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from slurmlet.gateway import dns_messages
from slurmlet.gateway.dns_tls import TlsClient
from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet.encryption.tls_connection import ROOM_BYTES

OnAnswer = Callable[[bytes | None], None]
CLUSTER_DOMAIN = "cluster.local"
SERVER_NAME = "dns.slurmlet"
# A little more than the resolvers of C libraries wait.
PATIENCE_S = 6.0
_AGAIN_S = 0.1
_MAX_OUTSIDE_LANES = 16
_MAX_WAITING = 8192
_WIRE_DOMAIN = dns_messages.wire_name(CLUSTER_DOMAIN)


@dataclass
class _Question:
    message: bytes
    done: OnAnswer
    due_s: float


class Resolver:
    """`port` says where CoreDNS listens at the moment."""

    def __init__(self, loop: Loop, port: Callable[[], int], context: ssl.SSLContext) -> None:
        self._loop, self._port, self._context = loop, port, context
        self._room = bytearray(ROOM_BYTES)
        self._inside = _Lane(loop, self._connect)
        self._outside: list[_Lane] = []
        self.counts = {"questions": 0, "unanswered": 0}

    def ask(self, message: bytes, done: OnAnswer) -> None:
        """`message` is a whole question; so is the answer. Raises Malformed."""
        self.counts["questions"] += 1
        lane = self._inside if dns_messages.asks_within(message, _WIRE_DOMAIN) else self._lane_outside()
        if lane.waiting >= _MAX_WAITING:
            self._unanswered(done)
            return
        question = _Question(message, done, time.monotonic() + PATIENCE_S)
        lane.ask(question, lambda: self._unanswered(done))

    def addresses(self, name: str, done: Callable[[list[int], bool], None]) -> None:
        """done(addresses, whether CoreDNS answered at all). Raises Malformed for what is no name."""

        def answered(answer: bytes | None) -> None:
            if answer is None or dns_messages.rcode(answer) not in (0, dns_messages.NXDOMAIN):
                done([], answer is not None)
                return
            try:
                found = dns_messages.addresses_of(answer)
            except dns_messages.Malformed:
                found = []
            done(found, True)

        self.ask(dns_messages.query(0, name), answered)

    def close(self) -> None:
        for lane in (self._inside, *self._outside):
            lane.close()

    def _unanswered(self, done: OnAnswer) -> None:
        self.counts["unanswered"] += 1
        done(None)

    def _lane_outside(self) -> _Lane:
        free = min(self._outside, key=lambda lane: lane.waiting, default=None)
        if free is None or (free.waiting and len(self._outside) < _MAX_OUTSIDE_LANES):
            free = _Lane(self._loop, self._connect)
            self._outside.append(free)
        return free

    def _connect(
        self, on_up: Callable[[], None], on_message: Callable[[bytes], None], on_lost: Callable[[str], None]
    ) -> TlsClient:
        address = ("127.0.0.1", self._port())
        return TlsClient(
            self._loop, address, self._context, SERVER_NAME, self._room, on_up, on_message, on_lost
        )


Connect = Callable[[Callable[[], None], Callable[[bytes], None], Callable[[str], None]], TlsClient]


class _Lane:
    """One connection, made when there is a question and made again while there is one."""

    def __init__(self, loop: Loop, connect: Connect) -> None:
        self._loop, self._connect = loop, connect
        self._client: TlsClient | None = None
        self._asked: dict[int, tuple[_Question, Callable[[], None]]] = {}
        self._last = int.from_bytes(os.urandom(2), "big")
        self._again: Timer | None = None
        self._sweep: Timer | None = None
        self._complained = ""

    @property
    def waiting(self) -> int:
        return len(self._asked)

    def ask(self, question: _Question, gave_up: Callable[[], None]) -> None:
        number = self._free_number()
        self._asked[number] = (question, gave_up)
        if self._client is None:
            self._dial()
        elif self._client.up:
            self._client.send(dns_messages.renumbered(question.message, number))
        if self._sweep is None:
            self._sweep = self._loop.later(1.0, self._give_up_old)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _free_number(self) -> int:
        while True:
            self._last = (self._last + 1) & 0xFFFF
            if self._last not in self._asked:
                return self._last

    def _dial(self) -> None:
        if self._again is None:
            self._client = self._connect(self._up, self._answered, self._lost)

    def _up(self) -> None:
        assert self._client is not None
        self._complained = ""
        for number, (question, _) in self._asked.items():
            self._client.send(dns_messages.renumbered(question.message, number))

    def _answered(self, answer: bytes) -> None:
        held = self._asked.pop(dns_messages.number_of(answer), None) if len(answer) >= 2 else None
        if held is not None:
            question = held[0]
            question.done(dns_messages.renumbered(answer, dns_messages.number_of(question.message)))

    def _lost(self, why: str) -> None:
        self._client = None
        if self._asked and why != self._complained:
            self._complained = why
            print(f"CoreDNS: {why}; retrying", file=sys.stderr, flush=True)
        if self._asked:
            self._again = self._loop.later(_AGAIN_S, self._dial_again)

    def _dial_again(self) -> None:
        self._again = None
        if self._asked:
            self._dial()

    def _give_up_old(self) -> None:
        self._sweep = None
        now_s = time.monotonic()
        for number in [n for n, (question, _) in self._asked.items() if question.due_s <= now_s]:
            self._asked.pop(number)[1]()
        if self._asked:
            self._sweep = self._loop.later(1.0, self._give_up_old)
