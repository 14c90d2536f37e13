"""Named files inside an image archive: a layout directory or a tar, gzipped or not.

Nothing is ever unpacked under a name from the archive: members are read in place, so a hostile name leads nowhere.
"""

from __future__ import annotations

import contextlib
import gzip
import posixpath
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from slurmlet.base.errors import UserError
from slurmlet.linux.safe_tar import headers, open_tar

MAX_DOCUMENT_BYTES = 16 << 20
_MAX_MEMBERS = 100_000
_MAX_SYMLINK_HOPS = 5
_GZIP_MAGIC = b"\x1f\x8b"
_COPY_BYTES = 1 << 20


class BadImage(UserError):
    """What was given is not an image, or is a damaged one."""

    reason = "InvalidImage"


class Bundle(Protocol):
    """Files by name. `label` is what people know it by (error messages)."""

    label: str

    def has(self, name: str) -> bool: ...

    def open(self, name: str) -> IO[bytes]: ...


class DirectoryBundle:
    def __init__(self, root: Path) -> None:
        self.label = str(root)
        self._root = root

    def has(self, name: str) -> bool:
        return self._path(name).is_file()

    def open(self, name: str) -> IO[bytes]:
        try:
            return self._path(name).open("rb")
        except OSError as error:
            raise BadImage(f"{self.label}: cannot read {name}: {error.strerror}", hint=_AGAIN) from error

    def _path(self, name: str) -> Path:
        if ".." in name.split("/") or name.startswith("/"):
            raise BadImage(f"{self.label}: {name!r} leads outside the layout", hint=_AGAIN)
        return self._root / name


class TarBundle:
    """An uncompressed tar, read in place."""

    def __init__(self, tar: tarfile.TarFile, label: str) -> None:
        self.label = label
        self._tar = tar
        try:
            self._members = self._index()
        except (tarfile.TarError, EOFError) as error:
            raise BadImage(f"{label} is not a readable tar archive: {error}", hint=_WHAT_LOADS) from error

    def _index(self) -> dict[str, tarfile.TarInfo]:
        members: dict[str, tarfile.TarInfo] = {}
        for number, member in enumerate(headers(self._tar)):
            if number >= _MAX_MEMBERS:
                raise BadImage(f"{self.label} has more than {_MAX_MEMBERS} members", hint=_WHAT_LOADS)
            members[_clean(member.name)] = member
        return members

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def open(self, name: str) -> IO[bytes]:
        member = self._find(name)
        opened = self._tar.extractfile(member) if member is not None else None
        if opened is None:
            raise BadImage(f"{self.label}: {name} is missing from the archive", hint=_AGAIN)
        return opened

    def _find(self, name: str) -> tarfile.TarInfo | None:
        """`docker save` before 25 links layers that occur twice; follow such links inside the archive only."""
        name = _clean(name)
        for _ in range(_MAX_SYMLINK_HOPS):
            member = self._members.get(name)
            if member is None or member.isreg():
                return member
            if not (member.issym() or member.islnk()):
                return None
            base = posixpath.dirname(name) if member.issym() else ""
            name = _clean(posixpath.join(base, member.linkname))
        return None


_WHAT_LOADS = (
    "Give an OCI layout (directory or tar) or a docker archive (`docker save`, `podman save`, `crane pull`)."
)
_AGAIN = "The archive is incomplete or damaged; save or copy it again."


@contextlib.contextmanager
def open_bundle(path: Path, scratch: Path) -> Iterator[Bundle]:
    """Open what the user gave; a gzipped archive is first unzipped into `scratch`."""
    if path.is_dir():
        yield DirectoryBundle(path)
        return
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP_MAGIC
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}", hint="Check the path and its permissions."
        ) from error
    plain = _unzip(path, scratch) if zipped else path
    with plain.open("rb") as file:
        try:
            tar = open_tar(file)
        except (tarfile.TarError, EOFError) as error:
            raise BadImage(f"{path} is not a readable tar archive: {error}", hint=_WHAT_LOADS) from error
        yield TarBundle(tar, str(path))


def _unzip(path: Path, scratch: Path) -> Path:
    target = scratch / "archive.tar"
    try:
        with gzip.open(path) as source, target.open("wb") as sink:
            while chunk := source.read(_COPY_BYTES):
                check_space(scratch, len(chunk), str(path))
                sink.write(chunk)
    except (OSError, EOFError) as error:
        raise BadImage(f"{path} cannot be unzipped: {error}", hint=_AGAIN) from error
    return target


def check_space(directory: Path, needed_bytes: int, label: str) -> None:
    """A bomb must not fill the file system that everybody's home is on."""
    usage = shutil.disk_usage(directory)
    reserve_bytes = min(1 << 30, usage.total // 100)
    if needed_bytes > usage.free - reserve_bytes:
        raise UserError(
            f"{label} needs {needed_bytes >> 20} MiB in {directory}, but only {usage.free >> 20} MiB are free",
            hint="Free space with `slurmlet image rm`, or move SLURMLET_HOME to a larger file system.",
        )


def read_document(bundle: Bundle, name: str) -> bytes:
    """A small file (JSON) of the bundle, whole."""
    with bundle.open(name) as file:
        raw = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise BadImage(f"{bundle.label}: {name} is larger than {MAX_DOCUMENT_BYTES >> 20} MiB", hint=_AGAIN)
    return raw


def _clean(name: str) -> str:
    return posixpath.normpath(name).lstrip("/")
