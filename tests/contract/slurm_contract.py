"""What `slurmlet.slurm.interface.Slurm` promises, as one suite for the fake, the commands and slurmrestd.

Plain functions without pytest, because the real ones run where Slurm is: tests/e2e/test_slurm_contract.py takes this file
into the testbed and runs it there as an ordinary user (`python slurm_contract.py commands`), and
tests/contract/test_slurm_contract.py runs the same cases on the fake. A rig knows how a job comes to start and to end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from slurmlet.base.errors import SlurmError
from slurmlet.model.host_lists import expand
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage, is_over, stage_of
from slurmlet.model.slurm_values import Job, JobSpec
from slurmlet.slurm.interface import Slurm

SLEEP = "#!/bin/sh\nexec sleep 60\n"
NOBODY = JobId("4000000")
A_YEAR_S = 365 * 86400.0
HOSTILE = (
    "a'; echo foo", "with  two spaces", "$(echo foo)", "`echo foo`", 'q"q', "back\\slash", "100%j", "a|b|c",
    "ü日本", "(null", "{}[],:",
)  # fmt: skip


class Rig(Protocol):
    slurm: Slurm
    runs_scripts: bool

    async def started(self, job_id: JobId) -> Job:
        """The job once it runs."""

    async def over(self, job_id: JobId, code: int = 0, signal: int = 0) -> None:
        """Wait until the script has ended so (on the fake: end it so)."""

    def scratch(self) -> Path:
        """A directory that login and compute hosts share."""


def spec(name: str = "contract", script: str = SLEEP, **fields: Any) -> JobSpec:
    return JobSpec(
        **{"name": name, "script": script, "output": "/dev/null", "tasks": 1, "memory_mb": 32, **fields}
    )


async def job_of(rig: Rig, job_id: JobId) -> Job:
    found = [job for job in await rig.slurm.jobs() if job.job_id == job_id]
    assert len(found) == 1, f"{job_id} is listed {len(found)} times"
    return found[0]


async def refused(work: Awaitable[object]) -> SlurmError:
    try:
        told = await work
    except SlurmError as error:
        return error
    raise AssertionError(f"not refused: {told!r}")


async def a_submitted_job_is_listed_as_it_was_asked_for(rig: Rig) -> None:
    before_s = time.time() if rig.runs_scripts else 0.0
    job_id = await rig.slurm.submit(spec("a-name", comment="a comment", partition="batch", time_limit_min=7))
    job = await job_of(rig, job_id)
    assert (job.name, job.comment, job.partition, job.node_count) == ("a-name", "a comment", "batch", 1)
    assert stage_of(job.state) in (Stage.QUEUED, Stage.RUNNING), job.state
    assert (job.limit_s, job.left_s is not None and job.left_s <= 420.0) == (420.0, True), job
    assert job.submitted_at_s is not None
    assert job.submitted_at_s >= int(before_s) - 1
    await rig.slurm.cancel([job_id])


async def names_and_comments_are_text(rig: Rig) -> None:
    made = {
        text: await rig.slurm.submit(spec(text, comment=text, options=(("hold", None),))) for text in HOSTILE
    }
    listed = {job.job_id: job for job in await rig.slurm.jobs()}
    wrong = [
        (text, listed[one])
        for text, one in made.items()
        if listed[one].name != text or listed[one].comment != text
    ]
    await rig.slurm.cancel(list(made.values()))
    assert not wrong, wrong


async def a_job_without_a_limit_has_none(rig: Rig) -> None:
    job_id = await rig.slurm.submit(spec(partition="batch"))
    job = await rig.started(job_id)
    await rig.slurm.cancel([job_id])
    if job.limit_s == A_YEAR_S:
        # Slurm's backfill scheduler gives the jobs that it starts a year in the place of no limit (22.05).
        assert job.left_s is not None
        assert job.ends_at_s is not None
    else:
        assert (job.limit_s, job.left_s, job.ends_at_s) == (None, None, None), job


async def a_running_job_tells_where_and_until_when(rig: Rig) -> None:
    job_id = await rig.slurm.submit(spec(time_limit_min=3, cpus_per_task=2))
    job = await rig.started(job_id)
    grants = await rig.slurm.grants(job_id)
    await rig.slurm.cancel([job_id])
    assert stage_of(job.state) is Stage.RUNNING
    assert len(expand(job.nodes)) == 1
    assert job.starts_at_s is not None
    assert job.ends_at_s is not None
    assert abs(job.ends_at_s - job.starts_at_s - 180.0) <= 2
    assert job.left_s is not None
    assert 120 < job.left_s <= 180
    assert {host: (one.cpus, one.memory_mb) for host, one in grants.items()} == {job.nodes: (2, 32)}, grants


async def a_job_on_two_hosts_is_one_job(rig: Rig) -> None:
    if not rig.runs_scripts:
        return
    job_id = await rig.slurm.submit(spec(nodes=2, tasks=2))
    job = await rig.started(job_id)
    grants = await rig.slurm.grants(job_id)
    await rig.slurm.cancel([job_id])
    assert job.node_count == 2
    assert sorted(expand(job.nodes)) == sorted(grants)
    assert len(grants) == 2


async def devices_are_granted_by_name(rig: Rig) -> None:
    job_id = await rig.slurm.submit(spec(gres=(("gpu", 1),)))
    await rig.started(job_id)
    (grant,) = (await rig.slurm.grants(job_id)).values()
    await rig.slurm.cancel([job_id])
    assert grant.gres == (("gpu", 1),), grant


async def who_holds_nothing_has_no_grants(rig: Rig) -> None:
    job_id = await rig.slurm.submit(spec(options=(("hold", None),)))
    assert await rig.slurm.grants(job_id) == {}
    await rig.slurm.cancel([job_id])
    assert await rig.slurm.grants(NOBODY) == {}


async def an_end_has_its_exit_code_and_times(rig: Rig) -> None:
    job_id = await rig.slurm.submit(spec(script="#!/bin/sh\nexit 3\n"))
    await rig.started(job_id)
    await rig.over(job_id, code=3)
    ended = (await rig.slurm.ended([job_id]))[job_id]
    assert (ended.exit_code, ended.signal, ended.state) == (3, 0, "FAILED"), ended
    assert ended.cancelled_by_uid is None
    assert ended.started_at_s is not None
    assert ended.ended_at_s is not None
    assert ended.started_at_s <= ended.ended_at_s


async def an_end_by_a_signal_names_it(rig: Rig) -> None:
    job_id = await rig.slurm.submit(spec(script="#!/bin/sh\nkill -9 $$\n"))
    await rig.started(job_id)
    await rig.over(job_id, signal=9)
    ended = (await rig.slurm.ended([job_id]))[job_id]
    assert (ended.exit_code, ended.signal) == (0, 9), ended


async def a_good_end(rig: Rig) -> None:
    job_id = await rig.slurm.submit(spec(script="#!/bin/sh\ntrue\n"))
    await rig.started(job_id)
    await rig.over(job_id)
    ended = (await rig.slurm.ended([job_id]))[job_id]
    assert (ended.state, ended.exit_code, ended.signal) == ("COMPLETED", 0, 0), ended
    assert is_over((await job_of(rig, job_id)).state), "it is remembered for a while"


async def a_cancelled_job_says_by_whom(rig: Rig) -> None:
    job_id = await rig.slurm.submit(spec())
    await rig.started(job_id)
    await rig.slurm.cancel([job_id])
    await rig.slurm.cancel([job_id])
    await rig.over(job_id, signal=15)
    await rig.slurm.cancel([job_id])
    assert (await rig.slurm.ended([job_id]))[job_id].state == "CANCELLED"

    async def named() -> bool:
        # Only accounting knows; it may lag behind the controller.
        return (await rig.slurm.ended([job_id]))[job_id].cancelled_by_uid is not None

    await until_async(named)


async def a_job_in_the_queue_can_be_cancelled(rig: Rig) -> None:
    job_id = await rig.slurm.submit(spec(options=(("hold", None),)))
    await rig.slurm.cancel([NOBODY, job_id])
    assert (await job_of(rig, job_id)).state == "CANCELLED", "one that nobody knows does not save the others"


async def jobs_that_nobody_knows_are_missing_and_no_error(rig: Rig) -> None:
    assert await rig.slurm.ended([]) == {}
    assert await rig.slurm.ended([NOBODY]) == {}
    await rig.slurm.cancel([])
    await rig.slurm.cancel([NOBODY])
    await rig.slurm.signal(NOBODY, "USR1")


async def a_job_that_runs_has_not_ended(rig: Rig) -> None:
    job_id = await rig.slurm.submit(spec())
    await rig.started(job_id)
    found = await rig.slurm.ended([job_id, NOBODY])
    await rig.slurm.cancel([job_id])
    assert list(found) == [job_id]
    assert not is_over(found[job_id].state)


async def many_ends_are_one_question(rig: Rig) -> None:
    ids = [await rig.slurm.submit(spec(script="#!/bin/sh\ntrue\n")) for _ in range(10)]
    for job_id in ids:
        await rig.started(job_id)
    await asyncio.gather(*(rig.over(job_id) for job_id in ids))
    found = await rig.slurm.ended(ids)
    assert {one.state for one in found.values()} == {"COMPLETED"}
    assert set(found) == set(ids)


async def a_signal_reaches_the_script(rig: Rig) -> None:
    mark = rig.scratch() / "signalled"
    script = (
        f"#!/bin/sh\ntrap 'echo usr1 > {mark}; exit 5' USR1\necho > {mark}.up\nwhile :; do sleep 0.1; done\n"
    )
    job_id = await rig.slurm.submit(spec(script=script))
    await rig.started(job_id)
    if rig.runs_scripts:
        await until(lambda: Path(f"{mark}.up").exists())
    await rig.slurm.signal(job_id, "USR1")
    await rig.over(job_id, code=5)
    assert not rig.runs_scripts or mark.read_text() == "usr1\n"
    await rig.slurm.signal(job_id, "USR1")


async def the_script_finds_its_place(rig: Rig) -> None:
    """Working directory, output taken literally and appended to, environment: what was asked for, nothing else."""
    if not rig.runs_scripts:
        return
    place = rig.scratch() / "100%j of it's"
    place.mkdir()
    output = place / "out %x.log"
    output.write_text("before\n")
    lines = (
        "pwd",
        'echo "$GREETING"',
        "env | grep -c -e ^SBATCH_ -e ^SQUEUE_",
        "command -v sbatch >/dev/null && echo path",
    )
    script = "\n".join(("#!/bin/sh", *lines, ""))
    asked = spec(
        script=script, directory=str(place), output=str(output), environment={"GREETING": "hello  'you'"}
    )
    job_id = await rig.slurm.submit(asked)
    await rig.over(job_id)
    await until(lambda: output.read_text().count("\n") >= 5)
    assert output.read_text() == f"before\n{place}\nhello  'you'\n0\npath\n"


async def what_can_never_be_is_refused(rig: Rig) -> None:
    error = await refused(rig.slurm.submit(spec(partition="no-such-partition")))
    assert (error.transient, error.reason) == (False, "SlurmRefused"), error
    assert "partition" in error.said.lower(), error.said
    if rig.runs_scripts:
        error = await refused(rig.slurm.submit(spec(gres=(("no-such-device", 1),))))
        assert (error.transient, error.reason) == (False, "SlurmRefused"), error


async def options_win_over_fields(rig: Rig) -> None:
    options = (("partition", "short"), ("time", "5"), ("hold", None), ("nice", "100"), ("mem", "1G"))
    job_id = await rig.slurm.submit(spec(partition="batch", time_limit_min=1, options=options))
    job = await job_of(rig, job_id)
    await rig.slurm.cancel([job_id])
    assert (job.partition, job.limit_s, stage_of(job.state)) == ("short", 300.0, Stage.QUEUED), job
    assert not rig.runs_scripts or job.reason == "JobHeldUser", job


async def nodes_and_partitions_agree(rig: Rig) -> None:
    nodes, partitions = await rig.slurm.nodes(), await rig.slurm.partitions()
    assert [one.name for one in partitions if one.default] == ["batch"]
    for partition in partitions:
        mine = [node for node in nodes if partition.name in node.partitions]
        assert partition.up
        assert (partition.nodes, partition.nodes_usable) == (len(mine), sum(node.usable for node in mine))
        assert partition.cpus == sum(node.cpus for node in mine)
        assert partition.memory_mb == sum(node.memory_mb for node in mine)
        assert partition.cpus_per_node == max(node.cpus for node in mine)
        assert sum(partition.node_states.values()) == partition.nodes
        assert set(partition.node_states) == {node.state for node in mine}, (partition, mine)
    assert len({node.name for node in nodes}) == len(nodes)
    if rig.runs_scripts:
        limits = {one.name: one.time_limit for one in partitions}
        assert limits == {"batch": "infinite", "short": "10:00"}
        assert {one.name: one.gpus for one in partitions} == {"batch": 2, "short": 2}


async def capabilities_do_not_change(rig: Rig) -> None:
    first = await rig.slurm.capabilities()
    assert first.release >= (20, 11), first
    assert first.accounting
    assert first.kill_wait_s > 0
    assert await rig.slurm.capabilities() == first


async def arrays_and_strangers_do_no_harm(rig: Rig) -> None:
    """Jobs of the user's own making: an array with tasks that run and that wait, a name and a comment that Slurm allows."""
    if not rig.runs_scripts:
        return
    first_line = f"at {time.time()}"
    process = await asyncio.create_subprocess_exec(
        "sbatch", "--parsable", "--array=1-3%1", "--output=/dev/null", "--mem=16M", "--wrap=sleep 30",
        f"--comment={first_line}\nand another", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    array = JobId(out.decode().strip())

    async def mine() -> list[Job]:
        return [job for job in await rig.slurm.jobs() if job.comment.startswith(first_line)]

    async def runs_one() -> bool:
        return any(stage_of(job.state) is Stage.RUNNING for job in await mine())

    async def all_over() -> bool:
        return all(is_over(job.state) for job in await mine())

    await until_async(runs_one)
    listed = await mine()
    states = {stage_of(job.state) for job in listed}
    await rig.slurm.cancel([array])
    assert states == {Stage.QUEUED, Stage.RUNNING}, listed
    assert len({job.job_id for job in listed}) == len(listed)
    await until_async(all_over)


async def nobody_answers(rig: Rig) -> None:
    """While slurmctld is away: nothing is empty, nothing is unknown, nothing was refused."""
    slurm = rig.slurm
    works = {
        "submit": slurm.submit(spec()), "jobs": slurm.jobs(), "cancel": slurm.cancel([NOBODY]),
        "ended": slurm.ended([NOBODY]), "nodes": slurm.nodes(), "partitions": slurm.partitions(),
        "grants": slurm.grants(NOBODY), "signal": slurm.signal(NOBODY, "USR1"), "capabilities": slurm.capabilities(),
    }  # fmt: skip
    errors = await asyncio.gather(*(refused(work) for work in works.values()))
    told = {name: (error.transient, error.reason) for name, error in zip(works, errors, strict=True)}
    assert told == dict.fromkeys(works, (True, "SlurmUnavailable")), (told, [error.said for error in errors])


CASES: dict[str, Callable[[Rig], Awaitable[None]]] = {
    case.__name__: case
    for case in (
        a_submitted_job_is_listed_as_it_was_asked_for, names_and_comments_are_text, a_job_without_a_limit_has_none,
        a_running_job_tells_where_and_until_when, a_job_on_two_hosts_is_one_job, devices_are_granted_by_name,
        who_holds_nothing_has_no_grants, an_end_has_its_exit_code_and_times, an_end_by_a_signal_names_it, a_good_end,
        a_cancelled_job_says_by_whom, a_job_in_the_queue_can_be_cancelled, jobs_that_nobody_knows_are_missing_and_no_error,
        a_job_that_runs_has_not_ended, many_ends_are_one_question, a_signal_reaches_the_script, the_script_finds_its_place,
        what_can_never_be_is_refused, options_win_over_fields, nodes_and_partitions_agree, capabilities_do_not_change,
        arrays_and_strangers_do_no_harm,
    )
}  # fmt: skip
AWAY_CASES: dict[str, Callable[[Rig], Awaitable[None]]] = {nobody_answers.__name__: nobody_answers}


async def until(done: Callable[[], object], limit_s: float = 20.0) -> None:
    async def told() -> object:
        return done()

    await until_async(told, limit_s)


async def until_async(done: Callable[[], Awaitable[object]], limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not await done():
        assert time.monotonic() < deadline_s, "it takes too long"
        await asyncio.sleep(0.1)


class RealRig:
    """Jobs start and end by themselves; this one waits for them."""

    runs_scripts = True

    def __init__(self, slurm: Slurm, directory: Path) -> None:
        self.slurm, self._directory = slurm, directory
        self._number = 0

    def scratch(self) -> Path:
        self._number += 1
        made = self._directory / str(self._number)
        made.mkdir()
        return made

    async def started(self, job_id: JobId) -> Job:
        async def runs() -> bool:
            return stage_of((await job_of(self, job_id)).state) is not Stage.QUEUED

        await until_async(runs)
        return await job_of(self, job_id)

    async def over(self, job_id: JobId, code: int = 0, signal: int = 0) -> None:
        del code, signal

        async def ended() -> bool:
            return is_over((await job_of(self, job_id)).state)

        await until_async(ended)
        # What the controller knows is known, however far accounting lags behind it.
        assert is_over((await self.slurm.ended([job_id]))[job_id].state)


async def run_cases(cases: dict[str, Callable[[Rig], Awaitable[None]]], rig: Rig) -> dict[str, str]:
    """What went wrong with each; "" for nothing. Several at once: most of their time they wait for jobs."""
    slots = asyncio.Semaphore(6)

    async def run(case: Callable[[Rig], Awaitable[None]]) -> str:
        async with slots:
            began_s = time.monotonic()
            try:
                await asyncio.wait_for(case(rig), 200)
            except Exception:  # the caller reports it
                return traceback.format_exc()
            finally:
                print(f"{case.__name__}: {time.monotonic() - began_s:.1f} s", file=sys.stderr)
            return ""

    # Two answers are compared: nobody else may start a job in between.
    alone = {name: await run(case) for name, case in cases.items() if case is nodes_and_partitions_agree}
    others = {name: case for name, case in cases.items() if name not in alone}
    told = await asyncio.gather(*(run(case) for case in others.values()))
    return {**alone, **dict(zip(others, told, strict=True))}


async def main(words: list[str]) -> None:
    """`KIND [away]`: commands, or what slurmlet's `--slurm` takes."""
    import tempfile

    from slurmlet.slurm.connection import parse
    from slurmlet.slurm.session import opened

    kind, cases = words[0], AWAY_CASES if "away" in words else CASES
    with tempfile.TemporaryDirectory(dir=Path.home()) as directory:
        async with opened(parse(kind)) as slurm:
            told = await run_cases(cases, RealRig(slurm, Path(directory)))
    print("told:", json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
