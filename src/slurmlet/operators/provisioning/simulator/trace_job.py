"""One job of a trace, as both formats and the generator tell it."""

from __future__ import annotations

from dataclasses import dataclass

from slurmlet.base.errors import UserError
from slurmlet.model.slurm_admin_values import Gres


class TraceError(UserError):
    """A trace that cannot be read; the message names line and field."""

    reason = "InvalidTrace"


@dataclass(frozen=True, slots=True)
class TraceJob:
    job_id: str
    submit_s: float
    run_s: float
    nodes: int = 1
    cpus: int = 1  # of the whole job
    memory_mb: int = 0  # of the whole job
    gres: Gres = ()  # of the whole job
    limit_s: float | None = None
    partition: str = ""
    features: str = ""
    user: str = ""
    held_s: float = 0.0  # between its submission and when it was eligible: held, dependent, or to begin later


def whole(value: str, line: int, field: str, *, least: int | None = None) -> int:
    """A whole number of a field, or an error that says where it is not one."""
    try:
        number = int(float(value))
    except (ValueError, OverflowError):
        raise TraceError(f"line {line}: field {field!r} is {value[:40]!r}, expected a number") from None
    if least is not None and number < least:
        raise TraceError(f"line {line}: field {field!r} is {value[:40]!r}, expected at least {least}")
    return number
