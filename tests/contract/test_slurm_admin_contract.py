"""The contract of an administrator's Slurm on the fake. On the real ones: tests/e2e/test_slurm_admin_contract.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slurmlet.model.ids import JobId
from slurmlet.model.slurm_admin_values import QueuedJob
from slurmlet.slurm.admin_fake import FakeAdmin
from slurmlet.slurm.fake import away
from tests.contract.slurm_admin_contract import AWAY_CASES, CASES, job_of


class FakeRig:
    real = False

    def __init__(self) -> None:
        self.admin = FakeAdmin()
        for name in ("c1", "c2", "c3"):
            self.admin.register(name, flags=frozenset())

    async def submit(self, *_words: str, user: str = "user1", **fields: Any) -> JobId:
        return self.admin.submit(user=user, **fields)

    async def started(self, job_id: JobId) -> QueuedJob:
        self.admin.start(job_id, [(await job_of(self, job_id)).required_nodes])
        return await job_of(self, job_id)

    async def limit(self, partition: str, nodes: int | None) -> None:
        self.admin.limits = {} if nodes is None else {partition: nodes}

    async def end(self, job_id: JobId) -> None:
        self.admin.finish(job_id)


@pytest.mark.parametrize("case", CASES)
def test_the_fake_keeps_the_contract(case: str) -> None:
    asyncio.run(CASES[case](FakeRig()))


@pytest.mark.parametrize("case", AWAY_CASES)
def test_nobody_answers(case: str) -> None:
    rig = FakeRig()
    rig.admin.hooks = dict.fromkeys(
        ("queue", "workers", "partition_limits", "drain", "resume", "delete"), away
    )
    asyncio.run(AWAY_CASES[case](rig))
