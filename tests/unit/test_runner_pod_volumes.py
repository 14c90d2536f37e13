"""Volumes of files and their swap, limits, removal: the parts that need no namespaces."""

from __future__ import annotations

import base64
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from slurmlet.runner.host.sandbox import SINGLE, Mapping
from slurmlet.runner.host.scratch import Scratch
from slurmlet.runner.pod import eviction
from slurmlet.runner.volumes import volume_removal
from slurmlet.runner.volumes.pod_volumes import MountFailed, VolumeError, Volumes
from slurmlet.runner.volumes.projected_files import BadName, project


def files(default_mode: int = 0o644, **contents: str) -> dict[str, Any]:
    named = {name.replace("__", "/"): text for name, text in contents.items()}
    return {
        "kind": "files",
        "default_mode": default_mode,
        "files": {name: {"data": base64.b64encode(text.encode()).decode()} for name, text in named.items()},
    }


def names(directory: Path) -> list[str]:
    return sorted(one.name for one in directory.iterdir())


def test_the_kubelets_layout(tmp_path: Path) -> None:
    assert project(str(tmp_path), files(0o440, plain="1", deep__er="2"))
    data = str((tmp_path / "..data").readlink())
    assert data.startswith("..2")
    assert str((tmp_path / "plain").readlink()) == "..data/plain"
    assert str((tmp_path / "deep").readlink()) == "..data/deep"
    assert (tmp_path / "deep/er").read_text() == "2"
    assert (tmp_path / "plain").stat().st_mode & 0o777 == 0o440
    assert names(tmp_path) == sorted(["..data", data, "plain", "deep"])


def test_a_change_is_one_swap_and_no_change_is_none(tmp_path: Path) -> None:
    project(str(tmp_path), files(a="old", b="stays"))
    before = str((tmp_path / "..data").readlink())
    assert not project(str(tmp_path), files(a="old", b="stays"))
    assert str((tmp_path / "..data").readlink()) == before
    assert project(str(tmp_path), files(a="new", c="more"))
    after = str((tmp_path / "..data").readlink())
    assert after != before
    assert names(tmp_path) == sorted(["..data", after, "a", "c"])
    assert (tmp_path / "a").read_text() == "new"


def test_a_reader_never_sees_half_a_change(tmp_path: Path) -> None:
    project(str(tmp_path), files(a="0", b="0"))
    odd: list[tuple[str, str]] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            # As a careful program does it: one look at the directory, then its files.
            try:
                now = os.open(tmp_path / "..data", os.O_RDONLY)
            except FileNotFoundError:
                continue  # replaced between the look at the link and the step behind it
            try:
                pair = tuple(Path(f"/proc/self/fd/{now}/{name}").read_text() for name in "ab")
                if pair[0] != pair[1]:
                    odd.append(pair)  # type: ignore[arg-type]
            except FileNotFoundError:
                pass  # replaced twice in between
            finally:
                os.close(now)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        project(str(tmp_path), files(a=str(number), b=str(number)))
    done.set()
    reader.join()
    assert not odd


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "..data", "..data/x", "..2026"])
def test_no_file_lies_outside_or_over_the_links(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadName):
        project(str(tmp_path), {"files": {name: {"data": "eA=="}}})
    assert names(tmp_path) == []


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(str(tmp_path / "scratch"), "pod1")


def volumes(scratch: Scratch, **plans: dict[str, Any]) -> Volumes:
    return Volumes({"volumes": plans}, scratch, Mapping(SINGLE, 1, 1))


def mount(volume: str, **more: Any) -> dict[str, Any]:
    return {"mounts": [{"volume": volume, "path": f"/{volume}", **more}]}


def test_refresh_of_a_mounted_volume_keeps_what_it_is_told_to(scratch: Scratch) -> None:
    here = volumes(scratch, v=files(a="old", token="jwt"), unused=files(x="1"))
    (found,) = here.mounts(mount("v"))
    assert found.read_only
    newer = files(a="new")
    newer["files"]["token"] = {"keep": True}
    here.refresh({"v": newer, "unused": files(x="2"), "stranger": files(y="3")})
    assert Path(found.source, "a").read_text() == "new"
    assert Path(found.source, "token").read_text() == "jwt"
    # Kept once more: what was kept is still known.
    newer["files"]["a"] = {"data": base64.b64encode(b"newer").decode()}
    here.refresh({"v": newer})
    assert Path(found.source, "token").read_text() == "jwt"
    # A volume that nobody has mounted yet starts with the newest.
    (later,) = here.mounts(mount("unused"))
    assert Path(later.source, "x").read_text() == "2"


def test_what_cannot_be_set_up_speaks_as_the_kubelet_does(scratch: Scratch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    here = volumes(scratch, h={"kind": "host", "path": str(tmp_path / "file"), "type": "Directory"})
    with pytest.raises(MountFailed) as caught:
        here.mounts(mount("h"))
    assert str(caught.value) == (
        f'MountVolume.SetUp failed for volume "h" : hostPath type check failed: {tmp_path / "file"} is not a directory'
    )
    assert (caught.value.event, caught.value.reason) == ("FailedMount", "ContainerCreating")
    with pytest.raises(VolumeError, match="no volume named"):
        here.mounts(mount("none"))


def test_a_claim_can_be_read_only_whatever_the_mount_says(scratch: Scratch, tmp_path: Path) -> None:
    here = volumes(scratch, c={"kind": "host", "path": str(tmp_path), "type": "Directory", "read_only": True})
    assert here.mounts(mount("c", read_only=False))[0].read_only


def test_only_limited_directories_on_disk_are_watched(scratch: Scratch) -> None:
    limit = {"kind": "empty", "medium": "", "size_bytes": 1 << 20, "limit": "1Mi"}
    here = volumes(scratch, small=limit, free={**limit, "size_bytes": None}, idle=limit)
    here.mounts(mount("small"))
    here.mounts(mount("free"))
    assert here.limited() == {"small": (f"{scratch.pod}/volumes/small", 1 << 20, "1Mi")}


def test_usage_counts_blocks_once_and_the_sentence_is_the_kubelets(tmp_path: Path) -> None:
    empty = eviction.disk_usage_bytes(str(tmp_path))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/big").write_bytes(b"x" * (1 << 20))
    os.link(tmp_path / "sub/big", tmp_path / "again")
    (tmp_path / "outside").symlink_to("/usr")
    used = eviction.disk_usage_bytes(str(tmp_path))
    assert (1 << 20) <= used - empty < (1 << 20) + 65536
    limited = {"d": (str(tmp_path), 1 << 20, "1Mi")}
    assert eviction.too_much(limited, {"d": used}) == 'Usage of EmptyDir volume "d" exceeds the limit "1Mi". '
    assert eviction.too_much(limited, {"d": 1 << 20}) == ""
    assert eviction.too_much(limited, {}) == ""


def test_removing_takes_closed_directories_too(tmp_path: Path) -> None:
    deep = tmp_path / "volume/a/b"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    (tmp_path / "volume/a/link").symlink_to(kept)
    deep.chmod(0)
    (tmp_path / "volume/a").chmod(0)
    assert volume_removal.main([str(tmp_path / "volume")]) == 0
    assert not (tmp_path / "volume").exists()
    assert (kept / "file").exists()
    assert volume_removal.main(["relative"]) == 2
    assert volume_removal.main(["/"]) == 2
