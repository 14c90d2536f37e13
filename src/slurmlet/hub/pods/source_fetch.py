"""Fetches what pods draw on: config maps, secrets, claims, service account tokens, pull credentials."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from slurmlet.images.registry_credentials import auths_from_secrets
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.model.claims import claim_name
from slurmlet.model.pod_sources import (
    MissingSource,
    Needs,
    Sources,
    Token,
    config_map_data,
    needs,
    secret_data,
    volume_needs,
)

Obj = Mapping[str, Any]
# Objects read already, by path; None where there is none. Shared by whoever reads for many pods at once.
Memo = dict[str, Any]
_TRUST_BUNDLES = "/apis/certificates.k8s.io/v1beta1/clustertrustbundles"
_ROOTS, _ROOTS_S = "kube-root-ca.crt", 60.0


class Roots:
    """The cluster's authority as each namespace has it, and nearly every pod mounts it.

    The controller manager writes it, and puts it right when somebody changes it: what was read a minute ago will do, and
    a pod that starts alone starts 4 ms sooner. One that was not there yet is asked for again.
    """

    def __init__(self) -> None:
        self._read: dict[str, tuple[float, Any]] = {}

    def memo(self, namespace: str) -> Memo:
        at_s, found = self._read.get(namespace, (0.0, None))
        return {_path(namespace): found} if found and time.monotonic() - at_s < _ROOTS_S else {}

    def keep(self, namespace: str, memo: Memo) -> None:
        found = memo.get(_path(namespace))
        if found is not None and self._read.get(namespace, (0.0, None))[1] is not found:
            now_s = time.monotonic()
            # Also forgets namespaces that nobody starts pods in.
            self._read = {name: kept for name, kept in self._read.items() if now_s - kept[0] < _ROOTS_S}
            self._read[namespace] = now_s, found


def _path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps/{_ROOTS}"


async def gather(client: ApiClient, pod: Obj, *, with_tokens: bool, roots: Roots | None = None) -> Sources:
    """All sources of a pod that exist now; what is missing is simply absent (`Sources` complains when it matters)."""
    wanted, namespace = needs(pod), pod["metadata"]["namespace"]
    memo = roots.memo(namespace) if roots is not None else {}
    read, claims, tokens = await asyncio.gather(
        _read(client, pod, wanted, memo),
        _claims(client, pod),
        _tokens(client, pod, wanted.tokens if with_tokens else ()),
    )
    if roots is not None:
        roots.keep(namespace, memo)
    return replace(read, claims=claims, tokens=tokens)


async def add_tokens(client: ApiClient, pod: Obj, sources: Sources) -> Sources:
    """The same sources with fresh tokens."""
    return replace(sources, tokens=await _tokens(client, pod, needs(pod).tokens))


async def gather_files(client: ApiClient, pod: Obj, tokens: Iterable[Token], memo: Memo) -> Sources:
    """What a running pod's volumes of files show, with new tokens for those named."""
    read = await _read(client, pod, volume_needs(pod), memo)
    return replace(read, tokens=await _tokens(client, pod, tokens))


async def _read(client: ApiClient, pod: Obj, wanted: Needs, memo: Memo) -> Sources:
    namespace = pod["metadata"]["namespace"]
    config_maps, secrets, bundles = await asyncio.gather(
        _objects(client, namespace, "configmaps", wanted.config_maps, memo),
        _objects(client, namespace, "secrets", wanted.secrets, memo),
        _one(client, _TRUST_BUNDLES, memo) if wanted.trust_bundles else asyncio.sleep(0),
    )
    versions = {("configmaps", name): obj["metadata"]["resourceVersion"] for name, obj in config_maps.items()}
    versions |= {("secrets", name): obj["metadata"]["resourceVersion"] for name, obj in secrets.items()}
    return Sources(
        config_maps={name: config_map_data(obj) for name, obj in config_maps.items()},
        secrets={name: secret_data(obj) for name, obj in secrets.items()},
        trust_bundles=(bundles or {}).get("items") or (),
        versions=versions,
    )


async def _claims(client: ApiClient, pod: Obj) -> dict[str, tuple[Obj | None, Obj | None]]:
    found = {}
    for volume in pod["spec"].get("volumes", ()):
        name = claim_name(pod, volume)
        if not name:
            continue
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/persistentvolumeclaims/{name}"
        claim = await _one(client, path, {})
        bound = ((claim or {}).get("spec") or {}).get("volumeName")
        persistent = await _one(client, f"/api/v1/persistentvolumes/{bound}", {}) if bound else None
        found[volume["name"]] = (claim, persistent)
    return found


async def _tokens(client: ApiClient, pod: Obj, wanted: Iterable[Token]) -> dict[Token, str]:
    return {token: await _token(client, pod, token) for token in wanted}


async def pull_credentials(client: ApiClient, pod: Obj) -> dict[str, dict[str, str]]:
    """Registry credentials from the pod's imagePullSecrets. A missing secret is skipped, as the kubelet does."""
    names = [one.get("name", "") for one in pod["spec"].get("imagePullSecrets") or ()]
    if not names:
        return {}
    found = await _objects(client, pod["metadata"]["namespace"], "secrets", names, {})
    return auths_from_secrets(found.values())


async def _objects(
    client: ApiClient, namespace: str, kind: str, names: Iterable[str], memo: Memo
) -> dict[str, Any]:
    wanted = [name for name in names if name]
    found = await asyncio.gather(
        *(_one(client, f"/api/v1/namespaces/{namespace}/{kind}/{name}", memo) for name in wanted)
    )
    return {name: obj for name, obj in zip(wanted, found, strict=True) if obj is not None}


async def _one(client: ApiClient, path: str, memo: Memo) -> Any:
    """The object, or None where there is none."""
    if path not in memo:
        try:
            memo[path] = await client.read(path)
        except ApiError as error:
            if error.status != 404:
                raise
            memo[path] = None
    return memo[path]


async def _token(client: ApiClient, pod: Obj, token: Token) -> str:
    metadata = pod["metadata"]
    account = pod["spec"].get("serviceAccountName") or "default"
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": [token.audience] if token.audience else [],
            "expirationSeconds": token.expiry_s,
            "boundObjectRef": {
                "kind": "Pod",
                "apiVersion": "v1",
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        },
    }
    path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
    try:
        answer = await client.create(path, request)
    except ApiError as error:
        if error.status == 404:
            raise MissingSource(f'serviceaccount "{account}" not found') from error
        raise
    return str(answer["status"]["token"])
