"""Limits of a user's association, as a site's administrator sets them with sacctmgr.

    with association_limits(bed, "user1", MaxSubmitJobs=5):
        ...                                          # the sixth sbatch is refused

Slurm enforces them from the next submission on. Needs a testbed with accounting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from slurmlet.testbed.config_files import CLUSTER
from slurmlet.testbed.hosts import DEFAULT_USER, Testbed

# What sacctmgr takes for "no limit".
_NONE = -1


@contextlib.contextmanager
def association_limits(bed: Testbed, user: str = DEFAULT_USER, **limits: int) -> Iterator[None]:
    """Keywords are sacctmgr's own: MaxSubmitJobs, MaxJobs, GrpTRESMins … with a number. Reset at the end."""
    set_limits(bed, user, **limits)
    try:
        yield
    finally:
        set_limits(bed, user, **dict.fromkeys(limits, _NONE))


def set_limits(bed: Testbed, user: str = DEFAULT_USER, **limits: int) -> None:
    changes = [f"{name}={value}" for name, value in limits.items()]
    where = ["where", f"name={user}", f"cluster={CLUSTER}"]
    bed.run(["sacctmgr", "--immediate", "modify", "user", *where, "set", *changes], user="root")
