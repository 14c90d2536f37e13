"""runner.pyz: the runner as one file on the shared file system, ready to start in every job.

Holds compiled modules beside their sources: where the compute node's Python is the one that packed it, nothing is
compiled at start; any other Python finds the sources. The same input gives the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import py_compile
import sys
import tempfile
import zipfile
from pathlib import Path

from slurmlet import __version__
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir, write_private
from slurmlet.base.layout import cache_dir

_MAIN = """import sys
from slurmlet.runner.main import main
sys.exit(main())
"""
_KEPT_PACKS = 4
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_runner(path: Path) -> None:
    """Pack the installed runner to `path`, atomically; an unchanged one is left alone."""
    packed = _packed_before(runner_sources())
    try:
        if path.read_bytes() == packed:
            return
    except FileNotFoundError:
        pass
    write_private(path, packed)


def _packed_before(sources: dict[str, bytes]) -> bytes:
    """The same sources packed by the same Python are read from the cache: compiling them takes a third of a second."""
    made_of = hashlib.sha256(f"{sys.version}\0{_MAIN}".encode())
    for name, source in sorted(sources.items()):
        made_of.update(f"\0{name}\0{len(source)}\0".encode() + source)
    known = cache_dir() / "runners" / f"{made_of.hexdigest()[:32]}.pyz"
    try:
        return known.read_bytes()
    except OSError:
        packed = pack_runner(sources)
    with contextlib.suppress(OSError, SlurmletError):
        private_dir(known.parent)
        write_private(known, packed)
        _forget_older(known.parent)
    return packed


def _forget_older(directory: Path) -> None:
    newest_first = sorted(directory.glob("*.pyz"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first[_KEPT_PACKS:]:
        path.unlink(missing_ok=True)


def runner_sources() -> dict[str, bytes]:
    """Name in the archive → source, of the runner package as it is installed."""
    spec = importlib.util.find_spec("slurmlet.runner")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    found = {f"slurmlet/runner/{file.relative_to(root)}": file.read_bytes() for file in root.rglob("*.py")}
    # `slurmlet` itself holds its version only: whatever its __init__ grows, runners must not pay for it.
    package = f'__version__ = "{__version__}"\n'.encode()
    return {**found, "slurmlet/__init__.py": package, "__main__.py": _MAIN.encode()}


def pack_runner(sources: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    buffer.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(buffer, "a") as archive:
        for name in sorted(sources):
            _add(archive, name, sources[name])
            if name != "__main__.py":
                _add(archive, name + "c", compiled(name, sources[name]))
    return buffer.getvalue()


def compiled(name: str, source: bytes) -> bytes:
    """An unchecked-hash pyc: no time in it, and no stat of a source at import."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "module.py")
        file.write_bytes(source)
        target = py_compile.compile(
            str(file),
            cfile=str(Path(scratch, "module.pyc")),
            dfile=name,
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        assert target is not None
        return Path(target).read_bytes()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = 0o600 << 16
    # Stored, not deflated: inflating costs more than reading at each of many starts, and the file is small.
    entry.compress_type = zipfile.ZIP_STORED
    archive.writestr(entry, data)
