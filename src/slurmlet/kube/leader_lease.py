"""One of several processes leads: a coordination.k8s.io/v1 Lease, with client-go's rules.

Clocks of hosts differ, so nobody compares another's renewTime with their own clock: a holder counts as gone when its lease
has not changed for its whole duration *as seen from here*. A leader that could not renew for `renew_deadline_s` stops
before others may begin (the deadline is shorter than the duration); nothing of its work runs on after that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from slurmlet.base.clock import micro_time
from slurmlet.base.errors import UserError
from slurmlet.kube.client import ApiClient, ApiError

log = logging.getLogger(__name__)
Obj = dict[str, Any]


@dataclass(frozen=True)
class LeaseTimes:
    duration_s: int = 15
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.retry_s < self.renew_deadline_s < self.duration_s:
            raise UserError(
                f"lease times: retry ({self.retry_s} s) < renew deadline ({self.renew_deadline_s} s) "
                f"< duration ({self.duration_s} s) expected"
            )


class LeaderElector:
    """`on_started()` runs while this process leads and is cancelled when it no longer does; then `on_lost()` is called."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        name: str,
        identity: str,
        on_started: Callable[[], Coroutine[Any, Any, None]],
        on_lost: Callable[[], None] = lambda: None,
        times: LeaseTimes = LeaseTimes(),  # noqa: B008 - frozen
    ) -> None:
        self._client, self._name, self.identity, self._times = client, name, identity, times
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._on_started, self._on_lost = on_started, on_lost
        self._seen: tuple[str, float] = ("", 0.0)  # version of the lease, and when it was first seen
        self._renewed_s = 0.0
        self.leading = False

    async def run(self) -> None:
        """Until it is cancelled, or what `on_started` does ends; the lease is given up then, for others to take at once."""
        while True:
            await self._acquire()
            if await self._lead():
                return

    async def _acquire(self) -> None:
        while not await self._try():  # noqa: ASYNC110 - nobody tells when a holder is gone
            await asyncio.sleep(self._times.retry_s)

    async def _lead(self) -> bool:
        """Whether the work ended by itself (True) or leadership was lost (False)."""
        log.info("lease %s: %s leads", self._name, self.identity)
        self.leading = True
        work = asyncio.create_task(self._on_started(), name=f"leader of {self._name}")
        try:
            while await self._renewed(work):
                pass
            if work.done():
                work.result()
                return True
            log.warning("lease %s: %s could not renew it and leads no longer", self._name, self.identity)
            return False
        finally:
            ours = self.leading
            self.leading = False
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self._on_lost()
            if ours:
                await self._give_up()

    async def _renewed(self, work: asyncio.Task[None]) -> bool:
        """Wait for the next turn, then renew; False when the work is over or the lease is another's."""
        await asyncio.wait([work], timeout=self._times.retry_s)
        if work.done():
            return False
        if await self._try():
            return True
        late_s = asyncio.get_running_loop().time() - self._renewed_s
        if late_s < self._times.renew_deadline_s and self.leading:
            return True
        self.leading = False
        return False

    async def _give_up(self) -> None:
        """Read first: a renewal that was cut short may have been written all the same."""
        path = f"{self._leases}/{self._name}"
        try:
            async with asyncio.timeout(self._times.renew_deadline_s / 2):
                lease = await self._client.get(path)
                if lease["spec"].get("holderIdentity") == self.identity:
                    version = {"resourceVersion": lease["metadata"]["resourceVersion"]}
                    free = {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._client.patch(path, {"metadata": version, "spec": free})
        except (ApiError, TimeoutError) as error:
            log.info("lease %s: not given up: %s", self._name, error)

    async def _try(self) -> bool:
        """Take or renew the lease. An answer that does not come counts as no."""
        began_s = asyncio.get_running_loop().time()
        patience_s = self._times.renew_deadline_s / 2
        if self.leading:
            patience_s = max(0.0, min(patience_s, self._renewed_s + self._times.renew_deadline_s - began_s))
        try:
            async with asyncio.timeout(patience_s):
                lease = await self._written()
        except (ApiError, TimeoutError) as error:
            log.debug("lease %s: %s", self._name, error)
            return False
        if lease is not None:
            self._seen = (lease["metadata"]["resourceVersion"], began_s)
            # From before the request was sent: others count from when it was written, which is later.
            self._renewed_s = began_s
        return lease is not None

    async def _written(self) -> Obj | None:
        try:
            lease = await self._client.get(f"{self._leases}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            spec = {**self._spec(), "acquireTime": micro_time(), "leaseTransitions": 0}
            return await self._client.create(self._leases, {"metadata": {"name": self._name}, "spec": spec})
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self.identity) and (self.leading or not self._is_over(lease)):
            self.leading = False  # somebody else led meanwhile: our work must end before it may begin again
            return None
        if holder != self.identity:
            log.info("lease %s: free (it was held by %s)", self._name, holder or "nobody")
        changes = {} if holder == self.identity else self._taken(spec)
        # With the version: of two who find it free one writes first, and the other is refused.
        metadata = {"resourceVersion": lease["metadata"]["resourceVersion"]}
        change = {"metadata": metadata, "spec": {**self._spec(), **changes}}
        return await self._client.patch(f"{self._leases}/{self._name}", change)

    def _is_over(self, lease: Obj) -> bool:
        """Whether the lease was not renewed for its duration, by our own clock."""
        version, now_s = lease["metadata"]["resourceVersion"], asyncio.get_running_loop().time()
        if self._seen[0] != version:
            self._seen = (version, now_s)
        return now_s - self._seen[1] > float(
            lease["spec"].get("leaseDurationSeconds") or self._times.duration_s
        )

    def _spec(self) -> Obj:
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self._times.duration_s,
            "renewTime": micro_time(),
        }

    def _taken(self, spec: Obj) -> Obj:
        return {"acquireTime": micro_time(), "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
