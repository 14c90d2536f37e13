"""What pods draw on, fetched from a scripted API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.hub.pods.source_fetch import Roots, gather
from slurmlet.kube.client import ApiError
from slurmlet.model.pod_sources import Token
from tests.unit.loopback import Api, api_server, make_keys

MAPS, SECRETS = "/api/v1/namespaces/ns/configmaps", "/api/v1/namespaces/ns/secrets"
TOKEN = "/api/v1/namespaces/ns/serviceaccounts/robot/token"
POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
    "spec": {
        "serviceAccountName": "robot",
        "containers": [{"name": "c", "envFrom": [{"configMapRef": {"name": "cm"}}, {"secretRef": {"name": "sec"}}]}],
        "volumes": [
            {"name": "t", "projected": {"sources": [
                {"serviceAccountToken": {"path": "a", "expirationSeconds": 3607}},
                {"serviceAccountToken": {"path": "b", "audience": "vault"}},
            ]}},
        ],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def served(keys: Path, scenario: Callable[[Api], Awaitable[None]]) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            api.on("GET", f"{MAPS}/cm", {"metadata": {"resourceVersion": "1"}, "data": {"a": "1"}})
            api.on("GET", f"{SECRETS}/sec", {"metadata": {"resourceVersion": "1"}, "data": {"b": "Mg=="}})
            api.on("POST", TOKEN, {"status": {"token": "jwt", "expirationTimestamp": "2036-01-01T00:00:00Z"}})
            await scenario(api)

    asyncio.run(run())


def test_everything_that_is_there_comes(keys: Path) -> None:
    async def scenario(api: Api) -> None:
        sources = await gather(api.client, POD, with_tokens=True)
        assert sources.contents("configmap", "cm", False) == {"a": b"1"}
        assert sources.contents("secret", "sec", False) == {"b": b"2"}
        assert set(sources.tokens) == {Token("", 3607), Token("vault", 3600)}

    served(keys, scenario)


def test_tokens_are_bound_to_their_pod(keys: Path) -> None:
    async def scenario(api: Api) -> None:
        await gather(api.client, POD, with_tokens=True)
        asked = sorted(
            (body["spec"] for _, body in api.seen("POST", TOKEN)), key=lambda spec: spec["audiences"]
        )
        assert [spec["audiences"] for spec in asked] == [[], ["vault"]]
        assert [spec["expirationSeconds"] for spec in asked] == [3607, 3600]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": "p", "uid": "u-1"}
        assert [spec["boundObjectRef"] for spec in asked] == [bound, bound]

    served(keys, scenario)


def test_no_token_is_made_before_one_is_needed(keys: Path) -> None:
    async def scenario(api: Api) -> None:
        assert not (await gather(api.client, POD, with_tokens=False)).tokens
        assert api.seen("POST", TOKEN) == []

    served(keys, scenario)


def test_what_is_missing_is_absent(keys: Path) -> None:
    async def scenario(api: Api) -> None:
        api.on("GET", f"{MAPS}/cm", 404)
        sources = await gather(api.client, POD, with_tokens=False)
        assert sources.contents("configmap", "cm", True) is None
        assert sources.contents("secret", "sec", False) == {"b": b"2"}

    served(keys, scenario)


@pytest.mark.parametrize("status", [403, 500])
def test_what_cannot_be_read_is_not_taken_for_missing(keys: Path, status: int) -> None:
    async def scenario(api: Api) -> None:
        api.on("GET", f"{SECRETS}/sec", status)
        with pytest.raises(ApiError):
            await gather(api.client, POD, with_tokens=False)

    served(keys, scenario)


def test_the_authority_of_a_namespace_is_read_once_for_pods_that_follow_each_other(keys: Path) -> None:
    pod = {
        **POD,
        "spec": {**POD["spec"], "volumes": [{"name": "v", "configMap": {"name": "kube-root-ca.crt"}}]},
    }

    async def scenario(api: Api) -> None:
        roots = Roots()
        api.on("GET", f"{MAPS}/kube-root-ca.crt", 404)
        sources = await gather(api.client, pod, with_tokens=False, roots=roots)
        assert sources.contents("configmap", "kube-root-ca.crt", True) is None
        # One that was not there yet is asked for again.
        found = {"metadata": {"resourceVersion": "1"}, "data": {"ca.crt": "x"}}
        api.on("GET", f"{MAPS}/kube-root-ca.crt", found)
        for _ in range(3):
            sources = await gather(api.client, pod, with_tokens=False, roots=roots)
            assert sources.contents("configmap", "kube-root-ca.crt", False) == {"ca.crt": b"x"}
        assert len(api.seen("GET", f"{MAPS}/kube-root-ca.crt")) == 2
        elsewhere = {**pod, "metadata": {**pod["metadata"], "namespace": "elsewhere"}}
        api.on("GET", "/api/v1/namespaces/elsewhere/configmaps/kube-root-ca.crt", found)
        await gather(api.client, elsewhere, with_tokens=False, roots=roots)
        assert len(api.seen("GET", "/api/v1/namespaces/elsewhere/configmaps/kube-root-ca.crt")) == 1

    served(keys, scenario)
