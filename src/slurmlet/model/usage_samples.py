"""What pods use, from the runners' answers: samples, rates between two of them, and the objects of metrics.k8s.io.

Pure. A sample is what one runner said at one moment; a rate needs two samples of the same run of a container, or one
and the moment the run began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from slurmlet.base.clock import parse_rfc3339, rfc3339

GROUP, VERSION = "metrics.k8s.io", "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
Obj = dict[str, Any]


@dataclass(frozen=True)
class Space:
    """Room on a file system: what is used by the thing asked about, and the whole behind it."""

    used_bytes: int = 0
    inodes_used: int = 0
    capacity_bytes: int = 0
    available_bytes: int = 0
    inodes: int = 0
    inodes_free: int = 0


@dataclass(frozen=True)
class ContainerSample:
    name: str
    started_at: str
    cpu_s: float
    memory_bytes: int
    rss_bytes: int
    processes: int
    rootfs: Space | None = None
    logs: Space | None = None


@dataclass(frozen=True)
class PodSample:
    at_s: float
    containers: tuple[ContainerSample, ...]
    volumes: Mapping[str, Space] = field(default_factory=dict)

    def container(self, name: str) -> ContainerSample | None:
        return next((one for one in self.containers if one.name == name), None)

    @property
    def cpu_s(self) -> float:
        return sum(one.cpu_s for one in self.containers)

    @property
    def has_space(self) -> bool:
        return any(one.rootfs is not None for one in self.containers)


@dataclass(frozen=True)
class Measured:
    """The newest sample of a pod and the one its rates are counted from."""

    now: PodSample
    before: PodSample | None = None


def sample(answer: Mapping[str, Any]) -> PodSample:
    """A runner's answer. Raises KeyError, TypeError or ValueError for one that is not."""
    containers = tuple(
        ContainerSample(
            name=str(name),
            started_at=str(one["started_at"]),
            cpu_s=float(one["cpu_s"]),
            memory_bytes=int(one["memory_bytes"]),
            rss_bytes=int(one["rss_bytes"]),
            processes=int(one["processes"]),
            rootfs=_space(one.get("rootfs")),
            logs=_space(one.get("logs")),
        )
        for name, one in answer["containers"].items()
    )
    volumes = {str(name): space for name, one in answer["volumes"].items() if (space := _space(one))}
    return PodSample(float(answer["at"]), containers, volumes)


def _space(told: Mapping[str, Any] | None) -> Space | None:
    return None if told is None else Space(**{name: int(value) for name, value in told.items()})


def cpu_cores(measured: Measured, name: str) -> tuple[float, float]:
    """(cores, seconds they were measured over) of a running container."""
    now = measured.now.container(name)
    assert now is not None
    before = measured.before.container(name) if measured.before is not None else None
    if before is not None and measured.before is not None and before.started_at == now.started_at:
        window_s, used_s = measured.now.at_s - measured.before.at_s, now.cpu_s - before.cpu_s
    else:
        # A run that began after the sample before, or a first look: since its start.
        window_s, used_s = measured.now.at_s - _unix_s(now.started_at), now.cpu_s
    # A tick of the kernel's clock is the shortest time that can be told apart.
    window_s = max(window_s, 0.01)
    return max(0.0, used_s) / window_s, window_s


def _unix_s(text: str) -> float:
    return parse_rfc3339(text).timestamp()


def pod_cores(measured: Measured) -> float:
    return sum(cpu_cores(measured, one.name)[0] for one in measured.now.containers)


def pod_memory_bytes(measured: Measured) -> int:
    return sum(one.memory_bytes for one in measured.now.containers)


# The objects of metrics.k8s.io


def cpu_quantity(cores: float) -> str:
    return f"{round(cores * 1e9)}n"


def memory_quantity(size_bytes: int) -> str:
    return f"{-(-size_bytes // 1024)}Ki"


def go_duration(seconds: float) -> str:
    """As Go prints it, in seconds: "10.5s"."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _usage(cores: float, memory_bytes: int) -> dict[str, str]:
    return {"cpu": cpu_quantity(cores), "memory": memory_quantity(memory_bytes)}


def _moment(at_s: float) -> str:
    return rfc3339(datetime.fromtimestamp(at_s, UTC))


def pod_metrics(pod: Mapping[str, Any], measured: Measured) -> Obj | None:
    """A PodMetrics object; None while nothing of the pod runs."""
    rates = {one.name: cpu_cores(measured, one.name) for one in measured.now.containers}
    if not rates:
        return None
    containers = [
        {"name": one.name, "usage": _usage(rates[one.name][0], one.memory_bytes)}
        for one in measured.now.containers
    ]
    window_s = max(window_s for _, window_s in rates.values())
    return {**_head("PodMetrics", pod["metadata"], measured.now.at_s, window_s), "containers": containers}


def node_metrics(node: Mapping[str, Any], measured: Iterable[Measured], now_s: float) -> Obj:
    """A NodeMetrics object: the sum over the pods of the partition."""
    every = list(measured)
    windows = [cpu_cores(one, container.name)[1] for one in every for container in one.now.containers]
    at_s = max((one.now.at_s for one in every), default=now_s)
    usage = _usage(sum(map(pod_cores, every)), sum(map(pod_memory_bytes, every)))
    return {**_head("NodeMetrics", node["metadata"], at_s, max(windows, default=0.0)), "usage": usage}


def _head(kind: str, metadata: Mapping[str, Any], at_s: float, window_s: float) -> Obj:
    kept = {key: metadata[key] for key in ("name", "namespace", "labels") if metadata.get(key)}
    return {
        "kind": kind,
        "apiVersion": API_VERSION,
        "metadata": {**kept, "creationTimestamp": _moment(at_s)},
        "timestamp": _moment(at_s),
        "window": go_duration(window_s),
    }


def metrics_list(kind: str, items: list[Obj]) -> Obj:
    return {"kind": kind, "apiVersion": API_VERSION, "metadata": {}, "items": items}
