"""What a job holds on each host, as `scontrol --details` writes it."""

from __future__ import annotations

from slurmlet.model.slurm_values import Grant
from slurmlet.slurm.grants import expand, parse_details

# Slurm 24.11, one line; shortened at both ends.
LINE = (
    "JobId=14 JobName=sh NumNodes=3 NumCPUs=5 CPUs/Task=1 JOB_GRES=gpu:3   Nodes=c1 CPU_IDs=1 Mem=100 GRES="
    "   Nodes=c[2-3] CPU_IDs=0-1,8 Mem=200 GRES=gpu:a100:2(IDX:0-1),shard:4(1/4,3/4) MinCPUsNode=1 Features=(null)"
)


def test_each_kind_of_host_has_its_own_part() -> None:
    assert parse_details(LINE) == [
        ("c1", Grant(1, 100)),
        ("c[2-3]", Grant(3, 200, (("gpu:a100", 2), ("shard", 4)))),
    ]


def test_a_job_that_is_not_running_holds_nothing() -> None:
    assert parse_details("JobId=14 JobState=PENDING NodeList= NumNodes=1-1") == []


def test_a_plain_list_needs_no_help_from_slurm() -> None:
    assert expand("c1,d7") == ["c1", "d7"]
