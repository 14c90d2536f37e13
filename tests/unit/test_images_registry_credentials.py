from __future__ import annotations

import base64
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.errors import SlurmletError
from slurmlet.images.references import parse
from slurmlet.images.registry_credentials import (
    attempts,
    auths_from_secrets,
    covers,
    docker_config,
    user_config,
)


def secret(kind: str, key: str, document: Any, name: str = "pull") -> dict[str, Any]:
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return {
        "metadata": {"name": name},
        "type": f"kubernetes.io/{kind}",
        "data": {key: base64.b64encode(raw).decode()},
    }


def test_both_secret_types_give_auths_and_the_first_of_a_registry_wins() -> None:
    found = auths_from_secrets(
        [
            secret(
                "dockerconfigjson",
                ".dockerconfigjson",
                {"auths": {"a.example": {"username": "u", "password": "1"}}},
            ),
            secret(
                "dockercfg",
                ".dockercfg",
                {"b.example": {"auth": "dTpw", "email": "x"}, "a.example": {"auth": "late"}},
            ),
            {"type": "Opaque", "data": {".dockercfg": "!!"}},
        ]
    )
    assert found == {"a.example": {"username": "u", "password": "1"}, "b.example": {"auth": "dTpw"}}


@pytest.mark.parametrize("raw", [b"not json: hunter2", b"[]", b"\xff\xfe", b""])
def test_a_broken_secret_is_named_but_never_quoted(raw: bytes) -> None:
    with pytest.raises(SlurmletError) as caught:
        auths_from_secrets([secret("dockerconfigjson", ".dockerconfigjson", raw, name="mine")])
    assert "'mine'" in caught.value.message
    assert "hunter2" not in str(caught.value)
    assert caught.value.__context__ is None or "hunter2" not in str(caught.value.__cause__)
    assert caught.value.reason == "ErrImagePull"


@pytest.mark.parametrize(
    ("key", "reference", "expected"),
    [
        ("a.example", "a.example/x", True),
        ("https://a.example/v2/", "a.example/x", True),
        ("*.example", "a.example/x", True),
        ("*.example", "a.b.example/x", False),
        ("a.example:5000", "a.example:5000/x", True),
        ("a.example", "a.example:5000/x", False),
        ("a.example/team", "a.example/team/x", True),
        ("a.example/team", "a.example/team", True),
        ("a.example/team", "a.example/teammate/x", False),
        ("https://index.docker.io/v1/", "busybox", True),
        ("docker.io", "busybox", True),
        ("docker.io/user", "user/app", True),
        ("docker.io/user", "busybox", False),
        ("evil.example", "a.example/x", False),
    ],
)
def test_keys_match_as_in_the_kubelet(key: str, reference: str, expected: bool) -> None:
    assert covers(key, parse(reference)) is expected


def test_attempts_go_from_the_most_exact_secret_to_the_users_own() -> None:
    auths = {
        "r.example": {"auth": "wide"},
        "r.example/team": {"auth": "exact"},
        "other": {"auth": "no"},
        "r.example/empty": {},
    }
    config = {
        "auths": {"r.example": {"auth": "own"}},
        "credsStore": "pass",
        "credHelpers": {"r.example": "h"},
        "x": 1,
    }
    tried = attempts(parse("r.example/team/app"), auths, config)
    assert [entry["auths"] for entry in tried] == [
        {"r.example": {"auth": "exact"}},
        {"r.example": {"auth": "wide"}},
        {"r.example": {"auth": "own"}},
        {},
    ]
    assert tried[-1] == {"auths": {}, "credHelpers": {"r.example": "h"}, "credsStore": "pass"}


def test_docker_hub_credentials_go_where_crane_looks() -> None:
    (only,) = attempts(parse("busybox"), {"docker.io": {"auth": "x"}}, {})
    assert only == {"auths": {"https://index.docker.io/v1/": {"auth": "x"}}}


def test_without_credentials_the_pull_is_anonymous() -> None:
    assert attempts(parse("busybox"), None, {}) == [{"auths": {}}]


def test_the_users_config_is_found_and_podmans_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert user_config() == {}
    (tmp_path / "podman.json").write_text('{"auths": {"p": {}}}')
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "podman.json"))
    assert user_config() == {"auths": {"p": {}}}
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text('{"auths": {"d": {}}}')
    assert user_config() == {"auths": {"d": {}}}
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"credsStore": "x"}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "other"))
    assert user_config() == {"credsStore": "x"}


def test_the_config_handed_to_crane_is_private_and_short_lived() -> None:
    with docker_config({"auths": {"a": {"auth": "secret"}}}) as directory:
        file = directory / "config.json"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert json.loads(file.read_text()) == {"auths": {"a": {"auth": "secret"}}}
    assert not directory.exists()
