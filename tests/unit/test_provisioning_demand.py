"""Which jobs are a reason for machines, and on which machines they would run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurmlet.operators.provisioning.autoscaler.demand import demand_of
from slurmlet.operators.provisioning.autoscaler.feature_expressions import Group, ways
from slurmlet.operators.provisioning.autoscaler.worker_sets import Shape, WorkerSet
from tests.unit.provisioning_facts import NOW_S, decision, facts, node, running_job, waiting_job, worker_set


def replicas(*specs: WorkerSet, **given: object) -> dict[str, int | None]:
    made = decision(*(facts(spec=spec) for spec in specs), **given)  # type: ignore[arg-type]
    return {one.name: one.replicas for one in made.sets}


class TestDemand:
    @pytest.mark.parametrize(
        "reason",
        [
            "Resources", "Priority", "None", "", "PartitionConfig", "PartitionNodeLimit",
            "ReqNodeNotAvail, UnavailableNodes:n1",
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
        ],
    )  # fmt: skip
    def test_a_job_that_waits_for_nodes_counts(self, reason: str) -> None:
        assert demand_of([waiting_job(reason=reason)], NOW_S).waiting

    def test_why_others_do_not_count_is_told_with_an_example(self) -> None:
        jobs = [waiting_job(1, held=True, reason="JobHeldUser"), waiting_job(2, reason="QOSGrpCpuLimit")]
        found = {one.why: one.example for one in demand_of(jobs, NOW_S).ignored}
        assert found == {
            "is held by its user": "1",
            "is over a limit of its user, account or QOS (QOSGrpCpuLimit)": "2",
        }

    def test_of_an_array_as_many_tasks_count_as_may_run(self) -> None:
        waiting = waiting_job(5, array_id="5", tasks_pending=90, tasks_at_once=4)
        running = [running_job(6, "n1", array_id="5"), running_job(7, "n2", array_id="5")]
        found = demand_of([waiting, *running], NOW_S)
        assert [one.count for one in found.waiting] == [2]
        assert [(one.count, one.why) for one in found.ignored] == [(88, "is at the limit of its array")]

    def test_jobs_that_ask_for_the_same_are_counted_together_in_their_turn(self) -> None:
        jobs = [waiting_job(1, cpus=2), waiting_job(2, cpus=4, priority=5), waiting_job(3, cpus=2)]
        assert [(one.need.cpus, one.count) for one in demand_of(jobs, NOW_S).waiting] == [(4, 1), (2, 2)]

    def test_a_job_over_its_partitions_limit_never_counts(self) -> None:
        job = waiting_job(nodes_min=4, partitions=("batch", "large"))
        assert demand_of([job], NOW_S, {"batch": 2, "large": 4}).waiting
        assert not demand_of([job], NOW_S, {"batch": 2, "large": 3}).waiting
        assert demand_of([job], NOW_S, {"batch": 2}).waiting


class TestConstraints:
    def test_each_node_has_both_or_either(self) -> None:
        ((both,),) = ways("ib&ssd")
        assert both.accepts(frozenset({"ib", "ssd", "x"}))
        assert not both.accepts(frozenset({"ib"}))
        ((either,),) = ways("(ib|eth)&ssd")
        assert either.accepts(frozenset({"eth", "ssd"}))
        assert not either.accepts(frozenset({"ib", "eth"}))

    def test_brackets_make_all_nodes_take_the_same_side(self) -> None:
        assert [way[0].choice for way in ways("[rack1|rack2]&ssd")] == [
            (frozenset({"rack1", "ssd"}),),
            (frozenset({"rack2", "ssd"}),),
        ]

    def test_counts_part_the_nodes(self) -> None:
        assert ways("[gpu*2&cpu*4]") == (
            (Group((frozenset({"gpu"}),), 2), Group((frozenset({"cpu"}),), 4)),
        )  # fmt: skip

    @pytest.mark.parametrize(
        "text", ["a&", "&a", "(a", "a)", "a b", "[a|b", "*3", "a**", "(" * 50 + "a" + ")" * 50]
    )
    def test_what_is_no_constraint_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError):
            ways(text)


GPU = worker_set(
    "gpu", partitions=frozenset({"batch", "gpu"}), shape=Shape(64, 512_000, (("gpu:a100", 4),)), max=4
)
SMALL = worker_set("small")


class TestPacking:
    def test_each_job_gets_the_smallest_shape_that_fits(self) -> None:
        jobs = [waiting_job(1, cpus=4), waiting_job(2, cpus=4, gres_per_node=(("gpu", 1),))]
        assert replicas(SMALL, GPU, jobs=jobs) == {"small": 1, "gpu": 1}

    def test_a_node_that_is_needed_anyway_takes_small_jobs_too(self) -> None:
        jobs = [waiting_job(1, cpus=4, gres_per_node=(("gpu", 1),), priority=9), waiting_job(2, cpus=4)]
        assert replicas(SMALL, GPU, jobs=jobs) == {"small": None, "gpu": 1}

    def test_cards_are_shared_until_they_are_used_up(self) -> None:
        jobs = [waiting_job(number, cpus=1, gres_per_node=(("gpu:a100", 2),)) for number in range(5)]
        assert replicas(GPU, jobs=jobs) == {"gpu": 3}

    def test_another_type_of_card_is_not_to_be_had(self) -> None:
        made = decision(facts(spec=GPU), jobs=[waiting_job(cpus=1, gres_per_node=(("gpu:h100", 1),))])
        assert made.sets[0].replicas is None
        assert made.unplaced[0].impossible
        assert "1 gpu:h100" in made.unplaced[0].why

    def test_memory_limits_how_many_share_a_node(self) -> None:
        jobs = [waiting_job(number, cpus=1, memory_mb_per_node=30_000) for number in range(4)]
        assert replicas(SMALL, jobs=jobs) == {"small": 2}

    def test_an_exclusive_job_has_its_node_alone(self) -> None:
        alone, other = waiting_job(1, cpus=1, exclusive=True), waiting_job(2, cpus=1)
        assert replicas(SMALL, jobs=[alone, other]) == {"small": 2}
        assert replicas(SMALL, jobs=[alone, replace(other, priority=9)]) == {"small": 2}

    def test_an_exclusive_job_takes_no_room_beside_others(self) -> None:
        partly = node("n1", state="MIXED", cpus_allocated=4)
        jobs = [running_job(1, "n1", cpus=4), waiting_job(2, reason="None", cpus=4, exclusive=True)]
        assert decision(facts("n1"), workers=[partly], jobs=jobs).sets[0].replicas == 2

    def test_tasks_without_a_number_of_nodes_are_spread(self) -> None:
        assert replicas(SMALL, jobs=[waiting_job(cpus=40)]) == {"small": 3}
        # squeue has at least one CPU of each node for every job.
        assert replicas(SMALL, jobs=[waiting_job(cpus=40, cpus_per_node=1)]) == {"small": 3}

    def test_tasks_that_must_be_on_one_node_are_not_spread(self) -> None:
        for job in (waiting_job(cpus=40, nodes_max=1), waiting_job(cpus=40, cpus_per_node=20)):
            made = decision(facts(spec=SMALL), jobs=[job])
            assert made.sets[0].replicas is None
            assert "large enough" in made.unplaced[0].why

    def test_a_job_for_a_domain_gets_all_its_machines_there(self) -> None:
        racks = [worker_set(f"rack{n}", topology_domain=f"rack{n}", max=4) for n in (1, 2)]
        busy = [node(f"rack1-{n}", busy=True) for n in range(2)]
        sets = [facts("rack1-0", "rack1-1", spec=racks[0]), facts(spec=racks[1])]
        jobs = [waiting_job(nodes_min=3, cpus=48, switches=1)]
        made = decision(*sets, workers=busy, jobs=jobs)
        assert {one.name: one.replicas for one in made.sets} == {"rack1": None, "rack2": 3}
        anywhere = decision(*sets, workers=busy, jobs=[replace(jobs[0], switches=0)])
        assert sum((one.replicas or 0) > 0 for one in anywhere.sets) == 2

    def test_a_job_for_a_feature_gets_machines_that_have_it(self) -> None:
        racks = [worker_set(f"rack{n}", features=frozenset({f"rack{n}"})) for n in (1, 2)]
        assert replicas(*racks, jobs=[waiting_job(features="rack2")]) == {"rack1": None, "rack2": 1}
        same = decision(
            *(facts(spec=one) for one in racks), jobs=[waiting_job(nodes_min=2, features="[rack1|rack2]")]
        )
        assert sorted(one.replicas or 0 for one in same.sets) == [0, 2]

    def test_nodes_of_different_kinds_in_one_job(self) -> None:
        cpu = worker_set("cpu", features=frozenset({"cpu"}))
        big = replace(GPU, features=frozenset({"big"}))
        job = waiting_job(nodes_min=3, cpus=3, features="[big*1&cpu*2]")
        assert replicas(cpu, big, jobs=[job]) == {"cpu": 2, "gpu": 1}

    def test_nodes_that_a_job_excludes_do_not_serve_it(self) -> None:
        workers = [node("n1"), node("n2")]
        job = waiting_job(excluded_nodes="n[1-2]")
        assert decision(facts("n1", "n2"), workers=workers, jobs=[job]).sets[0].replicas == 3

    def test_nodes_that_a_job_names_are_kept_for_it_and_none_are_made(self) -> None:
        workers = [node("n1", idle_s=900), node("n2", idle_s=900)]
        job = waiting_job(required_nodes="n2")
        made = decision(facts("n1", "n2"), workers=workers, jobs=[job])
        assert made.sets[0].drain == ("n1",)
        gone = decision(facts(), jobs=[job])
        assert gone.sets[0].replicas is None
        assert "by name" in gone.unplaced[0].why

    def test_a_large_job_gets_what_there_is_below_the_maximum(self) -> None:
        """Others end: it must not wait behind smaller ones until they happen to leave all its nodes at once."""
        names = [f"n{number}" for number in range(5)]
        sets = facts(*names, spec=worker_set(max=8))
        made = decision(
            sets, workers=[node(name, busy=True) for name in names], jobs=[waiting_job(nodes_min=6, cpus=96)]
        )
        assert made.sets[0].replicas == 8
        assert not made.unplaced[0].impossible

    def test_jobs_that_have_not_all_their_nodes_are_told(self) -> None:
        jobs = [waiting_job(number, nodes_min=2, cpus=32) for number in range(3)]
        made = decision(facts(spec=worker_set(max=5)), jobs=jobs)
        assert made.sets[0].replicas == 5
        assert [(one.count, one.why) for one in made.unplaced] == [
            (1, "no machine is left for it below the maximum")
        ]
