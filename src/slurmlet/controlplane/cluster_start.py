"""`slurmlet up`: find the running cluster or start it, and return when a pod could be scheduled.

A cluster that runs with another slurmlet than the one installed is started anew with this one. Its pods go on meanwhile:
they are Slurm's jobs, and their runners dial the new hub, which understands them (`protocol/version.py`).

A failed `up` leaves nothing running; data and Slurm jobs stay as they were.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.console import Steps
from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.base.files import read_json
from slurmlet.base.host_addresses import advertised_address, host_addresses, host_name, routed_networks
from slurmlet.base.layout import ClusterFiles
from slurmlet.base.processes import run
from slurmlet.controlplane import address_ranges as ranges
from slurmlet.controlplane import cluster_config as configs
from slurmlet.controlplane import kubeconfigs, network_config, scheduler_config
from slurmlet.controlplane.api_probe import ApiProbe
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.cluster_stop import stop_supervisor
from slurmlet.controlplane.components import BINARIES, GATEWAY, HUB
from slurmlet.controlplane.installed_code import installed_code
from slurmlet.controlplane.run_files import (
    lifecycle_lock,
    make_dirs,
    read_components,
    run_files,
    running_supervisor,
    supervisor_code,
)
from slurmlet.controlplane.supervisor import rotate
from slurmlet.model.partition_node import HELD_BY_SLURM
from slurmlet.slurm.connection import Connection

_POLL_S = 0.05
# A component that ends this often within one `up` will not come up.
_HOPELESS_DEATHS = 3
_TAIL_LINES = 15


@dataclass(frozen=True)
class Started:
    files: ClusterFiles
    config: ClusterConfig
    already_running: bool
    nodes: tuple[str, ...]
    took_s: float


class StartError(SlurmletError):
    """A component does not come up; the message carries the end of its log."""

    reason = "StartFailed"


def up(
    files: ClusterFiles,
    *,
    partitions: Sequence[str] = (),
    address: str | None = None,
    wanted: ranges.Wanted = ranges.Wanted(),  # noqa: B008 - frozen
    encrypt: bool | None = None,
    launch: str | None = None,
    slurm: Connection | None = None,
    timeout_s: float = 120.0,
    steps: Steps | None = None,
) -> Started:
    steps = steps or Steps()
    # Before the lock: a cluster on another host must not leave a directory or a wait behind here.
    running_supervisor(files, "up")
    with lifecycle_lock(files):
        make_dirs(files)
        found = running_supervisor(files, "up")
        running = found is not None
        if found is not None:
            config = configs.load_existing(files)
            _check_same(config, partitions, launch)
            _check_same_slurm(config, slurm)
            ranges.choose((), wanted, ranges.Ranges(config.pod_range, config.service_range))
            configs.encryption(config, encrypt)
            if supervisor_code(run_files(files)) != installed_code():
                with steps.step("stopping the control plane of another version"):
                    stop_supervisor(found[0])
                # Compute nodes that run pods know this one.
                running, address = False, address or config.api_address
        if not running:
            _prepare_and_spawn(files, _Asked(partitions, address, wanted, encrypt, launch, slurm), steps)
        try:
            nodes = _wait_until_usable(files, steps, timeout_s)
        except BaseException:
            if not running:
                _give_up(files)
            raise
    return Started(files, configs.load_existing(files), running, tuple(nodes), steps.elapsed_s())


def _check_same(config: ClusterConfig, partitions: Sequence[str], launch: str | None) -> None:
    if launch is not None and launch != config.launch:
        raise UserError(
            f"--launch {launch}: cluster {config.name!r} is running with {config.launch}",
            hint=f"Stop it first: slurmlet down -c {config.name}",
        )
    if partitions and tuple(partitions) != config.partitions:
        now = ", ".join(config.partitions) if config.partitions else "all"
        raise UserError(
            f"cluster {config.name!r} is running with other partitions than --partition: {now}",
            hint=f"Stop it first: slurmlet down -c {config.name}",
        )


def _check_same_slurm(config: ClusterConfig, slurm: Connection | None) -> None:
    if slurm is not None and slurm != config.connection:
        raise UserError(
            f"--slurm: cluster {config.name!r} is running with {config.connection.kind} {config.connection.place}".rstrip(),
            hint=f"Stop it first: slurmlet down -c {config.name}",
        )


@dataclass(frozen=True)
class _Asked:
    """The options given; one that was left out keeps its value, or gets a default."""

    partitions: Sequence[str]
    address: str | None
    ranges: ranges.Wanted
    encrypt: bool | None
    launch: str | None = None
    slurm: Connection | None = None


def _prepare_and_spawn(files: ClusterFiles, asked: _Asked, steps: Steps) -> None:
    from slurmlet.upstream.binaries import ensure

    binaries = ensure([*BINARIES, "kubectl"])
    with steps.step("keys, ports and configuration"):
        prepare(files, binaries, asked)
    _spawn(files, binaries)


def prepare(files: ClusterFiles, binaries: Path, asked: _Asked) -> ClusterConfig:
    """Everything the supervisor and the hub read."""
    # cryptography takes 0.1 s to import: `status` and the supervisor need none of it.
    from slurmlet.controlplane import pki, runner_archive
    from slurmlet.upstream import netfast_build, static_runc

    addresses = host_addresses()
    before = configs.load(files)
    kept = ranges.Ranges(before.pod_range, before.service_range) if before else None
    config = configs.decide(
        files,
        kubernetes=run([str(binaries / "kube-apiserver"), "--version"]).stdout.split()[-1],
        host=host_name(),
        addresses=addresses,
        api_address=advertised_address(addresses, asked.address),
        partitions=asked.partitions,
        ranges=ranges.choose(routed_networks(), asked.ranges, kept),
        encrypt=configs.encryption(before, asked.encrypt),
        launch=asked.launch,
        slurm=asked.slurm,
    )
    pki.ensure(files.pki, pki.leaves(config.host, addresses, config.service_range, encrypt=config.encrypt))
    config.save(files)
    kubeconfigs.write_all(files, config)
    network_config.write_all(files, config)
    scheduler_config.write(files)
    runner_archive.write_runner(files.runner)
    netfast_build.write_for(files)
    static_runc.write_for(files)
    return config


def _spawn(files: ClusterFiles, binaries: Path) -> None:
    """Start the supervisor in a session of its own: it stays when this terminal closes."""
    # What an earlier supervisor recorded must not be taken for this one's news.
    run_files(files).components.unlink(missing_ok=True)
    run_files(files).supervisor.unlink(missing_ok=True)
    log = files.logs / "supervisor.log"
    rotate(log)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        # base/processes.run waits for an end; this one is meant to stay.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slurmlet.controlplane", str(files.root), str(binaries)],
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=handle,
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(handle)
    deadline_s = time.monotonic() + 20
    while running_supervisor(files, "up") is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise _failed(files, "supervisor", "the supervisor does not start")
        time.sleep(0.01)
    # It is on its own now; without this Python would warn that we never waited for it.
    process.returncode = 0


def _wait_until_usable(files: ClusterFiles, steps: Steps, timeout_s: float) -> list[str]:
    probe = ApiProbe(files)
    watch = _Watch(files, time.monotonic() + timeout_s, _deaths(files))
    try:
        with steps.step("API server"):
            watch.until(probe.ready, lambda: _why_not_ready(probe))
        with steps.step("nodes"):
            watch.until(lambda: _hub_serves(files) and _all_ready(probe), lambda: _why_no_nodes(files, probe))
        with steps.step("controllers and scheduler"):
            watch.until(
                lambda: _all_started(files) and probe.has_default_account(),
                lambda: ("kube-controller-manager", "there is no default service account"),
            )
        with steps.step("network"):
            watch.until(
                lambda: _names_resolve(files),
                lambda: ("coredns", "the cluster's names do not resolve (see gateway.log too)"),
            )
        return [node.name for node in probe.nodes()]
    finally:
        probe.close()


def _hub_serves(files: ClusterFiles) -> bool:
    """Whether the hub of this start listens: Nodes may still look Ready from the days of an earlier one."""
    told = read_json(files.hub)
    hub = read_components(run_files(files)).get(HUB, {})
    return isinstance(told, dict) and hub.get("pid") is not None and told.get("pid") == hub["pid"]


def _names_resolve(files: ClusterFiles) -> bool:
    """Whether the gateway of this start had an answer from CoreDNS."""
    told = read_json(files.gateway)
    gateway = read_components(run_files(files)).get(GATEWAY, {})
    return isinstance(told, dict) and bool(told.get("dns")) and told.get("pid") == gateway.get("pid")


def _all_started(files: ClusterFiles) -> bool:
    states = read_components(run_files(files))
    return bool(states) and all(state["pid"] is not None for state in states.values())


def _all_ready(probe: ApiProbe) -> bool:
    """As ready as they will be: a partition that Slurm holds back is no fault of ours, and the others work."""
    nodes = probe.nodes()
    return bool(nodes) and all(node.ready or node.reason in HELD_BY_SLURM for node in nodes)


def _why_not_ready(probe: ApiProbe) -> tuple[str, str]:
    failing = probe.unready_checks()
    said = f"its checks {', '.join(failing)} fail" if failing else "it does not answer"
    return "kube-apiserver", f"the API server is not ready: {said}"


def _why_no_nodes(files: ClusterFiles, probe: ApiProbe) -> tuple[str, str]:
    waiting = [f"{node.name} ({node.reason})" for node in probe.nodes() if not node.ready]
    what = f"not Ready: {', '.join(waiting)}" if waiting else "the hub registered no node"
    return "hub", f"{what} (see {files.logs / 'hub.log'})"


@dataclass(frozen=True)
class _Watch:
    """Waits for things while an eye stays on the supervisor and its components."""

    files: ClusterFiles
    deadline_s: float
    # How often each component had ended before: a cluster that runs for weeks has a past.
    earlier_deaths: dict[str, int]

    def until(self, done: Callable[[], bool], why: Callable[[], tuple[str, str]]) -> None:
        while not done():
            if running_supervisor(self.files, "up") is None:
                raise _failed(self.files, "supervisor", "the supervisor ended")
            for name, deaths in _deaths(self.files).items():
                if deaths - self.earlier_deaths.get(name, 0) >= _HOPELESS_DEATHS:
                    raise _failed(self.files, name, f"{name} keeps ending")
            if time.monotonic() > self.deadline_s:
                raise _failed(self.files, *why())
            time.sleep(_POLL_S)


def _deaths(files: ClusterFiles) -> dict[str, int]:
    return {name: int(state["restarts"]) for name, state in read_components(run_files(files)).items()}


def _failed(files: ClusterFiles, component: str, what: str) -> StartError:
    log = files.logs / f"{component}.log"
    try:
        tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        tail = []
    shown = "".join(f"\n    {line[:400]}" for line in tail)
    return StartError(f"{what}{shown}", hint=f"See the full log: {log}")


def _give_up(files: ClusterFiles) -> None:
    found = running_supervisor(files, "up")
    if found is None:
        return
    found[0].send(signal.SIGTERM)
    deadline_s = time.monotonic() + 30
    while found[0].alive() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    found[0].send(signal.SIGKILL)
