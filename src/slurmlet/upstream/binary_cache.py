"""The cache of upstream binaries: one flat directory per set of pins, with a manifest written last.

A binary counts only when the manifest names it with its size and sha256: a half-written file, or one that
somebody put there by hand, is never taken for done. Changing anything here needs the lock of `exclusive()`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.console import say
from slurmlet.base.files import locked, private_dir, read_json, write_json

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """One line of the manifest."""

    version: str
    pin: str
    source: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class BinaryCache:
    root: Path
    label: str

    @property
    def bin(self) -> Path:
        return self.root / self.label

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def lookup(self, name: str, pin: str) -> Entry | None:
        """The entry of a binary that is there in full; looks at sizes only, so it costs microseconds."""
        return _lookup(self.bin, name, pin)

    def intact(self, name: str, entry: Entry) -> bool:
        """Whether the bytes on disk are still those that were installed."""
        return sha256_of(self.bin / name) == entry.sha256

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        private_dir(self.root)
        lock = self.root / ".lock"
        with locked(lock, wait=False) as mine:
            if mine:
                self._sweep()
                yield
                return
        say("  another slurmlet is preparing the upstream binaries; waiting for it")
        with locked(lock):
            self._sweep()
            yield

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A directory on the same file system, so that `install` is a rename."""
        private_dir(self.root)
        with tempfile.TemporaryDirectory(dir=self.root, prefix=".staging-") as name:
            yield Path(name)

    def install(self, name: str, staged: Path, *, version: str, pin: str, source: str) -> None:
        # The parent of `bin` is 0700 and keeps strangers out; inside, plain modes let a testbed bind-mount
        # the directory for its own users.
        self.bin.mkdir(mode=0o755, exist_ok=True)
        self.bin.chmod(0o755)
        staged.chmod(0o755)
        entry = Entry(version, pin, source, sha256_of(staged), staged.stat().st_size)
        manifest = _manifest(self.bin)
        if manifest.pop(name, None) is not None:
            write_json(self.bin / _MANIFEST, manifest)
        staged.replace(self.bin / name)
        write_json(self.bin / _MANIFEST, {**manifest, name: asdict(entry)})

    def adopt(self, name: str, pin: str) -> bool:
        """Take a binary over from the set of an earlier or later slurmlet that pins it alike."""
        for other in sorted(self.root.glob(f"*/{_MANIFEST}")):
            entry = _lookup(other.parent, name, pin)
            if entry is None or other.parent == self.bin or sha256_of(other.parent / name) != entry.sha256:
                continue
            with self.staging() as staging:
                _link_or_copy(other.parent / name, staging / name)
                self.install(name, staging / name, version=entry.version, pin=pin, source=entry.source)
            return True
        return False

    def _sweep(self) -> None:
        """Staging directories are used under the lock only: any that is there now was left by a crash."""
        for left in self.root.glob(".staging-*"):
            shutil.rmtree(left, ignore_errors=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(directory: Path) -> dict[str, Any]:
    read = read_json(directory / _MANIFEST)
    return read if isinstance(read, dict) else {}


def _lookup(directory: Path, name: str, pin: str) -> Entry | None:
    raw = _manifest(directory).get(name)
    if not isinstance(raw, dict):
        return None
    try:
        entry = Entry(**raw)
        seen = (directory / name).stat()
    except (TypeError, OSError):
        return None
    usable = entry.pin == pin and entry.size_bytes == seen.st_size and os.access(directory / name, os.X_OK)
    return entry if usable else None


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
