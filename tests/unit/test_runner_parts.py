"""Small parts of the runner: users, back-off, paths beneath a directory, scratch, ids, claims."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import slurmlet
from slurmlet.linux.safe_open import Escape, open_beneath, read_beneath
from slurmlet.runner import VERSION
from slurmlet.runner.containers.container_user import UnknownUser, User, resolve
from slurmlet.runner.containers.restart_backoff import Backoff, spoken
from slurmlet.runner.containers.root_overlay import overlay_options
from slurmlet.runner.host.sandbox import parse_ranges
from slurmlet.runner.host.scratch import Scratch, choose_base, private_and_ours
from slurmlet.runner.link.reporter import write_atomically
from slurmlet.runner.network.network_view import HostNetwork
from slurmlet.runner.pod.claim import PodDir, claim
from slurmlet.runner.volumes.etc_files import hosts_file
from slurmlet.runner.volumes.pod_volumes import VolumeError, host_path


@pytest.fixture
def image(tmp_path: Path) -> str:
    root = tmp_path / "image"
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n42:x:7:8::/:/\n"
    )
    (root / "etc/group").write_text("root:x:0:\nstaff:x:50:app,other\nweb:x:33:app\n")
    return str(root)


def who(image: str, name: str = "", uid: int | None = None, gid: int | None = None) -> User:
    return resolve(image, {"name": name, "uid": uid, "gid": gid, "groups": []})


def test_users_of_an_image(image: str) -> None:
    assert who(image) == User(0, 0, (), "/root")
    assert who(image, "app") == User(1000, 1001, (50, 33), "/home/app")
    assert who(image, "app:web") == User(1000, 33, (50,), "/home/app")
    assert who(image, "1000") == User(1000, 1001, (50, 33), "/home/app")
    assert who(image, "1000:5") == User(1000, 5, (50, 33), "/home/app")
    assert who(image, "4711") == User(4711, 0, (), "/")
    # A name made of digits is a name first.
    assert who(image, "42") == User(7, 8, (), "/")


def test_the_plan_outranks_the_image(image: str) -> None:
    assert who(image, "app", uid=5) == User(5, 0, (), "/")
    assert who(image, "app", uid=1000, gid=9) == User(1000, 9, (50, 33), "/home/app")
    assert who(image, "app", gid=9).gid == 9


def test_unknown_names_are_an_error(image: str) -> None:
    with pytest.raises(UnknownUser, match="nobody-here"):
        who(image, "nobody-here")
    with pytest.raises(UnknownUser, match="no-group"):
        who(image, "app:no-group")


def test_an_image_without_passwd_knows_root(tmp_path: Path) -> None:
    assert who(str(tmp_path)) == User(0, 0, (), "/")


def test_backoff_is_the_kubelets() -> None:
    backoff, waits = Backoff(), []
    now_s = 1000.0
    for _ in range(8):
        wait_s = backoff.wait_s(now_s, now_s)
        waits.append(wait_s)
        now_s += wait_s
        backoff.restarted(now_s)
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300]


def test_backoff_forgets_after_a_long_run() -> None:
    backoff = Backoff()
    for now_s in (0.0, 10.0, 30.0):
        backoff.restarted(now_s)
    assert backoff.wait_s(30 + 599, 30 + 599) == 40
    assert backoff.wait_s(30 + 601, 30 + 601) == 0
    backoff.restarted(30 + 601)
    assert backoff.delay_s == 10


def test_durations_are_spoken_as_go_does() -> None:
    assert [spoken(each) for each in (10, 80, 300)] == ["10s", "1m20s", "5m0s"]


def path_of(fd: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    finally:
        os.close(fd)


def test_beneath_follows_links_inside_only(tmp_path: Path) -> None:
    volume = tmp_path / "v"
    (volume / "a/b").mkdir(parents=True)
    (volume / "in").symlink_to("a/b")
    (volume / "a/up").symlink_to("../a/b")
    (volume / "out").symlink_to("/etc")
    (volume / "climb").symlink_to("../../..")
    (volume / "loop").symlink_to("loop")
    assert path_of(open_beneath(str(volume), "in")) == str(volume / "a/b")
    assert path_of(open_beneath(str(volume), "a/up")) == str(volume / "a/b")
    for path in ("out", "out/passwd", "climb", "..", "a/../../x", "loop"):
        with pytest.raises(Escape):
            open_beneath(str(volume), path)
    with pytest.raises(FileNotFoundError):
        open_beneath(str(volume), "missing")
    assert path_of(open_beneath(str(volume), "new/deep", make_dirs=True)) == str(volume / "new/deep")


def test_beneath_restarts_absolute_links_at_an_images_root(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").symlink_to("/usr/passwd")
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/passwd").write_text("of the image")
    assert read_beneath(str(tmp_path), "etc/passwd") == b"of the image"
    (tmp_path / "etc/host").symlink_to("../../../../etc/hostname")
    assert read_beneath(str(tmp_path), "etc/host") == b""


def test_scratch_of_others_is_not_used(tmp_path: Path) -> None:
    uid = os.geteuid()
    environ = {"TMPDIR": str(tmp_path)}
    expected = tmp_path / "slurmlet-77"
    assert choose_base(environ, uid, 77) == str(expected)
    assert private_and_ours(str(expected), uid)
    assert not private_and_ours(str(expected), uid + 1)
    expected.chmod(0o755)
    fresh = choose_base(environ, uid, 77)
    assert fresh != str(expected)
    assert Path(fresh).stat().st_mode & 0o777 == 0o700
    assert choose_base(environ, uid, 77) == fresh
    Path(fresh).chmod(0o755)
    assert choose_base(environ, uid, 77) not in (fresh, str(expected))
    expected.rmdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    expected.symlink_to(tmp_path / "mine")
    assert choose_base(environ, uid, 77) != str(expected)


def test_slurms_scratch_comes_first(tmp_path: Path) -> None:
    for name in ("job", "tmp"):
        (tmp_path / name).mkdir()
    environ = {"SLURM_TMPDIR": str(tmp_path / "job"), "TMPDIR": str(tmp_path / "tmp")}
    assert choose_base(environ, os.geteuid(), 5) == str(tmp_path / "job/slurmlet-5")
    environ["SLURM_TMPDIR"] = "/no/such/place"
    assert choose_base(environ, os.geteuid(), 5) == str(tmp_path / "tmp/slurmlet-5")


def test_only_files_of_runners_that_are_gone_are_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, dead = Scratch(str(tmp_path), "living"), Scratch(str(tmp_path), "dead")
    os.close(dead._lock)
    mine = Scratch(str(tmp_path), "mine")
    assert mine.abandoned() == []
    hour_later_s = time.time() + 3600
    monkeypatch.setattr("slurmlet.runner.host.scratch.time.time", lambda: hour_later_s)
    assert mine.abandoned() == [str(tmp_path / "pods/dead")]
    for scratch in (living, mine):
        os.close(scratch._lock)


def test_one_job_claims_a_pod(tmp_path: Path) -> None:
    pod = PodDir(str(tmp_path))
    assert claim(pod, "41") == ""
    assert claim(pod, "42") == "41"
    assert claim(pod, "41") == ""
    (tmp_path / "claim").write_text("")
    assert claim(pod, "41") == "unknown"


def test_atomic_files_are_private_and_leave_no_rest(tmp_path: Path) -> None:
    write_atomically(str(tmp_path / "r"), b"one")
    write_atomically(str(tmp_path / "r"), b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert (tmp_path / "r").read_bytes() == b"two"
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o600


def test_subordinate_ranges(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_text("# comment\nuser2:100000:65536\n1001:7:0\n1001:200000:65536\nbroken\nuser1:x:1\n")
    assert parse_ranges(str(file), ["user2"]) == [(100000, 65536)]
    assert parse_ranges(str(file), ["1001", "user1"]) == [(200000, 65536)]
    assert parse_ranges(str(tmp_path / "none"), ["user1"]) == []


def test_overlay_paths_are_escaped() -> None:
    options = overlay_options("/a,b:c\\d", "/u", "/w")
    assert options == "lowerdir=/a\\,b\\:c\\\\d,upperdir=/u,workdir=/w,userxattr"


def test_the_hosts_file() -> None:
    text = hosts_file(
        HostNetwork({"hostname": "pod1"}, "10.0.0.1"), ["pod1.sub", "pod1"], [["1.2.3.4", "a", "b"]]
    )
    assert text.startswith("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n")
    assert "10.0.0.1\tpod1.sub\tpod1\n" in text
    assert text.endswith("# Entries added by HostAliases.\n1.2.3.4\ta\tb\n")


def test_host_path_types(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert host_path(str(tmp_path / "file"), "File") == str(tmp_path / "file")
    assert host_path(str(tmp_path / "new"), "DirectoryOrCreate") == str(tmp_path / "new")
    assert (tmp_path / "new").is_dir()
    assert host_path(str(tmp_path / "new2"), "FileOrCreate") == str(tmp_path / "new2")
    assert host_path("/dev/null", "CharDevice") == "/dev/null"
    for path, kind in ((tmp_path / "file", "Directory"), (tmp_path, "Socket"), (tmp_path / "none", "File")):
        with pytest.raises(VolumeError, match="type check failed"):
            host_path(str(path), kind)
    with pytest.raises(VolumeError, match="not absolute"):
        host_path("relative", "")


def test_the_runner_says_the_version_of_the_package() -> None:
    assert slurmlet.__version__ == VERSION
