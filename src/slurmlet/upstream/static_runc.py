"""A static runc beside runner.pyz, for compute nodes without crun.

In the cluster's own directory because that is what every node sees: the cache and SLURMLET_UPSTREAM_DIR may be of the login
host alone. It must never keep a cluster from starting: most sites have crun.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from slurmlet.base.console import say
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir, write_private
from slurmlet.base.layout import ClusterFiles
from slurmlet.upstream.binaries import Found, Place, inventory

NAME = "runc"
# A site without a way out would make every `up` wait for a download that cannot come.
_RETRY_S = 24 * 3600.0


def write_for(files: ClusterFiles) -> None:
    """For a cluster that starts; fetches it where necessary and says when there is none."""
    failed = private_dir(files.libraries) / f"{NAME}.failed"
    fetch = not failed.exists() or time.time() - failed.stat().st_mtime > _RETRY_S
    why = provide(files.libraries, fetch=fetch)
    if not why:
        failed.unlink(missing_ok=True)
        return
    if fetch:
        write_private(failed, why)
    say(f"  warning: pods will not run on compute nodes without crun: {why}")


def write_for_this_host(directory: Path) -> None:
    """For a cluster inside one job: its hosts are alike, and what this one does not need costs time at its start."""
    if shutil.which("crun") is None:
        provide(directory, fetch=False)


def provide(directory: Path, *, fetch: bool) -> str:
    """Put runc into `directory`, where it is not yet; "" or why there is none."""
    try:
        found = _look(fetch)
        if found is None:
            return "there is no runc among the upstream binaries (`slurmlet upstream` fetches or builds it)"
        _copy(found.path, private_dir(directory) / NAME)
    except (OSError, SlurmletError) as error:
        return error.message if isinstance(error, SlurmletError) else str(error)
    return ""


def _look(fetch: bool) -> Found | None:
    place = Place.here()
    found = place.look(NAME)
    # A directory that the user named is complete as it is: no `up` should try a download that its site does not allow.
    if found is not None or not fetch or place.directory is not None:
        return found
    return inventory([NAME])[0]


def _copy(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        there, wanted = target.stat(), source.stat()
        if (there.st_size, there.st_mtime_ns) == (wanted.st_size, wanted.st_mtime_ns):
            return
    seen = source.stat()
    # A new file under the old name: pods that run with the old one keep it.
    write_private(target, source.read_bytes(), mode=0o700)
    os.utime(target, ns=(seen.st_atime_ns, seen.st_mtime_ns))
