"""A job that starts at once: srun asks for resources and starts one task in a single request, or is told that none are free.

sbatch's jobs wait for slurmctld's next round, up to a second. srun's do not, but srun stays, and ends the job with
itself. Once Slurm has said that the task is started nothing needs it any more: its watcher, which would end the job,
is killed first, then srun. Where Slurm has steps that nobody waits for (`srun --async`, 26.05) nobody is killed: salloc
asks for the resources and leaves, srun hands the task in and leaves. Either way the task itself has to tell slurmctld of
the end (entrypoint/job_step.py).

Methods block. Until `let_go` the job ends with srun, whatever becomes of this process: nothing is ever left over
between the two.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.errors import SlurmError, SlurmletError
from slurmlet.base.processes import CommandError, Completed, run
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import Capabilities, JobSpec
from slurmlet.slurm.command_options import salloc_words, srun_words
from slurmlet.slurm.environment import command_environment
from slurmlet.slurm.refusals import sentence

# Both are said with -v, in the same words from 20.11 to 26.05. Up to 22.05 a plugin says the second one, its name before it.
_GRANTED = re.compile(r"^srun: jobid (\d+): nodes\(", re.MULTILINE)
_STARTED = re.compile(r"^srun: (?:launch/slurm: \w+: )?Node \S+, \d+ tasks started", re.MULTILINE)
_ALLOCATED = re.compile(r"^salloc: Granted job allocation (\d+)", re.MULTILINE)
_GRANT_S, _START_S, _END_S = 10.0, 20.0, 3.0
_COMPLETE_S = 30.0
# Our part of srun's command line: what a hub that came later knows it by.
MARK = "--immediate"
_STEP = ("--input=none", "--output=none", "--error=none", "--mpi=none", "--cpu-bind=none", "--overlap")
_OWN = (MARK, "--verbose", *_STEP)


class NotNow(SlurmletError):
    """Slurm does not start the job at once; it may well take it into the queue."""

    reason = "NotAtOnce"


class LaunchFailed(SlurmletError):
    """The job got its resources, but its task was not seen to start. srun's watcher ends the job."""

    reason = "LaunchFailed"

    def __init__(self, job_id: JobId, said: str) -> None:
        super().__init__(f"Slurm job {job_id} did not start: {said}")
        self.job_id = job_id


@dataclass(frozen=True)
class Site:
    """What this site needs for it: where Slurm's library is, or why there is no way."""

    library: str = ""
    problem: str = ""
    async_steps: bool = False


def look_at_site(capabilities: Capabilities) -> Site:
    """Whether a job can be let go of and ended here. Tries the library, in a process of its own."""
    if capabilities.immediate_problem:
        return Site(problem=capabilities.immediate_problem)
    for library in libraries(capabilities.plugin_dirs):
        done = _runner("complete", library, check=False)
        if done.ok:
            return Site(library, async_steps=capabilities.async_steps)
    return Site(problem="Slurm's library (libslurmfull.so or libslurm.so) is not on this host")


def libraries(plugin_dirs: str) -> Iterator[str]:
    """Slurm's own programs use the one beside its plugins."""
    for directory in plugin_dirs.split(":"):
        path = Path(directory) / "libslurmfull.so"
        if directory and path.exists():
            yield str(path)
    yield "libslurm.so"


def complete(library: str, job_id: JobId, status: int) -> None:
    """End a job that nobody else ends; `status` is a wait status. Raises CommandError."""
    _runner("complete", library, job_id, str(status))


def _runner(*words: str, check: bool = True) -> Completed:
    argv = [sys.executable, "-m", "slurmlet.entrypoint", *words]
    return run(argv, timeout_s=_COMPLETE_S, env=command_environment(), check=check)


class Launch:
    """One srun, from the request until it is let go."""

    def __init__(self, options: Sequence[str], task: Sequence[str], environment: Mapping[str, str]) -> None:
        self._said, self._silent = b"", False
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            # srun has the reading end too: it must not find the pipe broken when this process dies.
            self._process = subprocess.Popen(
                ["srun", *_OWN, *options, *task],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=writer,
                env=dict(environment),
                cwd=Path.home(),
                pass_fds=[reader],
                start_new_session=True,
            )
        except OSError as error:
            os.close(reader)
            raise NotNow(f"srun: {error}") from error
        finally:
            os.close(writer)
        self._reader = reader

    def granted(self) -> JobId:
        """The job's id once it has its resources. Raises NotNow, or a transient SlurmError when srun does not say."""
        found = self._wait_for(_GRANTED, _GRANT_S)
        if found is not None:
            return JobId(found[1])
        answered = self._silent
        self._abandon()
        if answered:
            raise NotNow(self.complaint)
        text = f"srun failed: timed out after {_GRANT_S:g} s"
        raise SlurmError(text, reason="SlurmUnavailable", transient=True)

    def started(self, job_id: JobId) -> None:
        """Wait for the task's start, then let go. Raises LaunchFailed."""
        if self._wait_for(_STARTED, _START_S) is None:
            said = self.complaint
            self._abandon()
            raise LaunchFailed(job_id, said)
        let_go(self._process.pid)
        self._process.wait()
        self._close()

    @property
    def complaint(self) -> str:
        """What srun said of its errors, without its decoration."""
        lines = [line.removeprefix("srun: ") for line in self._said.decode(errors="replace").splitlines()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith(("error: ", "fatal: "))]
        return "; ".join(dict.fromkeys(errors)) or "srun gave no reason"

    def _wait_for(self, words: re.Pattern[str], timeout_s: float) -> re.Match[str] | None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = words.search(self._said.decode(errors="replace"))
            left_s = deadline_s - time.monotonic()
            if found or left_s <= 0 or not _readable(self._reader, left_s):
                return found
            piece = os.read(self._reader, 65536)
            if not piece:
                self._silent = True
                return None
            self._said += piece

    def _abandon(self) -> None:
        """End srun, if it has not ended, so that it or its watcher ends the job."""
        if not self._silent:
            self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close()

    def _close(self) -> None:
        os.close(self._reader)


def start(
    spec: JobSpec, task: Sequence[str], environment: Mapping[str, str], *, async_steps: bool = False
) -> JobId:
    """The job, its task started. Raises NotNow, LaunchFailed, or a transient SlurmError that may hide a success."""
    if async_steps:
        job_id = _allocated(spec, environment)
        _hand_in(job_id, spec, task, environment)
        return job_id
    launch = Launch(srun_words(spec), task, environment)
    job_id = launch.granted()
    launch.started(job_id)
    return job_id


def _allocated(spec: JobSpec, environment: Mapping[str, str]) -> JobId:
    """An allocation without a process of ours. After a hub that dies now, the next one ends what has no step."""
    argv = ["salloc", MARK, "--no-shell", "--stepmgr", *salloc_words(spec)]
    try:
        done = run(argv, timeout_s=_GRANT_S, env=environment, cwd=Path.home(), check=False)
    except CommandError as error:
        if error.transient:
            raise SlurmError(error.message, reason="SlurmUnavailable", transient=True) from error
        raise NotNow(error.message) from error
    found = _ALLOCATED.search(done.stderr)
    if found is None:
        raise NotNow(sentence(done.stderr) or "salloc said nothing")
    return JobId(found[1])


def _hand_in(job_id: JobId, spec: JobSpec, task: Sequence[str], environment: Mapping[str, str]) -> None:
    """The task as a step that Slurm's step manager starts and looks after. Raises LaunchFailed, the job ended."""
    own = (
        f"--jobid={job_id}",
        "--async",
        "--parsable",
        *_STEP,
        "--mem=0",
        "--nodes=1",
        "--ntasks=1",
        "--export=ALL",
    )
    size = [f"--cpus-per-task={spec.cpus_per_task}"] if spec.cpus_per_task else []
    directory = [f"--chdir={spec.directory}"] if spec.directory else []
    try:
        run(["srun", *own, *size, *directory, *task], timeout_s=_START_S, env=environment, cwd=Path.home())
    except CommandError as error:
        # Nobody else ends it.
        run(["scancel", job_id], timeout_s=_COMPLETE_S, env=environment, check=False)
        raise LaunchFailed(job_id, sentence(error.stderr) or error.message) from error


def let_go(pid: int) -> None:
    """End an srun but not its job: its watcher first, which would end the job with it."""
    for number in [*_children(pid), pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def left_behind(word: str) -> Iterator[tuple[int, str]]:
    """(pid, command line) of sruns of ours whose starter is gone, with `word` in their command line."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, IndexError):
            if entry.stat().st_uid != os.getuid():
                continue
            line = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            is_srun = line.startswith(f"srun {MARK} ") and word in line
            if is_srun and parent != os.getpid() and not _is_srun(parent):
                yield int(entry.name), line


def _is_srun(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"srun\0" + MARK.encode())
    return False


def steps() -> set[JobId]:
    """Jobs of this user that have a step with tasks of ours. Raises CommandError."""
    argv = ["squeue", "--noheader", "--steps", "-u", str(os.getuid()), "-o", "%i"]
    return parse_steps(run(argv, timeout_s=_COMPLETE_S, env=command_environment()).stdout)


def parse_steps(text: str) -> set[JobId]:
    """ "123.0", "123.batch" or "123.extern", one a line; the last is Slurm's own and stays while the job does."""
    pairs = (line.strip().partition(".") for line in text.split("\n"))
    return {JobId(job) for job, _, step in pairs if job.isdecimal() and step != "extern"}


def step_status(job_id: JobId) -> int | None:
    """The wait status of the job's first step, from accounting; None where it is not known. Raises CommandError."""
    argv = ["sacct", "--noheader", "--parsable2", "-j", job_id, "-o", "JobIDRaw,ExitCode"]
    done = run(argv, timeout_s=_COMPLETE_S, env=command_environment(), check=False)
    return parse_status(job_id, done.stdout)


def parse_status(job_id: JobId, text: str) -> int | None:
    for line in text.split("\n"):
        step, _, both = line.strip().partition("|")
        code, _, number = both.partition(":")
        if step == f"{job_id}.0" and code.isdecimal() and number.isdecimal():
            return int(code) << 8 | int(number)
    return None


def _readable(fd: int, timeout_s: float) -> bool:
    # Not select(): a hub with a thousand runners has descriptors above the 1024 it can take.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
