"""The image store as an unprivileged user on the login host: a real registry, real archives."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

IMAGE = "localhost:5000/busybox:1"


@pytest.fixture
def image(testbed: Any) -> Any:
    """`slurmlet image …` as user1 with a store of the test's own."""
    home = testbed.run(["mktemp", "-d", "/home/user1/store-XXXXXX"]).stdout.strip()

    def call(*arguments: str, check: bool = True) -> Any:
        return testbed.run(["env", f"SLURMLET_HOME={home}", "slurmlet", "image", *arguments], check=check)

    call.home = home  # type: ignore[attr-defined]
    yield call
    testbed.run(["rm", "-rf", home])


def test_pull_list_remove(image: Any, testbed: Any) -> None:
    pulled = image("pull", IMAGE).stdout.strip()
    assert pulled.startswith("localhost:5000/busybox@sha256:")
    (entry,) = json.loads(image("ls", "-o", "json").stdout)
    assert (entry["reference"], entry["repoDigest"]) == (IMAGE, pulled)
    members = testbed.run(["tar", "tf", f"{entry['directory']}/rootfs.tar"]).stdout.split()
    assert any(name.endswith("bin/busybox") for name in members)
    others = testbed.run(["ls", entry["directory"]], user="user2", check=False)
    assert others.code != 0
    image("rm", IMAGE)
    assert json.loads(image("ls", "-o", "json").stdout) == []


def test_load_an_archive(image: Any, testbed: Any) -> None:
    archive = testbed.run(["sh", "-c", "ls /opt/slurmlet/images/*.tar | head -n 1"]).stdout.strip()
    assert image("load", archive, "--name", "mine:1").stdout.strip() == "docker.io/library/mine:1"
    assert "docker.io/library/mine:1" in image("ls").stdout
    node = testbed.run(["ls", f"{image.home}/_store/images"], host="c1").stdout
    assert node.startswith("sha256-")


def test_errors_are_sentences(image: Any) -> None:
    for arguments, words in [
        (("pull", "localhost:5000/no-such-image:1"), "NAME_UNKNOWN"),
        (("pull", "Not Valid"), "couldn't parse image name"),
        (("load", "/etc/hostname"), "is not a readable tar archive"),
        (("rm", "nothing:1"), "no image nothing:1"),
    ]:
        failed = image(*arguments, check=False)
        assert failed.code == 1
        assert words in failed.stderr
        assert "Traceback" not in failed.stderr
