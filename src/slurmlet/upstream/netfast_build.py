"""netd's hot spot in C, compiled with the site's own compiler: docs/decisions/0015.

Optional in every way: without a compiler, with one that fails, or with SLURMLET_NO_NATIVE=1, there is no library, and pods'
networks work in Python. It must never keep a cluster from starting.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import os
import platform
import shutil
from pathlib import Path

from slurmlet.base.console import say
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir, write_private
from slurmlet.base.layout import ClusterFiles, cache_dir
from slurmlet.base.processes import CommandError, run
from slurmlet.podnet.fast.native.native_library import NAME, OFF
from slurmlet.upstream.binaries import DIRECTORY_VARIABLE

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fstack-protector-strong", "-Wl,-z,relro,-z,now")
_MACHINES = ("x86_64", "aarch64")
_TIMEOUT_S = 60.0


def write_for(files: ClusterFiles) -> None:
    """For a cluster that starts; says what is missing."""
    why = write_library(files.libraries)
    if why and not os.environ.get(OFF):
        say(f"New connections of pods will be slower, because they are handled in Python: {why}")


def write_library(directory: Path) -> str:
    """Compile into `directory`, or take what was compiled before; "" or why there is none."""
    target = directory / NAME
    try:
        library = b"" if os.environ.get(OFF) else _compiled_before()[1]
    except (OSError, SlurmletError) as error:
        target.unlink(missing_ok=True)
        return str(error)
    if not library:
        # Runners would find one of an earlier start.
        target.unlink(missing_ok=True)
        return f"{OFF} is set"
    with contextlib.suppress(FileNotFoundError):
        if target.read_bytes() == library:
            return ""
    private_dir(directory)
    # A new file under the old name: those who run with the old one keep it.
    write_private(target, library)
    return ""


def _compiled_before() -> tuple[str, bytes]:
    """Named by what it is made of, so that an old one is never taken."""
    sources = {
        each.name: each.read_bytes() for each in _sources().iterdir() if each.name.endswith((".c", ".h"))
    }
    made_of = hashlib.sha256(f"{platform.machine()} {_FLAGS}".encode())
    for name, source in sorted(sources.items()):
        made_of.update(f"\0{name}\0{len(source)}\0".encode() + source)
    name = f"netfast-{made_of.hexdigest()[:32]}.so"
    known = cache_dir() / "native" / name
    for place in (Path(os.environ.get(DIRECTORY_VARIABLE) or known.parent), known.parent):
        with contextlib.suppress(OSError):
            return name, (place / name).read_bytes()
    private_dir(known.parent)
    _compile(known, sources)
    return name, known.read_bytes()


def provide(directory: Path) -> bool:
    """Lay it ready beside the upstream binaries, for hosts without a compiler; whether that could be done."""
    with contextlib.suppress(OSError, SlurmletError):
        name, library = _compiled_before()
        for old in directory.glob("netfast-*.so"):
            old.unlink()
        (directory / name).write_bytes(library)
        return True
    return False


def _sources() -> importlib.resources.abc.Traversable:
    return importlib.resources.files("slurmlet.podnet.fast.native")


def _compile(target: Path, sources: dict[str, bytes]) -> None:
    if platform.machine() not in _MACHINES:
        raise SlurmletError(f"{platform.machine()} is not supported")
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise SlurmletError("this host has no C compiler (cc)")
    scratch = private_dir(target.with_suffix(f".{os.getpid()}"))
    try:
        for name, source in sources.items():
            write_private(scratch / name, source)
        made = scratch / "made.so"
        run([compiler, *_FLAGS, "-o", str(made), str(scratch / "netfast.c")], timeout_s=_TIMEOUT_S)
        made.replace(target)
    except CommandError as error:
        raise SlurmletError(f"{compiler} cannot compile it: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
