"""What processes use, by /proc: of this very process, and of a made-up table of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmlet.runner.pod import resource_usage
from slurmlet.runner.pod.resource_usage import Running, look, processes_of, space

TICKS = os.sysconf("SC_CLK_TCK")
HOLD = """
import sys, time
held = bytearray(50 << 20)
for i in range(0, len(held), 4096):
    held[i] = 1
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[int]:
    """A process that has used 0.3 s of CPU and holds 50 MiB."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.kill()


def test_a_real_process(holder: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # It shares our mount namespace, as a container never does.
    monkeypatch.setattr(
        resource_usage, "processes_of", lambda roots, proc: {name: [pid] for name, pid in roots.items()}
    )
    told = look(
        [Running("main", holder, "2026-01-01T00:00:00Z", str(tmp_path), "/nonexistent")], {}, disk=True
    )
    main = told["containers"]["main"]
    assert 0.25 <= main["cpu_s"] < 3
    assert 50 << 20 <= main["memory_bytes"] < 75 << 20
    assert 50 << 20 <= main["rss_bytes"] <= main["memory_bytes"]
    assert main["rootfs"]["inodes_used"] == 1
    assert main["logs"] is None


def make(proc: Path, pid: int, parent: int, namespace: str, ticks: int = 0, name: str = "sh") -> None:
    directory = proc / str(pid)
    (directory / "ns").mkdir(parents=True)
    (directory / "ns" / "mnt").symlink_to(namespace)
    fields = ["S", str(parent), *["0"] * 9, str(ticks), "1", "2", "3", *["0"] * 30]
    (directory / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    (directory / "statm").write_text("100 10 4 0 0 0 0\n")


def test_processes_belong_to_their_container_or_their_parents(tmp_path: Path) -> None:
    for pid, parent, namespace in [
        (1, 0, "mnt:[1]"),  # the runner
        (10, 1, "mnt:[2]"),  # first process of a
        (11, 10, "mnt:[2]"),
        (12, 11, "mnt:[9]"),  # has a mount namespace of its own
        (20, 1, "mnt:[3]"),  # first process of b
        (21, 1, "mnt:[3]"),  # an exec
        (30, 1, "mnt:[1]"),  # a fork of the runner
    ]:
        make(tmp_path, pid, parent, namespace)
    (tmp_path / "self").mkdir()
    (tmp_path / "99").mkdir()  # ended meanwhile
    found = processes_of({"a": 10, "b": 20, "ended": 77}, str(tmp_path))
    assert {name: sorted(pids) for name, pids in found.items()} == {
        "a": [10, 11, 12],
        "b": [20, 21],
        "ended": [],
    }


def test_odd_command_names_and_old_kernels(tmp_path: Path) -> None:
    make(tmp_path, 10, 1, "mnt:[2]", ticks=94, name="a) R 1 2 (b")
    told = look([Running("main", 10, "x", "", "")], {}, disk=False, proc=str(tmp_path))["containers"]["main"]
    assert told["cpu_s"] == pytest.approx(100 / TICKS)
    page = os.sysconf("SC_PAGE_SIZE")
    assert (told["memory_bytes"], told["rss_bytes"], told["processes"]) == (10 * page, 6 * page, 1)
    assert told["rootfs"] is None


def test_room_is_counted_like_du(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "big").write_bytes(b"x" * (1 << 20))
    (tmp_path / "again").hardlink_to(tmp_path / "d" / "big")
    (tmp_path / "link").symlink_to(tmp_path / "d")
    expected = int(
        subprocess.run(
            ["du", "-sx", "-B1", str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout.split()[0]
    )
    found = space(str(tmp_path))
    assert found is not None
    assert (found["used_bytes"], found["inodes_used"]) == (expected, 4)
    assert found["capacity_bytes"] > found["used_bytes"]
    assert space(str(tmp_path / "nobody")) is None


def test_a_tree_too_large_to_walk_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_usage, "_WALK_S", -1.0)
    assert space(str(tmp_path)) is None
