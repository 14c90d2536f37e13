"""Tells every netd, and the gateway, what the board says: everything when it comes, then changes.

How often: the first change after a quiet time goes out after 5 ms; while changes go on, all of them together every 20 ms
and 0.1 ms more for each follower (0.4 s with 4,000 of them, and never more than that). A follower that does not read is
waited for by its own task alone; no queue grows for it, and when it reads again it may have to be told everything anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from slurmlet.hub.network.table_board import COMPLETE, Board
from slurmlet.hub.runner_links import LinkLost, RunnerLink
from slurmlet.protocol import wire
from slurmlet.protocol.network_tables import NetworkUpdate

log = logging.getLogger(__name__)
_SETTLE_S = 0.005
_BASE_S, _PER_FOLLOWER_S, _MAX_S = 0.02, 0.0001, 0.4

# Fields of a "network" message that are for one follower only.
Own = Callable[[], NetworkUpdate | None]


class Follower:
    def __init__(self, link: RunnerLink, own: Own, may_begin: Awaitable[None]) -> None:
        self.link, self.own, self.may_begin = link, own, may_begin
        self.wake = asyncio.Event()
        # Whether what is its own is to be told (again).
        self.own_due = True


class Pusher:
    def __init__(self, board: Board) -> None:
        self._board = board
        board.subscribe(self.soon)
        self._followers: dict[RunnerLink, Follower] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._told_s = 0.0
        self._rounds = 0

    def __len__(self) -> int:
        return len(self._followers)

    def soon(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            due_s = self._told_s + interval_s(len(self._followers))
            self._timer = loop.call_at(max(loop.time() + _SETTLE_S, due_s), self._tell)

    def _tell(self) -> None:
        self._board.tell()
        self._timer = None
        self._rounds += 1
        self._told_s = asyncio.get_running_loop().time()
        for follower in self._followers.values():
            follower.wake.set()

    def own_changed(self, link: RunnerLink | None) -> None:
        follower = self._followers.get(link) if link is not None else None
        if follower is not None:
            follower.own_due = True
            follower.wake.set()

    def follows(self, link: RunnerLink) -> bool:
        return link in self._followers

    async def follow(self, follower: Follower) -> None:
        """Until the link ends."""
        self._followers[follower.link] = follower
        try:
            await follower.may_begin
            await self._follow(follower)
        except LinkLost:
            pass
        except Exception:
            # One runner's connection must not take the hub down with it.
            log.exception("telling the runner of pod %s about the network", follower.link.uid)
        finally:
            del self._followers[follower.link]

    async def _follow(self, follower: Follower) -> None:
        place: int | None = None
        while follower.link.alive:
            follower.wake.clear()
            # First of all, so that no connection is made against a policy that is only on its way.
            if follower.own_due:
                follower.own_due = False
                fields = follower.own()
                if fields is not None:
                    await follower.link.send(wire.control({"type": "network", "reset": False, **fields}))
            place = await self._catch_up(follower, place)
            if place == self._board.end and not follower.own_due:
                await follower.wake.wait()

    async def _catch_up(self, follower: Follower, place: int | None) -> int:
        link = follower.link
        try:
            if place is not None:
                return await self._send_log(link, place)
        except LookupError:
            log.info("the runner of pod %s fell behind and is told everything anew", link.uid)
        known = self._rounds + (self._timer is not None)
        frames, place = self._board.snapshot()
        for frame in frames:
            await link.send(frame)
        # It is about to forget what it was not told: so also what is known by now and waits for the next round.
        while self._rounds < known and link.alive:
            follower.wake.clear()
            await follower.wake.wait()
        try:
            place = await self._send_log(link, place)
        except LookupError:
            return place
        await link.send(COMPLETE)
        return place

    async def _send_log(self, link: RunnerLink, place: int) -> int:
        while (frame := self._board.frame(place)) is not None:
            await link.send(frame)
            place += 1
        return place


def interval_s(followers: int) -> float:
    return min(_MAX_S, _BASE_S + followers * _PER_FOLLOWER_S)
