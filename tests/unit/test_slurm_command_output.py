"""Lines as Slurm prints them. Those marked 24.11 were printed by the testbed's Slurm 24.11.5; the others are made after the
sources of the versions they name (print.c, node_state_string, job_state_string)."""

from __future__ import annotations

import pytest

from slurmlet.model.slurm_values import EndedJob, Grant, Job, Partition, SlurmNode
from slurmlet.slurm import command_output


def line(short: str) -> str:
    """A whole line of squeue's from the fields that a test is about: id, state, reason, nodes, partition, comment."""
    fields = short.split("|", 5)
    if len(fields) < 6:
        return short
    middle = ["1", "UNLIMITED", "INVALID", "N/A", "N/A", "N/A", "a name"]
    return command_output.SEPARATOR.join([*fields[:5], *middle, fields[5]])


# 24.11, as `squeue --noheader --states=all --me -o '%A|%T|%r|%N|%P|%k'` tells it; job 26 was submitted with a newline in its
# comment.
QUEUE = """\
32|CANCELLED|None|c3|batch|(null)
31|COMPLETED|None|c2|batch|(null)
29|FAILED|NonZeroExitCode|c3|batch|(null)
30|FAILED|RaisedSignal:9(Killed)|c1|batch|(null)
23|FAILED|BadConstraints||batch|(null)
27|PENDING|BeginTime||batch|slurmlet:deadbeef:0f0f-uid cluster=default pod=default/x
26|PENDING|JobHeldUser||batch|a|b
c|d
25|RUNNING|None|c[1-2]|batch|(null)
24|PENDING|PartitionTimeLimit||short|(null)
"""


def test_a_whole_queue() -> None:
    told = "\n".join(line(one) for one in QUEUE.split("\n"))
    jobs = {job.job_id: job for job in command_output.parse_queue(told)}
    assert len(jobs) == 9
    comment = "slurmlet:deadbeef:0f0f-uid cluster=default pod=default/x"
    assert jobs["27"] == Job("27", "PENDING", "BeginTime", "", "batch", comment, "a name")
    assert jobs["25"] == Job("25", "RUNNING", "", "c[1-2]", "batch", "", "a name")
    assert jobs["30"].reason == "RaisedSignal:9(Killed)"
    assert jobs["26"].comment == "a|b"
    assert jobs["24"].partition == "short"


@pytest.mark.parametrize(
    ("told", "comment"),
    [
        ("1|PENDING|None||batch|", ""),
        ("1|PENDING|None||batch|(null)", ""),
        ("1|PENDING|None||batch|a|b|c|d|e|f|g", "a|b|c|d|e|f|g"),
        # Characters at which str.splitlines would cut
        ("1|PENDING|None||batch|form\x0cfeed", "form\x0cfeed"),
        ("1|PENDING|None||batch|\x1c\x85\u2028|x", "\x1c\x85\u2028|x"),
        ("1|PENDING|None||batch|carriage\rreturn", "carriage\rreturn"),
        ("1|PENDING|None||batch|  spaces kept ", "  spaces kept "),
    ],
)
def test_odd_comments_cost_nothing(told: str, comment: str) -> None:
    (job,) = command_output.parse_queue(f"{line(told)}\n")
    assert job.comment == comment


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "slurm_load_jobs error: Unable to contact slurm controller\n",
        "x|RUNNING|None|c1|batch|y\n",
        "7|RUNNING\n",
        "²|A|B|C|D|E\n",
    ],
)
def test_what_is_no_job_is_passed_over(text: str) -> None:
    assert command_output.parse_queue(line(text)) == []


@pytest.mark.parametrize(
    ("told", "state", "reason"),
    [
        # 22.05: launch failures hold the job
        ("9|PENDING|JobHeldAdmin||batch|", "PENDING", "JobHeldAdmin"),
        ("9|PENDING|ReqNodeNotAvail, UnavailableNodes:c1||batch|", "PENDING", "ReqNodeNotAvail, UnavailableNodes:c1"),
        ("9|COMPLETING|NodeDown|c1|batch|", "COMPLETING", "NodeDown"),
        ("9|OUT_OF_MEMORY|OutOfMemory|c1|batch|", "OUT_OF_MEMORY", "OutOfMemory"),
        # 25.11
        ("9|EXPEDITING|None|c1|batch|", "EXPEDITING", ""),
    ],
)  # fmt: skip
def test_states_and_reasons(told: str, state: str, reason: str) -> None:
    (job,) = command_output.parse_queue(line(told))
    assert (job.state, job.reason) == (state, reason)


def test_limits_times_and_names() -> None:
    """24.11, with SLURM_TIME_FORMAT=%s."""
    fields = [
        "7",
        "RUNNING",
        "None",
        "c[1-2]",
        "batch",
        "2",
        "1-00:00:00",
        "23:59:50",
        "1763272800",
        "1763272801",
        "1763359201",
    ]
    (job,) = command_output.parse_queue(command_output.SEPARATOR.join([*fields, "a|b, c", "x"]))
    assert (job.name, job.node_count, job.limit_s, job.left_s) == ("a|b, c", 2, 86400.0, 86390.0)
    assert (job.submitted_at_s, job.starts_at_s, job.ends_at_s) == (1763272800.0, 1763272801.0, 1763359201.0)


# Slurm 24.11, `scontrol --details --oneliner show job`; shortened at both ends.
DETAILS = (
    "JobId=14 JobName=sh NumNodes=3 NumCPUs=5 CPUs/Task=1 JOB_GRES=gpu:3   Nodes=c1 CPU_IDs=1 Mem=100 GRES="
    "   Nodes=c[2-3] CPU_IDs=0-1,8 Mem=200 GRES=gpu:a100:2(IDX:0-1),shard:4(1/4,3/4) MinCPUsNode=1 Features=(null)"
)


def test_each_kind_of_host_has_its_own_part() -> None:
    assert command_output.parse_details(DETAILS) == [
        ("c1", Grant(1, 100)),
        ("c[2-3]", Grant(3, 200, (("gpu:a100", 2), ("shard", 4)))),
    ]


def test_a_job_that_is_not_running_holds_nothing() -> None:
    assert command_output.parse_details("JobId=14 JobState=PENDING NodeList= NumNodes=1-1") == []


def test_a_node_in_two_partitions_is_one_node() -> None:
    told = (
        "c1|batch|mixed-|16|2/14/0/16|6000|ib|gpu:2|none\nc1|short|mixed-|16|2/14/0/16|6000|ib|gpu:2|none\n"
    )
    told += "c2|batch|drained*|16|0/0/16/16|6000|(null)|(null)|fans | noisy\n"
    first, second = command_output.parse_nodes(told)
    assert first == SlurmNode(
        "c1",
        "mixed",
        True,
        16,
        2,
        6000,
        frozenset({"batch", "short"}),
        frozenset({"ib"}),
        frozenset({"gpu:2"}),
    )
    assert (second.usable, second.reason, second.has_room) == (False, "fans | noisy", False)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("COMPLETED", "COMPLETED"), ("CANCELLED by 1002", "CANCELLED"), ("CANCELLED+", "CANCELLED"),
        ("OUT_OF_ME+", "OUT_OF_ME"),
        ("completed", "COMPLETED"), ("", "UNKNOWN"), ("  ", "UNKNOWN"),
    ],
)  # fmt: skip
def test_base_state(text: str, state: str) -> None:
    assert command_output.base_state(text) == state


def test_accounts() -> None:
    """24.11, `sacct -n -P -X -o JobIDRaw,State,ExitCode`."""
    text = "25|RUNNING|0:0\n29|FAILED|3:0\n30|FAILED|0:9\n31|COMPLETED|0:0\n32|CANCELLED by 1002|0:0\n"
    assert command_output.parse_sacct(text) == [
        EndedJob("25", "RUNNING", 0, 0, None),
        EndedJob("29", "FAILED", 3, 0, None),
        EndedJob("30", "FAILED", 0, 9, None),
        EndedJob("31", "COMPLETED", 0, 0, None),
        EndedJob("32", "CANCELLED", 0, 0, 1002),
    ]


@pytest.mark.parametrize(
    "text", ["", "\n", "29.batch|FAILED|3:0\n", "29+0|FAILED|0:0\n", "sacct: error: x\n", "29|FAILED\n"]
)
def test_accounts_of_no_job(text: str) -> None:
    assert command_output.parse_sacct(text) == []


# 24.11, `scontrol -o show job 32`, shortened in the middle
SHOWN = (
    "JobId=32 JobName=c UserId=user2(1002) GroupId=user2(1002) MCS_label=N/A Priority=1 Nice=0 Account=research QOS=normal "
    "JobState=CANCELLED Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:15 "
    "RunTime=00:00:01 TimeLimit=UNLIMITED Partition=batch AllocNode:Sid=login:0 NodeList=c3 BatchHost=c3 Command=(null) "
    "WorkDir=/home/user2 StdErr=/home/user2/slurm-32.out StdIn=/dev/null StdOut=/home/user2/slurm-32.out \n"
)


@pytest.mark.parametrize(
    ("text", "job"),
    [
        (SHOWN, EndedJob("32", "CANCELLED", 0, 15, None)),
        # 22.05 has the array's fields before the job's name; order must not matter.
        (
            "JobId=40 ArrayJobId=39 ArrayTaskId=1 JobName=x ExitCode=1:0 Reason=NonZeroExitCode JobState=FAILED",
            EndedJob("40", "FAILED", 1, 0, None, "NonZeroExitCode"),
        ),
        ("JobId=41 JobState=RUNNING Reason=None ExitCode=0:0", EndedJob("41", "RUNNING", 0, 0, None)),
        ("No jobs in the system", None),
        ("", None),
        ("slurm_load_jobs error: Invalid job id specified", None),
    ],
)
def test_what_the_controller_remembers(text: str, job: EndedJob | None) -> None:
    assert command_output.parse_show_job(text) == job


def partition(*lines: str) -> Partition:
    (found,) = command_output.parse_partitions("\n".join(lines) + "\n")
    return found


def test_the_partitions_of_the_testbed() -> None:
    """24.11, `sinfo --noheader --exact -o '%P|%a|%l|%D|%c|%m|%T|%f|%G|%E'`."""
    batch, short = command_output.parse_partitions(
        "batch*|up|infinite|3|16|6000|idle|(null)|(null)|none\nshort|up|10:00|3|16|6000|idle|(null)|(null)|none\n"
    )
    assert batch == Partition(
        "batch",
        True,
        True,
        "infinite",
        3,
        3,
        48,
        16,
        18000,
        6000,
        0,
        frozenset(),
        frozenset(),
        {"idle": 3},
        "up",
    )
    assert (short.name, short.default, short.time_limit) == ("short", False, "10:00")


def test_why_nodes_are_away_in_the_words_of_whoever_did_it() -> None:
    found = partition(
        "p|drain|1:00|1|4|100|drained|(null)|(null)|fans | noisy",
        "p|drain|1:00|1|4|100|down*|(null)|(null)|Not responding",
        "p|drain|1:00|1|4|100|idle|(null)|(null)|none",
    )
    assert (found.state, found.up) == ("drain", False)
    assert found.reasons == ("Not responding", "fans | noisy")


def test_kinds_of_nodes_are_summed() -> None:
    found = partition(
        "gpu|up|1-00:00:00|2|64|512000|mixed-|a100,ib|gpu:a100:4(S:0-1)",
        "gpu|up|1-00:00:00|4|32|256000+|allocated+|v100|gpu:v100:2(S:0),gpu:t4:1,shard:8",
        "gpu|up|1-00:00:00|1|32|256000|down*|v100,old|gpu:v100:2",
    )
    assert (found.nodes, found.nodes_usable, found.cpus, found.cpus_per_node) == (7, 6, 288, 64)
    assert (found.memory_mb, found.memory_mb_per_node) == (2 * 512000 + 5 * 256000, 512000)
    assert found.gpus == 2 * 4 + 4 * 3 + 2
    assert found.features == {"a100", "ib", "v100", "old"}
    assert found.node_states == {"mixed": 2, "allocated": 4, "down": 1}
    assert found.time_limit == "1-00:00:00"


@pytest.mark.parametrize(
    "state",
    [
        "idle", "mixed", "allocated", "completing", "planned", "reserved", "blocked", "idle~", "idle#", "idle%", "idle!",
        "mixed-", "allocated+", "alloc", "mix", "comp", "powering_up", "powered_down", "IDLE",
        # Not answering is not yet down: Slurm says so when it has given up.
        "idle*", "allocated*", "mixed@",
    ],
)  # fmt: skip
def test_nodes_that_may_run_jobs(state: str) -> None:
    assert partition(f"p|up|infinite|2|1|1|{state}|(null)|(null)").nodes_usable == 2


@pytest.mark.parametrize(
    "state",
    [
        "down", "down*", "down~", "drained", "drained*", "drained~", "draining", "draining@", "fail", "failing*", "maint",
        "maint*", "reboot^", "reboot", "inval", "unknown*", "future", "n/a", "?", "",
    ],
)  # fmt: skip
def test_nodes_that_may_not(state: str) -> None:
    found = partition(f"p|up|infinite|2|1|1|{state}|(null)|(null)")
    assert (found.nodes, found.nodes_usable) == (2, 0)


@pytest.mark.parametrize(
    ("available", "up"), [("up", True), ("down", False), ("drain", False), ("inact", False), ("", False)]
)
def test_availability(available: str, up: bool) -> None:
    assert partition(f"p|{available}|infinite|1|1|1|idle|(null)|(null)").up is up


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", 0), ("", 0), ("gpu:4", 4), ("gpu:4(S:0-1)", 4), ("gpu:a100:4", 4), ("gpu:a100:4(S:0,2)", 4),
        ("gpu:a100:2,gpu:v100:1", 3), ("gpu:1g.5gb:7", 7), ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", 8), ("mps:400", 0),
        ("craynetwork:4,gpu:2", 2), ("nogpu:3", 0), ("tmpdisk:100G", 0),
    ],
)  # fmt: skip
def test_gpus(gres: str, gpus: int) -> None:
    assert partition(f"p|up|infinite|1|1|1|idle|(null)|{gres}").gpus == gpus


def test_a_partition_without_nodes() -> None:
    found = partition("empty|up|infinite|0|0|0|n/a|(null)|(null)")
    assert (found.nodes, found.nodes_usable, found.cpus, found.gpus) == (0, 0, 0, 0)


def test_what_is_no_partition_is_passed_over() -> None:
    assert command_output.parse_partitions("sinfo: error: something\n\nbatch|up\n") == []
