"""What an administrator's tool asks of Slurm: everybody's queue, all nodes, and changes of a node's state.

Apart from interface.py, which is one user's view: this one needs an operator's or administrator's rights in Slurm. What each
method promises is written as tests (tests/contract/slurm_admin_contract.py) that run on a fake, on the commands and on
slurmrestd. In short: every method may be repeated; a SlurmError that is transient says nothing about the node, and the
change may have been made; nothing here ends, requeues or signals a job.
"""

from __future__ import annotations

from typing import Protocol

from slurmlet.model.slurm_admin_values import QueuedJob, WorkerNode


class SlurmAdmin(Protocol):
    async def queue(self) -> list[QueuedJob]:
        """Every job of every user that has not ended. Raises SlurmError, never an empty list because nobody answered."""

    async def workers(self) -> list[WorkerNode]:
        """Every node that slurmctld knows. Raises SlurmError, never an empty list because nobody answered."""

    async def partition_limits(self) -> dict[str, int]:
        """The most nodes that a job may have (MaxNodes), of the partitions that have such a limit."""

    async def drain(self, name: str, reason: str) -> None:
        """Let no new job start there; what runs goes on. An existing reason is overwritten: look at it before."""

    async def resume(self, name: str) -> None:
        """Let jobs start there again; safe where they may already."""

    async def delete(self, name: str) -> None:
        """Remove the record of a dynamic node; one that is not known is no error.

        Raises SlurmError, not transient, where Slurm refuses for good: the node is in slurm.conf. While a job is on the
        node, Slurm refuses too (transient): the job is never touched.
        """

    async def set_address(self, name: str, address: str) -> None:
        """NodeAddr, until the node registers again (since 24.05 a registration resets it)."""

    async def power_up(self, name: str) -> None:
        """Have slurmctld call its ResumeProgram for the node."""

    async def power_down(self, name: str) -> None:
        """Have slurmctld call its SuspendProgram for the node, once nothing runs there."""

    async def close(self) -> None:
        """Close what is open; nothing may be asked after that."""
