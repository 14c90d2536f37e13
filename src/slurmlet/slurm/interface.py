"""What all of slurmlet asks of Slurm, and nothing else does: one interface over its commands, its REST API and a fake.

What each method promises is written as tests that run on all three (tests/contract/slurm_contract.py). In short:
every method may be repeated but `submit`; ids that Slurm does not know are no error; a SlurmError that is transient says
nothing about the job, and after one from `submit` the job may exist: look at `jobs()` before submitting again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import Capabilities, EndedJob, Grant, Job, JobSpec, Partition, SlurmNode


class Slurm(Protocol):
    async def submit(self, spec: JobSpec) -> JobId:
        """Queue a batch job. Raises SlurmError; one that is not transient: never as asked for."""

    async def jobs(self) -> list[Job]:
        """Every job of this user that slurmctld remembers, those that ended a moment ago included (MinJobAge).

        Of an array: a record per task that has started, and one for all that have not. Raises SlurmError, never an
        empty list because nobody answered.
        """

    async def ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        """How jobs ended: from accounting, then from what slurmctld remembers. One that both do not know is missing;
        one that still runs is there with its state. Raises a transient SlurmError while one of the two is away.
        """

    async def cancel(self, job_ids: Sequence[JobId]) -> None:
        """End jobs; those already over are no error. Raises SlurmError when Slurm could not be told."""

    async def signal(self, job_id: JobId, name: str) -> None:
        """Send a signal ("USR1") to every process of a running job, its batch script included; safe when it is over."""

    async def nodes(self) -> list[SlurmNode]: ...

    async def partitions(self) -> list[Partition]:
        """Those that this user may see, each summed over its nodes."""

    async def grants(self, job_id: JobId) -> dict[str, Grant]:
        """What a running job holds, by host; nothing for one that holds nothing or is not known."""

    async def capabilities(self) -> Capabilities:
        """Asked of Slurm once; then remembered."""
