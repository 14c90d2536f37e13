"""Discovery: the preferred version that has the kind; what was not there yet is looked for again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slurmlet.kube.client import ApiError
from slurmlet.kube.discovery import Discovery
from tests.unit.loopback import Api, api_server, make_keys

GROUP = {
    "preferredVersion": {"version": "v1"},
    "versions": [{"version": "v2alpha1"}, {"version": "v1"}],
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def served(keys: Path, scenario: Callable[[Api, Discovery], Awaitable[None]]) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            await scenario(api, Discovery(api.client))

    asyncio.run(run())


def resources(*found: tuple[str, str, bool]) -> dict[str, object]:
    return {"resources": [{"name": name, "kind": kind, "namespaced": inside} for name, kind, inside in found]}


def test_paths_of_core_kinds(keys: Path) -> None:
    async def scenario(api: Api, discovery: Discovery) -> None:
        api.on(
            "GET",
            "/api/v1",
            resources(("nodes", "Node", False), ("pods", "Pod", True), ("pods/status", "Pod", True)),
        )
        pod, node = await discovery.resource("Pod"), await discovery.resource("Node")
        assert pod.path("p", "ns", "status") == "/api/v1/namespaces/ns/pods/p/status"
        assert (pod.path(), pod.path(namespace="ns")) == ("/api/v1/pods", "/api/v1/namespaces/ns/pods")
        assert (node.path("n", "ignored"), node.api_version) == ("/api/v1/nodes/n", "v1")
        assert pod.subresources == {"status"}

    served(keys, scenario)


def test_the_preferred_version_first_then_others_and_only_once(keys: Path) -> None:
    async def scenario(api: Api, discovery: Discovery) -> None:
        api.on("GET", "/apis/x.io", GROUP)
        api.on("GET", "/apis/x.io/v1", resources(("things", "Thing", True)))
        api.on("GET", "/apis/x.io/v2alpha1", resources(("things", "Thing", True), ("news", "New", False)))
        thing, new = await discovery.resource("Thing", "x.io"), await discovery.resource("New", "x.io")
        assert (thing.api_version, new.api_version) == ("x.io/v1", "x.io/v2alpha1")
        count = len(api.requests)
        assert await discovery.resource("Thing", "x.io") is thing
        assert len(api.requests) == count
        discovery.forget("Thing", "x.io")
        assert await discovery.resource("Thing", "x.io") == thing
        assert len(api.requests) > count

    served(keys, scenario)


def test_a_kind_that_comes_later_is_found_then(keys: Path) -> None:
    async def scenario(api: Api, discovery: Discovery) -> None:
        api.on("GET", "/apis/x.io", 404, GROUP)
        api.on("GET", "/apis/x.io/v1", resources())
        api.on("GET", "/apis/x.io/v2alpha1", resources(), resources(("things", "Thing", True)))
        assert not await discovery.has("Thing", "x.io")
        with pytest.raises(ApiError, match=r"serves no kind Thing in group 'x\.io'"):
            await discovery.resource("Thing", "x.io")
        assert await discovery.has("Thing", "x.io")
        api.on("GET", "/apis/y.io", 503)
        with pytest.raises(ApiError) as error:
            await discovery.has("Thing", "y.io")
        assert error.value.status == 503

    served(keys, scenario)
