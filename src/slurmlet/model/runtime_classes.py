"""RuntimeClasses by which a manifest chooses where it runs: `pool` (allocation nodes), `queue` (a Slurm job per pod). Pure.

They choose nodes only: containers run the same way on all of them.
"""

from __future__ import annotations

from typing import Any

from slurmlet.model.partition_node import KIND_LABEL

# name → kind of node
CLASSES = {"pool": "allocation", "queue": "partition"}
_HANDLER = "slurmlet"


def objects() -> list[tuple[str, dict[str, Any]]]:
    """(name, what to write beside the metadata)."""
    return [
        (name, {"handler": _HANDLER, "scheduling": {"nodeSelector": {KIND_LABEL: kind}}})
        for name, kind in CLASSES.items()
    ]
