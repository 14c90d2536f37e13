"""What `slurmlet.slurm.administration.SlurmAdmin` promises, as one suite for the fake, the commands and slurmrestd.

As slurm_contract.py: plain functions without pytest. tests/e2e/test_slurm_admin_contract.py takes this file into the testbed
and runs it there as root; tests/contract/test_slurm_admin_contract.py runs the same cases on the fake.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from slurmlet.base.errors import SlurmError
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage
from slurmlet.model.slurm_admin_values import DRAIN_REASON, QueuedJob, WorkerNode
from slurmlet.slurm.administration import SlurmAdmin

REASON = f'{DRAIN_REASON} it\'s "quoted", 100% $(echo a) `b` [c@d] ü'
NOBODY = "no-such-node"


class Rig(Protocol):
    admin: SlurmAdmin
    real: bool

    async def submit(self, *words: str, user: str = "user1", **fields: Any) -> JobId:
        """`words`: sbatch's; `fields`: what the fake is to list."""

    async def started(self, job_id: JobId) -> QueuedJob: ...

    async def limit(self, partition: str, nodes: int | None) -> None:
        """MaxNodes of a partition; None: no limit."""

    async def end(self, job_id: JobId) -> None: ...


async def job_of(rig: Rig, job_id: JobId) -> QueuedJob:
    (found,) = [job for job in await rig.admin.queue() if job.job_id == job_id]
    return found


async def worker(rig: Rig, name: str) -> WorkerNode:
    (found,) = [node for node in await rig.admin.workers() if node.name == name]
    return found


async def refused(work: Awaitable[object]) -> SlurmError:
    try:
        told = await work
    except SlurmError as error:
        return error
    raise AssertionError(f"not refused: {told!r}")


async def until(done: Callable[[], Awaitable[object]], limit_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not await done():
        assert time.monotonic() < deadline_s, "it takes too long"
        await asyncio.sleep(0.1)


async def jobs_of_everybody_are_listed(rig: Rig) -> None:
    mine = await rig.submit("--hold", user="user1", held=True, reason="JobHeldUser")
    theirs = await rig.submit("--hold", user="user2", held=True, reason="JobHeldUser")
    assert ((await job_of(rig, mine)).user, (await job_of(rig, theirs)).user) == ("user1", "user2")
    await rig.end(mine)
    await rig.end(theirs)
    assert not {mine, theirs} & {job.job_id for job in await rig.admin.queue()}, "what has ended is no demand"


async def a_held_job_tells_all_that_it_asks_for(rig: Rig) -> None:
    job_id = await rig.submit(
        "--hold", "--nodes=2-3", "--ntasks=4", "--cpus-per-task=2", "--mem=64M", "--time=7", "--exclusive",
        "--exclude=c3", "--partition=batch",
        held=True, reason="JobHeldUser", nodes_min=2, nodes_max=3, cpus=8, memory_mb=128, memory_mb_per_node=64,
        exclusive=True, limit_s=420.0, excluded_nodes="c3", partitions=("batch",),
    )  # fmt: skip
    job = await job_of(rig, job_id)
    await rig.end(job_id)
    assert (job.stage, job.held, job.reason) == (Stage.QUEUED, True, "JobHeldUser"), job
    assert (job.nodes_min, job.nodes_max, job.partitions) == (2, 3, ("batch",)), job
    assert (job.cpus, job.memory_mb_per_node, job.memory_mb) == (8, 64, 128), job
    assert (job.exclusive, job.limit_s) == (True, 420.0), job
    # Squeue of 22.05 does not tell.
    assert job.excluded_nodes in ("c3", ""), job
    assert (job.nodes, job.started_at_s) == ((), None), job
    assert job.submitted_at_s is not None


async def devices_are_told_by_node_and_in_all(rig: Rig) -> None:
    each = await rig.submit(
        "--hold", "--nodes=2", "--gres=gpu:1", held=True, reason="JobHeldUser", nodes_min=2,
        gres=(("gpu", 2),), gres_per_node=(("gpu", 1),),
    )  # fmt: skip
    total = await rig.submit("--hold", "--gpus=2", held=True, reason="JobHeldUser", gres=(("gpu", 2),))
    by_node, by_sum = await job_of(rig, each), await job_of(rig, total)
    await rig.end(each)
    await rig.end(total)
    assert by_node.gres_per_node == (("gpu", 1),), by_node
    assert by_sum.gres_per_node == (), by_sum
    # A site whose AccountingStorageTRES does not name the device tells no sum.
    assert by_sum.gres in ((("gpu", 2),), ()), by_sum


async def an_array_tells_how_many_tasks_wait_and_may_run(rig: Rig) -> None:
    job_id = await rig.submit(
        "--hold", "--array=1-9:2%2", held=True, reason="JobHeldUser", tasks_pending=5, tasks_at_once=2, array_id="x"
    )  # fmt: skip
    job = await job_of(rig, job_id)
    await rig.end(job_id)
    assert (job.tasks_pending, job.tasks_at_once, bool(job.array_id)) == (5, 2, True), job


async def a_dependent_job_names_what_it_waits_for(rig: Rig) -> None:
    first = await rig.submit("--hold", held=True, reason="JobHeldUser")
    second = await rig.submit(
        f"--dependency=afterok:{first}", reason="Dependency", dependency=f"afterok:{first}(unfulfilled)"
    )
    job = await job_of(rig, second)
    await rig.end(second)
    await rig.end(first)
    assert str(first) in job.dependency, job
    assert not job.held, job


async def a_running_job_and_its_node_name_each_other(rig: Rig) -> None:
    job_id = await rig.submit("--nodelist=c1", required_nodes="c1")
    job = await rig.started(job_id)
    node = await worker(rig, "c1")
    assert (job.stage, job.nodes) == (Stage.RUNNING, ("c1",)), job
    assert job.started_at_s is not None
    assert node.busy, node
    assert node.cpus_allocated >= 1, node
    await rig.end(job_id)


async def nodes_tell_what_they_have(rig: Rig) -> None:
    node = await worker(rig, "c2")
    assert node.cpus > 1, node
    assert node.memory_mb > 100, node
    assert "batch" in node.partitions, node
    assert node.address, node
    assert (node.registered, node.responding, node.drain) == (True, True, False), node
    assert node.slurmd_started_at_s is not None


async def a_drain_lets_a_running_job_go_on(rig: Rig) -> None:
    job_id = await rig.submit("--nodelist=c2", required_nodes="c2")
    await rig.started(job_id)
    try:
        await rig.admin.drain("c2", REASON)
        await rig.admin.drain("c2", REASON)
        node = await worker(rig, "c2")
        assert (node.drain, node.drained, node.busy, node.usable) == (True, False, True, False), node
        assert (node.reason, node.drained_by_us) == (REASON, True), node
        assert (await job_of(rig, job_id)).nodes == ("c2",)
        await rig.end(job_id)

        async def drained() -> bool:
            return (await worker(rig, "c2")).drained

        await until(drained)
    finally:
        await rig.admin.resume("c2")
    node = await worker(rig, "c2")
    assert (node.drain, node.reason, node.drained_by_us) == (False, "", False), node
    await rig.admin.resume("c2")

    async def idle() -> bool:
        # It has to register first.
        return (await worker(rig, "c2")).idle

    await until(idle)


async def a_node_of_the_configuration_cannot_be_deleted(rig: Rig) -> None:
    error = await refused(rig.admin.delete("c3"))
    assert (error.transient, error.reason) == (False, "SlurmRefused"), error
    await worker(rig, "c3")


async def what_is_not_there_is_deleted_already(rig: Rig) -> None:
    await rig.admin.delete(NOBODY)


async def what_is_not_there_cannot_be_changed(rig: Rig) -> None:
    for work in (rig.admin.drain(NOBODY, REASON), rig.admin.set_address(NOBODY, "10.0.0.1")):
        error = await refused(work)
        assert (error.transient, error.reason) == (False, "SlurmRefused"), error


async def an_address_can_be_corrected(rig: Rig) -> None:
    was = (await worker(rig, "c1")).address
    address = socket.gethostbyname("c1") if rig.real else "10.9.8.7"
    await rig.admin.set_address("c1", address)
    told = (await worker(rig, "c1")).address
    await rig.admin.set_address("c1", was)
    assert told == address


async def the_most_nodes_of_a_job_are_told_by_partition(rig: Rig) -> None:
    assert await rig.admin.partition_limits() == {}
    await rig.limit("short", 2)
    told = await rig.admin.partition_limits()
    await rig.limit("short", None)
    assert told == {"short": 2}


async def nobody_answers(rig: Rig) -> None:
    """While slurmctld is away: nothing is empty, nothing was refused for good."""
    admin = rig.admin
    works = {
        "queue": admin.queue(), "workers": admin.workers(), "limits": admin.partition_limits(),
        "drain": admin.drain("c1", REASON), "resume": admin.resume("c1"), "delete": admin.delete(NOBODY),
    }  # fmt: skip
    errors = await asyncio.gather(*(refused(work) for work in works.values()))
    told = {name: (error.transient, error.reason) for name, error in zip(works, errors, strict=True)}
    assert told == dict.fromkeys(works, (True, "SlurmUnavailable")), (told, [error.said for error in errors])


CASES: dict[str, Callable[[Rig], Awaitable[None]]] = {
    case.__name__: case
    for case in (
        jobs_of_everybody_are_listed, a_held_job_tells_all_that_it_asks_for, devices_are_told_by_node_and_in_all,
        an_array_tells_how_many_tasks_wait_and_may_run, a_dependent_job_names_what_it_waits_for,
        a_running_job_and_its_node_name_each_other, nodes_tell_what_they_have, a_drain_lets_a_running_job_go_on,
        a_node_of_the_configuration_cannot_be_deleted, what_is_not_there_is_deleted_already,
        what_is_not_there_cannot_be_changed, an_address_can_be_corrected,
        the_most_nodes_of_a_job_are_told_by_partition,
    )
}  # fmt: skip
AWAY_CASES: dict[str, Callable[[Rig], Awaitable[None]]] = {nobody_answers.__name__: nobody_answers}


class RealRig:
    real = True

    def __init__(self, admin: SlurmAdmin) -> None:
        self.admin = admin

    async def submit(self, *words: str, user: str = "user1", **_fields: Any) -> JobId:
        argv = ["sbatch", "--parsable", "--output=/dev/null", "--chdir=/", *words, "--wrap=sleep 120"]
        done = await asyncio.to_thread(
            subprocess.run, ["runuser", "-u", user, "--", *argv], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return JobId(done.stdout.strip().partition(";")[0])

    async def started(self, job_id: JobId) -> QueuedJob:
        async def runs() -> bool:
            return (await job_of(self, job_id)).stage is Stage.RUNNING

        await until(runs)
        return await job_of(self, job_id)

    async def limit(self, partition: str, nodes: int | None) -> None:
        words = [f"partitionname={partition}", f"maxnodes={'UNLIMITED' if nodes is None else nodes}"]
        await asyncio.to_thread(subprocess.run, ["scontrol", "update", *words], check=True, timeout=30)

    async def end(self, job_id: JobId) -> None:
        await asyncio.to_thread(subprocess.run, ["scancel", job_id], check=True, timeout=30)

        async def gone() -> bool:
            return job_id not in {job.job_id for job in await self.admin.queue()}

        await until(gone)


async def run_cases(cases: dict[str, Callable[[Rig], Awaitable[None]]], rig: Rig) -> dict[str, str]:
    """What went wrong with each; "" for nothing. One after another: they change the same nodes."""
    told = {}
    for name, case in cases.items():
        try:
            await asyncio.wait_for(case(rig), 100)
            told[name] = ""
        except Exception:  # the caller reports it
            told[name] = traceback.format_exc()
    return told


async def main(words: list[str]) -> None:
    """`KIND [away]`: commands, or what slurmlet's `--slurm` takes."""
    from slurmlet.slurm.admin_session import opened
    from slurmlet.slurm.connection import parse

    async with opened(parse(words[0])) as admin:
        told = await run_cases(AWAY_CASES if "away" in words else CASES, RealRig(admin))
    print("told:", json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
