"""The Slurm jobs of allocations, for the pool and for gangs: asked for, given back, and known only from a look after that.

A job that was just asked for is not in an older list of Slurm's: whoever counts without it asks for another. So every
change is noted with the number of the last look (`JobWatch.mark`) under its owner, who waits until there was a later one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from slurmlet.hub.agents import Agent
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.runner_credentials import NODE_NAME_PREFIX, RunnerAuthority
from slurmlet.model import pool
from slurmlet.model.ids import JobId
from slurmlet.model.pod_job import job_name
from slurmlet.model.slurm_values import JobSpec
from slurmlet.slurm.interface import Slurm


class AllocationJobs:
    """`owner`: the pool, or one gang."""

    def __init__(self, settings: Settings, slurm: Slurm, watch: JobWatch, authority: RunnerAuthority) -> None:
        self._settings, self._slurm, self._watch, self._authority = settings, slurm, watch, authority
        self._marks: dict[str, int] = {}  # by owner: of the last change that was asked for

    def are_known(self, owner: str) -> bool:
        """Whether what Slurm said last counts for this owner."""
        return self._watch.looked_since(self._marks.get(owner, 0))

    def forget(self, owner: str) -> None:
        self._marks.pop(owner, None)

    async def equip(self, *nodes: str) -> None:
        """What the agents of these nodes need to dial in. Raises OSError."""
        await asyncio.to_thread(self._equip, nodes)

    def _equip(self, nodes: tuple[str, ...]) -> None:
        for node in nodes:
            self._authority.equip(self._settings.files.node(node), node, NODE_NAME_PREFIX)

    async def submit(self, owner: str, label: str, name: str, first_node: str, spec: JobSpec) -> JobId:
        """`spec` with what every allocation's job has: names that we know it by, and where its log lies."""
        settings = self._settings
        files = settings.files.node(first_node)
        spec = replace(
            spec,
            name=job_name(label, settings.cluster_id, name),
            comment=pool.comment(settings.cluster_id, name),
            directory=str(files.root),
            output=str(files.job_log),
        )
        try:
            return await self._slurm.submit(spec)
        finally:
            self._asked(owner)

    async def cancel(self, owner: str, job_id: JobId) -> None:
        try:
            await self._slurm.cancel([job_id])
        finally:
            self._asked(owner)

    def _asked(self, owner: str) -> None:
        """Slurm was asked for a change: what it says from now on counts."""
        self._marks[owner] = self._watch.mark
        self._watch.expect(owner, f"change after look {self._watch.mark}")


async def end(agent: Agent) -> None:
    """Let it end by itself, so that Slurm sees a job that completed. Raises LinkLost."""
    if agent.link is not None:
        await agent.link.tell({"type": "end", "grace_s": 0})
