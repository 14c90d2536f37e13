from __future__ import annotations

import pytest

from slurmlet.images.references import InvalidImageName, default_pull_policy, is_digest, normalise, parse

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("busybox", "docker.io/library/busybox:latest"),
        ("busybox:1.36", "docker.io/library/busybox:1.36"),
        ("user/app", "docker.io/user/app:latest"),
        ("docker.io/busybox", "docker.io/library/busybox:latest"),
        ("index.docker.io/busybox", "docker.io/library/busybox:latest"),
        ("localhost/app", "localhost/app:latest"),
        ("localhost:5000/busybox:1", "localhost:5000/busybox:1"),
        ("Registry/app", "Registry/app:latest"),
        ("ghcr.io/org/team/app:v1.2.3-rc_1", "ghcr.io/org/team/app:v1.2.3-rc_1"),
        ("[::1]:5000/app", "[::1]:5000/app:latest"),
        (f"busybox@{DIGEST}", f"docker.io/library/busybox@{DIGEST}"),
        (f"busybox:1.36@{DIGEST}", f"docker.io/library/busybox@{DIGEST}"),
        (f"localhost:5000/a@{DIGEST}", f"localhost:5000/a@{DIGEST}"),
    ],
)
def test_names_are_completed_as_docker_does(written: str, normal: str) -> None:
    assert normalise(written) == normal
    assert normalise(normal) == normal


@pytest.mark.parametrize(
    "bad",
    [
        "", " ", "busybox ", " busybox", "busybox:", ":1", "a//b", "/a", "a/", "a:b:c", "a@sha256:12", "a@md5:" + "0" * 32,
        "-a", "a..b", "a:-x", "a:" + "x" * 129, "a\n", "a;rm -rf", "$(id)", "`id`", "--insecure", "http://a/b", "a b",
        "registry.example/../../etc", "x" * 256, "ab" * 32, "ü/a", "localhost:port/a", "@" + DIGEST,
    ],
)  # fmt: skip
def test_bad_names_are_refused_in_the_kubelets_words(bad: str) -> None:
    with pytest.raises(InvalidImageName) as caught:
        normalise(bad)
    assert caught.value.reason == "InvalidImageName"
    assert f'couldn\'t parse image name "{bad}"' in caught.value.message


def test_upper_case_is_named_as_the_fault() -> None:
    with pytest.raises(InvalidImageName, match=r"repository name \(library/BusyBox\) must be lowercase"):
        normalise("BusyBox")


@pytest.mark.parametrize(
    ("reference", "policy"),
    [
        ("busybox", "Always"),
        ("busybox:latest", "Always"),
        ("localhost:5000/busybox", "Always"),
        ("busybox:1", "IfNotPresent"),
        (f"busybox@{DIGEST}", "IfNotPresent"),
        (f"busybox:latest@{DIGEST}", "IfNotPresent"),
        ("Not Valid", "IfNotPresent"),
    ],
)
def test_pull_policy_defaults(reference: str, policy: str) -> None:
    assert default_pull_policy(reference) == policy


def test_repository_and_digest() -> None:
    assert parse("busybox:1").repository == "docker.io/library/busybox"
    assert is_digest(DIGEST)
    assert not is_digest(DIGEST + "0")
    assert not is_digest(DIGEST.upper())
