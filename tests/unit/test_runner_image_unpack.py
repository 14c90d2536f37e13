"""Unpacking images: hostile archives stay in their tree, honest ones arrive as they are."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from slurmlet.runner.host.image_unpack import BadArchive, find_unpacked, remove_tree, unpack, unpack_once
from slurmlet.runner.host.sandbox import SINGLE, Mapping

ONE = Mapping(SINGLE, 1, 1)


def entry(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def archive(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> str:
    with tarfile.open(path, "w") as tar:
        for info, content in entries:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "tree"
    path.mkdir()
    return path


def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.mkdir()
    (path / "victim").write_text("untouched")
    return path


def test_an_honest_image(tmp_path: Path, root: Path) -> None:
    made = archive(
        tmp_path / "a.tar",
        (entry("./", tarfile.DIRTYPE, mode=0o755), b""),
        (entry("usr/bin/tool", mode=0o4755), b"#!x"),
        (entry("usr", tarfile.DIRTYPE, mode=0o751), b""),
        (entry("bin", tarfile.SYMTYPE, link="usr/bin"), b""),
        (entry("bin/other", mode=0o600), b"through the link"),
        (entry("usr/bin/again", tarfile.LNKTYPE, link="usr/bin/tool"), b""),
        (entry("run/pipe", tarfile.FIFOTYPE), b""),
    )
    unpack(made, str(root), ONE)
    assert stat.S_IMODE((root / "usr/bin/tool").stat().st_mode) == 0o4755
    assert stat.S_IMODE((root / "usr").stat().st_mode) == 0o751
    assert (root / "bin").readlink() == Path("usr/bin")
    assert (root / "usr/bin/other").read_bytes() == b"through the link"
    assert (root / "usr/bin/again").stat().st_ino == (root / "usr/bin/tool").stat().st_ino
    assert stat.S_ISFIFO((root / "run/pipe").stat().st_mode)


def test_names_that_climb_are_refused(tmp_path: Path, root: Path) -> None:
    for name in ("../victim", "a/../../victim", "/../victim"):
        with pytest.raises(BadArchive, match="leads out"):
            unpack(archive(tmp_path / "a.tar", (entry(name), b"evil")), str(root), ONE)


def test_absolute_names_land_inside(tmp_path: Path, root: Path) -> None:
    unpack(archive(tmp_path / "a.tar", (entry("/etc/x"), b"inside")), str(root), ONE)
    assert (root / "etc/x").read_bytes() == b"inside"


@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_does_not_lead_a_file_out(tmp_path: Path, root: Path, absolute: bool) -> None:
    away = outside(tmp_path)
    target = str(away) if absolute else "../outside"
    made = archive(
        tmp_path / "a.tar",
        (entry("door", tarfile.SYMTYPE, link=target), b""),
        (entry("door/victim"), b"evil"),
    )
    unpack(made, str(root), ONE)
    assert (away / "victim").read_text() == "untouched"


def test_a_file_replaces_a_link_instead_of_following_it(tmp_path: Path, root: Path) -> None:
    away = outside(tmp_path)
    made = archive(
        tmp_path / "a.tar",
        (entry("x", tarfile.SYMTYPE, link=str(away / "victim")), b""),
        (entry("x", mode=0o666), b"evil"),
    )
    unpack(made, str(root), ONE)
    assert (away / "victim").read_text() == "untouched"
    assert (root / "x").read_bytes() == b"evil"


def test_a_directory_swapped_for_a_link_is_noticed(tmp_path: Path, root: Path) -> None:
    away = outside(tmp_path)
    made = archive(
        tmp_path / "a.tar",
        (entry("d/one"), b"1"),
        (entry("d", tarfile.SYMTYPE, link=str(away)), b""),
        (entry("d/victim"), b"evil"),
    )
    unpack(made, str(root), ONE)
    assert (away / "victim").read_text() == "untouched"
    assert sorted(path.name for path in away.iterdir()) == ["victim"]


def test_hard_links_stay_inside(tmp_path: Path, root: Path) -> None:
    away = outside(tmp_path)
    with pytest.raises(BadArchive):
        made = archive(tmp_path / "a.tar", (entry("h", tarfile.LNKTYPE, link="../outside/victim"), b""))
        unpack(made, str(root), ONE)
    made = archive(
        tmp_path / "b.tar",
        (entry("door", tarfile.SYMTYPE, link=str(away)), b""),
        (entry("h", tarfile.LNKTYPE, link="door/victim"), b""),
    )
    with pytest.raises(BadArchive, match="not there"):
        unpack(made, str(root), ONE)
    assert (away / "victim").stat().st_nlink == 1


def test_devices_are_left_out(tmp_path: Path, root: Path) -> None:
    unpack(archive(tmp_path / "a.tar", (entry("dev/sda", tarfile.BLKTYPE), b"")), str(root), ONE)
    assert not os.path.lexists(root / "dev/sda")


def test_link_loops_end(tmp_path: Path, root: Path) -> None:
    made = archive(
        tmp_path / "a.tar",
        (entry("a", tarfile.SYMTYPE, link="b"), b""),
        (entry("b", tarfile.SYMTYPE, link="a"), b""),
        (entry("a/file"), b"x"),
    )
    with pytest.raises(BadArchive, match="too many links"):
        unpack(made, str(root), ONE)


def store(tmp_path: Path, made: str) -> tuple[str, str]:
    image, images = tmp_path / "sha256-aa", tmp_path / "images"
    image.mkdir()
    images.mkdir()
    Path(made).rename(image / "rootfs.tar")
    return str(image), str(images)


def test_a_tree_is_made_once_and_found_after(tmp_path: Path) -> None:
    image, images = store(tmp_path, archive(tmp_path / "a.tar", (entry("x"), b"1")))
    assert find_unpacked(image, images, ONE) == ""
    tree = unpack_once(image, images, ONE)
    assert find_unpacked(image, images, ONE) == tree
    marker = Path(tree).stat().st_ino
    assert unpack_once(image, images, ONE) == tree
    assert Path(tree).stat().st_ino == marker


def test_a_tree_of_an_earlier_boot_is_made_again(tmp_path: Path) -> None:
    image, images = store(tmp_path, archive(tmp_path / "a.tar", (entry("x"), b"1")))
    tree = Path(unpack_once(image, images, ONE))
    (tree / "x").write_bytes(b"")
    Path(str(tree) + ".boot").write_text("another boot")
    assert find_unpacked(image, images, ONE) == ""
    unpack_once(image, images, ONE)
    assert (tree / "x").read_bytes() == b"1"


def test_a_broken_archive_leaves_nothing(tmp_path: Path) -> None:
    whole = Path(archive(tmp_path / "a.tar", (entry("x"), b"1" * 100_000)))
    whole.write_bytes(whole.read_bytes()[:50_000])
    image, images = store(tmp_path, str(whole))
    with pytest.raises(BadArchive):
        unpack_once(image, images, ONE)
    assert [path.name for path in Path(images).iterdir() if path.suffix != ".lock"] == []


def test_remove_tree_opens_closed_directories(tmp_path: Path) -> None:
    deep = tmp_path / "t" / "closed"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    deep.chmod(0o000)
    remove_tree(str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()
