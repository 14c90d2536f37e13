"""`slurmlet status` and `ls`: what runs, where, since when. Changes nothing."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.base.layout import ClusterFiles, check_cluster_name, home_dir
from slurmlet.controlplane import cluster_config as configs
from slurmlet.controlplane.api_probe import ApiProbe, NodeState
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.components import BINARIES, GATEWAY, HUB
from slurmlet.controlplane.run_files import (
    read_components,
    read_supervisor,
    run_files,
    running_supervisor,
    start_ticks,
)
from slurmlet.model.stats_summary import SLURM_REQUESTS


@dataclass(frozen=True)
class ComponentState:
    name: str
    pid: int | None
    since: str
    restarts: int
    memory_bytes: int | None

    @property
    def running(self) -> bool:
        return self.pid is not None


@dataclass(frozen=True)
class ClusterState:
    config: ClusterConfig
    running: bool
    since: str
    api_ready: bool
    components: tuple[ComponentState, ...]
    nodes: tuple[NodeState, ...]
    pods: dict[str, int]
    jobs: dict[str, int] | None  # by state; None when Slurm does not answer
    slurm_requests_last_minute: int | None = None  # of the hub to slurmctld; None when it does not tell


@dataclass(frozen=True)
class ClusterLine:
    name: str
    state: str  # running, stopped, elsewhere, broken
    host: str
    since: str
    api: str


def status(files: ClusterFiles) -> ClusterState:
    config = configs.load_existing(files)
    found = running_supervisor(files, "status")
    parts = tuple(_components(files)) if found else ()
    ready, nodes, pods = False, tuple[NodeState, ...](), dict[str, int]()
    requests = None
    if found:
        probe = ApiProbe(files)
        ready = probe.ready()
        if ready:
            nodes, pods = tuple(probe.nodes()), probe.pods_by_phase()
            requests = _slurm_requests(probe, nodes)
            nodes = _refreshed(probe, nodes)
        probe.close()
    since = found[1] if found else ""
    jobs = _jobs(config)
    return ClusterState(config, found is not None, since, ready, parts, nodes, pods, jobs, requests)


def _refreshed(probe: ApiProbe, nodes: tuple[NodeState, ...]) -> tuple[NodeState, ...]:
    """At rest the hub looks at partitions rarely; who asks wants to see them as they are."""
    if not nodes:
        return nodes
    probe.refresh(nodes[0].name)
    return tuple(probe.nodes(latest=True))


def _slurm_requests(probe: ApiProbe, nodes: tuple[NodeState, ...]) -> int | None:
    """From the hub's own metrics, which any of its nodes serves."""
    if not nodes:
        return None
    lines = probe.metrics(nodes[0].name).splitlines()
    found = [line.split()[1] for line in lines if line.startswith(f"{SLURM_REQUESTS} ")]
    return int(float(found[0])) if found else None


def clusters() -> list[ClusterLine]:
    """Every cluster of this user, by name."""
    root = home_dir()
    if not root.is_dir():
        return []
    return [line for path in sorted(root.iterdir()) if (line := _line(path)) is not None]


def _line(path: Path) -> ClusterLine | None:
    try:
        check_cluster_name(path.name)
        config = configs.load(ClusterFiles(path))
    except UserError:
        return None
    except (KeyError, TypeError, ValueError):
        return ClusterLine(path.name, "broken", "", "", "")
    if config is None:
        return None
    found = read_supervisor(run_files(ClusterFiles(path)))
    if found is None:
        return ClusterLine(path.name, "stopped", config.host, "", "")
    if found[0].elsewhere:
        return ClusterLine(path.name, "elsewhere", found[0].host, found[1], config.api_url)
    if not found[0].alive():
        return ClusterLine(path.name, "stopped", config.host, "", "")
    return ClusterLine(path.name, "running", found[0].host, found[1], config.api_url)


def _components(files: ClusterFiles) -> list[ComponentState]:
    recorded = read_components(run_files(files))
    return [_component(name, recorded.get(name, {})) for name in (*BINARIES, GATEWAY, HUB)]


def _component(name: str, state: dict[str, Any]) -> ComponentState:
    pid = state.get("pid")
    if pid is not None and start_ticks(pid) != state.get("start_ticks"):
        pid = None
    memory = _memory_bytes(pid) if pid is not None else None
    return ComponentState(name, pid, state.get("since", ""), int(state.get("restarts", 0)), memory)


def _memory_bytes(pid: int) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _jobs(config: ClusterConfig) -> dict[str, int] | None:
    from slurmlet.controlplane.cluster_jobs import live_jobs

    counts: dict[str, int] = {}
    try:
        for job in live_jobs(config):
            counts[job.state] = counts.get(job.state, 0) + 1
    except SlurmletError:
        return None
    return counts


def age(since: str, now: datetime.datetime | None = None) -> str:
    """kubectl's way of saying how long ago: 45s, 12m, 3h, 5d."""
    if not since:
        return "-"
    then = datetime.datetime.fromisoformat(since.replace("Z", "+00:00"))
    seconds = max(0, int(((now or datetime.datetime.now(datetime.UTC)) - then).total_seconds()))
    for limit, unit_s, letter in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // unit_s}{letter}"
    return f"{seconds // 86400}d"
