from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

from slurmlet import __version__
from slurmlet.controlplane.packing import pack_runner, runner_sources, write_runner

SOURCES = {
    "__main__.py": b"import sys\nfrom slurmlet.runner.main import main\nsys.exit(main())\n",
    "slurmlet/__init__.py": b"",
    "slurmlet/runner/__init__.py": b"",
    "slurmlet/runner/main.py": b"import sys\ndef main():\n    print('ran', sys.argv[1:])\n    return 7\n",
}


def run(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", *flags, str(path), "some dir"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_runs_with_its_arguments_and_exit_status(tmp_path: Path) -> None:
    path = tmp_path / "runner.pyz"
    path.write_bytes(pack_runner(SOURCES))
    done = run(path)
    assert (done.returncode, done.stdout) == (7, "ran ['some dir']\n")


def test_compiled_modules_are_used(tmp_path: Path) -> None:
    # The compiled module says another thing than the source: what is printed tells which one ran.
    path = tmp_path / "runner.pyz"
    path.write_bytes(pack_runner(SOURCES))
    changed = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(
                name, b"raise SystemExit('compiled')" if name.endswith("main.py") and "/" in name else data
            )
    path.write_bytes(changed.getvalue())
    assert run(path).stdout == "ran ['some dir']\n"


def test_another_python_falls_back_to_the_source(tmp_path: Path) -> None:
    path = tmp_path / "runner.pyz"
    path.write_bytes(pack_runner(SOURCES))
    changed = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, b"\x00\x00\r\n" + data[4:] if name.endswith(".pyc") else data)
    path.write_bytes(changed.getvalue())
    done = run(path)
    assert (done.returncode, done.stdout) == (7, "ran ['some dir']\n")


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
    assert {"__main__.py", "slurmlet/runner/main.py", "slurmlet/runner/wire.py"} <= set(sources)
    # Not the package's own __init__, which may grow.
    assert sources["slurmlet/__init__.py"].decode() == f'__version__ = "{__version__}"\n'
    assert all(name == "__main__.py" or name.startswith("slurmlet/") for name in sources)
