"""The autoscaler's decisions: scale-out for jobs that nodes would help, and scale-in step by step from facts alone."""

from __future__ import annotations

from dataclasses import replace

from slurmlet.operators.provisioning.autoscaler.cluster_snapshot import Machine, SetFacts, Snapshot
from slurmlet.operators.provisioning.autoscaler.decision import PolicyState, decide
from slurmlet.operators.provisioning.autoscaler.worker_sets import DrainPolicy, Shape
from tests.unit.provisioning_facts import (
    NOW_S,
    OURS,
    decision,
    facts,
    node,
    only,
    running_job,
    waiting_job,
    worker_set,
)


class TestScaleOut:
    def test_from_zero_a_waiting_job_gets_its_nodes(self) -> None:
        found = only(facts(), jobs=[waiting_job(nodes_min=3, cpus=48)])
        assert (found.desired, found.replicas) == (3, 3)
        assert any("scale out by 3 to 3" in reason for reason in found.reasons)

    def test_desired_is_busy_and_what_waits(self) -> None:
        jobs = [running_job(1, "n1"), waiting_job(2), waiting_job(3)]
        found = only(facts("n1", "n2"), workers=[node("n1", busy=True), node("n2")], jobs=jobs)
        # n2 is idle and takes one of the two.
        assert (found.desired, found.replicas) == (3, 3)

    def test_machines_on_their_way_are_not_asked_for_twice(self) -> None:
        jobs = [waiting_job(1), waiting_job(2)]
        asked = only(facts(replicas=2), jobs=jobs)
        assert (asked.replicas, asked.starting) == (None, 2)
        young = Machine("n1", "n1", NOW_S - 30)
        booting = SetFacts(worker_set(), 2, (young,))
        assert only(booting, jobs=jobs).replicas is None

    def test_small_jobs_share_a_node(self) -> None:
        jobs = [waiting_job(number, cpus=4) for number in range(8)]
        assert only(facts(), jobs=jobs).replicas == 2

    def test_never_over_the_maximum(self) -> None:
        found = only(facts(), jobs=[waiting_job(number) for number in range(50)])
        assert found.replicas == 10

    def test_the_step_counts_machines_that_are_starting(self) -> None:
        spec = worker_set(scale_out_step=3)
        jobs = [waiting_job(number) for number in range(8)]
        assert only(facts(spec=spec), jobs=jobs).replicas == 3
        assert only(facts(replicas=2, spec=spec), jobs=jobs).replicas == 3
        waiting = only(facts(replicas=3, spec=spec), jobs=jobs)
        assert waiting.replicas is None
        assert any("scale-out step" in reason for reason in waiting.reasons)

    def test_the_minimum_is_kept_without_jobs(self) -> None:
        assert only(facts(spec=worker_set(min=2))).replicas == 2

    def test_a_job_that_slurm_has_not_looked_at_may_use_room_on_busy_nodes(self) -> None:
        partly = node("n1", state="MIXED", cpus_allocated=4)
        held = running_job(1, "n1", cpus=4)
        fresh = waiting_job(2, reason="None", cpus=4)
        assert only(facts("n1"), workers=[partly], jobs=[held, fresh]).replicas is None
        tried = waiting_job(2, reason="Resources", cpus=4)
        assert only(facts("n1"), workers=[partly], jobs=[held, tried]).replicas == 2

    def test_nodes_that_are_nobodys_to_scale_are_used_first(self) -> None:
        assert only(facts(), workers=[node("static1")], jobs=[waiting_job()]).replicas is None


class TestScaleIn:
    def test_an_idle_worker_is_drained_only_after_the_cool_down(self) -> None:
        early = only(facts("n1"), workers=[node("n1", idle_s=299)])
        assert not early.changes
        assert any("300 s of idleness" in reason for reason in early.reasons)
        assert only(facts("n1"), workers=[node("n1", idle_s=300)]).drain == ("n1",)

    def test_where_slurm_does_not_tell_since_when_a_node_is_idle_it_is_remembered(self) -> None:
        silent = node("n1", last_busy_at_s=None)
        first = decision(facts("n1"), workers=[silent])
        assert first.of("small").drain == ()
        later = decision(facts("n1"), workers=[silent], state=first.state, now_s=NOW_S + 300)
        assert later.of("small").drain == ("n1",)
        # Memory that was lost costs a delay, nothing else.
        assert only(facts("n1"), workers=[silent], now_s=NOW_S + 300).drain == ()

    def test_a_drained_worker_is_marked_and_the_replicas_lowered(self) -> None:
        found = only(facts("n1", "n2"), workers=[node("n1", reason=OURS), node("n2", busy=True)])
        assert (found.mark, found.replicas) == (("n1",), 1)

    def test_a_crash_between_mark_and_replicas_is_gone_on_from(self) -> None:
        marked = Machine("n1", "n1", NOW_S, marked=True, marked_by_us=True)
        found = only(SetFacts(worker_set(), 1, (marked,)), workers=[node("n1", reason=OURS)])
        assert (found.mark, found.replicas) == ((), 0)

    def test_replicas_are_lowered_once_until_the_machine_is_being_deleted(self) -> None:
        marked = Machine("n1", "n1", NOW_S, marked=True, marked_by_us=True)
        busy = Machine("n2", "n2", NOW_S)
        workers = [node("n1", reason=OURS), node("n2", busy=True)]
        assert not only(SetFacts(worker_set(), 1, (marked, busy)), workers=workers).changes
        deleting = replace(marked, deleting=True)
        assert not only(SetFacts(worker_set(), 1, (deleting, busy)), workers=workers).changes

    def test_replicas_are_not_lowered_while_machines_are_still_to_come(self) -> None:
        """The number of machines would not tell whether it was done."""
        drained = only(facts("n1", replicas=2), workers=[node("n1", reason=OURS)])
        assert (drained.mark, drained.replicas) == ((), None)

    def test_a_machine_that_is_given_up_cannot_be_kept_and_what_follows_waits(self) -> None:
        marked = Machine("n1", "n1", NOW_S, marked=True, marked_by_us=True)
        found = only(
            SetFacts(worker_set(), 0, (marked,)), workers=[node("n1", reason=OURS)], jobs=[waiting_job()]
        )
        assert not found.changes
        assert found.desired == 1
        assert any("scale-out waits" in reason for reason in found.reasons)

    def test_a_job_that_came_in_between_keeps_its_worker(self) -> None:
        draining = node("n1", busy=True, reason=OURS)
        found = only(facts("n1"), workers=[draining], jobs=[running_job(1, "n1")])
        assert (found.undrain, found.mark, found.replicas) == (("n1",), (), None)

    def test_a_job_that_only_the_queue_shows_makes_its_node_busy(self) -> None:
        found = only(facts("n1"), workers=[node("n1", idle_s=900)], jobs=[running_job(1, "n1")])
        assert not found.changes
        drained = only(facts("n1"), workers=[node("n1", reason=OURS)], jobs=[running_job(1, "n1")])
        assert (drained.mark, drained.replicas) == ((), None)

    def test_a_job_submitted_after_the_drain_gets_the_drained_worker_back(self) -> None:
        marked = Machine("n1", "n1", NOW_S, marked=True, marked_by_us=True)
        found = only(
            SetFacts(worker_set(), 1, (marked,)), workers=[node("n1", reason=OURS)], jobs=[waiting_job()]
        )
        assert (found.unmark, found.undrain, found.replicas) == (("n1",), ("n1",), None)

    def test_a_persons_drain_is_left_alone(self) -> None:
        found = only(facts("n1"), workers=[node("n1", idle_s=9999, reason="disk, ask user1")])
        assert not found.changes
        assert found.unavailable == 1

    def test_a_person_who_takes_a_drain_over_gets_our_mark_off(self) -> None:
        marked = Machine("n1", "n1", NOW_S, marked=True, marked_by_us=True)
        found = only(SetFacts(worker_set(), 1, (marked,)), workers=[node("n1", reason="mine now")])
        assert (found.unmark, found.replicas) == (("n1",), None)

    def test_a_mark_that_is_not_ours_stops_scale_in(self) -> None:
        theirs = Machine("n1", "n1", NOW_S, marked=True)
        ours = Machine("n2", "n2", NOW_S)
        workers = [node("n1", busy=True), node("n2", reason=OURS)]
        found = only(SetFacts(worker_set(), 2, (theirs, ours)), workers=workers)
        assert not found.changes
        assert any("not ours" in reason for reason in found.reasons)

    def test_a_worker_that_slurm_plans_a_job_on_stays(self) -> None:
        assert not only(facts("n1"), workers=[node("n1", idle_s=999, flags=frozenset({"PLANNED"}))]).changes

    def test_the_step_counts_workers_on_their_way_out(self) -> None:
        spec = worker_set(scale_in_step=2)
        workers = [node(name, idle_s=900) for name in ("n1", "n2", "n3")]
        assert len(only(facts("n1", "n2", "n3", spec=spec), workers=workers).drain) == 2
        workers[0] = node("n1", reason=OURS)
        assert len(only(facts("n1", "n2", "n3", spec=spec), workers=workers).drain) == 1

    def test_the_minimum_stays(self) -> None:
        workers = [node(name, idle_s=900) for name in ("n1", "n2", "n3")]
        assert len(only(facts("n1", "n2", "n3", spec=worker_set(min=2)), workers=workers).drain) == 1

    def test_the_longest_idle_goes_first(self) -> None:
        spec = worker_set(min=1)
        workers = [node("n1", idle_s=400), node("n2", idle_s=900)]
        assert only(facts("n1", "n2", spec=spec), workers=workers).drain == ("n2",)

    def test_with_the_policy_never_nothing_is_drained(self) -> None:
        spec = worker_set(drain_policy=DrainPolicy.NEVER)
        assert not only(facts("n1", spec=spec), workers=[node("n1", idle_s=9999)]).changes


class TestFaults:
    def test_without_slurm_nothing_changes(self) -> None:
        found = decide(
            Snapshot((facts("n1"),), problem="Unable to contact slurm controller"),
            PolicyState({"n1": 1.0}),
            NOW_S,
        )
        assert not found.sets[0].changes
        assert "Unable to contact" in found.sets[0].reasons[0]
        assert found.state.idle_since_s == {"n1": 1.0}

    def test_a_set_whose_target_is_away_is_left_and_the_others_go_on(self) -> None:
        away = replace(facts(spec=worker_set("away")), problem="MachineDeployment away: not found")
        found = decision(away, facts(), jobs=[waiting_job()])
        assert not found.of("away").changes
        assert found.of("small").replicas == 1

    def test_a_machine_that_never_registers_is_replaced_after_its_deadline(self) -> None:
        dead = SetFacts(worker_set(max=1), 1, (Machine("n1", "n1", NOW_S - 1801),))
        found = only(dead, jobs=[waiting_job()])
        assert (found.mark, found.replicas, found.failed) == (("n1",), 0, 1)
        assert any("never registered" in reason for reason in found.reasons)
        # With room below the maximum the next one comes first.
        assert only(replace(dead, spec=worker_set()), jobs=[waiting_job()]).replicas == 2

    def test_a_machine_that_slurm_forgot_is_no_failed_start(self) -> None:
        forgotten = SetFacts(worker_set(), 1, (Machine("n1", "n1", NOW_S - 9999, registered_before=True),))
        assert not only(forgotten).changes

    def test_machines_that_hold_less_than_their_spec_says_do_not_multiply(self) -> None:
        """A job that fits the spec, and none of the machines that came: without this, one more would come each time."""
        spec = worker_set(shape=Shape(16, 64_000))
        job = waiting_job(memory_mb_per_node=64_000)
        first = decision(facts(spec=spec), jobs=[job])
        assert first.of("small").replicas == 1
        came = SetFacts(spec, 1, (Machine("n1", "n1", NOW_S + 5),))
        second = decision(came, workers=[node("n1", memory_mb=63_000)], jobs=[job], state=first.state)
        assert second.of("small").replicas is None
        assert "large enough" in second.unplaced[0].why
        # Also once that machine is gone.
        assert decision(facts(spec=spec), jobs=[job], state=second.state).of("small").replicas is None
        # Another spec is believed again, whatever machines of the old one are left.
        larger = SetFacts(worker_set(shape=Shape(16, 65_000)), 1, came.machines)
        later_s = NOW_S + 60
        made = decision(
            larger, workers=[node("n1", memory_mb=63_000)], jobs=[job], state=second.state, now_s=later_s
        )
        assert made.of("small").replicas == 2

    def test_one_worker_that_is_as_promised_proves_the_spec(self) -> None:
        spec = worker_set(shape=Shape(16, 64_000, (("gpu", 2),)))
        first = decision(facts(spec=spec))
        came = SetFacts(spec, 2, (Machine("n1", "n1", NOW_S + 5), Machine("n2", "n2", NOW_S + 5)))
        workers = [node("n1", busy=True, memory_mb=63_000), node("n2", busy=True, gres=(("gpu:a100", 2),))]
        job = waiting_job(memory_mb_per_node=64_000, gres_per_node=(("gpu", 1),))
        assert decision(came, workers=workers[:1], jobs=[job], state=first.state).of("small").replicas is None
        assert decision(came, workers=workers, jobs=[job], state=first.state).of("small").replicas == 3

    def test_what_workers_were_short_of_for_a_moment_is_forgotten(self) -> None:
        spec = worker_set(features=frozenset({"ib"}))
        first = decision(facts(spec=spec))
        came = SetFacts(spec, 1, (Machine("n1", "n1", NOW_S + 5),))
        bare, whole = node("n1", busy=True), node("n1", busy=True, features=frozenset({"ib"}))
        second = decision(came, workers=[bare], jobs=[waiting_job(features="ib")], state=first.state)
        assert second.of("small").replicas is None
        third = decision(came, workers=[whole], jobs=[waiting_job(features="ib")], state=second.state)
        assert third.of("small").replicas == 2

    def test_a_paused_set_shows_what_it_would_do(self) -> None:
        found = only(facts(spec=worker_set(paused=True)), jobs=[waiting_job()])
        assert not found.changes
        assert "paused, nothing is changed" in found.reasons
        assert any("would scale out by 1" in reason for reason in found.reasons)

    def test_jobs_go_to_a_set_that_is_not_paused(self) -> None:
        both = [facts(spec=worker_set("a", paused=True)), facts(spec=worker_set("b"))]
        found = decision(*both, jobs=[waiting_job()])
        assert (found.of("a").desired, found.of("b").replicas) == (0, 1)

    def test_a_machine_deleted_by_hand_is_not_counted(self) -> None:
        gone = SetFacts(worker_set(), 1, (Machine("n1", "n1", NOW_S, deleting=True),))
        found = only(gone, workers=[node("n1", busy=True)], jobs=[running_job(1, "n1")])
        assert not found.changes
        assert found.starting == 1
