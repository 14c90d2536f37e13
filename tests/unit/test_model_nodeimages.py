"""status.images of a Node, and Slurm's reasons in its Ready condition."""

from __future__ import annotations

from dataclasses import replace

from slurmlet.model import partition_node
from slurmlet.model.slurm_values import Partition

PART = Partition("batch", True, True, "infinite", 3, 3, 48, 16, 18000, 6000, 0)


def test_largest_first_digest_before_tags_and_names_together() -> None:
    found = partition_node.image_list(
        [
            ("localhost:5000/a:1", "localhost:5000/a@sha256:aa", 10),
            ("localhost:5000/a:2", "localhost:5000/a@sha256:aa", 10),
            ("docker.io/library/b:1", "sha256:bb", 20),
            ("", "sha256:cc", 5),
        ]
    )
    assert found == [
        {"names": ["docker.io/library/b:1"], "sizeBytes": 20},
        {
            "names": ["localhost:5000/a@sha256:aa", "localhost:5000/a:1", "localhost:5000/a:2"],
            "sizeBytes": 10,
        },
    ]


def test_as_many_as_a_kubelet_tells() -> None:
    many = [(f"r/i{n}:t{tag}", f"r/i{n}@sha256:{n:064d}", n + 1) for n in range(60) for tag in range(9)]
    found = partition_node.image_list(many)
    assert len(found) == 50
    assert all(len(one["names"]) == 5 for one in found)
    assert (found[0]["sizeBytes"], found[-1]["sizeBytes"]) == (60, 11)


def test_slurms_reason_is_in_the_message() -> None:
    away = replace(PART, nodes_usable=0, node_states={"drained": 3}, reasons=("fans", "power"))
    assert partition_node.ready(away) == (
        False,
        "NoUsableNodes",
        "no node of Slurm partition batch can run jobs (3 drained): fans; power",
    )
    assert (
        partition_node.ready(replace(PART, up=False, state="drain"))[2]
        == "Slurm partition batch is not up (DRAIN)"
    )
    some = partition_node.ready(replace(PART, nodes_usable=2, reasons=("fans",)))
    assert (some[0], some[2]) == (True, "2 of 3 Slurm nodes can run jobs (others: fans)")
    told = {partition_node.ready(away)[1], partition_node.ready(replace(PART, up=False))[1]}
    assert told | {partition_node.AGENT_LOST} == set(partition_node.HELD_BY_SLURM)
