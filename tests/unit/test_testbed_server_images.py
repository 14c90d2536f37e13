"""Images of servers: what decides that one is made anew, and that what is written is an image."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from slurmlet.images.archives import find_images
from slurmlet.images.bundles import open_bundle
from slurmlet.testbed import server_images
from slurmlet.testbed.debian_packages import Archive
from slurmlet.upstream import pins

IMAGE = server_images.IMAGES[0]


def tree(root: Path) -> Path:
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/program").write_bytes(b"x" * 1000)
    (root / "usr/bin/program").chmod(0o755)
    (root / "bin").symlink_to("usr/bin")
    return root


def test_the_archive_is_an_image_with_the_tree(tmp_path: Path) -> None:
    server_images.write_archive(tree(tmp_path / "t"), IMAGE, tmp_path / "made.tar")
    with open_bundle(tmp_path / "made.tar", tmp_path) as bundle:
        (image,) = find_images(bundle, pins.architecture()[0])
        assert image.names == (IMAGE.reference,)
        with bundle.open(image.layers[0].name) as opened, tarfile.open(fileobj=opened) as layer:
            kept = {member.name: member for member in layer}
    assert (kept["usr/bin/program"].size, kept["usr/bin/program"].mode) == (1000, 0o755)
    assert kept["bin"].linkname == "usr/bin"
    assert {member.uid for member in kept.values()} == {0}


def test_the_same_tree_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        server_images.write_archive(tree(tmp_path / name), IMAGE, tmp_path / f"{name}.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_a_changed_recipe_is_another_image() -> None:
    changed = replace(IMAGE, packages=(*IMAGE.packages, "one-more"))
    assert server_images.image_key(changed) != server_images.image_key(IMAGE)
    assert len({server_images.image_key(image) for image in server_images.IMAGES}) == len(
        server_images.IMAGES
    )


def test_apt_runs_in_the_hosts_root_only_and_installs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of its own does not keep apt from installing into the machine; another root and --simulate do."""
    calls: list[list[str]] = []

    def note(argv: list[str], **_: object) -> object:
        calls.append(argv)
        return type("Done", (), {"stdout": "Inst tiny (1.0 Debian:13 [amd64])\n"})()

    monkeypatch.setattr("slurmlet.testbed.debian_packages.run", note)
    root = tmp_path / "root"
    (root / "etc/apt").mkdir(parents=True)
    (root / "etc/apt/sources.list").write_text("deb http://mirror.example/debian trixie main\n")
    archive = Archive(root, tmp_path)
    archive.refresh()
    assert "http://mirror.example/debian" in (tmp_path / "apt/sources.list").read_text()
    (tmp_path / "downloads/tiny_1.0_amd64.deb").touch()
    archive.unpack(["tiny"], (), tmp_path / "tree")
    assert [argv[argv.index(str(root)) + 1 :] for argv in calls][-1] == [
        "dpkg-deb",
        "--extract",
        "/mnt/downloads/tiny_1.0_amd64.deb",
        "/mnt/tree",
    ]
    for argv in calls:
        assert argv[0] == "unshare"
        assert 'exec chroot "$root"' in argv[argv.index("-euc") + 1]
        assert "install" not in argv or "--simulate" in argv
