"""What the testbed gives its users: slurmlet as a wheel, upstream binaries, test images."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from slurmlet.testbed import busybox_images, user_install
from slurmlet.testbed import wheel as packing
from slurmlet.testbed.testbed_plan import Paths

CHECKOUT = Path(__file__).resolve().parents[2]


class TestPacking:
    def test_the_checkout_is_found(self) -> None:
        assert packing.checkout() == CHECKOUT

    def test_a_wheel_of_the_checkout_holds_the_package_and_no_more(self, tmp_path: Path) -> None:
        wheel = packing.build_wheel(tmp_path / "made")
        names = set(zipfile.ZipFile(wheel).namelist())
        assert {"slurmlet/cli/testbed.py", "slurmlet/testbed/host_boot.py", "slurmlet/py.typed"} <= names
        assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]

    def test_an_installed_slurmlet_packs_the_same_wheel_again(self, tmp_path: Path) -> None:
        wheel = packing.build_wheel(tmp_path / "made")
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
        script = (
            "import sys, pathlib; from slurmlet.testbed import wheel as packing; assert packing.checkout() is None; "
            "print(packing.build_wheel(pathlib.Path(sys.argv[1])))"
        )
        again = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "again")],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        before, after = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
        assert set(before.namelist()) == set(after.namelist())
        assert all(before.read(n) == after.read(n) for n in before.namelist() if not n.endswith("/RECORD"))

    def test_the_fingerprint_follows_the_sources(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = tmp_path / "src/slurmlet/a.py"
        source.parent.mkdir(parents=True)
        source.write_text("one")
        monkeypatch.setattr(packing, "checkout", lambda: tmp_path)
        first = packing.fingerprint()
        (source.parent / "__pycache__").mkdir()
        (source.parent / "__pycache__/a.pyc").write_text("noise")
        assert packing.fingerprint() == first
        source.write_text("two")
        assert packing.fingerprint() != first


class TestUpstream:
    @pytest.fixture
    def paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
        source = tmp_path / "upstream"
        source.mkdir()
        (source / "kubectl").write_text("v1")
        (source / "kubectl").chmod(0o700)
        (source / "manifest.json").write_text("{}")
        monkeypatch.setattr(user_install, "ensure", lambda: source)
        made = Paths(tmp_path / "bed")
        (made.opt / "upstream").mkdir(parents=True)
        return made

    def test_only_programs_are_handed_out_and_everybody_may_run_them(self, paths: Paths) -> None:
        assert user_install.link_upstream(paths)
        (program,) = (paths.opt / "upstream").iterdir()
        assert (program.name, program.stat().st_mode & 0o777) == ("kubectl", 0o755)

    def test_what_is_fresh_is_left_alone_and_what_changed_is_not(self, paths: Paths, tmp_path: Path) -> None:
        user_install.link_upstream(paths)
        assert not user_install.link_upstream(paths)
        program = tmp_path / "upstream/kubectl"
        program.unlink()
        program.write_text("version 2")
        program.chmod(0o755)
        assert user_install.link_upstream(paths)
        assert (paths.opt / "upstream/kubectl").read_text() == "version 2"


class TestImages:
    @pytest.fixture
    def busybox(self, tmp_path: Path) -> Path:
        program = tmp_path / "busybox"
        program.write_text("#!/bin/sh\nprintf 'sh\\nls\\nbusybox\\nsh\\n'\n")
        program.chmod(0o755)
        return program

    def test_the_layer_is_the_same_bytes_each_time(self, busybox: Path) -> None:
        assert busybox_images.layer(busybox) == busybox_images.layer(busybox)

    def test_the_layer_is_a_usable_root(self, busybox: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(busybox_images.layer(busybox))) as tar:
            members = {member.name: member for member in tar}
        assert {members["bin/sh"].linkname, members["bin/ls"].linkname} == {"busybox"}
        assert members["bin/busybox"].mode == 0o755
        assert members["tmp"].mode == 0o1777
        assert (members["srv/app"].uid, members["srv/app"].gid) == (1000, 1000)
        assert {"etc/passwd", "etc/group", "proc", "sys", "dev"} <= set(members)

    def test_no_option_would_be_split_at_a_comma(self) -> None:
        """crane reads --cmd as comma-separated values."""
        assert not [option for image in busybox_images.IMAGES for option in image.options if "," in option]

    def test_another_busybox_means_other_images(self, busybox: Path) -> None:
        before = busybox_images.image_key(busybox)
        busybox.write_text(busybox.read_text() + "# newer\n")
        assert busybox_images.image_key(busybox) != before
