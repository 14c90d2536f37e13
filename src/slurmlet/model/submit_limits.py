"""Which limit Slurm names when it takes no more jobs: one that other jobs of the user will free, or one that this job
itself breaks. Pure.

With the sentence "violates accounting/qos policy" sbatch and slurmrestd give the limit's name, which is also the reason
that a pending job would show: AssocMaxSubmitJobLimit, QOSMaxSubmitJobPerUserLimit, QOSMaxCpuPerJobLimit …
"""

from __future__ import annotations

import re

_LIMIT = re.compile(r"\b((?:Assoc|QOS)\w*Limit)\b")
# Of jobs in the queue and running: passes when one of them ends.
_OF_COUNT = re.compile(r"Submit|MaxJobs|GrpJobs")


def named_limit(said: str) -> str:
    """ "AssocMaxSubmitJobLimit"; "" where Slurm gives no name."""
    found = _LIMIT.search(said)
    return found[1] if found else ""


def breaks_it_alone(said: str) -> bool:
    """Whether the job itself asks for more than is allowed: no other job's end will help it."""
    name = named_limit(said)
    return bool(name) and not _OF_COUNT.search(name)
