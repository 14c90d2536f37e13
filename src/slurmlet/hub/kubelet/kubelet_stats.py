"""What a kubelet tells of its pods and itself: `/pods`, `/runningpods/`, `/stats/summary`, `/metrics/resource`, `/metrics`.

The hub is the kubelet of every node, all at one address. Which node is meant is in the header that the API server's
proxy adds; who comes without it (nobody but the API server may come) is told about all nodes.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from slurmlet.base.clock import rfc3339
from slurmlet.hub.hub_metrics import Counts
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.kubelet.pod_usage import Usage
from slurmlet.hub.network.pod_network import Network
from slurmlet.hub.nodes.partition_node_controller import PartitionNodeController
from slurmlet.hub.pods.pod_manager import Pods
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.model.container_reports import containers_of
from slurmlet.model.stats_summary import Family, NodeFacts, exposition, resource_metrics, summary
from slurmlet.model.usage_samples import Measured

# As the API server's proxy writes it: /api/v1/nodes/<name> or <scheme>:<name>:<port>, then /proxy/…
_PROXIED = re.compile(r"/api/v1/nodes/(?:https?:)?([a-z0-9.-]+)(?::[a-z0-9]*)?/proxy(?:/.*)?")
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def node_asked(headers: Mapping[str, str]) -> str | None:
    found = _PROXIED.fullmatch(headers.get("X-Forwarded-Uri", ""))
    return found[1] if found else None


class StatServer:
    def __init__(
        self,
        pods: Pods,
        nodes: PartitionNodeController,
        usage: Usage,
        watch: JobWatch,
        counts: Counts,
        network: Network | None = None,
    ) -> None:
        self._pods = pods
        self._nodes = nodes
        self._usage = usage
        self._watch = watch
        self._counts = counts
        self._network = network

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/pods", self._list_pods)
        router.add_get("/runningpods/", self._list_running)
        router.add_get("/stats/summary", self._summary)
        router.add_get("/metrics/resource", self._resource)
        router.add_get("/metrics", self._metrics)

    def _states(self, request: web.Request) -> list[PodState]:
        node = node_asked(request.headers)
        return [worker.state for worker in self._pods if node is None or worker.state.node == node]

    async def _list_pods(self, request: web.Request) -> web.Response:
        return _pod_list([state.pod for state in self._states(request)])

    async def _list_running(self, request: web.Request) -> web.Response:
        told = (running_pod(state) for state in self._states(request))
        return _pod_list([pod for pod in told if pod["spec"]["containers"]])

    async def _summary(self, request: web.Request) -> web.Response:
        small = request.query.get("only_cpu_and_memory", "").lower() in ("true", "1")
        states = self._states(request)
        measured = await self._usage.look(states, space=not small)
        facts = self._facts(request, states, measured)
        told = summary(facts, _with_objects(states, measured), only_cpu_and_memory=small)
        return web.json_response(told)

    async def _resource(self, request: web.Request) -> web.Response:
        states = self._states(request)
        measured = await self._usage.look(states)
        facts = self._facts(request, states, measured)
        families = resource_metrics(facts, _with_objects(states, measured), self._usage.silent(states))
        return _exposed(families)

    def _facts(
        self, request: web.Request, states: list[PodState], measured: Mapping[Any, Measured]
    ) -> NodeFacts:
        name = node_asked(request.headers) or ""
        partition = self._nodes.partition_of(name)
        nodes = {name} if name else {state.node for state in states}
        return NodeFacts(
            name=name,
            start_time=self._nodes.made_at(name) or rfc3339(),
            now_s=time.time(),
            ended_cpu_s=sum(self._usage.other_cpu_s(node, measured) for node in nodes),
            memory_bytes=partition.memory_mb << 20 if partition is not None else 0,
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        states = self._states(request)
        node = node_asked(request.headers)
        families = [
            *_of_pods(states),
            self._jobs(),
            *self._counts.families(),
            *(self._network.families() if self._network is not None else ()),
            *_of_process(self._counts.began_s),
        ]
        name = Family("kubelet_node_name", "gauge", "The node's name. The count is always 1.")
        for each in [node] if node else sorted(one["metadata"]["name"] for one in self._nodes.objects()):
            name.add(1, {"node": each})
        return _exposed([name, *families])

    def _jobs(self) -> Family:
        family = Family(
            "slurmlet_jobs", "gauge", "Slurm jobs of this cluster that slurmctld remembers, by state"
        )
        for state, count in sorted(Counter(job.state for job in self._watch.all_jobs().values()).items()):
            family.add(count, {"state": state})
        return family


def running_pod(state: PodState) -> dict[str, Any]:
    """As a kubelet sees its runtime: names and images of what runs, and no more."""
    metadata, spec = state.pod["metadata"], state.pod["spec"]
    told = containers_of(state.report)
    running = {name for name, one in told.items() if one["state"] == "running"}
    containers = [
        {"name": one["name"], "image": one["image"], "resources": {}}
        for one in (*(spec.get("initContainers") or ()), *spec["containers"])
        if one["name"] in running and state.live_link is not None
    ]
    kept = {key: metadata[key] for key in ("name", "namespace", "uid")}
    return {"metadata": {**kept, "creationTimestamp": None}, "spec": {"containers": containers}, "status": {}}


def _pod_list(items: list[dict[str, Any]]) -> web.Response:
    return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})


def _with_objects(
    states: list[PodState], measured: Mapping[Any, Measured]
) -> list[tuple[dict[str, Any], Measured]]:
    return [(state.pod, measured[state.uid]) for state in states if state.uid in measured]


def _exposed(families: list[Family]) -> web.Response:
    return web.Response(body=exposition(families).encode(), headers={"Content-Type": _TEXT})


def _of_pods(states: list[PodState]) -> list[Family]:
    pods = Family("slurmlet_pods", "gauge", "Pods the hub looks after, by phase")
    for phase, count in sorted(Counter(_phase(state) for state in states).items()):
        pods.add(count, {"phase": phase})
    links = Family("slurmlet_runner_links", "gauge", "Runners that are connected")
    links.add(sum(1 for state in states if state.live_link is not None))
    running = Family("kubelet_running_pods", "gauge", "Number of pods that have a running container")
    running.add(sum(1 for state in states if running_pod(state)["spec"]["containers"]))
    containers = Family("kubelet_running_containers", "gauge", "Number of containers, by state")
    names = {"running": "running", "terminated": "exited", "waiting": "created"}
    seen = Counter(
        names[one["state"]]
        for state in states
        if state.report is not None
        for one in (*state.report["init_containers"].values(), *state.report["containers"].values())
    )
    for state_name, count in sorted(seen.items()):
        containers.add(count, {"container_state": state_name})
    return [pods, links, running, containers]


def _phase(state: PodState) -> str:
    return str((state.pod.get("status") or {}).get("phase") or "Pending")


def _of_process(began_s: float) -> list[Family]:
    """The hub itself, under the names every Prometheus client gives."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = Family("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.")
    cpu.add(round(usage.ru_utime + usage.ru_stime, 3))
    memory = Family("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.")
    memory.add(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    files = Family("process_open_fds", "gauge", "Number of open file descriptors.")
    files.add(sum(1 for _ in Path("/proc/self/fd").iterdir()))
    start = Family(
        "process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds."
    )
    start.add(round(began_s, 3))
    return [cpu, memory, files, start]
