"""runner.pyz: the runner as one file on the shared file system, ready to start in every job.

Holds compiled modules beside their sources: where the compute node's Python is the one that packed it, nothing is
compiled at start; any other Python finds the sources. The same input gives the same bytes.
"""

from __future__ import annotations

import importlib.util
import io
import py_compile
import tempfile
import zipfile
from pathlib import Path

from slurmlet import __version__
from slurmlet.base.files import write_private

_MAIN = """import sys
from slurmlet.runner.main import main
sys.exit(main())
"""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_runner(path: Path) -> None:
    """Pack the installed runner to `path`, atomically; an unchanged one is left alone."""
    packed = pack_runner(runner_sources())
    try:
        if path.read_bytes() == packed:
            return
    except FileNotFoundError:
        pass
    write_private(path, packed)


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
