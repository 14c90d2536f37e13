"""One layer as a stream of plain tar, its diff id checked to the last byte. Knows compression, not file trees."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import shutil
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from slurmlet.base.errors import SiteError
from slurmlet.base.processes import CommandError, run
from slurmlet.images.archives import Layer
from slurmlet.images.bundles import BadImage, Bundle, check_space
from slurmlet.linux.safe_tar import headers, open_tar

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_UNZSTD_TIMEOUT_S = 3600
_AGAIN = "The archive is incomplete or damaged; save or pull it again."


class _Hashing(io.RawIOBase):
    """Passes reads through, remembers their digest, and skips forward by reading: nothing escapes the digest.

    Under a BufferedReader it serves tarfile's plain mode, which is three times as fast as its stream mode.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        data = self._source.read(len(view))
        view[: len(data)] = data
        self._hash.update(data)
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset + (self._position if whence == io.SEEK_CUR else 0)
        if whence == io.SEEK_END or target < self._position:
            raise io.UnsupportedOperation("a layer is read from front to back")
        self._skip(target - self._position)
        return self._position

    def digest(self) -> str:
        self._skip(sys.maxsize)
        return f"sha256:{self._hash.hexdigest()}"

    def _skip(self, count: int) -> None:
        scrap = bytearray(CHUNK_BYTES)
        while count > 0 and (got := self.readinto(memoryview(scrap)[: min(count, CHUNK_BYTES)])):
            count -= got


@contextmanager
def layer_entries(bundle: Bundle, layer: Layer, scratch: Path) -> Iterator[tarfile.TarFile]:
    """The layer opened for one pass from front to back; on leaving, its diff id has been checked."""
    try:
        with bundle.open(layer.name) as blob, _plain(blob, layer, bundle, scratch) as plain:
            stream = _Hashing(plain)
            buffered = io.BufferedReader(stream, CHUNK_BYTES)
            with open_tar(buffered) as archive:
                yield archive
            if stream.digest() != layer.diff_id:
                raise BadImage(f"{bundle.label}: layer {layer.name} does not match its digest", hint=_AGAIN)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadImage(
            f"{bundle.label}: layer {layer.name} is not a readable tar: {error}", hint=_AGAIN
        ) from error
    except OSError as error:
        # tarfile says so of content that ends too early; what the system refuses has a number.
        if error.errno is not None:
            raise
        raise BadImage(f"{bundle.label}: layer {layer.name}: {error}", hint=_AGAIN) from error


def entries(archive: tarfile.TarFile) -> Iterator[tuple[int, tarfile.TarInfo]]:
    """Numbered headers."""
    return enumerate(headers(archive))


@contextmanager
def _plain(blob: IO[bytes], layer: Layer, bundle: Bundle, scratch: Path) -> Iterator[IO[bytes]]:
    magic = blob.read(4)
    blob.seek(0)
    if magic.startswith(_GZIP):
        with gzip.GzipFile(fileobj=blob) as plain:
            yield cast(IO[bytes], plain)
    elif magic == _ZSTD:
        with _unzstd(blob, layer, bundle, scratch) as file:
            yield file
    else:
        yield blob


@contextmanager
def _unzstd(blob: IO[bytes], layer: Layer, bundle: Bundle, scratch: Path) -> Iterator[IO[bytes]]:
    """Python reads zstd from 3.14 on; before that the zstd program does it, into scratch."""
    try:
        zstd = importlib.import_module("compression.zstd")
    except ImportError:
        path = _unzstd_by_program(blob, layer, bundle, scratch)
        try:
            with path.open("rb") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)
    else:
        try:
            with zstd.open(blob) as file:
                yield file
        except zstd.ZstdError as error:
            raise BadImage(f"{bundle.label}: layer {layer.name}: {error}", hint=_AGAIN) from error


def _unzstd_by_program(blob: IO[bytes], layer: Layer, bundle: Bundle, scratch: Path) -> Path:
    program = shutil.which("zstd")
    if program is None:
        raise SiteError(
            f"{bundle.label}: layer {layer.name} is compressed with zstd, which this host cannot read",
            hint="Install the zstd program, run slurmlet with Python 3.14 or newer, or save the image with gzip.",
        )
    packed, plain = scratch / "layer.zst", scratch / "layer.tar"
    with packed.open("wb") as sink:
        shutil.copyfileobj(blob, sink, CHUNK_BYTES)
    check_space(scratch, packed.stat().st_size, bundle.label)
    # prlimit: a bomb ends at what the file system can spare.
    limit = shutil.disk_usage(scratch).free * 9 // 10
    try:
        run(
            ["prlimit", f"--fsize={limit}", program, "-dqf", str(packed), "-o", str(plain)],
            timeout_s=_UNZSTD_TIMEOUT_S,
        )
    except CommandError as error:
        raise BadImage(f"{bundle.label}: layer {layer.name}: {error.stderr[:300]}", hint=_AGAIN) from error
    finally:
        packed.unlink(missing_ok=True)
    return plain
