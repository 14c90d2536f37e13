"""slurmlet for the users of the testbed, installed the way a user would: a wheel, pip, a venv all hosts see.

Never imports the checkout into the testbed. What is fresh is left alone: the wheel is built again only when a source
file changed, and dependencies are downloaded again only when the requirements did.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from slurmlet.base.errors import SiteError
from slurmlet.base.files import locked, read_json, write_json
from slurmlet.base.processes import CommandError, run
from slurmlet.testbed import wheel as packing
from slurmlet.testbed.host_namespaces import enter_argv, find_init
from slurmlet.testbed.testbed_plan import LOGIN, OPT, Paths, Plan
from slurmlet.upstream import netfast_build
from slurmlet.upstream.binaries import ensure

_STAMP = "slurmlet-testbed.json"
_PIP_LIMIT_S = 600
_ENV = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}


def link_upstream(paths: Paths) -> bool:
    """Put the upstream binaries where the users find them; whether anything changed."""
    source, target, changed = ensure(), paths.opt / "upstream", False
    for program in sorted(source.iterdir()):
        if not program.is_file() or not os.access(program, os.X_OK):
            continue
        there = target / program.name
        if there.exists() and _same_file(program, there):
            continue
        there.unlink(missing_ok=True)
        _link_or_copy(program, there)
        changed = True
    return changed


def lay_library_ready(paths: Paths) -> None:
    """netd's library, compiled here: the hosts have no compiler. Every testbed has a directory of its own for it."""
    netfast_build.provide(paths.opt / "upstream")


def _same_file(one: Path, other: Path) -> bool:
    a, b = one.stat(), other.stat()
    return (a.st_ino, a.st_dev) == (b.st_ino, b.st_dev) or (a.st_size, a.st_mtime_ns) == (
        b.st_size,
        b.st_mtime_ns,
    )


def _link_or_copy(source: Path, target: Path) -> None:
    """A hard link costs nothing; a copy where that is impossible, or where only root may read the original."""
    if source.stat().st_mode & 0o005 == 0o005:
        try:
            os.link(source.resolve(), target)
            return
        except OSError:
            pass
    shutil.copy2(source, target)
    target.chmod(0o755)


def install(paths: Paths, plan: Plan) -> bool:
    """Make the testbed's slurmlet that of this checkout (or of this installation); whether anything was done."""
    venv, wheels = paths.venv(plan), paths.wheels(plan)
    with locked(paths.suite(plan) / "install.lock"):
        have = read_json(venv / _STAMP) or {}
        want = {"slurmlet": packing.fingerprint(), "dependencies": _dependencies_key(plan, paths)}
        if have == want:
            return False
        wheel = packing.build_wheel(paths.suite(plan) / "build")
        whole = have.get("dependencies") != want["dependencies"]
        if whole:
            _download(wheel, wheels, _target_python(paths, plan))
        if not have:
            _make_venv(paths)
        # Until all is done: an interrupted installation is never taken for a finished one.
        write_json(venv / _STAMP, {"slurmlet": "", "dependencies": "" if whole else want["dependencies"]})
        _put_wheel(wheel, wheels)
        _pip_install(paths, wheel, whole)
        write_json(venv / _STAMP, want)
    return True


def _dependencies_key(plan: Plan, paths: Paths) -> str:
    parts = [_target_python(paths, plan), platform.machine(), *_requirement_lines()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _lock_file() -> Path | None:
    checkout = packing.checkout()
    lock = checkout / "requirements.lock" if checkout else None
    return lock if lock is not None and lock.exists() else None


def _requirement_lines() -> Iterable[str]:
    lock = _lock_file()
    return lock.read_text().splitlines() if lock else packing.requirements()


def _target_python(paths: Paths, plan: Plan) -> str:
    name = (paths.root(plan) / "usr/bin/python3").readlink().name
    return name.removeprefix("python")


def _download(wheel: Path, wheels: Path, python: str) -> None:
    """Wheels for the target's Python, fetched by this machine: the hosts have no way out."""
    if importlib.util.find_spec("pip") is None:
        raise SiteError(
            "this Python has no pip to download wheels with", hint=f"{sys.executable} -m ensurepip"
        )
    machine = platform.machine()
    platforms = [f"manylinux_2_28_{machine}", f"manylinux_2_17_{machine}", f"manylinux2014_{machine}"]
    lock = _lock_file()
    what = ["-r", str(lock)] if lock else [str(wheel)]
    argv = [sys.executable, "-m", "pip", "--quiet", "download", "--only-binary=:all:"]
    argv += [f"--python-version={python}", *(f"--platform={name}" for name in platforms)]
    for old in wheels.glob("*.whl"):
        old.unlink()
    try:
        run([*argv, "--dest", str(wheels), *what], timeout_s=_PIP_LIMIT_S)
    except CommandError as error:
        raise SiteError(
            f"the dependencies of slurmlet could not be downloaded: {error.stderr}",
            hint="Check that `pip download` works on this machine (network, index, proxy).",
        ) from error


def _put_wheel(wheel: Path, wheels: Path) -> None:
    for old in wheels.glob("slurmlet-*.whl"):
        old.unlink()
    shutil.copyfile(wheel, wheels / wheel.name)
    for every in wheels.glob("*.whl"):
        every.chmod(0o644)


def _make_venv(paths: Paths) -> None:
    """Only the first time: later ones install into it, since users of a running testbed may be at work in it."""
    # Not `venv --clear`: it would remove the directory, which is a mount point here.
    _inside(paths, ["find", f"{OPT}/venv", "-mindepth", "1", "-delete"])
    _inside(paths, ["python3", "-m", "venv", f"{OPT}/venv"])


def _pip_install(paths: Paths, wheel: Path, whole: bool) -> None:
    # Forced: the version may be the same while the code is not; and dependencies may also have become older.
    how = ["--force-reinstall", *([] if whole else ["--no-deps"])]
    pip = [
        f"{OPT}/venv/bin/python",
        "-m",
        "pip",
        "--quiet",
        "install",
        "--no-index",
        f"--find-links={OPT}/wheels",
    ]
    _inside(paths, [*pip, *how, f"{OPT}/wheels/{wheel.name}"])


def _inside(paths: Paths, argv: list[str]) -> None:
    init = find_init(paths, LOGIN)
    if init is None:
        raise SiteError("host login is off", hint="Run: slurmlet testbed up")
    run(enter_argv(init, "root", argv), env=_ENV, timeout_s=_PIP_LIMIT_S)
