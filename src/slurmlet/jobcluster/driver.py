"""The driver of a run: cluster up, command, cluster down. One thread; signals are noted and acted on while it waits.

The command goes first when the job is signalled, then pods, then the rest. Whatever goes wrong here, the guard above
this process ends and removes what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmlet.base.console import say
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import read_json
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.components import BINARIES, HUB
from slurmlet.controlplane.run_files import read_components, run_files
from slurmlet.jobcluster import controlplane_start
from slurmlet.jobcluster.allocation import Task, agent_argv
from slurmlet.jobcluster.arguments import Request
from slurmlet.jobcluster.command_environment import command_environment
from slurmlet.jobcluster.controlplane_start import Progress
from slurmlet.jobcluster.run_directories import RunPlaces
from slurmlet.model.host_lists import expand
from slurmlet.slurm.commands import CommandSlurm
from slurmlet.upstream.binaries import ensure

_POLL_S = 0.02
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DEFAULT_KILL_WAIT_S = 30.0
_CONFIG_S = 2.0
# Of the time between Slurm's SIGTERM and its SIGKILL, what pods and teardown need.
_TEARDOWN_S = 3.0
_STOP_S = 4.0
_HUB_BACK_S = 1.5
_OUTPUT_GRACE_S = 2.0
# fronting.py keeps two of them further apart.
_SAME_SIGNAL_S = 1.0
_KEEP_S, _KEEP_SIGNALLED_S = 20.0, 1.0


class Driver:
    def __init__(self, task: Task, request: Request, places: RunPlaces) -> None:
        self._task, self._request, self._places = task, request, places
        self._files = places.files
        self._progress = Progress(request.verbose)
        self._signals: list[int] = []
        self._supervisor = self._agent = 0
        self._command: subprocess.Popen[bytes] | None = None
        self._kill_at_s: float | None = None
        self._interrupted_s: float | None = None

    def run(self) -> int:
        """The wait status with which the whole run should end."""
        for number in _SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        status = 1 << 8
        try:
            config = self._bring_up()
            status = self._work(config)
        except SlurmletError as error:
            say(f"slurmlet: {error.message}")
            if error.hint:
                say(f"  {error.hint}")
        except _Interrupted as interrupted:
            status = interrupted.number
        finally:
            began_s = time.monotonic()
            self._tear_down()
            self._progress.tell(f"everything is removed ({time.monotonic() - began_s:.2f} s)")
        return status

    def _note(self, number: int, _frame: Any) -> None:
        self._signals.append(number)

    # Up

    def _bring_up(self) -> ClusterConfig:
        files, progress = self._files, self._progress
        hosts = expand(self._task.hosts)
        progress.tell(f"allocation: Slurm job {self._task.job_id} on {', '.join(hosts)}")
        binaries = ensure([*BINARIES, "kubectl"])
        config = controlplane_start.prepare(files, binaries, encrypt=self._request.encrypt)
        self._supervisor = controlplane_start.start_supervisor(files, binaries)
        progress.tell("keys and configuration")
        controlplane_start.equip_hosts(files, hosts)
        shared = self._places.shared
        self._agent = controlplane_start.start_agent(
            agent_argv(shared, self._task.host), files.logs / "agent.log"
        )
        self._load_images()
        # The hub is the one that knows first; asking the API server ourselves would only slow it down.
        self._until(files.hub.exists, "the API server is not ready", "kube-apiserver")
        progress.tell("API server")
        self._until(files.token.exists, "not all nodes are Ready", "hub")
        progress.tell(f"{len(hosts)} node{'s' if len(hosts) > 1 else ''} Ready")
        return config

    def _load_images(self) -> None:
        if not self._request.images:
            return
        from slurmlet.base.layout import store_dir
        from slurmlet.images.image_store import Store

        for image in self._request.images:
            Store(store_dir()).load(Path(image))
        self._progress.tell("images")

    def _until(self, done: Callable[[], bool], problem: str, component: str) -> None:
        deadline_s = time.monotonic() + self._request.timeout_s
        while not done():
            self._raise_if_interrupted()
            if os.waitpid(self._supervisor, os.WNOHANG)[0]:
                self._supervisor = 0
                raise self._failed("the supervisor ended", "supervisor")
            if time.monotonic() > deadline_s:
                raise self._failed(f"{problem} after {self._request.timeout_s:g} s", component)
            time.sleep(_POLL_S)

    def _raise_if_interrupted(self) -> None:
        ending = [number for number in self._signals if number in _ENDING]
        if ending:
            raise _Interrupted(ending[0])

    def _failed(self, what: str, component: str) -> SlurmletError:
        return SlurmletError(what + controlplane_start.log_tail(self._files.logs / f"{component}.log"))

    # The work

    def _work(self, config: ClusterConfig) -> int:
        environment = command_environment(self._files, config, os.environ)
        if self._request.manifests:
            from slurmlet.jobcluster import manifests

            manifests.apply(self._request.manifests, environment)
            if self._request.wait:
                return self._finished(
                    manifests.wait(self._request.manifests, environment, self._raise_if_interrupted)
                )
        argv = list(self._request.command) or [environment.get("SHELL") or "/bin/sh"]
        self._progress.tell("workload starts")
        return self._finished(self._run_command(argv, environment))

    def _finished(self, status: int) -> int:
        # Where Slurm signals every process of a job, the workload may be gone before we hear of it.
        signalled = bool(self._kill_at_s is not None or self._signals or os.WIFSIGNALED(status))
        if self._request.keep_logs or (status and not signalled):
            from slurmlet.jobcluster import kept_files

            environment = command_environment(self._files, None, os.environ)
            # Slurm's SIGKILL is near, and it may have signalled the API server too.
            limit_s = _KEEP_SIGNALLED_S if signalled else _KEEP_S
            kept_files.Keeping(self._files, environment, limit_s).keep(self._request.keep_logs, status)
        return status

    def _run_command(self, argv: list[str], environment: dict[str, str]) -> int:
        own_group = not sys.stdin.isatty()
        try:
            self._command = command = subprocess.Popen(
                argv, env=environment, preexec_fn=lambda: _tie(own_group)
            )
        except OSError as error:
            say(f"slurmlet: {argv[0]}: {error.strerror}")
            return (127 if isinstance(error, FileNotFoundError) else 126) << 8
        while (status := _poll(command.pid)) is None:
            self._pass_on(command.pid)
            self._watch_cluster(command.pid)
            if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
                command.kill()
            time.sleep(_POLL_S)
        command.returncode = 0  # reaped above; Popen must not look for it again
        return status if self._supervisor else 1 << 8

    def _watch_cluster(self, pid: int) -> None:
        """Without its control plane the workload is lost: it hears so, and the run fails."""
        if self._supervisor and _reaped(self._supervisor):
            self._supervisor = 0
            say("slurmlet: the control plane of this run was killed; stopping")
            self._kill_at_s = time.monotonic() + _OUTPUT_GRACE_S
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _pass_on(self, pid: int) -> None:
        """The workload hears of every signal; after the first that means the end it has so long."""
        while self._signals:
            number = self._signals.pop(0)
            # At a terminal Ctrl-C reaches the command directly: it is in the foreground, we are beside it.
            if number != signal.SIGINT or not sys.stdin.isatty():
                with contextlib.suppress(ProcessLookupError):
                    _send(pid, number)
            if number == signal.SIGINT and self._insists():
                self._kill_at_s = time.monotonic()
            if number == signal.SIGTERM and self._kill_at_s is None:
                self._kill_at_s = time.monotonic() + max(1.0, _kill_wait_s() - _TEARDOWN_S)

    def _insists(self) -> bool:
        """Whether this SIGINT is a second one. The same one can come twice: from Slurm and from the guard."""
        now_s = time.monotonic()
        if self._interrupted_s is None:
            self._interrupted_s = now_s
        return not sys.stdin.isatty() and now_s - self._interrupted_s > _SAME_SIGNAL_S

    # Down

    def _tear_down(self) -> None:
        """Pods get their grace from the hub, which ends first; the rest has nothing to lose."""
        hub = self._serving_hub()
        if hub is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(hub, signal.SIGUSR2)
        elif self._agent:
            # Nobody to tell it: it ends by itself when it finds no hub.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._agent, signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_S
        while self._agent and not _reaped(self._agent) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if self._supervisor:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._supervisor, signal.SIGKILL)
                os.waitpid(self._supervisor, 0)

    def _serving_hub(self) -> int | None:
        """The hub's pid once it listens: one that has just been started again would die of our signal."""
        deadline_s = time.monotonic() + _HUB_BACK_S
        while self._supervisor and self._files.hub.exists():
            pid = read_components(run_files(self._files)).get(HUB, {}).get("pid")
            if pid is not None and pid == (read_json(self._files.hub) or {}).get("pid"):
                return int(pid)
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        return None


class _Interrupted(Exception):
    """The job was signalled before its workload began."""

    def __init__(self, number: int) -> None:
        self.number = number


def _tie(own_group: bool) -> None:
    """In the child: dies with the driver, and hears its signals from the driver alone."""
    controlplane_start.die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    if own_group:
        os.setpgid(0, 0)


def _send(pid: int, number: int) -> None:
    """As a terminal would: what is typed there reaches a shell and what it waits for, or the shell would go on waiting."""
    if number in (signal.SIGINT, signal.SIGQUIT) and os.getpgid(pid) == pid:
        os.killpg(pid, number)
    else:
        os.kill(pid, number)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return status if found else None


def _kill_wait_s() -> float:
    """How long Slurm waits between SIGTERM and SIGKILL here."""
    with contextlib.suppress(SlurmletError, TimeoutError):
        return asyncio.run(asyncio.wait_for(CommandSlurm().capabilities(), _CONFIG_S)).kill_wait_s
    return _DEFAULT_KILL_WAIT_S
