"""Reading tar archives that nobody vouches for. Whatever is wrong with one ends in tarfile.TarError, and soon.

Python's tarfile follows a negative size backwards and reads the same header for ever (CVE-2025-8194, mended in some
versions only), and reads an extended header of any size into memory. Sizes are checked here before it acts on them.
"""

from __future__ import annotations

import math
import tarfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any, Iterator

# Paths, owners and attributes of one entry; Linux takes no attribute above 64 KiB.
_MAX_EXTENDED_BYTES = 4 << 20
_EXTENDED = frozenset(
    (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )
)
# A file system keeps 64 bits of seconds at most; Python refuses more with an OverflowError.
_MAX_TIME_S = 1 << 40


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        made = super().frombuf(buf, encoding, errors)
        if made.size < 0 or (made.type in _EXTENDED and made.size > _MAX_EXTENDED_BYTES):
            raise tarfile.ReadError(f"a header with a size of {made.size} bytes")
        return made


def open_tar(file: IO[bytes]) -> tarfile.TarFile:
    """For one pass from front to back, by `headers`. Raises tarfile.TarError."""
    try:
        return tarfile.open(fileobj=file, mode="r:", tarinfo=_Header)
    except (ValueError, OverflowError) as error:
        raise tarfile.ReadError(str(error)) from error


def headers(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Every entry once, without tarfile's habit of remembering each (100 MB for a big image). Raises tarfile.TarError."""
    while True:
        try:
            found = tar.next()
        except (ValueError, OverflowError) as error:
            raise tarfile.ReadError(str(error)) from error
        if found is None:
            return
        tar.members = []  # type: ignore[attr-defined,unused-ignore]
        _check(found)
        yield found


def _check(found: tarfile.TarInfo) -> None:
    # Once more: an extended header says its own size.
    for name, value, largest in (
        ("size", found.size, 1 << 62),
        ("uid", found.uid, 1 << 32),
        ("gid", found.gid, 1 << 32),
        ("mtime", abs(found.mtime), _MAX_TIME_S),
    ):
        if not math.isfinite(value) or not 0 <= value <= largest:
            raise tarfile.ReadError(f"{found.name!r} has a {name} of {value}")
    if "\0" in found.name or "\0" in found.linkname:
        raise tarfile.ReadError(f"{found.name!r} has a name with a null character")
