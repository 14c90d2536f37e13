"""metrics.k8s.io/v1beta1, served by the hub behind the API server's aggregator: `kubectl top`, autoscalers.

A port of its own that takes one certificate, the aggregator's. The API server has asked RBAC before it calls, so what it
lets through is answered. Never says a figure that no runner gave.
"""

from __future__ import annotations

import base64
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from aiohttp import web

from slurmlet.base.clock import micro_time
from slurmlet.base.errors import SlurmletError
from slurmlet.hub.hub_settings import METRICS_SERVICE, Settings
from slurmlet.hub.kubelet.pod_usage import Usage
from slurmlet.hub.nodes.partition_node_controller import PartitionNodeController
from slurmlet.hub.pods.pod_manager import Pods
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.model import label_selectors
from slurmlet.model.usage_samples import API_VERSION, GROUP, VERSION, metrics_list, node_metrics, pod_metrics

log = logging.getLogger(__name__)
AGGREGATOR = "slurmlet:front-proxy"
NAMESPACE = "kube-system"
_BASE = f"/apis/{API_VERSION}"
Obj = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _only_the_aggregator(request: web.Request, handler: Handler) -> web.StreamResponse:
    certificate = request.transport.get_extra_info("peercert") if request.transport else None
    names = [v for part in (certificate or {}).get("subject", ()) for k, v in part if k == "commonName"]
    if names != [AGGREGATOR]:
        return _refusal(403, "Forbidden", "only the API server may ask")
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refusal(error.status, error.reason, error.text or "")
    except SlurmletError as error:
        return _refusal(400, "BadRequest", error.message)


def _refusal(status: int, reason: str, message: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason.replace(" ", ""),
        "code": status,
    }
    return web.json_response(body, status=status)


class MetricsServer:
    def __init__(self, settings: Settings, pods: Pods, nodes: PartitionNodeController, usage: Usage) -> None:
        self._settings = settings
        self._pods = pods
        self._nodes = nodes
        self._usage = usage

    async def start(self, port: int) -> web.AppRunner:
        app = web.Application(middlewares=[_only_the_aggregator])
        app.router.add_get("/openapi/v2", _openapi_v2)
        app.router.add_get("/openapi/v3", _openapi_v3)
        app.router.add_get(f"/apis/{GROUP}", _group)
        app.router.add_get(_BASE, _resources)
        app.router.add_get(f"{_BASE}/pods", self._list_pods)
        app.router.add_get(f"{_BASE}/namespaces/{{namespace}}/pods", self._list_pods)
        app.router.add_get(f"{_BASE}/namespaces/{{namespace}}/pods/{{name}}", self._get_pod)
        app.router.add_get(f"{_BASE}/nodes", self._list_nodes)
        app.router.add_get(f"{_BASE}/nodes/{{name}}", self._get_node)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self._settings.api_address, port, ssl_context=self._tls()).start()
        return runner

    def _tls(self) -> ssl.SSLContext:
        pki = self._settings.pki
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pki("front-proxy-ca.crt")))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(str(pki("hub-server.crt")), str(pki("hub-server.key")))
        return context

    # Pods

    async def _list_pods(self, request: web.Request) -> web.Response:
        namespace = request.match_info.get("namespace")
        chosen = _chosen(request.query, (worker.state.pod for worker in self._pods), namespace)
        return web.json_response(metrics_list("PodMetricsList", await self._of_pods(chosen)))

    async def _get_pod(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        worker = self._pods.named(namespace, name)
        found = await self._of_pods([worker.state.pod]) if worker is not None else []
        if not found:
            return _refusal(404, "NotFound", f'podmetrics.{GROUP} "{namespace}/{name}" not found')
        return web.json_response(found[0])

    async def _of_pods(self, pods: Iterable[Obj]) -> list[Obj]:
        wanted = {pod["metadata"]["uid"]: pod for pod in pods}
        states = [worker.state for worker in self._pods if worker.state.uid in wanted]
        measured = await self._usage.look(states)
        told = (pod_metrics(wanted[uid], one) for uid, one in measured.items())
        return sorted(
            filter(None, told), key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"])
        )

    # Nodes

    async def _list_nodes(self, request: web.Request) -> web.Response:
        chosen = list(_chosen(request.query, self._nodes.objects(), None))
        return web.json_response(metrics_list("NodeMetricsList", await self._of_nodes(chosen)))

    async def _get_node(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        found = await self._of_nodes(
            [one for one in self._nodes.objects() if one["metadata"]["name"] == name]
        )
        if not found:
            return _refusal(404, "NotFound", f'nodemetrics.{GROUP} "{name}" not found')
        return web.json_response(found[0])

    async def _of_nodes(self, nodes: list[Obj]) -> list[Obj]:
        names = {node["metadata"]["name"] for node in nodes}
        states = [worker.state for worker in self._pods if worker.state.node in names]
        measured = await self._usage.look(states)
        where = {state.uid: state.node for state in states}
        now_s = time.time()
        return [
            node_metrics(
                node, [one for uid, one in measured.items() if where[uid] == node["metadata"]["name"]], now_s
            )
            for node in nodes
        ]


def _chosen(query: Mapping[str, str], objects: Iterable[Obj], namespace: str | None) -> Iterable[Obj]:
    """What the selectors of a list request leave. Raises UserError for one that is none."""
    matches = label_selectors.parse(query.get("labelSelector", ""))
    fields = label_selectors.parse(query.get("fieldSelector", ""))
    for one in objects:
        metadata = one["metadata"]
        if namespace is not None and metadata["namespace"] != namespace:
            continue
        shown = {f"metadata.{key}": metadata.get(key, "") for key in ("name", "namespace")}
        if matches(metadata.get("labels") or {}) and fields(shown):
            yield one


async def _group(_: web.Request) -> web.Response:
    version = {"groupVersion": API_VERSION, "version": VERSION}
    group = {"name": GROUP, "versions": [version], "preferredVersion": version}
    return web.json_response({"kind": "APIGroup", "apiVersion": "v1", **group})


async def _resources(_: web.Request) -> web.Response:
    verbs = ["get", "list"]
    resources = [
        {"name": "nodes", "singularName": "", "namespaced": False, "kind": "NodeMetrics", "verbs": verbs},
        {"name": "pods", "singularName": "", "namespaced": True, "kind": "PodMetrics", "verbs": verbs},
    ]
    told = {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": API_VERSION,
        "resources": resources,
    }
    return web.json_response(told)


async def _openapi_v2(_: web.Request) -> web.Response:
    """No schema: the aggregator asks for one and complains in its log where there is none to ask for."""
    info = {"title": "slurmlet metrics", "version": VERSION}
    return web.json_response({"swagger": "2.0", "info": info, "paths": {}, "definitions": {}})


async def _openapi_v3(_: web.Request) -> web.Response:
    return web.json_response({"paths": {}})


# What tells the API server where we are


async def register(client: ApiClient, settings: Settings, port: int) -> None:
    """The objects that make the aggregator call us. Raises ApiError."""
    ca = base64.b64encode(settings.pki("hub-ca.crt").read_bytes()).decode()
    for path, wanted in _objects(settings.api_address, port, ca):
        try:
            await client.create(path, wanted)
        except ApiError as error:
            if error.status != 409:
                raise
            await client.patch(f"{path}/{wanted['metadata']['name']}", wanted)


def _objects(address: str, port: int, ca: str) -> list[tuple[str, Obj]]:
    where = {"name": METRICS_SERVICE, "namespace": NAMESPACE}
    service = {
        "metadata": where,
        # No selector: its one endpoint is not a pod. No address: nobody in the cluster needs to reach it.
        "spec": {"clusterIP": "None", "ports": [{"name": "https", "port": 443, "protocol": "TCP"}]},
    }
    endpoints = {
        # The annotation changes with each start, so that the aggregator looks at once and not in half a minute.
        "metadata": {
            **where,
            "labels": {"kubernetes.io/service-name": METRICS_SERVICE},
            "annotations": {"slurmlet.io/since": micro_time()},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
    }
    role = {
        "metadata": {
            "name": "system:aggregated-metrics-reader",
            "labels": {
                f"rbac.authorization.k8s.io/aggregate-to-{who}": "true" for who in ("view", "edit", "admin")
            },
        },
        "rules": [{"apiGroups": [GROUP], "resources": ["pods", "nodes"], "verbs": ["get", "list", "watch"]}],
    }
    api = {
        "metadata": {"name": f"{VERSION}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "version": VERSION,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "service": {**where, "port": 443},
            "caBundle": ca,
        },
    }
    return [
        (f"/api/v1/namespaces/{NAMESPACE}/services", service),
        (f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices", endpoints),
        ("/apis/rbac.authorization.k8s.io/v1/clusterroles", role),
        ("/apis/apiregistration.k8s.io/v1/apiservices", api),
    ]
