"""What pods use, asked of their runners while somebody wants to know; nobody is asked otherwise.

A look keeps the pods it was about warm for some minutes: they are asked in the background, so that the next look is
answered at once and its rates cover a steady window. Questions go out a few dozen at a time; a runner that does not
answer costs its own figures and holds up nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from slurmlet.hub.runner_links import LinkLost, RunnerLink
from slurmlet.model.ids import PodUid
from slurmlet.model.usage_samples import Measured, PodSample, sample

log = logging.getLogger(__name__)

# A pod that was looked at is asked this often, for this long after the last look.
POLL_S = 10.0
WARM_S = 180.0
# A sample older than this says nothing about now.
_STALE_S = 1.5 * POLL_S
# File systems change slowly and cost a walk over their files.
_STALE_SPACE_S = 60.0
# A rate counted from a sample older than this would be history; from one younger, noise.
_OLDEST_BASE_S = 6 * POLL_S
_SHORTEST_BASE_S = 1.0
_ANSWER_S = 3.0
_SPACE_ANSWER_S = 12.0
_AT_ONCE = 64


class PodLike(Protocol):
    """What is needed of a pod's state: who it is, where it is counted, and its runner."""

    uid: PodUid

    @property
    def node(self) -> str: ...
    @property
    def live_link(self) -> RunnerLink | None: ...


class _Kept:
    """The samples of one pod."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.now: PodSample | None = None
        self.before: PodSample | None = None
        self.space: PodSample | None = None  # the newest with file systems
        self.taken_s = float("-inf")  # by our own clock: the runners' may differ
        self.space_taken_s = float("-inf")
        self.wanted_s = 0.0

    def take(self, new: PodSample, now_s: float) -> None:
        if self.now is not None and new.at_s - self.now.at_s >= _SHORTEST_BASE_S:
            self.before = self.now
        self.now, self.taken_s = new, now_s
        if new.has_space or not new.containers:
            self.space, self.space_taken_s = new, now_s

    @property
    def base_missing(self) -> bool:
        """Whether a rate has nothing young enough to be counted from."""
        if self.now is None or not self.now.containers:
            return False
        return self.before is None or self.now.at_s - self.before.at_s > _OLDEST_BASE_S


class Usage:
    def __init__(self, pods: Callable[[], Iterable[PodLike]]) -> None:
        self._pods = pods
        self._kept: dict[PodUid, _Kept] = {}
        self._ended_cpu_s: dict[str, float] = {}
        self._one_look = asyncio.Lock()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._wanted = asyncio.Event()

    async def look(self, pods: Iterable[PodLike], *, space: bool = False) -> dict[PodUid, Measured]:
        """The usage of those of the pods that have a runner and something running; fresh, with rates."""
        wanted = [pod for pod in pods if pod.live_link is not None]
        now_s = time.monotonic()
        for pod in wanted:
            self._keep(pod).wanted_s = now_s
        self._wanted.set()
        # One at a time: a second asker finds what the first one learnt.
        async with self._one_look:
            if space:
                await self._ask([pod for pod in wanted if self._space_is_stale(pod)], space=True)
            await self._ask([pod for pod in wanted if self._is_stale(pod)])
            cold = [pod for pod in wanted if pod.uid in self._kept and self._kept[pod.uid].base_missing]
            if cold:
                await asyncio.sleep(_SHORTEST_BASE_S)
                await self._ask(cold)
        return dict(self._measured(wanted))

    def other_cpu_s(self, node: str, measured: Collection[PodUid]) -> float:
        """CPU time of a node's pods that ended, or that are not among those measured now, as far as it is known."""
        others = (
            kept.now.cpu_s
            for uid, kept in self._kept.items()
            if kept.node == node and kept.now is not None and uid not in measured
        )
        return self._ended_cpu_s.get(node, 0.0) + sum(others)

    def silent(self, pods: Iterable[PodLike]) -> int:
        """How many pods with a runner have not answered lately."""
        return sum(1 for pod in pods if pod.live_link is not None and self._is_stale(pod))

    async def run(self) -> None:
        """Keeps what was looked at warm."""
        while True:
            await self._wanted.wait()
            await asyncio.sleep(POLL_S)
            self._forget_ended()
            warm_since_s = time.monotonic() - WARM_S
            warm = [
                pod
                for pod in self._pods()
                if (kept := self._kept.get(pod.uid)) is not None and kept.wanted_s > warm_since_s
            ]
            if not warm:
                self._wanted.clear()
                continue
            async with self._one_look:
                await self._ask([pod for pod in warm if pod.live_link is not None])

    def _measured(self, pods: Iterable[PodLike]) -> Iterator[tuple[PodUid, Measured]]:
        now_s = time.monotonic()
        for pod in pods:
            kept = self._kept.get(pod.uid)
            if kept is None or kept.now is None or now_s - kept.taken_s > _STALE_S + _ANSWER_S:
                continue
            now, before = kept.now, kept.before
            if before is not None and now.at_s - before.at_s > _OLDEST_BASE_S:
                before = None
            yield pod.uid, Measured(_with_space(now, kept.space), before)

    def _keep(self, pod: PodLike) -> _Kept:
        return self._kept.setdefault(pod.uid, _Kept(pod.node))

    def _is_stale(self, pod: PodLike) -> bool:
        return time.monotonic() - self._keep(pod).taken_s > _STALE_S

    def _space_is_stale(self, pod: PodLike) -> bool:
        return time.monotonic() - self._keep(pod).space_taken_s > _STALE_SPACE_S

    async def _ask(self, pods: list[PodLike], *, space: bool = False) -> None:
        await asyncio.gather(*(self._ask_one(pod, space=space) for pod in pods))

    async def _ask_one(self, pod: PodLike, *, space: bool) -> None:
        async with self._slots:
            link = pod.live_link
            if link is None:
                return
            try:
                usage = await link.ask_usage(_SPACE_ANSWER_S if space else _ANSWER_S, disk=space)
                if usage is not None:
                    self._keep(pod).take(sample(usage), time.monotonic())
            except (TimeoutError, LinkLost):
                log.info("the runner of pod %s did not say what it uses", pod.uid)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                log.warning("the runner of pod %s told nonsense about its usage: %r", pod.uid, error)

    def _forget_ended(self) -> None:
        """Pods that are gone leave their CPU time with their node: its counter must not fall."""
        known = {pod.uid for pod in self._pods()}
        for uid in [uid for uid in self._kept if uid not in known]:
            kept = self._kept.pop(uid)
            if kept.now is not None:
                self._ended_cpu_s[kept.node] = self._ended_cpu_s.get(kept.node, 0.0) + kept.now.cpu_s


def _with_space(now: PodSample, space: PodSample | None) -> PodSample:
    """The newest figures, with the file systems of the look that last walked them."""
    if now.has_space or space is None:
        return now
    walked = {one.name: one for one in space.containers}
    containers = tuple(
        replace(one, rootfs=walked[one.name].rootfs, logs=walked[one.name].logs)
        if one.name in walked
        else one
        for one in now.containers
    )
    return replace(now, containers=containers, volumes=space.volumes)
