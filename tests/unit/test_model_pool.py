"""The pool's decisions: how it grows, shrinks and renews, and that it never takes a node from under a pod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model import pool
from slurmlet.model.ids import JobId
from slurmlet.model.pool import Member, Plan, PoolSpec, plan
from slurmlet.model.pool_jobs import PoolJob, pool_jobs
from slurmlet.model.slurm_values import Job
from slurmlet.slurm.command_output import seconds


def member(name: str, **changes: Any) -> Member:
    return Member(**{"name": name, "job_id": "1", "queued": False, "ready": True, **changes})


class TestSize:
    def test_what_is_missing_is_asked_for(self) -> None:
        assert plan(PoolSpec(2, 2), [member("a")], 0) == Plan(add=1)

    def test_one_in_the_queue_counts(self) -> None:
        assert plan(PoolSpec(1, 1), [member("a", queued=True, ready=False)], 0) == Plan()

    def test_pods_that_wait_make_it_grow_up_to_its_most(self) -> None:
        assert plan(PoolSpec(1, 3), [member("a", pods=4)], waiting_pods=5).add == 2

    def test_nodes_on_their_way_are_not_asked_for_twice(self) -> None:
        members = [member("a", pods=1), member("b", queued=True, ready=False)]
        assert plan(PoolSpec(1, 3), members, waiting_pods=1).add == 0

    def test_waiting_pods_do_nothing_to_a_pool_that_is_fixed(self) -> None:
        assert plan(PoolSpec(1, 1), [member("a")], waiting_pods=5) == Plan()


class TestShrinking:
    spec = PoolSpec(1, 3, idle_s=60)

    def test_what_was_idle_for_long_goes_the_longest_idle_first(self) -> None:
        members = [member("a", idle_s=70), member("b", idle_s=90), member("c", idle_s=10)]
        assert plan(self.spec, members, 0).retire == (("b", "idle"), ("a", "idle"))

    def test_never_below_the_least_and_never_while_pods_wait(self) -> None:
        members = [member("a", idle_s=70), member("b", idle_s=90)]
        assert plan(self.spec, members, 0).retire == (("b", "idle"),)
        assert plan(self.spec, members, 1).retire == ()

    def test_one_with_pods_is_never_idle(self) -> None:
        members = [member("a", pods=1, idle_s=0), member("b", pods=1, idle_s=0)]
        assert plan(self.spec, members, 0) == Plan()

    def test_a_smaller_pool_lets_go_of_the_emptiest(self) -> None:
        members = [member("a", pods=2), member("b", pods=1), member("c", queued=True, ready=False)]
        retired = plan(PoolSpec(1, 1), members, 0).retire
        assert [name for name, _ in retired] == ["c", "b"]


class TestLeaving:
    def test_one_that_leaves_is_replaced_before_its_pods_move(self) -> None:
        leaving = member("a", retiring="its time limit is near", pods=2)
        assert plan(PoolSpec(1, 1), [leaving], 0) == Plan(add=1)
        coming = member("b", ready=False)
        assert plan(PoolSpec(1, 1), [leaving, coming], 0) == Plan()
        assert plan(PoolSpec(1, 1), [leaving, member("b")], 0) == Plan(evict=("a",))

    def test_it_goes_when_it_is_empty_and_not_before(self) -> None:
        assert plan(PoolSpec(0, 0), [member("a", retiring="removed", pods=1)], 0).release == ()
        assert plan(PoolSpec(0, 0), [member("a", retiring="removed")], 0).release == ("a",)

    def test_a_time_limit_that_is_near(self) -> None:
        near = member("a", left_s=200.0, limit_s=36000.0)
        far = member("b", left_s=200.0, limit_s=600.0)
        made = plan(PoolSpec(2, 2), [near, far], 0)
        assert made.retire == (("a", "its time limit is near"),)
        assert made.add == 1

    def test_one_that_was_named(self) -> None:
        made = plan(PoolSpec(0, 0, unwanted=frozenset({"a"})), [member("a", pods=3)], 0)
        assert made.retire == (("a", "removed"),)


class TestJobs:
    def test_pool_jobs_are_told_by_their_comment(self) -> None:
        def job(number: str, state: str, comment: str, reason: str = "") -> Job:
            return Job(JobId(number), state, reason, "", "batch", comment)

        listed = [
            replace(job("7", "RUNNING", "slurmlet-pool:cafe:pool-1"), left_s=598.0, limit_s=600.0),
            job("8", "PENDING", "slurmlet-pool:cafe:pool-2", "Resources"),
            job("9", "RUNNING", "slurmlet-pool:beef:pool-3"),
            job("10", "RUNNING", "slurmlet:cafe:a-pod"),
            job("11", "COMPLETED", "slurmlet-pool:cafe:pool-4"),
            job("12", "RUNNING", ""),
        ]
        assert pool_jobs("cafe", listed) == [
            PoolJob(JobId("7"), "pool-1", "RUNNING", 598.0, 600.0),
            PoolJob(JobId("8"), "pool-2", "PENDING", None, None, 1, "Resources"),
        ]

    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ("1-02:03:04", 93784.0),
            ("02:03:04", 7384.0),
            ("10:00", 600.0),
            ("UNLIMITED", None),
            ("NOT_SET", None),
            ("", None),
        ],
    )
    def test_slurms_times(self, text: str, wanted: float | None) -> None:
        assert seconds(text) == wanted

    def test_options_of_an_earlier_slurmlet_are_understood(self) -> None:
        read = pool.spec_of({"least": 1, "most": 1, "options": ["-p", "short", "--time=5"]})
        assert read.options == (("partition", "short"), ("time", "5"))
        assert pool.spec_of({"options": [["partition", "short"], ["hold", None]]}).options == (
            ("partition", "short"),
            ("hold", None),
        )
        with pytest.raises(RefusedPod, match="--wrap"):
            pool.spec_of({"options": ["--wrap=reboot"]})
