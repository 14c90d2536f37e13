"""The kubelet's `/stats/summary` and `/metrics/resource` of one node, from samples of its pods. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from slurmlet.base.clock import parse_rfc3339, rfc3339
from slurmlet.model.usage_samples import Measured, Space, cpu_cores, pod_cores, pod_memory_bytes

Obj = dict[str, Any]
_NANO = 1_000_000_000

# A gauge of the hub's that `slurmlet status` shows.
SLURM_REQUESTS = "slurmlet_slurm_requests_last_minute"


@dataclass(frozen=True)
class NodeFacts:
    """What a summary says of the node beside its pods."""

    name: str
    start_time: str
    now_s: float
    # CPU time of pods that are gone: the node's counter must never fall.
    ended_cpu_s: float = 0.0
    memory_bytes: int = 0  # all the partition has


def summary(
    node: NodeFacts, pods: Iterable[tuple[Mapping[str, Any], Measured]], *, only_cpu_and_memory: bool = False
) -> Obj:
    """statsapi.Summary; file systems are left out where nobody looked at them."""
    every = list(pods)
    told = [_pod(pod, measured, with_space=not only_cpu_and_memory) for pod, measured in every]
    measured = [one for _, one in every]
    memory_bytes = sum(map(pod_memory_bytes, measured))
    cpu_s = node.ended_cpu_s + sum(one.now.cpu_s for one in measured)
    memory = _memory(node.now_s, memory_bytes, sum(_rss(one) for one in measured))
    if node.memory_bytes:
        memory["availableBytes"] = max(0, node.memory_bytes - memory_bytes)
    return {
        "node": {
            "nodeName": node.name,
            "startTime": node.start_time,
            "cpu": _cpu(node.now_s, sum(map(pod_cores, measured)), cpu_s),
            "memory": memory,
        },
        "pods": told,
    }


def _pod(pod: Mapping[str, Any], measured: Measured, *, with_space: bool) -> Obj:
    now, metadata = measured.now, pod["metadata"]
    found: Obj = {
        "podRef": {key: metadata[key] for key in ("name", "namespace", "uid")},
        "startTime": (pod.get("status") or {}).get("startTime"),
        "containers": [_container(measured, one.name, with_space=with_space) for one in now.containers],
        "cpu": _cpu(now.at_s, pod_cores(measured), now.cpu_s),
        "memory": _memory(now.at_s, pod_memory_bytes(measured), _rss(measured)),
        "process_stats": {"process_count": sum(one.processes for one in now.containers)},
    }
    if with_space:
        spaces = [space for one in now.containers for space in (one.rootfs, one.logs) if space is not None]
        if now.volumes:
            found["volume"] = [
                {"name": name, **_fs(now.at_s, space)} for name, space in sorted(now.volumes.items())
            ]
        if spaces or now.volumes:
            found["ephemeral-storage"] = _fs(now.at_s, _sum([*spaces, *now.volumes.values()]))
    return found


def _container(measured: Measured, name: str, *, with_space: bool) -> Obj:
    one, at_s = measured.now.container(name), measured.now.at_s
    assert one is not None
    found: Obj = {
        "name": name,
        "startTime": one.started_at,
        "cpu": _cpu(at_s, cpu_cores(measured, name)[0], one.cpu_s),
        "memory": _memory(at_s, one.memory_bytes, one.rss_bytes),
    }
    if with_space:
        found |= {
            key: _fs(at_s, space)
            for key, space in (("rootfs", one.rootfs), ("logs", one.logs))
            if space is not None
        }
    return found


def _cpu(at_s: float, cores: float, cpu_s: float) -> Obj:
    return {
        "time": _moment(at_s),
        "usageNanoCores": round(cores * _NANO),
        "usageCoreNanoSeconds": round(cpu_s * _NANO),
    }


def _memory(at_s: float, memory_bytes: int, rss_bytes: int) -> Obj:
    return {
        "time": _moment(at_s),
        "usageBytes": memory_bytes,
        "workingSetBytes": memory_bytes,
        "rssBytes": rss_bytes,
    }


def _fs(at_s: float, space: Space) -> Obj:
    return {
        "time": _moment(at_s),
        "availableBytes": space.available_bytes,
        "capacityBytes": space.capacity_bytes,
        "usedBytes": space.used_bytes,
        "inodesFree": space.inodes_free,
        "inodes": space.inodes,
        "inodesUsed": space.inodes_used,
    }


def _sum(spaces: list[Space]) -> Space:
    """Used together; the file system itself is that of the first, since all lie in the node's scratch."""
    first = spaces[0]
    return Space(
        used_bytes=sum(one.used_bytes for one in spaces),
        inodes_used=sum(one.inodes_used for one in spaces),
        capacity_bytes=first.capacity_bytes,
        available_bytes=first.available_bytes,
        inodes=first.inodes,
        inodes_free=first.inodes_free,
    )


def _rss(measured: Measured) -> int:
    return sum(one.rss_bytes for one in measured.now.containers)


def _moment(at_s: float) -> str:
    return rfc3339(datetime.fromtimestamp(at_s, UTC))


# Prometheus' text format


@dataclass(frozen=True)
class Family:
    """One metric with its samples: (suffix of the name, labels, value, unix seconds or None)."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, Mapping[str, str], float, float | None]] = field(default_factory=list)

    def add(self, value: float, labels: Mapping[str, str] | None = None, at_s: float | None = None) -> None:
        self.samples.append(("", labels or {}, value, at_s))


def exposition(families: Iterable[Family]) -> str:
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
        lines += [
            _line(family.name + suffix, labels, value, at_s) for suffix, labels, value, at_s in family.samples
        ]
    return "\n".join(lines) + "\n"


def _line(name: str, labels: Mapping[str, str], value: float, at_s: float | None) -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    head = f"{name}{{{inner}}}" if inner else name
    number = str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
    return f"{head} {number}" + (f" {round(at_s * 1000)}" if at_s is not None else "")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resource_metrics(
    node: NodeFacts, pods: Iterable[tuple[Mapping[str, Any], Measured]], errors: int
) -> list[Family]:
    """The kubelet's /metrics/resource, names and labels as upstream promises them."""
    container_cpu = Family(
        "container_cpu_usage_seconds_total",
        "counter",
        "Cumulative cpu time consumed by the container in core-seconds",
    )
    container_memory = Family(
        "container_memory_working_set_bytes", "gauge", "Current working set of the container in bytes"
    )
    container_start = Family(
        "container_start_time_seconds", "gauge", "Start time of the container since unix epoch in seconds"
    )
    node_cpu = Family(
        "node_cpu_usage_seconds_total", "counter", "Cumulative cpu time consumed by the node in core-seconds"
    )
    node_memory = Family("node_memory_working_set_bytes", "gauge", "Current working set of the node in bytes")
    pod_cpu = Family(
        "pod_cpu_usage_seconds_total", "counter", "Cumulative cpu time consumed by the pod in core-seconds"
    )
    pod_memory = Family("pod_memory_working_set_bytes", "gauge", "Current working set of the pod in bytes")
    scrape = Family(
        "resource_scrape_error",
        "gauge",
        "1 if there was an error while getting container metrics, 0 otherwise",
    )
    cpu_s, memory_bytes = node.ended_cpu_s, 0
    for pod, measured in pods:
        now = measured.now
        where = {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]}
        for one in now.containers:
            labels = {"container": one.name, **where}
            container_start.add(parse_rfc3339(one.started_at).timestamp(), labels)
            container_cpu.add(one.cpu_s, labels, now.at_s)
            container_memory.add(one.memory_bytes, labels, now.at_s)
        pod_cpu.add(now.cpu_s, where, now.at_s)
        pod_memory.add(pod_memory_bytes(measured), where, now.at_s)
        cpu_s += now.cpu_s
        memory_bytes += pod_memory_bytes(measured)
    node_cpu.add(cpu_s, at_s=node.now_s)
    node_memory.add(memory_bytes, at_s=node.now_s)
    scrape.add(min(errors, 1))
    return [
        container_cpu, container_memory, container_start, node_cpu, node_memory, pod_cpu, pod_memory, scrape
    ]  # fmt: skip
