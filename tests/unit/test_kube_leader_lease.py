"""The leader lease: one leads, a silent one is followed, one that cannot renew stops before another may begin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slurmlet.base.errors import UserError
from slurmlet.kube.leader_lease import LeaderElector, LeaseTimes
from tests.unit.loopback import Api, Stored, api_server, make_keys, until

LEASES = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
# Patient, so that a busy machine is not taken for a lost server; asks often.
EAGER = LeaseTimes(duration_s=15, renew_deadline_s=10.0, retry_s=0.02)
# Gives up soon.
QUICK = LeaseTimes(duration_s=2, renew_deadline_s=0.8, retry_s=0.02)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


class Candidate:
    def __init__(self, api: Api, name: str, times: LeaseTimes = EAGER) -> None:
        self.working = False
        self.lost = 0
        self.end = asyncio.Event()
        self.elector = LeaderElector(api.client, "ns", "op", name, self._work, self._on_lost, times)
        self.task = asyncio.create_task(self.elector.run())

    async def _work(self) -> None:
        self.working = True
        try:
            await self.end.wait()
        finally:
            self.working = False

    def _on_lost(self) -> None:
        assert not self.working, "the work has ended before anybody hears of it"
        self.lost += 1

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def served(keys: Path, scenario: Callable[[Api, Stored], Awaitable[None]]) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            async with asyncio.timeout(5):
                await scenario(api, Stored(api, LEASES))

    asyncio.run(run())


def test_one_leads_and_its_end_lets_the_other_follow_at_once(keys: Path) -> None:
    async def scenario(api: Api, leases: Stored) -> None:
        first = Candidate(api, "one")
        await until(lambda: first.working)
        second = Candidate(api, "two")
        await asyncio.sleep(0.1)
        assert not second.working
        assert leases.objects["op"]["spec"]["holderIdentity"] == "one"
        await first.stop()
        assert (first.working, first.lost) == (False, 1)
        assert leases.objects["op"]["spec"]["holderIdentity"] == ""
        await until(lambda: second.working)
        assert leases.objects["op"]["spec"]["leaseTransitions"] == 1
        await second.stop()

    served(keys, scenario)


def test_a_holder_that_is_silent_for_its_duration_is_followed_and_no_sooner(keys: Path) -> None:
    async def scenario(api: Api, leases: Stored) -> None:
        # The times of a host whose clock is far off say nothing.
        spec = {
            "holderIdentity": "dead",
            "leaseDurationSeconds": 1,
            "renewTime": "2099-01-01T00:00:00.000000Z",
        }
        leases.put({"metadata": {"name": "op"}, "spec": spec})
        began_s = asyncio.get_running_loop().time()
        second = Candidate(api, "two")
        await until(lambda: second.working, 3)
        assert asyncio.get_running_loop().time() - began_s >= 1.0
        await second.stop()

    served(keys, scenario)


def test_a_leader_that_cannot_renew_stops_before_its_lease_is_over(keys: Path) -> None:
    async def scenario(api: Api, leases: Stored) -> None:
        first = Candidate(api, "one", QUICK)
        await until(lambda: first.working)
        api.on("GET", f"{LEASES}/op", 503)
        began_s = asyncio.get_running_loop().time()
        await until(lambda: first.lost, 3)
        assert 0.5 < asyncio.get_running_loop().time() - began_s < 2.0
        assert not first.elector.leading
        del api.routes["GET", f"{LEASES}/op"]
        await until(lambda: first.working)
        await first.stop()

    served(keys, scenario)


def test_a_short_absence_of_the_server_changes_nothing(keys: Path) -> None:
    async def scenario(api: Api, leases: Stored) -> None:
        first = Candidate(api, "one")
        await until(lambda: first.working)
        api.on("GET", f"{LEASES}/op", 503)
        await asyncio.sleep(0.2)
        del api.routes["GET", f"{LEASES}/op"]
        await asyncio.sleep(0.2)
        assert (first.working, first.lost) == (True, 0)
        await first.stop()

    served(keys, scenario)


def test_a_lease_that_another_took_ends_the_work_at_once(keys: Path) -> None:
    async def scenario(api: Api, leases: Stored) -> None:
        first = Candidate(api, "one")
        await until(lambda: first.working)
        spec = {**leases.objects["op"]["spec"], "holderIdentity": "two"}
        leases.put({"metadata": {"name": "op"}, "spec": spec})
        await until(lambda: first.lost)
        assert leases.objects["op"]["spec"]["holderIdentity"] == "two", "it is not ours to give up"
        await first.stop()

    served(keys, scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_ends_by_itself_ends_the_elector_and_frees_the_lease(keys: Path, fails: bool) -> None:
    async def scenario(api: Api, leases: Stored) -> None:
        async def work() -> None:
            if fails:
                raise ValueError("bug")

        elector = LeaderElector(api.client, "ns", "op", "one", work, times=EAGER)
        if fails:
            with pytest.raises(ValueError, match="bug"):
                await elector.run()
        else:
            await elector.run()
        assert leases.objects["op"]["spec"]["holderIdentity"] == ""

    served(keys, scenario)


def test_times_that_would_let_two_lead_are_refused() -> None:
    with pytest.raises(UserError, match="retry"):
        LeaseTimes(duration_s=5, renew_deadline_s=5.0, retry_s=1.0)
