"""Loading from files: every format that is promised, and every way a file can be broken or hostile."""

from __future__ import annotations

import gzip
import io
import json
import stat
import tarfile
from pathlib import Path

import pytest

from slurmlet.base.errors import UserError
from slurmlet.images import bundles
from slurmlet.images.bundles import BadImage
from slurmlet.images.image_store import Image, Store
from slurmlet.images.references import InvalidImageName
from tests.unit.images_building import (
    config,
    contents,
    digest,
    directory_of,
    docker_files,
    header,
    layer,
    layout_files,
    tar_of,
)

LAYERS = [layer(("a", "f", b"1"), ("b", "f", b"b")), layer(("a", "f", b"2"))]
TREE = {"a": b"2", "b": b"b"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def tree(image: Image) -> dict[str, object]:
    return contents(image.directory / "rootfs.tar")


def assert_untouched(root: Path) -> None:
    """Nothing of a failed load may stay: no image, no name, no scratch."""
    left = [path for path in root.rglob("*") if path.is_file() and path.parent.name != "locks"]
    assert left == []


def test_docker_archive(store: Store, tmp_path: Path) -> None:
    (image,) = store.load(tar_of(docker_files(LAYERS), tmp_path / "x.tar"), None)
    assert image.reference == "docker.io/t/a:1"
    assert image.digest == image.repo_digest == digest(json.dumps(config(LAYERS)).encode())
    assert image.config["config"] == {"Entrypoint": ["/bin/sh"], "User": "1000"}
    assert tree(image) == TREE
    assert image.size_bytes == (image.directory / "rootfs.tar").stat().st_size
    assert store.lookup("t/a:1") == store.lookup("docker.io/t/a:1") == image
    assert store.lookup(image.digest) is not None


def test_everything_in_the_store_is_private(store: Store, tmp_path: Path) -> None:
    store.load(tar_of(docker_files(LAYERS), tmp_path / "x.tar"), None)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_the_directory_is_laid_out_as_the_runner_expects(store: Store, tmp_path: Path) -> None:
    (image,) = store.load(tar_of(docker_files(LAYERS), tmp_path / "x.tar"), None)
    assert image.directory == tmp_path / "store" / "images" / image.digest.replace(":", "-")
    assert sorted(path.name for path in image.directory.iterdir()) == [
        "about.json",
        "config.json",
        "rootfs.tar",
    ]
    about = json.loads((image.directory / "about.json").read_text())
    assert sorted(about) == ["added_at", "digest", "reference", "repo_digest", "size_bytes"]
    assert json.loads((tmp_path / "store/references.json").read_text()) == {"docker.io/t/a:1": image.digest}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("form", ["directory", "tar", "tar.gz"])
def test_oci_layout(store: Store, tmp_path: Path, form: str, nested: bool) -> None:
    files = layout_files(LAYERS, nested=nested)
    path = directory_of(files, tmp_path / "d") if form == "directory" else tar_of(files, tmp_path / "x.tar")
    if form == "tar.gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    (image,) = store.load(path, None)
    manifest = next(raw for name, raw in files.items() if name.startswith("blobs") and b'"layers": [{' in raw)
    assert image.digest == digest(manifest)
    assert image.repo_digest == f"docker.io/t/oci@{image.digest}"
    assert tree(image) == TREE


def test_several_names_and_images_in_one_archive(store: Store, tmp_path: Path) -> None:
    files = docker_files(LAYERS, tags=("t/a:1", "t/a:2"))
    other = docker_files([LAYERS[0]], tags=("t/b:1",))
    entries = json.loads(files["manifest.json"])
    entries.append({"Config": "other.json", "RepoTags": ["t/b:1"], "Layers": ["layer0.tar"]})
    files |= {"manifest.json": json.dumps(entries).encode(), "other.json": other["config.json"]}
    path = tar_of(files, tmp_path / "x.tar")
    loaded = store.load(path, None)
    assert [image.reference for image in loaded] == ["docker.io/t/a:1", "docker.io/t/a:2", "docker.io/t/b:1"]
    assert loaded[0].digest == loaded[1].digest != loaded[2].digest
    with pytest.raises(UserError, match="--name can name only one"):
        store.load(path, "x:1")


def test_a_layer_linked_inside_the_archive_as_old_docker_saves_it(store: Store, tmp_path: Path) -> None:
    files = docker_files([LAYERS[0], LAYERS[0]])
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        for name, raw in files.items():
            if name == "layer1.tar":
                archive.addfile(header(name, "s", "./sub/../layer0.tar"))
                continue
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    (image,) = store.load(path, None)
    assert tree(image) == {"a": b"1", "b": b"b"}


def test_names(store: Store, tmp_path: Path) -> None:
    nameless = directory_of(layout_files(LAYERS, name=None), tmp_path / "d")
    with pytest.raises(UserError, match="gives no name for image") as caught:
        store.load(nameless, None)
    assert "--name" in caught.value.hint
    assert_untouched(tmp_path / "store")
    (image,) = store.load(nameless, "mine")
    assert image.reference == "docker.io/library/mine:latest"
    bare = directory_of(layout_files(LAYERS, name="latest"), tmp_path / "bare")
    with pytest.raises(UserError, match="gives no name"):
        store.load(bare, None)
    with pytest.raises(InvalidImageName):
        store.load(nameless, "Not Valid")
    with pytest.raises(InvalidImageName):
        store.load(tar_of(docker_files(LAYERS, tags=("BAD NAME",)), tmp_path / "x.tar"), None)


def test_the_same_image_twice_is_stored_once_and_a_name_can_move(store: Store, tmp_path: Path) -> None:
    first = tar_of(docker_files(LAYERS), tmp_path / "x.tar")
    (one,) = store.load(first, None)
    made = (one.directory / "rootfs.tar").stat().st_ino
    (again,) = store.load(first, "other:1")
    assert again.digest == one.digest
    assert (again.directory / "rootfs.tar").stat().st_ino == made
    (moved,) = store.load(tar_of(docker_files(LAYERS[:1]), tmp_path / "y.tar"), None)
    assert moved.digest != one.digest
    assert store.lookup("t/a:1") == moved


def broken_archives() -> dict[str, dict[str, bytes]]:
    good = docker_files(LAYERS)
    layout = layout_files(LAYERS)
    blob = {name: raw for name, raw in layout.items() if name.startswith("blobs")}
    manifest = next(name for name, raw in blob.items() if b'"layers": [{' in raw)
    packed = next(name for name, raw in blob.items() if raw[:2] == b"\x1f\x8b")

    def docker(**fields: object) -> bytes:
        return json.dumps(
            [{"Config": "config.json", "RepoTags": ["t/a:1"], "Layers": ["layer0.tar"], **fields}]
        ).encode()

    return {
        "neither index.json": {"hello": b"world"},
        "not JSON": {**good, "manifest.json": b"{"},
        "not a docker archive's": {**good, "manifest.json": b'{"a": 1}'},
        "config.json is missing": {name: raw for name, raw in good.items() if name != "config.json"},
        "layer layer1.tar is missing": {name: raw for name, raw in good.items() if name != "layer1.tar"},
        "disagree about the layers": {**good, "manifest.json": docker()},
        "layer1.tar does not match its digest": {**good, "layer1.tar": LAYERS[0]},
        "etc/passwd is missing": {**good, "manifest.json": docker(Config="../../../etc/passwd")},
        "is for linux/mips": docker_files(LAYERS, architecture="mips"),
        "is not a JSON object": {**good, "config.json": b"[]"},
        "not a readable tar": {**layout, packed: gzip.compress(b"no tar at all" * 100)},
        "not a readable tar: ": {**layout, packed: blob[packed][:-20]},
        "does not match its digest": {**layout, manifest: blob[manifest].replace(b"layers", b"Layers")},
        "layer blobs/sha256/": {name: raw for name, raw in layout.items() if name != packed},
        "not a sha256 descriptor": {**layout, "index.json": b'{"manifests": [{"digest": "sha256:../../x"}]}'},
        "is not JSON": {**layout, "index.json": b"[" * 100_000},
        "holds no image for": {**layout, "index.json": b'{"manifests": []}'},
    }


@pytest.mark.parametrize("words", list(broken_archives()))
@pytest.mark.parametrize("form", ["directory", "tar"])
def test_broken_archives_are_refused_with_a_reason(
    store: Store, tmp_path: Path, words: str, form: str
) -> None:
    files = broken_archives()[words]
    path = directory_of(files, tmp_path / "d") if form == "directory" else tar_of(files, tmp_path / "x.tar")
    with pytest.raises(BadImage) as caught:
        store.load(path, "x:1")
    said = caught.value.message
    if form == "tar" or "is missing" not in words:
        assert words in said
    assert str(path) in said
    assert caught.value.hint
    assert_untouched(tmp_path / "store")


def test_files_that_are_no_archives(store: Store, tmp_path: Path) -> None:
    for name, raw in {
        "text": b"hello",
        "empty": b"",
        "gz": gzip.compress(b"x"),
        "cut.gz": gzip.compress(b"x" * 999)[:20],
    }.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(BadImage) as caught:
            store.load(tmp_path / name, "x:1")
        assert str(tmp_path / name) in caught.value.message
    with pytest.raises(UserError, match="No such file"):
        store.load(tmp_path / "nothing", None)
    assert_untouched(tmp_path / "store")


def test_an_archive_with_a_device_in_place_of_a_file_is_not_read(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(header("manifest.json", "s", "/etc/passwd"))
    with pytest.raises(BadImage):
        store.load(path, "x:1")


def test_an_image_larger_than_the_disk_is_refused_before_it_is_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        total, used, free = 1 << 30, 1 << 29, 100

    monkeypatch.setattr(bundles.shutil, "disk_usage", lambda _: Usage)
    for path in (tar_of(docker_files(LAYERS), tmp_path / "x.tar"), tmp_path / "x.tar.gz"):
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress((tmp_path / "x.tar").read_bytes()))
        with pytest.raises(UserError, match="are free"):
            store.load(path, None)
    assert_untouched(tmp_path / "store")


def test_documents_are_not_read_without_end(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "MAX_DOCUMENT_BYTES", 10)
    with pytest.raises(BadImage, match="larger than"):
        store.load(tar_of(docker_files(LAYERS), tmp_path / "x.tar"), None)
