"""Promises the repository makes about itself. Few, and each one was broken by somebody somewhere before."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import click
import pytest

from slurmlet.cli.main import COMMANDS
from slurmlet.upstream import pins

ROOT = Path(__file__).parents[2]
LONGEST_MODULE_LINES = 400


def files() -> list[Path]:
    """What a clone would hold: tracked files, and new ones that are not ignored."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(argv, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout to know which files are ours")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_list_has_its_module(name: str) -> None:
    command = importlib.import_module(f"slurmlet.cli.{name}").command
    assert isinstance(command, click.Command)


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
class TestLocks:
    def test_names_no_host_and_no_path(self, lock: str) -> None:
        assert (
            re.findall(r"^.*(?:://|index-url|find-links|file:| @ |(?:^| )/\w).*$", read(lock), re.MULTILINE)
            == []
        )

    def test_every_requirement_has_a_hash(self, lock: str) -> None:
        entries = re.split(r"\n(?=[a-z])", read(lock).strip())
        assert len(entries) > 5
        assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []

    def test_holds_every_direct_dependency(self, lock: str) -> None:
        project = tomllib.loads(read("pyproject.toml"))
        wanted = project["project"]["dependencies"]
        if "dev" in lock:
            wanted = wanted + project["dependency-groups"]["dev"] + project["build-system"]["requires"]
        names = {re.split(r"[<>=\[; ]", line)[0].lower() for line in wanted}
        assert names - set(re.findall(r"^([a-z0-9-]+)==", read(lock), re.MULTILINE)) == set()


def test_the_locks_agree_with_each_other() -> None:
    runtime, dev = (
        set(re.findall(r"^[a-z0-9-]+==\S+", read(lock), re.MULTILINE))
        for lock in ("requirements.lock", "requirements-dev.lock")
    )
    assert runtime - dev == set()


def test_modules_stay_readable() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert {str(p): n for p, n in lengths.items() if n > LONGEST_MODULE_LINES} == {}


def test_a_name_means_one_module() -> None:
    """Commands are named after what they are about, which has a module of its own; all other names are searched for."""
    places: dict[str, list[str]] = {}
    for path in (ROOT / "src" / "slurmlet").rglob("*.py"):
        if not path.stem.startswith("__") and path.parent.name != "cli":
            places.setdefault(path.stem, []).append(str(path.parent.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_upstream_versions_are_written_in_one_place() -> None:
    """Elsewhere only the recipes may repeat them (a test of theirs compares), and prose that speaks of the past."""
    versions = {program.version for program in pins.load().programs}
    pattern = re.compile(
        r"(?<![\w.])(?:" + "|".join(re.escape(version) for version in versions) + r")(?![\w.])"
    )
    code = [
        path
        for path in files()
        if (path.suffix in (".py", ".yaml", ".sh", ".toml") or path.name == "Makefile")
        and path.relative_to(ROOT).parts[0] != "tests"  # a fixture may show what a version looks like
    ]
    repeated = [path.relative_to(ROOT) for path in code if pattern.search(path.read_text())]
    assert repeated == [Path("src/slurmlet/upstream/versions.toml")]


def test_ci_runs_what_people_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "exec make test" in script.read_text()


def read(name: str) -> str:
    return (ROOT / name).read_text()
