"""A node's scratch that is full: what nobody uses goes, oldest first; where that is not enough, it is said what to do."""

from __future__ import annotations

import errno
import os
import tarfile
import time
from pathlib import Path

import pytest

from slurmlet.runner.host import scratch as scratch_module
from slurmlet.runner.host import scratch_space
from slurmlet.runner.host.image_unpack import remove_tree, unpack_once
from slurmlet.runner.host.sandbox import SINGLE, Mapping
from slurmlet.runner.host.scratch import Scratch
from slurmlet.runner.host.scratch_space import NO_ROOM, NoRoom, make_room, told

ONE = Mapping(SINGLE, 1, 1)
TREE_BYTES = 1 << 20


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Directories of pods count at once, not after a minute.
    monkeypatch.setattr(scratch_module, "_YOUNG_S", -1.0)
    return tmp_path / "scratch"


def unpacked(base: Path, *names: str) -> None:
    for name in names:
        (base / "images" / f"{name}-single").mkdir(parents=True)
        time.sleep(0.01)


def left(base: Path) -> list[str]:
    return sorted(each.name for each in (base / "images").iterdir() if each.is_dir())


def limited(base: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """A file system on which each removed image frees TREE_BYTES."""
    count = len(left(base))
    monkeypatch.setattr(
        scratch_space, "free_bytes", lambda _path: free_bytes + TREE_BYTES * (count - len(left(base)))
    )


def test_where_there_is_room_nothing_is_removed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked(base, "sha256-a")
    limited(base, monkeypatch, 1 << 30)
    make_room(str(base / "images"), SINGLE, 1 << 20, remove_tree)
    assert left(base) == ["sha256-a-single"]


def test_the_oldest_that_nobody_uses_go_and_no_more_than_needed(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = Scratch(str(base), "pod-1")
    unpacked(base, "sha256-a", "sha256-b", "sha256-c", "sha256-d")
    pod.use_image("/store/images/sha256-b/")
    limited(base, monkeypatch, 15 << 20)
    make_room(str(base / "images"), SINGLE, 1 << 20, remove_tree)
    assert left(base) == ["sha256-b-single", "sha256-d-single"]


def test_images_of_dead_pods_and_of_nobody_count_as_unused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = Scratch(str(base), "pod-dead")
    dead.use_image("/store/images/sha256-a")
    os.close(dead._lock)
    unpacked(base, "sha256-a")
    limited(base, monkeypatch, 16 << 20)
    make_room(str(base / "images"), SINGLE, 1 << 20, remove_tree)
    assert left(base) == []


def test_nothing_is_removed_beside_a_runner_that_does_not_say_what_it_uses(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Scratch(str(base), "pod-old")
    (base / "pods" / "pod-old" / "uses").rmdir()
    unpacked(base, "sha256-a")
    limited(base, monkeypatch, 0)
    with pytest.raises(NoRoom):
        make_room(str(base / "images"), SINGLE, 1 << 20, remove_tree)
    assert left(base) == ["sha256-a-single"]
    os.close(old._lock)


def test_trees_of_another_mapping_are_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "images" / "sha256-a-subuid").mkdir(parents=True)
    limited(base, monkeypatch, 0)
    with pytest.raises(NoRoom):
        make_room(str(base / "images"), SINGLE, 1, remove_tree)
    assert left(base) == ["sha256-a-subuid"]


def test_an_image_that_is_being_unpacked_is_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    unpacked(base, "sha256-a")
    limited(base, monkeypatch, 0)
    with (base / "images" / "sha256-a-single.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NoRoom):
            make_room(str(base / "images"), SINGLE, 1, remove_tree)
    assert left(base) == ["sha256-a-single"]


def test_the_message_names_path_sizes_and_remedy(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = base / "store" / "sha256-a"
    image.mkdir(parents=True)
    (base / "images").mkdir()
    with tarfile.open(image / "rootfs.tar", "w"):
        pass
    monkeypatch.setattr(scratch_space, "free_bytes", lambda _path: 3 << 20)
    with pytest.raises(NoRoom) as refused:
        unpack_once(str(image), str(base / "images"), ONE)
    text = str(refused.value)
    assert text.startswith(
        f"{NO_ROOM}: {base}/images has 3 MiB free, and 16 MiB are needed to unpack the image"
    )
    assert "TMPDIR" in text
    assert left(base) == []


def test_a_disk_that_fills_meanwhile_is_told_the_same_way(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "not" / "there"))
    assert told(full).startswith(
        f"{NO_ROOM}: [Errno 28] No space left on device: '{tmp_path}/not/there'; {tmp_path} has"
    )
    assert "TMPDIR" in told(full)


def test_other_errors_are_told_as_they_are() -> None:
    assert told(OSError(errno.EACCES, "no")) == "[Errno 13] no"
    assert told(ValueError("x")) == "x"
