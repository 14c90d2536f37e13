"""runner.pyz: the runner as one file on the shared file system, ready to start in every job.

Holds all modules compiled, in one piece, beside their sources: where the compute node's Python is the one that packed
it, nothing is compiled or searched at start (entrypoint/archive.py); any other Python takes the sources. The same input
gives the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import marshal
import sys
import zipfile
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import slurmlet
from slurmlet import __version__
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir, write_private
from slurmlet.base.layout import cache_dir

# What runs in a job, lowest first.
_PACKAGES = ("linux", "protocol", "podnet", "runner", "agent", "entrypoint")
_BEGINNING = "slurmlet/entrypoint/archive.py"
_KEPT_PACKS = 4
# The head of a .pyc that is never compared with its source.
_UNCHECKED = MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
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
    """What was packed before of the same things, from the cache: compiling takes a third of a second."""
    made_of = hashlib.sha256(sys.version.encode() + Path(__file__).read_bytes())
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
    """Name in the archive → source, of the packages that run in a job, as they are installed."""
    root = Path(slurmlet.__file__).parent
    found = {
        f"slurmlet/{file.relative_to(root)}": file.read_bytes()
        for package in _PACKAGES
        for file in (root / package).rglob("*.py")
    }
    # `slurmlet` itself holds its version only: whatever its __init__ grows, runners must not pay for it.
    package = f'__version__ = "{__version__}"\n'.encode()
    return {**found, "slurmlet/__init__.py": package, "__main__.py": found[_BEGINNING]}


def pack_runner(sources: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    buffer.write(b"#!/usr/bin/env python3\n")
    modules = dict(map(_compiled, sorted(sources.items())))
    with zipfile.ZipFile(buffer, "a") as archive:
        _add(archive, f"compiled-{MAGIC_NUMBER.hex()}", marshal.dumps(modules))
        _add(archive, "__main__.pyc", _UNCHECKED + modules.pop("__main__")[1])
        # In an old form, which every Python reads.
        names = [(name, is_package) for name, (is_package, _) in modules.items()]
        _add(archive, "modules", marshal.dumps(names, 2))
        for name in sorted(sources):
            _add(archive, name, sources[name])
    return buffer.getvalue()


def _compiled(source: tuple[str, bytes]) -> tuple[str, tuple[bool, bytes]]:
    """A module's name → whether it is a package, its marshalled code."""
    path, text = source
    name, is_package = path.removesuffix(".py").replace("/", "."), path.endswith("/__init__.py")
    code = compile(text, path, "exec", dont_inherit=True)
    return name.removesuffix(".__init__"), (is_package, marshal.dumps(code))


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = 0o600 << 16
    # Stored, not deflated: inflating costs more than reading at each of many starts, and the file is small.
    entry.compress_type = zipfile.ZIP_STORED
    archive.writestr(entry, data)
