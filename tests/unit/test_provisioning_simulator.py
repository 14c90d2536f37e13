"""Traces of both formats, and what policies make of them in simulated time."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from slurmlet.base.errors import UserError
from slurmlet.base.step_chart import Panel, step_chart
from slurmlet.cli.provision_simulate import command
from slurmlet.operators.provisioning.simulator.simulated_cluster import Delays
from slurmlet.operators.provisioning.simulator.simulation import POLICIES, Outcome, default_set, simulate
from slurmlet.operators.provisioning.simulator.trace_files import generate, read_trace, to_swf
from slurmlet.operators.provisioning.simulator.trace_job import TraceError, TraceJob
from tests.unit.provisioning_facts import worker_set

# The head and the first jobs of a log in the archive's form.
SWF = """\
; Version: 2.2
; Computer: IBM SP2
; MaxNodes: 128
; UnixStartTime: 846028800
;
    1      0   2614   9640   32    -1    -1   32  14400    -1  1   3   1  -1   2  -1 -1 -1
    2   1029      0     -1   -1    -1    -1   16   3600    -1  5   4   1  -1   2  -1 -1 -1
    3   1500    120     60    4  58.0  2048    4     -1  4096  1   4   1  -1   2  -1 -1 -1
"""
SACCT = """\
JobID|User|Partition|Submit|Eligible|Start|End|Elapsed|Timelimit|NNodes|ReqCPUS|ReqMem|ReqTRES|Constraints|State
41|user1|batch|2026-05-01T10:00:00|2026-05-01T10:00:00|2026-05-01T10:00:05|2026-05-01T10:10:05|00:10:00|01:00:00|2|32|8G|billing=32,cpu=32,gres/gpu:a100=4,gres/gpu=4,node=2|ib|COMPLETED
41.batch|||2026-05-01T10:00:05||2026-05-01T10:00:05||00:10:00||1|16|||ib|COMPLETED
42_3|user2|batch|2026-05-01T10:01:00|2026-05-01T11:01:00|2026-05-01T11:02:00||1-00:00:01|UNLIMITED|1|1|2000Mc|||RUNNING
43|user2|batch|2026-05-01T10:02:00|Unknown|Unknown|Unknown|00:00:00|10:00|1|1|1G|||CANCELLED by 1002
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


class TestTraces:
    def test_a_log_in_the_standard_workload_format_is_read(self, tmp_path: Path) -> None:
        first, third = read_trace(write(tmp_path / "log.swf", SWF))
        assert first == TraceJob("1", 0.0, 9640.0, 1, 32, limit_s=14400.0, user="3")
        # Memory is in KiB for each processor; the second job never ran.
        assert (third.job_id, third.memory_mb, third.limit_s) == ("3", 16, None)

    def test_what_sacct_prints_is_read(self, tmp_path: Path) -> None:
        first, second = read_trace(write(tmp_path / "jobs", SACCT))
        assert first == TraceJob(
            "41", 0.0, 600.0, 2, 32, 8192, (("gpu:a100", 4),), 3600.0, "batch", "ib", "user1", held_s=0.0
        )
        assert (second.job_id, second.submit_s, second.run_s) == ("42_3", 60.0, 86_401.0)
        assert (second.memory_mb, second.limit_s, second.held_s) == (2000, None, 3600.0)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (SWF + "4 0 1 2\n", "line 9: has 4 fields, expected the 18"),
            (SWF.replace("9640", "long"), "line 6: field 'run time' is 'long', expected a number"),
            (SACCT.replace("|Elapsed|", "|Time|", 1), "line 1: the header has no column 'elapsed'"),
            (SACCT.replace("00:10:00|01:00:00", "soon|01:00:00"), "line 2: field 'Elapsed' is 'soon'"),
            (SACCT.replace("2026-05-01T10:00:00", "yesterday", 1), "line 2: field 'Submit' is 'yesterday'"),
            (SACCT.replace("|8G|", "|8X|"), "line 2: field 'ReqMem' is '8X'"),
            (SACCT.replace("|2|32|", "|0|32|"), "line 2: field 'NNodes' is '0', expected at least 1"),
            (SACCT + "44|user1|batch\n", "line 6: has 3 fields, expected the 15 of the header"),
            ("; Version: 2\n", "holds no job that ran"),
        ],
    )
    def test_what_cannot_be_read_is_named_by_line_and_field(
        self, tmp_path: Path, text: str, said: str
    ) -> None:
        with pytest.raises(TraceError, match=said.replace("'", ".")):
            read_trace(write(tmp_path / "bad", text))

    def test_a_file_that_is_not_there_is_a_users_error(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="No such file"):
            read_trace(tmp_path / "missing")

    def test_a_generated_trace_follows_from_its_seed_and_can_be_kept(self, tmp_path: Path) -> None:
        made = generate(200, 7)
        assert made == generate(200, 7)
        assert made != generate(200, 8)
        kept = read_trace(write(tmp_path / "trace.swf", to_swf(made, note="made up")))
        assert len(kept) == 200
        assert [job.cpus for job in kept] == [job.cpus for job in made]


def bounce(policy: str, *run_s: float) -> Outcome:
    """The thesis's experiment: one node each, a cool-down of five minutes."""
    jobs = [TraceJob(str(number), 0.0, length_s, 1, 16) for number, length_s in enumerate(run_s)]
    spec = default_set(cpus=16, memory_mb=64_000, most=3)
    return simulate(jobs, [spec], POLICIES[policy](), Delays(), horizon_s=11 * 3600)


class TestPolicies:
    """Figures 4.5 to 4.7 of the thesis, and the same under our policy."""

    def test_the_query_for_waiting_jobs_bounces_for_ever(self) -> None:
        found = bounce("slinky", 240, 240, 1800)
        assert (found.finished, found.jobs) == (2, 3)
        assert found.requeues > 50
        waiting = [sample.pending for sample in found.samples]
        assert sum(before == 0 < after for before, after in itertools.pairwise(waiting)) > 20

    def test_the_thesis_own_query_bounces_once(self) -> None:
        found = bounce("thesis", 240, 240, 1800)
        assert (found.finished, found.requeues) == (3, 1)

    @pytest.mark.parametrize(
        "lengths", [(240, 240, 1800), (300, 300, 1800), (60, 600, 5000), (1800, 1800, 1800)]
    )
    def test_ours_neither_requeues_nor_bounces(self, lengths: tuple[float, ...]) -> None:
        found = bounce("slurmlet", *lengths)
        assert (found.finished, found.requeues, found.lost_node_hours) == (3, 0, 0.0)
        assert found.scale_outs == 3
        nodes = [sample.nodes for sample in found.samples]
        top = nodes.index(max(nodes))
        # Up once and down once.
        assert nodes == sorted(nodes[:top]) + sorted(nodes[top:], reverse=True)
        assert nodes[-1] == 0

    def test_power_saving_starts_jobs_on_nodes_that_are_off(self) -> None:
        found = bounce("power-saving", 240, 240, 1800)
        assert (found.finished, found.requeues, set(found.waits_s)) == (3, 0, {300.0})

    def test_a_fixed_pool_never_waits_and_never_rests(self) -> None:
        found = bounce("fixed", 240, 240, 1800)
        assert (found.waits_s, found.requeues) == ((0.0, 0.0, 0.0), 0)
        assert found.node_hours >= 3 * 0.5

    def test_a_run_can_be_repeated(self) -> None:
        jobs = generate(60, 3, nodes=4)
        spec = default_set(cpus=16, memory_mb=64_000, most=4)
        first, second = (
            simulate(jobs, [spec], POLICIES["thesis"](), Delays(), horizon_s=40_000) for _ in range(2)
        )
        assert first.requeues > 0
        assert first == second

    def test_a_job_that_no_set_can_hold_is_told_and_waited_for_by_nobody(self) -> None:
        found = bounce("slurmlet", 60, 60)
        jobs = [TraceJob("1", 0.0, 60.0, 1, 16), TraceJob("2", 0.0, 60.0, 9, 9)]
        with_impossible = simulate(
            jobs, [default_set(cpus=16, memory_mb=64_000, most=3)], POLICIES["slurmlet"](), Delays()
        )
        assert (with_impossible.finished, with_impossible.impossible, with_impossible.unfinished) == (1, 1, 0)
        assert found.impossible == 0

    def test_held_jobs_bring_up_no_machine(self) -> None:
        jobs = [TraceJob("1", 0.0, 60.0, 1, 16, held_s=7200.0)]
        spec = default_set(cpus=16, memory_mb=64_000, most=3)
        ours = simulate(jobs, [spec], POLICIES["slurmlet"](), Delays())
        assert ours.samples[0].nodes == 0
        assert next(sample.at_s for sample in ours.samples if sample.nodes) >= 7200
        thesis = simulate(jobs, [spec], POLICIES["thesis"](), Delays())
        assert ours.node_hours < 0.3 < thesis.node_hours

    def test_several_sets_of_different_shapes(self) -> None:
        small = default_set(cpus=16, memory_mb=64_000, most=4)
        large = worker_set("large", shape=small.shape.__class__(64, 256_000), max=2)
        jobs = [TraceJob("1", 0.0, 60.0, 1, 64), *(TraceJob(str(n), 0.0, 600.0, 1, 8) for n in range(2, 8))]
        found = simulate(jobs, [small, large], POLICIES["slurmlet"](), Delays())
        assert (found.finished, found.requeues) == (7, 0)


class TestCommand:
    def test_prints_a_table_and_writes_pictures(self, tmp_path: Path) -> None:
        trace = str(write(tmp_path / "log.swf", SWF.replace("9640", "640")))
        ran = CliRunner().invoke(
            command,
            [trace, "--max", "4", "--cpus", "32", "--out", str(tmp_path / "out")],
            catch_exceptions=False,
        )
        assert ran.exit_code == 0
        for policy in POLICIES:
            assert policy in ran.stdout
        for name in ("policies.svg", "timeline.svg"):
            ElementTree.fromstring((tmp_path / "out" / name).read_text())
        figures = json.loads((tmp_path / "out" / "figures.json").read_text())
        assert [one["policy"] for one in figures] == list(POLICIES)
        assert figures[0]["decisions"]["count"] > 0

    def test_takes_worker_sets_of_a_manifest(self, tmp_path: Path) -> None:
        spec = {
            "slurmCluster": "one", "partitions": ["batch"], "shape": {"cpus": 64, "memoryMB": 1000}, "max": 1,
            "scaleTargetRef": {"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachineDeployment", "name": "x"},
        }  # fmt: skip
        manifest = write(
            tmp_path / "sets.yaml",
            yaml.safe_dump({"kind": "WorkerSet", "metadata": {"name": "x"}, "spec": spec}),
        )
        argv = [
            str(write(tmp_path / "log.swf", SWF)),
            "--worker-sets",
            str(manifest),
            "--policy",
            "slurmlet",
            "-o",
            "json",
        ]
        ran = CliRunner().invoke(command, argv, catch_exceptions=False)
        assert json.loads(ran.stdout)[0]["finished"] == 2

    @pytest.mark.parametrize("argv", [[], ["x.swf", "--generate", "5"]])
    def test_wants_a_trace_or_a_number_of_jobs(self, argv: list[str]) -> None:
        ran = CliRunner().invoke(command, argv)
        assert ran.exit_code == 2
        assert "either TRACE or --generate" in ran.stderr

    def test_refuses_a_minimum_over_the_maximum(self) -> None:
        ran = CliRunner().invoke(command, ["--generate", "5", "--min", "9", "--max", "3"])
        assert (ran.exit_code, "--min is 9" in ran.stderr) == (2, True)

    def test_a_generated_trace_is_kept(self, tmp_path: Path) -> None:
        argv = ["--generate", "30", "--policy", "slurmlet", "--out", str(tmp_path)]
        assert CliRunner().invoke(command, argv, catch_exceptions=False).exit_code == 0
        assert len(read_trace(tmp_path / "trace.swf")) == 30


def test_a_peak_between_two_dots_of_the_picture_stays() -> None:
    points = [(float(second), 9.0 if second == 5001 else 1.0) for second in range(10_000)]
    lone = step_chart("t", [Panel("p", [("l", points)])], 10_000.0)
    flat = step_chart("t", [Panel("p", [("l", points[:5000])])], 10_000.0)
    ElementTree.fromstring(lone)
    assert ">9.45<" in lone
    assert ">9.45<" not in flat
