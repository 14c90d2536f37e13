from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmlet import __version__
from slurmlet.controlplane.runner_archive import pack_runner, runner_sources, write_runner

SOURCES = {
    "__main__.py": runner_sources()["__main__.py"],
    "slurmlet/__init__.py": b"",
    "slurmlet/entrypoint/__init__.py": b"",
    "slurmlet/entrypoint/main.py": b"import sys\ndef main():\n    print('ran', sys.argv[1:])\n    return 7\n",
    "slurmlet/entrypoint/broken.py": b"def work():\n    raise ValueError('its own line')\n",
}


def run(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", *flags, str(path), "some dir"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_runs_with_its_arguments_and_exit_status(tmp_path: Path) -> None:
    path = tmp_path / "runner.pyz"
    path.write_bytes(pack_runner(SOURCES))
    done = run(path)
    assert (done.returncode, done.stdout) == (7, "ran ['some dir']\n")


def rewritten(path: Path, change: Callable[[str, bytes], tuple[str, bytes]]) -> None:
    """The archive with other names and contents in it."""
    changed = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(*change(name, old.read(name)))
    path.write_bytes(changed.getvalue())


def test_compiled_modules_are_used(tmp_path: Path) -> None:
    # The source says another thing than what was compiled: what is printed tells which one ran.
    path = tmp_path / "runner.pyz"
    path.write_bytes(pack_runner(SOURCES))
    rewritten(path, lambda name, data: (name, b"raise SystemExit(3)" if name.endswith("/main.py") else data))
    done = run(path)
    assert (done.returncode, done.stdout) == (7, "ran ['some dir']\n")


def of_another(name: str, data: bytes) -> tuple[str, bytes]:
    """As another Python finds the archive."""
    if name.startswith("compiled-"):
        return "compiled-00000d0a", b"not for you"
    return name, b"\x00\x00\r\n" + data[4:] if name.endswith(".pyc") else data


def test_another_python_falls_back_to_the_source(tmp_path: Path) -> None:
    path = tmp_path / "runner.pyz"
    path.write_bytes(pack_runner(SOURCES))
    rewritten(path, of_another)
    done = run(path)
    assert (done.returncode, done.stdout) == (7, "ran ['some dir']\n")


def test_a_traceback_shows_the_source(tmp_path: Path) -> None:
    path = tmp_path / "runner.pyz"
    call = b"""
import traceback
from slurmlet.entrypoint.broken import work

def main():
    try:
        work()
    except ValueError:
        traceback.print_exc()
"""
    path.write_bytes(pack_runner({**SOURCES, "slurmlet/entrypoint/main.py": call}))
    said = run(path, "-S").stderr
    assert "slurmlet/entrypoint/broken.py" in said
    assert "    raise ValueError('its own line')" in said


@pytest.mark.parametrize("python", ["the same Python", "another Python"])
def test_a_module_that_is_imported_late_is_of_the_version_that_was_started(
    tmp_path: Path, python: str
) -> None:
    """`slurmlet up` of a newer version replaces the archive under those that run."""
    late = b"""
import sys, traceback

def main():
    print('begun', flush=True)
    sys.stdin.readline()
    from slurmlet.entrypoint.other import VERSION
    print(VERSION)
    try:
        from slurmlet.entrypoint.broken import work
        work()
    except ValueError:
        traceback.print_exc()
"""
    old = {
        **SOURCES,
        "slurmlet/entrypoint/main.py": late,
        "slurmlet/entrypoint/other.py": b"VERSION = 'old'\n",
    }
    new = {
        **old,
        "slurmlet/entrypoint/other.py": b"VERSION = 'new'\n",
        "slurmlet/entrypoint/a.py": b"#" * 5000,
    }
    path, newer = tmp_path / "runner.pyz", tmp_path / "newer.pyz"
    for place, sources in ((path, old), (newer, new)):
        place.write_bytes(pack_runner(sources))
        if python == "another Python":
            rewritten(place, of_another)
    argv = [sys.executable, "-I", str(path)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        newer.replace(path)
        said, complained = process.communicate(b"go on\n", timeout=30)
    assert (process.returncode, said) == (0, b"old\n"), complained
    assert b"ValueError: its own line" in complained


def test_same_input_same_bytes(tmp_path: Path) -> None:
    assert pack_runner(SOURCES) == pack_runner(dict(reversed(SOURCES.items())))
    path = tmp_path / "runner.pyz"
    write_runner(path)
    first = (path.read_bytes(), path.stat().st_ino)
    write_runner(path)
    # Not even replaced: jobs may be reading it.
    assert (path.read_bytes(), path.stat().st_ino) == first
    assert path.stat().st_mode & 0o777 == 0o600


def test_installed_runner_is_complete_and_alone() -> None:
    sources = runner_sources()
    assert {"__main__.py", "slurmlet/entrypoint/main.py", "slurmlet/protocol/wire.py"} <= set(sources)
    # Not the package's own __init__, which may grow.
    assert sources["slurmlet/__init__.py"].decode() == f'__version__ = "{__version__}"\n'
    assert all(name == "__main__.py" or name.startswith("slurmlet/") for name in sources)
