"""A job's end told to slurmctld with the job's own exit code, through Slurm's library: no command of Slurm's can do it.

A job that srun allocated ends only when somebody says so; srun itself does it by the same call. The library may end the
process that it is loaded into (a configuration it cannot read is fatal to it), so it is only ever loaded into one
that has nothing else to do. `runner complete LIBRARY [JOB STATUS]` is that process where there is none.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, List

# API numbers: 36 is Slurm 20.11, the first with slurm_init. From 44 (25.11) on a job is named by a structure.
_FIRST_API, _STRUCTURE_API = 36, 44
_NO_VALUE = 0xFFFFFFFE
# What a node calls the library that the login host has under another path.
_ELSEWHERE = ("libslurm.so", *(f"libslurm.so.{number}" for number in range(46, _FIRST_API - 1, -1)))


# Slurm's numbers for what went wrong on the way to slurmctld; higher ones are answers of its own.
_ON_THE_WAY = range(1000, 2000)


class SlurmAway(OSError):
    """slurmctld did not answer: it may later."""


class _StepId(ctypes.Structure):
    _fields_ = [
        ("sluid", ctypes.c_uint64),
        ("job_id", ctypes.c_uint32),
        ("step_het_comp", ctypes.c_uint32),
        ("step_id", ctypes.c_uint32),
    ]


def load(library: str) -> Any:
    """Slurm's library, ready for calls. Raises OSError where there is none that we know how to call."""
    found = _open(library)
    found.slurm_init(None)
    if api_of(found) < _FIRST_API:
        raise OSError(f"{library}: too old (API {api_of(found)})")
    return found


def _open(library: str) -> Any:
    for name in (library, *_ELSEWHERE):
        try:
            # Its plugins look for their symbols in the process, not in the library.
            found = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if all(hasattr(found, call) for call in ("slurm_init", "slurm_api_version", "slurm_complete_job")):
            return found
    raise OSError(f"no library of Slurm's at {library}")


def api_of(library: Any) -> int:
    library.slurm_api_version.restype = ctypes.c_long
    return int(library.slurm_api_version()) >> 16


def complete(library: Any, job_id: int, status: int) -> None:
    """End the job; `status` is a wait status, so that exit codes and signals are told apart. Raises OSError."""
    if api_of(library) >= _STRUCTURE_API:
        job: Any = ctypes.byref(_StepId(0, job_id, _NO_VALUE, _NO_VALUE))
    else:
        job = ctypes.c_uint32(job_id)
    if library.slurm_complete_job(job, ctypes.c_uint32(status)) != 0:
        number = int(library.slurm_get_errno())
        kind = SlurmAway if number in _ON_THE_WAY else OSError
        raise kind(f"slurmctld did not take the end of job {job_id} ({number})")


def main(arguments: List[str]) -> int:
    """`LIBRARY`: say its API number. `LIBRARY JOB STATUS`: end the job."""
    try:
        library = load(arguments[0])
        if len(arguments) == 3:
            complete(library, int(arguments[1]), int(arguments[2]))
        else:
            print(api_of(library))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.flush()
    # Threads of the library's need not be waited for.
    os._exit(0)
