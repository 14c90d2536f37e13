"""The two directories of a run: a private one on its first host, and a small one on the shared file system.

The private one holds keys, etcd's data and logs, in memory where there is room. The shared one holds what other hosts must
read: their credentials, the runner, where the hub listens, pods' logs. Both go at the end; what a killed host leaves is
removed by the next run there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir
from slurmlet.base.layout import ClusterFiles, runs_dir
from slurmlet.runner.host.scratch import choose_base

_MEMORY = "/dev/shm"
# An etcd of a short life, logs, keys.
_ROOM_BYTES = 512 << 20
_YOUNG_S = 60.0
_LOCK = "lock"


@dataclass(frozen=True)
class RunPlaces:
    local: Path
    shared: Path

    @property
    def files(self) -> ClusterFiles:
        return ClusterFiles(self.local)


def of_run(key: str, environ: Mapping[str, str]) -> RunPlaces:
    return RunPlaces(_base(environ) / "runs" / f"run-{key}", shared_of(key))


def shared_of(key: str) -> Path:
    return runs_dir() / key


def _base(environ: Mapping[str, str]) -> Path:
    memory = os.statvfs(_MEMORY) if os.access(_MEMORY, os.W_OK) else None
    chosen = dict(environ)
    if memory is not None and memory.f_bavail * memory.f_frsize >= _ROOM_BYTES:
        chosen = {"TMPDIR": _MEMORY}
    return Path(choose_base(chosen, os.geteuid(), os.geteuid()))


def make(places: RunPlaces) -> int:
    """Make both, empty and private; the lock that says "in use" is held as long as the result stays open."""
    _remove_abandoned(places.local.parent)
    _remove_abandoned(places.shared.parent)
    for path in (places.local, places.shared):
        private_dir(path.parent)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError as error:
            raise SlurmletError(
                f"{path} already exists", hint="Check whether another `slurmlet run` uses this job step."
            ) from error
    (places.local / "shared").symlink_to(places.shared)
    lock = os.open(places.local / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def remove(places: RunPlaces) -> None:
    for path in (places.shared, places.local):
        shutil.rmtree(path, ignore_errors=True)
    for parent in (places.local.parent, places.local.parent.parent):
        with contextlib.suppress(OSError):
            parent.rmdir()


def _remove_abandoned(parent: Path) -> None:
    """Directories of runs on this host whose processes are all gone; a shared one goes with its private one."""
    with contextlib.suppress(OSError):
        for found in list(parent.iterdir()):
            link = found / "shared"
            if link.is_symlink() and _unused(found):
                shutil.rmtree(link.readlink(), ignore_errors=True)
                shutil.rmtree(found, ignore_errors=True)


def _unused(path: Path) -> bool:
    try:
        if time.time() - path.stat().st_ctime < _YOUNG_S:
            return False
        handle = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
