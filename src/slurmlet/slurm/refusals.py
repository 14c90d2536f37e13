"""Slurm's own sentences for "no" and "not now", sorted. The same words come from its commands and from slurmrestd."""

from __future__ import annotations

from slurmlet.base.errors import SlurmError
from slurmlet.base.processes import Completed

# The controller is away or restarts; nobody has heard the request, or nobody could answer.
_AWAY = (
    "unable to contact slurm controller", "socket timed out", "connection refused", "connection timed out",
    "transport endpoint", "slurm controller is", "zero bytes were transmitted", "unexpected message received",
    "resource temporarily unavailable", "slurmctld is", "try again", "no route to host",
    "communication connection failure", "slurm backup controller", "munge", "unspecified error",
)  # fmt: skip
# A limit on the user's jobs, their number mostly, that other jobs of theirs will free.
_LIMITED = (
    "job violates accounting/qos policy", "maxsubmitjob", "temporarily unable to accept job", "maxjobcount",
)  # fmt: skip
# slurmctld limits the rate of requests (SlurmctldParameters=rl_enable), or a proxy before slurmrestd does.
_BUSY = ("rate limit", "rpc rate", "too many requests", "backing off")


def reason_of(said: str, code: int | None = 0) -> str:
    """The reason of the SlurmError for what was said. A command that never ran or was killed has told nothing."""
    text = said.lower()
    for reason, words in (("SlurmBusy", _BUSY), ("SlurmLimited", _LIMITED), ("SlurmUnavailable", _AWAY)):
        if any(word in text for word in words):
            return reason
    return "SlurmUnavailable" if code is None or code < 0 else "SlurmRefused"


def slurm_error(done: Completed) -> SlurmError:
    """Of a command that failed."""
    text = done.stderr.strip() or done.stdout.strip()
    said = text.splitlines()[-1] if text else "no error message"
    message = f"{done.argv[0]} failed ({done.code}): {said}"
    reason = reason_of(text, done.code)
    return SlurmError(
        message, said=sentence(text) or message, reason=reason, transient=reason != "SlurmRefused"
    )


def sentence(text: str) -> str:
    """What a command said, without its decoration."""
    lines = [_plain(line) for line in text.splitlines()]
    return "; ".join(line for line in lines if line)


def _plain(line: str) -> str:
    for command in ("sbatch", "squeue", "sacct", "scancel", "sinfo", "scontrol", "srun", "salloc"):
        line = line.removeprefix(f"{command}: ")
    return line.removeprefix("error: ").removeprefix("fatal: ").strip()
