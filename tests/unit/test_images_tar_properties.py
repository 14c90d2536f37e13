"""Layers and archives by properties: whatever they hold, nothing is written outside the tree, and damage is told as such."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurmlet.images.archives import Layer
from slurmlet.images.bundles import BadImage, DirectoryBundle
from slurmlet.images.rootfs_tar import flatten
from slurmlet.runner.host.image_unpack import BadArchive, unpack
from slurmlet.runner.host.sandbox import SINGLE, Mapping
from tests.unit.images_building import Entry, contents, digest, header, layer

ONE = Mapping(SINGLE, 1, 1)
# Stands for a directory beside the tree, which has the names that the entries have.
OUTSIDE = "@outside"
NAMES = st.sampled_from(("a", "b", "c"))
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
ODD_PATHS = st.lists(st.sampled_from(("a", "b", "c", ".", "", "..", "a" * 300)), min_size=1, max_size=4).map(
    "/".join
)
TARGETS = PATHS | st.sampled_from(
    (
        OUTSIDE,
        f"{OUTSIDE}/a",
        "../outside",
        "../../outside/a",
        "/",
        "/a",
        "/a/b",
        "..",
        ".",
        "",
        "a/../b",
        "c" * 300,
    )
)


def entry_of(paths: st.SearchStrategy[str]) -> st.SearchStrategy[Entry]:
    return st.one_of(
        st.tuples(paths, st.just("f"), st.binary(max_size=8)),
        st.tuples(paths, st.sampled_from("dpc"), st.just(b"")),
        st.tuples(paths, st.sampled_from("sl"), TARGETS),
    )


@contextmanager
def places() -> Iterator[tuple[Path, Path]]:
    """An empty tree, and what lies beside it."""
    with tempfile.TemporaryDirectory() as made:
        tree, outside = Path(made, "tree"), Path(made, "outside")
        tree.mkdir()
        (outside / "a" / "b").mkdir(parents=True)
        (outside / "b").write_text("untouched")
        (outside / "a" / "c").write_text("untouched")
        for path in (*outside.rglob("*"), outside):
            os.utime(path, (1, 1))
        yield tree, outside


def state_of(directory: Path) -> list[tuple[Any, ...]]:
    found = []
    for path in sorted((directory, *directory.rglob("*"))):
        seen = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found.append((str(path), seen.st_mode, seen.st_nlink, seen.st_mtime_ns, content))
    return found


def placed(entries: list[Entry], outside: Path) -> list[Entry]:
    return [
        (path, kind, value.replace(OUTSIDE, str(outside)) if isinstance(value, str) else value)
        for path, kind, value in entries
    ]


@given(st.lists(entry_of(PATHS | ODD_PATHS), max_size=12))
@example([("a/b", "d", b""), ("a", "f", b"now a file")])
@example([("b/a", "d", b""), ("b", "s", OUTSIDE)])
@example([("a", "d", b""), ("b", "l", "a")])
@example([("a", "s", "")])
@example([("a", "f", b""), ("b", "l", "a/c")])
def test_an_archive_of_any_entries_stays_in_its_tree(entries: list[Entry]) -> None:
    with places() as (tree, outside):
        before = state_of(outside)
        archive = tree.parent / "rootfs.tar"
        archive.write_bytes(layer(*placed(entries, outside)))
        try:
            unpack(str(archive), str(tree), ONE)
        except BadArchive:
            pass
        assert state_of(outside) == before


def flat(where: Path, layers: list[bytes]) -> Path:
    for number, raw in enumerate(layers):
        (where / f"l{number}").write_bytes(raw)
    named = [Layer(f"l{number}", digest(raw)) for number, raw in enumerate(layers)]
    flatten(DirectoryBundle(where), named, where / "rootfs.tar", scratch=where)
    return where / "rootfs.tar"


WHITEOUTS = st.tuples(st.lists(NAMES, max_size=2), st.sampled_from((".wh.a", ".wh.b", ".wh..wh..opq"))).map(
    lambda parts: "/".join([*parts[0], parts[1]])
)


@given(st.lists(st.lists(entry_of(PATHS | WHITEOUTS), max_size=8), max_size=4))
def test_what_is_flattened_unpacks_and_stays_in_its_tree(stack: list[list[Entry]]) -> None:
    with places() as (tree, outside):
        before = state_of(outside)
        try:
            made = flat(tree.parent, [layer(*placed(entries, outside)) for entries in stack])
        except BadImage:
            return
        unpack(str(made), str(tree), ONE)
        assert state_of(outside) == before
        with tarfile.open(made) as archive:
            names = [info.name for info in archive]
        assert len(names) == len(set(names))
        assert not any(part.startswith(".wh.") for name in names for part in name.split("/"))
        for name in names:
            assert os.path.lexists(tree / name)


PLAIN = st.one_of(
    st.tuples(PATHS, st.just("f"), st.binary(max_size=8)),
    st.tuples(PATHS | WHITEOUTS, st.just("d"), st.just(b"")),
    st.tuples(WHITEOUTS, st.just("f"), st.just(b"")),
)


@given(st.lists(st.lists(PLAIN, max_size=8), max_size=4))
def test_layers_without_links_add_up_as_the_specification_says(stack: list[list[Entry]]) -> None:
    with places() as (tree, _):
        made = contents(flat(tree.parent, [layer(*entries) for entries in stack]))
        assert {path: value for path, value in made.items() if path != "."} == _added_up(stack)


def _added_up(stack: list[list[Entry]]) -> dict[str, bytes | None]:
    """The tree as {path: content or None for a directory}, by the words of the specification and nothing cleverer."""
    tree: dict[str, bytes | None] = {}

    def remove(path: str, *, below_only: bool = False) -> None:
        for other in list(tree):
            if other.startswith(path + "/") or (other == path and not below_only):
                del tree[other]

    def is_whiteout(path: str) -> bool:
        return path.rpartition("/")[2].startswith(".wh.")

    for entries in stack:
        for path, _, _ in entries:
            parent, _, name = path.rpartition("/")
            if name == ".wh..wh..opq":
                for other in list(tree):
                    if not parent or other.startswith(parent + "/"):
                        del tree[other]
            elif is_whiteout(path):
                hidden = name.removeprefix(".wh.")
                remove(f"{parent}/{hidden}" if parent else hidden)
        for path, kind, value in entries:
            if is_whiteout(path):
                continue
            parts = path.split("/")
            for depth in range(1, len(parts)):
                above = "/".join(parts[:depth])
                if tree.get(above) is not None:
                    remove(above)
                tree.setdefault(above, None)
            if kind == "d":
                if tree.get(path) is not None:
                    remove(path)
                tree.setdefault(path, None)
            else:
                remove(path)
                tree[path] = value
    return tree


def numbered(value: int) -> bytes:
    """A size as GNU tar writes those that do not fit, negative ones too."""
    return bytes((0o377 if value < 0 else 0o200,)) + (value % 256**11).to_bytes(11, "big")


def with_size(raw: bytes, at: int, size: int) -> bytes:
    """The header at this place with another size, and a checksum that is right."""
    info = bytearray(raw)
    info[at + 124 : at + 136] = numbered(size)
    info[at + 148 : at + 156] = b" " * 8
    info[at + 148 : at + 156] = b"%06o\0 " % sum(info[at : at + 512])
    return bytes(info)


@pytest.mark.timeout(60)
@given(st.integers(0, 2), st.integers(-5000, 5000) | st.integers(-(2**60), 2**60))
@example(1, -1024)
@example(1, -512)
@example(2, -2048)
def test_sizes_that_lie_are_told_as_damage(which: int, size: int) -> None:
    raw = with_size(layer(("a", "f", b""), ("b", "f", b""), ("c", "f", b"")), which * 512, size)
    check_damaged(raw)


@pytest.mark.timeout(60)
@given(st.sampled_from((b"x", b"g", b"L", b"K")), st.integers(-(2**40), 2**60))
@example(b"x", -512)
@example(b"L", 1 << 40)
def test_extended_headers_of_any_size_are_told_as_damage(kind: bytes, size: int) -> None:
    info = header("a", "f", b"")
    info.type = kind
    raw = with_size(info.tobuf(tarfile.GNU_FORMAT) + layer(("b", "f", b"")), 0, size)
    check_damaged(raw)


@pytest.mark.timeout(60)
@given(
    st.dictionaries(
        st.sampled_from(
            ("size", "mtime", "uid", "gid", "path", "linkpath", "GNU.sparse.major", "GNU.sparse.size")
        ),
        st.sampled_from(
            ("-1", "-1024", "0", "1e400", "nan", "99999999999999999999", "1.0", "a", "a\0b", "", "é")
        ),
        max_size=4,
    )
)
@example({"size": "-1024"})
@example({"path": "a\0b"})
@example({"mtime": "99999999999999999999"})
@example({"mtime": "nan"})
def test_extended_headers_of_any_content_are_told_as_damage(records: dict[str, str]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("a", "b"):
            info = header(name, "f", b"")
            info.pax_headers = records
            archive.addfile(info, io.BytesIO())
    check_damaged(buffer.getvalue())


@pytest.mark.timeout(60)
@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6), st.integers(0, 4096))
def test_damaged_bytes_are_told_as_damage(damage: list[tuple[int, int]], length: int) -> None:
    raw = bytearray(layer(("a", "d", b""), ("a/b", "f", b"x" * 600), ("c", "s", "a"), ("d", "l", "a/b")))
    for place, value in damage:
        raw[place % len(raw)] = value
    check_damaged(bytes(raw[:length]))


def check_damaged(raw: bytes) -> None:
    """Both readers of archives end, and say nothing worse than that this one is bad."""
    with places() as (tree, outside):
        before = state_of(outside)
        try:
            flat(tree.parent, [raw])
        except BadImage:
            pass
        archive = tree.parent / "raw.tar"
        archive.write_bytes(raw)
        try:
            unpack(str(archive), str(tree), ONE)
        except BadArchive:
            pass
        assert state_of(outside) == before
