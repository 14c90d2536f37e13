"""`slurmlet down`: the hub first, so that nothing is submitted anew; then the Slurm jobs; then the rest.

Works as well when the supervisor is dead: what it recorded is ended by pid and start time. Removes data only for --purge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.console import Steps, say
from slurmlet.base.errors import SlurmletError
from slurmlet.base.host_addresses import host_name
from slurmlet.base.layout import ClusterFiles
from slurmlet.base.processes import run
from slurmlet.controlplane import cluster_config as configs
from slurmlet.controlplane import heartbeat
from slurmlet.controlplane.cluster_jobs import cancel_all
from slurmlet.controlplane.components import HUB
from slurmlet.controlplane.run_files import (
    ProcessIdentity,
    boot_id,
    lifecycle_lock,
    read_components,
    read_supervisor,
    refuse_if_alive_elsewhere,
    run_files,
    running_supervisor,
)

_STOP_S = 60.0
_HUB_STOP_S = 20.0
_KILL_S = 10.0
_REMOVE_S = 3600.0


@dataclass(frozen=True)
class Stopped:
    was_running: bool
    cancelled_jobs: int
    purged: bool


def down(
    files: ClusterFiles, *, purge: bool = False, force: bool = False, steps: Steps | None = None
) -> Stopped:
    """Stop everything of the cluster. `force` forgets a supervisor on another host that gives no sign of life."""
    steps = steps or Steps()
    config = configs.load_existing(files)
    if force:
        refuse_if_alive_elsewhere(files)
    else:
        running_supervisor(files, "down")
    problem: SlurmletError | None = None
    with lifecycle_lock(files):
        supervisor = _supervisor_here(files)
        if supervisor is not None:
            with steps.step("hub"):
                _stop_hub(files, supervisor)
        cancelled = 0
        with steps.step("Slurm jobs"):
            try:
                cancelled = cancel_all(config)
            except SlurmletError as error:
                problem = error
        with steps.step("control plane"):
            if supervisor is not None:
                stop_supervisor(supervisor)
            _stop_leftovers(files)
        _forget(files)
        if purge and problem is None:
            with steps.step("data"):
                _remove_data(files.root)
    if problem is not None:
        raise SlurmletError(
            f"the cluster is stopped, but its Slurm jobs may still run: {problem.message}",
            hint=f"When Slurm answers again: slurmlet down -c {files.name}",
        ) from problem
    return Stopped(supervisor is not None, cancelled, purge)


def _supervisor_here(files: ClusterFiles) -> ProcessIdentity | None:
    found = read_supervisor(run_files(files))
    return found[0] if found and found[0].alive() else None


def _stop_hub(files: ClusterFiles, supervisor: ProcessIdentity) -> None:
    supervisor.send(signal.SIGUSR1)

    def hub_ended() -> bool:
        hub = read_components(run_files(files)).get(HUB, {})
        return not supervisor.alive() or (bool(hub.get("held")) and hub.get("pid") is None)

    if not _wait(hub_ended, _HUB_STOP_S):
        say("  the hub did not stop in time; it is killed")


def stop_supervisor(supervisor: ProcessIdentity) -> None:
    supervisor.send(signal.SIGTERM)
    if not _wait(lambda: not supervisor.alive(), _STOP_S):
        # Its children are tied to it: the kernel ends them too.
        supervisor.send(signal.SIGKILL)
        _wait(lambda: not supervisor.alive(), _KILL_S)


def _stop_leftovers(files: ClusterFiles) -> None:
    """Components that the record names and that still run on this host, if the supervisor died in an odd way."""
    record = read_supervisor(run_files(files))
    sign = heartbeat.read(run_files(files).heartbeat)
    if (record is not None and record[0].elsewhere) or (sign is not None and sign.host != host_name()):
        return  # their pids mean other processes here
    left = [
        who for state in read_components(run_files(files)).values() if (who := _recorded(state)) is not None
    ]
    for number, wait_s in ((signal.SIGTERM, _KILL_S), (signal.SIGKILL, _KILL_S)):
        left = [who for who in left if who.alive()]
        for who in left:
            who.send(number)
        _wait(lambda: not any(who.alive() for who in left), wait_s)  # noqa: B023 - called at once


def _recorded(state: dict[str, Any]) -> ProcessIdentity | None:
    if state.get("pid") is None or state.get("start_ticks") is None:
        return None
    return ProcessIdentity(int(state["pid"]), int(state["start_ticks"]), boot_id(), host_name())


def _forget(files: ClusterFiles) -> None:
    run = run_files(files)
    sign = heartbeat.read(run.heartbeat)
    if sign is not None and sign.host != host_name():
        heartbeat.give_up(run.heartbeat, host_name())
    else:
        run.heartbeat.unlink(missing_ok=True)
    for path in (run.supervisor, run.components, files.hub):
        path.unlink(missing_ok=True)


def _remove_data(root: Path) -> None:
    try:
        remove_tree(root)
    except PermissionError:
        # Where users have subordinate ids, volumes hold files of other users; a process of its own becomes those.
        argv = [sys.executable, "-P", "-m", "slurmlet.runner.volumes.volume_removal", str(root)]
        run(argv, timeout_s=_REMOVE_S)


def remove_tree(root: Path) -> None:
    """Remove a tree of ours, directories without write permission included (a pod may have made them)."""

    def unlock(function: Callable[..., Any], path: str, _error: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(Path(path).parent, 0o700)  # noqa: PTH101
            if function in (os.open, os.scandir, os.rmdir):
                os.chmod(path, 0o700)  # noqa: PTH101
                shutil.rmtree(path)
            else:
                os.unlink(path)  # noqa: PTH108

    if sys.version_info >= (3, 12):
        shutil.rmtree(root, onexc=unlock)
    else:
        shutil.rmtree(root, onerror=unlock)


def _wait(done: Callable[[], bool], limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True
