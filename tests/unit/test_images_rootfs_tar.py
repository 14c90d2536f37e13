from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from slurmlet.images import layer_trees
from slurmlet.images.archives import Layer
from slurmlet.images.bundles import BadImage, DirectoryBundle
from slurmlet.images.rootfs_tar import flatten
from tests.unit.images_building import contents, digest, directory_of, header, layer


def flat(tmp_path: Path, *layers: bytes) -> dict[str, Any]:
    directory_of({f"l{number}": raw for number, raw in enumerate(layers)}, tmp_path / "in")
    named = [Layer(f"l{number}", digest(raw)) for number, raw in enumerate(layers)]
    size = flatten(DirectoryBundle(tmp_path / "in"), named, tmp_path / "rootfs.tar", scratch=tmp_path)
    assert size == (tmp_path / "rootfs.tar").stat().st_size
    return contents(tmp_path / "rootfs.tar")


def test_later_layers_win_and_directories_merge(tmp_path: Path) -> None:
    lower = layer(("etc", "d", 0), ("etc/a", "f", b"1"), ("etc/b", "f", b"1"))
    upper = layer(("etc", "d", 0), ("./etc/a", "f", b"2"), ("/etc/c", "f", b"3"))
    assert flat(tmp_path, lower, upper) == {"etc": None, "etc/a": b"2", "etc/b": b"1", "etc/c": b"3"}


def test_whiteouts_hide_files_and_whole_directories(tmp_path: Path) -> None:
    lower = layer(("d", "d", 0), ("d/x", "f", b"x"), ("gone", "d", 0), ("gone/y", "f", b"y"))
    upper = layer(("d/.wh.x", "f", b""), (".wh.gone", "f", b""), (".wh.never-there", "f", b""))
    assert flat(tmp_path, lower, upper) == {"d": None}


def test_a_whiteout_spares_its_own_layer_wherever_it_stands(tmp_path: Path) -> None:
    lower = layer(("d", "d", 0), ("d/old", "f", b"old"))
    before = layer((".wh.d", "f", b""), ("d", "d", 0), ("d/new", "f", b"new"))
    after = layer(("d", "d", 0), ("d/newer", "f", b"newer"), (".wh.d", "f", b""))
    assert flat(tmp_path, lower, before) == {"d": None, "d/new": b"new"}
    assert flat(tmp_path, lower, before, after) == {"d": None, "d/newer": b"newer"}


def test_an_opaque_directory_keeps_only_its_own(tmp_path: Path) -> None:
    lower = layer(("d", "d", 0), ("d/old", "f", b"old"), ("d/sub", "d", 0), ("d/sub/older", "f", b"o"))
    upper = layer(("d", "d", 0), ("d/new", "f", b"new"), ("d/.wh..wh..opq", "f", b""))
    assert flat(tmp_path, lower, upper) == {"d": None, "d/new": b"new"}


def test_whiteout_metadata_of_old_storage_drivers_is_dropped(tmp_path: Path) -> None:
    assert flat(tmp_path, layer((".wh..wh.aufs", "f", b"x"), (".wh..wh.plnk", "d", 0), ("a", "f", b"a"))) == {
        "a": b"a"
    }


def test_a_hard_link_survives_the_name_it_was_made_from(tmp_path: Path) -> None:
    lower = layer(("one", "f", b"content"), ("two", "l", "one"), ("three", "l", "/two"))
    upper = layer((".wh.one", "f", b""))
    assert flat(tmp_path, lower) == {"one": b"content", "three": "= one", "two": "= one"}
    assert flat(tmp_path, lower, upper) == {"three": b"content", "two": "= three"}


def test_a_hard_link_keeps_the_old_content_when_its_source_is_replaced(tmp_path: Path) -> None:
    lower = layer(("one", "f", b"old"), ("two", "l", "one"))
    assert flat(tmp_path, lower, layer(("one", "f", b"new"))) == {"one": b"new", "two": b"old"}


def test_a_hard_link_into_a_lower_layer(tmp_path: Path) -> None:
    assert flat(tmp_path, layer(("one", "f", b"x")), layer(("two", "l", "one"))) == {
        "one": b"x",
        "two": "= one",
    }


def test_a_link_in_the_way_is_followed_inside_the_root(tmp_path: Path) -> None:
    """Debian's merged /usr: a layer that writes lib/foo means usr/lib/foo."""
    lower = layer(
        ("usr/lib", "d", 0), ("lib", "s", "usr/lib"), ("abs", "s", "/usr/lib"), ("up", "s", "../../../usr")
    )
    upper = layer(("lib/a", "f", b"a"), ("abs/b", "f", b"b"), ("up/c", "f", b"c"), ("lib/.wh.zzz", "f", b""))
    assert flat(tmp_path, lower, upper) == {
        "usr": None, "usr/lib": None, "usr/lib/a": b"a", "usr/lib/b": b"b", "usr/c": b"c",
        "lib": "-> usr/lib", "abs": "-> /usr/lib", "up": "-> ../../../usr",
    }  # fmt: skip


def test_kinds_replace_each_other(tmp_path: Path) -> None:
    lower = layer(("d", "d", 0), ("d/x", "f", b"x"), ("f", "f", b"f"), ("s", "s", "d"))
    upper = layer(("d", "f", b"now a file"), ("f", "d", 0), ("f/y", "f", b"y"), ("s", "d", 0))
    assert flat(tmp_path, lower, upper) == {"d": b"now a file", "f": None, "f/y": b"y", "s": None}


def test_devices_hide_and_are_left_out_fifos_stay(tmp_path: Path) -> None:
    assert flat(tmp_path, layer(("null", "f", b"x")), layer(("null", "c", 0), ("pipe", "p", 0))) == {
        "pipe": "fifo"
    }


def test_directories_come_first_and_links_last(tmp_path: Path) -> None:
    flat(tmp_path, layer(("a", "s", "z"), ("m", "f", b"m"), ("z/y", "f", b"y")))
    with tarfile.open(tmp_path / "rootfs.tar") as archive:
        assert [info.name for info in archive] == ["z", "m", "z/y", "a"]


def test_owners_modes_times_and_attributes_are_kept_names_of_users_are_not(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = header("ping" + "g" * 150, "f", b"")
        info.size, info.mode, info.uid, info.gid, info.uname, info.mtime = 1, 0o4755, 7, 8, "builder", 12345.5
        capability = b"\x01\xff\x00\x02".decode(errors="surrogateescape")
        info.pax_headers = {"SCHILY.xattr.security.capability": capability, "comment": "noise"}
        archive.addfile(info, io.BytesIO(b"x"))
    flat(tmp_path, buffer.getvalue())
    with tarfile.open(tmp_path / "rootfs.tar") as archive:
        (kept,) = archive.getmembers()
    assert (kept.mode, kept.uid, kept.gid, kept.uname, kept.mtime) == (0o4755, 7, 8, "", 12345)
    assert kept.pax_headers["SCHILY.xattr.security.capability"] == capability
    assert "comment" not in kept.pax_headers


def test_zstd_layers(tmp_path: Path) -> None:
    from slurmlet.base.processes import run

    if shutil.which("zstd") is None:
        pytest.skip("this machine has no zstd program to make the layer with")
    raw = layer(("a", "f", b"a" * 5000))
    (tmp_path / "raw").write_bytes(raw)
    run(["zstd", "-q", str(tmp_path / "raw"), "-o", str(tmp_path / "l0")])
    named = [Layer("l0", digest(raw))]
    flatten(DirectoryBundle(tmp_path), named, tmp_path / "rootfs.tar", scratch=tmp_path)
    assert contents(tmp_path / "rootfs.tar") == {"a": b"a" * 5000}
    assert not (tmp_path / "layer.tar").exists()


@pytest.mark.parametrize("name", ["../x", "a/../../x", "..", "/../x"])
def test_entries_that_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadImage, match="leads outside"):
        flat(tmp_path, layer((name, "f", b"x")))


@pytest.mark.parametrize("target", ["missing", "../../etc/passwd", "d", ""])
def test_hard_links_to_nothing_are_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(BadImage):
        flat(tmp_path, layer(("d", "d", 0), ("x", "l", target)))


def test_loops_of_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="too many symbolic links"):
        flat(tmp_path, layer(("a", "s", "b"), ("b", "s", "a"), ("a/x", "f", b"x")))


def test_endless_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_trees, "MAX_ENTRIES", 2)
    with pytest.raises(BadImage, match="more than 2 files"):
        flat(tmp_path, layer(("a", "f", b""), ("b", "f", b"")), layer(("c", "f", b"")))


def test_a_layer_that_is_not_what_the_config_promised_is_refused(tmp_path: Path) -> None:
    (tmp_path / "l0").write_bytes(layer(("a", "f", b"tampered")))
    with pytest.raises(BadImage, match="l0 does not match its digest"):
        flatten(
            DirectoryBundle(tmp_path), [Layer("l0", digest(b"other"))], tmp_path / "r.tar", scratch=tmp_path
        )
    assert not (tmp_path / "r.tar").exists()
