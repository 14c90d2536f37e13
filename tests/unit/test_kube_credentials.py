"""Credentials: kubeconfigs, tokens that change, what a pod is given; what is not supported is refused by name."""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from slurmlet.base.errors import SiteError, SlurmletError, UserError
from slurmlet.kube import credentials
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.credentials import Credentials, from_kubeconfig, in_cluster
from tests.unit.loopback import api_server, make_keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def kubeconfig(path: Path, cluster: dict[str, Any], user: dict[str, Any], **context: str) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1", **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", **context}},
            {"name": "there", "context": {"cluster": "gone", "user": "u"}},
        ],
    }
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize("embedded", [True, False])
def test_a_kubeconfig_with_certificates_inside_or_beside_it(
    keys: Path, tmp_path: Path, embedded: bool
) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            api.on("GET", "/x", {"ok": True})
            for name in ("ca.crt", "hub.crt", "hub.key"):
                (tmp_path / name).write_bytes((keys / name).read_bytes())
            if embedded:
                cluster = {"certificate-authority-data": data(keys / "ca.crt")}
                user = {"client-certificate-data": data(keys / "hub.crt"), "client-key": "hub.key"}
            else:
                cluster = {"certificate-authority": "ca.crt"}
                user = {"client-certificate": "hub.crt", "client-key": "hub.key"}
            path = kubeconfig(
                tmp_path / "config", {**cluster, "server": api.url + "/"}, user, namespace="mine"
            )
            found = from_kubeconfig(path)
            assert found.namespace == "mine"
            async with ApiClient(found) as client:
                assert await client.get("/x") == {"ok": True}

    asyncio.run(run())


def test_a_server_below_a_path_and_by_another_name(keys: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            api.on("GET", "/proxy/one/x", {"ok": True})
            files = {
                "ca_file": keys / "ca.crt",
                "certificate_file": keys / "hub.crt",
                "key_file": keys / "hub.key",
            }
            below = f"{api.url}/proxy/one"
            async with ApiClient(Credentials(below, **files, server_name="hub.slurmlet")) as client:  # type: ignore[arg-type]
                assert await client.get("/x") == {"ok": True}
            async with ApiClient(Credentials(below, **files, server_name="other.example")) as client:  # type: ignore[arg-type]
                with pytest.raises(ApiError, match="certificate"):
                    await client.get("/x")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("cluster", "user", "said"),
    [
        ({}, {"exec": {"command": "aws"}}, "exec"),
        ({}, {"auth-provider": {"name": "gcp"}}, "auth-provider"),
        ({}, {"username": "a", "password": "b"}, "username, password"),
        ({}, {"token": "x", "as": "root"}, "as"),
        ({}, {"client-certificate-data": "eA=="}, "without a key"),
        ({"certificate-authority-data": "no base64!"}, {}, "not base64"),
        ({"server": "http://127.0.0.1:1"}, {}, "https://"),
        ({"insecure-skip-tls-verify": True}, {}, "insecure-skip-tls-verify"),
        ({"proxy-url": "socks5://x"}, {}, "proxy-url"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        from_kubeconfig(kubeconfig(tmp_path / "config", cluster, user))


@pytest.mark.parametrize(
    ("text", "context", "said"),
    [
        ("", "", "is not a kubeconfig file"),
        ("a: [", "", "cannot be read"),
        ("contexts: []", "x", "no context 'x'"),
        ("contexts: [{name: x, context: {cluster: y}}]", "x", "no cluster 'y'"),
    ],
)
def test_a_file_that_is_no_kubeconfig(tmp_path: Path, text: str, context: str, said: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(UserError, match=said):
        from_kubeconfig(tmp_path / "config", context)
    with pytest.raises(UserError, match="cannot be read"):
        from_kubeconfig(tmp_path / "none")


def test_a_pods_own_credentials(tmp_path: Path) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(SiteError, match="not in a pod"):
        in_cluster(environment, tmp_path)
    (tmp_path / "token").write_text("t\n")
    (tmp_path / "namespace").write_text("mine")
    found = in_cluster(environment, tmp_path)
    assert (found.server, found.namespace) == ("https://[fd00::1]:443", "mine")
    assert (found.token_file, found.ca_file) == (tmp_path / "token", tmp_path / "ca.crt")
    with pytest.raises(SiteError, match="not in a pod"):
        in_cluster({}, tmp_path)


class Door:
    """Lets in who says the right token."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.said: list[str] = []

    async def __call__(self, request: web.Request) -> web.Response:
        self.said.append(request.headers.get("Authorization", ""))
        good = self.said[-1] == f"Bearer {self.token}"
        return web.json_response({"ok": True}) if good else web.json_response({"message": "who?"}, status=401)


def by_token(keys: Path, url: str, token_file: Path) -> Credentials:
    # The scripted server asks for a certificate in any case.
    return Credentials(
        url,
        ca_file=keys / "ca.crt",
        certificate_file=keys / "hub.crt",
        key_file=keys / "hub.key",
        token_file=token_file,
    )


def test_a_token_that_was_replaced_is_read_again_without_a_failed_request(keys: Path, tmp_path: Path) -> None:
    async def run() -> None:
        token = tmp_path / "token"
        token.write_text("first\n")
        async with api_server(keys) as api, ApiClient(by_token(keys, api.url, token)) as client:
            door = Door("first")
            api.on("GET", "/x", door)
            await client.get("/x")
            door.token = "second"
            token.write_text("second")
            assert await client.get("/x") == {"ok": True}
            assert door.said == ["Bearer first", "Bearer first", "Bearer second"]
            door.token = "third"
            with pytest.raises(ApiError) as error:
                await client.get("/x")
            assert error.value.status == 401
            assert len(door.said) == 5

    asyncio.run(run())


def test_a_token_is_read_again_as_time_goes_by_and_kept_while_the_file_cannot_be_read(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_TOKEN_FRESH_S", -1.0)

    async def run() -> None:
        token = tmp_path / "token"
        async with api_server(keys) as api, ApiClient(by_token(keys, api.url, token)) as client:
            with pytest.raises(SlurmletError, match="cannot be read"):
                await client.get("/x")
            door = Door("b")
            api.on("GET", "/x", door)
            token.write_text("b")
            await client.get("/x")
            token.unlink()
            assert await client.get("/x") == {"ok": True}

    asyncio.run(run())


def test_a_pair_leaves_no_file_behind(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = ssl.create_default_context()
    credentials.load_pair(context, (keys / "hub.crt").read_bytes(), (keys / "hub.key").read_bytes())
    assert list(tmp_path.iterdir()) == []
