"""metrics.k8s.io as the aggregator asks for it: who may ask, what is chosen, what is not there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from slurmlet.base.errors import UserError
from slurmlet.hub.kubelet import metrics_api
from slurmlet.hub.kubelet.metrics_api import MetricsServer
from slurmlet.kube.client import ApiError
from slurmlet.model.usage_samples import ContainerSample, Measured, PodSample

STARTED = "2026-01-01T00:00:00Z"


def make_pod(name: str, namespace: str = "ns", **labels: str) -> Any:
    metadata = {"name": name, "namespace": namespace, "uid": f"u-{name}", "labels": labels}
    pod = {"metadata": metadata, "spec": {"nodeName": "batch"}, "status": {"startTime": STARTED}}
    return SimpleNamespace(state=SimpleNamespace(pod=pod, uid=f"u-{name}", node="batch"))


class Pods:
    def __init__(self, *workers: Any) -> None:
        self._workers = workers

    def __iter__(self) -> Iterator[Any]:
        return iter(self._workers)

    def named(self, namespace: str, name: str) -> Any:
        wanted = (namespace, name)
        return next(
            (
                one
                for one in self
                if (one.state.pod["metadata"]["namespace"], one.state.pod["metadata"]["name"]) == wanted
            ),
            None,
        )


class Usage:
    """Every pod uses half a core, but for those whose runner is silent."""

    def __init__(self, silent: tuple[str, ...] = ()) -> None:
        self._silent = silent

    async def look(self, states: Any) -> dict[str, Measured]:
        now = PodSample(1767225610.0, (ContainerSample("c", STARTED, 5.0, 1 << 20, 1 << 20, 1),))
        return {state.uid: Measured(now) for state in states if state.uid not in self._silent}


def server(*workers: Any, silent: tuple[str, ...] = ()) -> MetricsServer:
    nodes = SimpleNamespace(
        objects=lambda: [{"metadata": {"name": name, "labels": {"p": name}}} for name in ("batch", "short")]
    )
    return MetricsServer(None, Pods(*workers), nodes, Usage(silent))  # type: ignore[arg-type]


def ask(handler: Any, path: str = "/", **match: str) -> tuple[int, Any]:
    async def main() -> Any:
        return await handler(make_mocked_request("GET", path, match_info=match))

    answer = asyncio.run(main())
    return answer.status, json.loads(answer.body)


def names(answer: Any) -> list[str]:
    return [one["metadata"]["name"] for one in answer["items"]]


def test_pods_are_listed_in_order_and_silent_ones_are_left_out() -> None:
    made = server(make_pod("b"), make_pod("a"), make_pod("c", "other"), make_pod("mute"), silent=("u-mute",))
    status, told = ask(made._list_pods)
    assert (status, told["kind"], names(told)) == (200, "PodMetricsList", ["a", "b", "c"])
    assert told["items"][0]["containers"][0]["usage"]["cpu"] == "500000000n"


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/?labelSelector=app%3Dweb", ["a"]),
        ("/?labelSelector=app%21%3Dweb", ["b"]),
        ("/?fieldSelector=metadata.name%3Db", ["b"]),
    ],
)
def test_selectors_choose(path: str, found: list[str]) -> None:
    made = server(make_pod("a", app="web"), make_pod("b"), make_pod("z", "other", app="web"))
    assert names(ask(made._list_pods, path, namespace="ns")[1]) == found


def test_one_pod_and_one_that_is_not_there() -> None:
    made = server(make_pod("a"), make_pod("mute"), silent=("u-mute",))
    assert ask(made._get_pod, namespace="ns", name="a")[1]["metadata"]["name"] == "a"
    for name in ("nobody", "mute"):
        status, told = ask(made._get_pod, namespace="ns", name=name)
        assert (status, told["reason"]) == (404, "NotFound")


def test_nodes_sum_up_their_pods() -> None:
    made = server(make_pod("a"), make_pod("b"))
    _, told = ask(made._list_nodes)
    assert names(told) == ["batch", "short"]
    _, one = ask(made._get_node, name="batch")
    _, idle = ask(made._get_node, name="short")
    assert one["usage"]["memory"] != idle["usage"]["memory"]
    assert ask(made._get_node, name="nobody")[0] == 404


def behind(handler: Any, common_name: str | None) -> tuple[int, Any]:
    async def main() -> Any:
        transport = Mock()
        subject = ((("commonName", common_name),),) if common_name else ()
        transport.get_extra_info = lambda name, default=None: (
            {"subject": subject} if name == "peercert" else None
        )
        request = make_mocked_request("GET", "/", transport=transport)
        return await metrics_api._only_the_aggregator(request, handler)

    answer = asyncio.run(main())
    return answer.status, json.loads(answer.body)


@pytest.mark.parametrize("name", [None, "slurmlet:pod:u-1", "system:admin"])
def test_nobody_but_the_aggregator_is_answered(name: str | None) -> None:
    status, told = behind(metrics_api._group, name)
    assert (status, told["reason"]) == (403, "Forbidden")


async def _bad(_request: web.Request) -> web.Response:
    raise UserError("no selector", hint="")


async def _missing(_request: web.Request) -> web.Response:
    raise web.HTTPNotFound(text="no such path")


def test_faults_are_told_as_kubernetes_tells_them() -> None:
    assert behind(_bad, metrics_api.AGGREGATOR) == (
        400,
        {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "no selector",
            "reason": "BadRequest", "code": 400,
        },
    )  # fmt: skip
    assert behind(_missing, metrics_api.AGGREGATOR)[1]["reason"] == "NotFound"


def test_discovery_names_what_is_served() -> None:
    assert behind(metrics_api._group, metrics_api.AGGREGATOR)[1]["name"] == "metrics.k8s.io"
    told = ask(metrics_api._resources)[1]
    assert [one["name"] for one in told["resources"]] == ["nodes", "pods"]
    assert ask(metrics_api._openapi_v2)[0] == ask(metrics_api._openapi_v3)[0] == 200


def test_registering_again_updates_what_is_there(tmp_path: Any) -> None:
    (tmp_path / "hub-ca.crt").write_bytes(b"pem")
    settings: Any = SimpleNamespace(pki=lambda name: tmp_path / name, api_address="192.0.2.1")
    patched: list[str] = []

    class Client:
        def __init__(self, status: int) -> None:
            self.status = status

        async def create(self, path: str, _obj: Any) -> None:
            raise ApiError(self.status, "it is there")

        async def patch(self, path: str, _obj: Any) -> None:
            patched.append(path)

    asyncio.run(metrics_api.register(Client(409), settings, 4443))  # type: ignore[arg-type]
    assert len(patched) == 4
    assert patched[-1].endswith("/apiservices/v1beta1.metrics.k8s.io")
    with pytest.raises(ApiError):
        asyncio.run(metrics_api.register(Client(500), settings, 4443))  # type: ignore[arg-type]
