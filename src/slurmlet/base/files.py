"""Files as a shared login node needs them: private by default, replaced atomically, locked across hosts.

Never leaves a half-written file under its final name, never creates anything group- or world-readable.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SlurmletError


def private_dir(path: Path) -> Path:
    """Make `path` (and missing parents) 0700 and ours; refuse a directory that belongs to somebody else."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    seen = path.lstat()
    if seen.st_uid != os.geteuid():
        raise SlurmletError(
            f"{path} is owned by uid {seen.st_uid}, not by you",
            hint="Remove it or choose another directory; slurmlet keeps secrets only in directories you own.",
            reason="ForeignDirectory",
        )
    if seen.st_mode & 0o077:
        path.chmod(0o700)
    return path


def write_private(path: Path, data: str | bytes, *, mode: int = 0o600) -> None:
    """Replace `path` atomically; a reader sees the old file or the new one, never a part."""
    raw = data.encode() if isinstance(data, str) else data
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(raw)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    write_private(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """The parsed file, or None where there is none (or a foreign hand broke it)."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on `path`; yields False at once when `wait` is off and somebody has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(handle)
