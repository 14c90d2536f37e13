"""The supervisor: one detached process per cluster that starts the components and restarts what dies.

One thread, woken by signals: SIGCHLD (something died), SIGTERM (end all, in order), SIGUSR1 (end the hub and keep it
ended; `down` cancels the Slurm jobs then, while nobody can submit new ones). It never writes cluster state besides
`run/`, and cluster.json with the kubeconfigs when a port was taken from under a component. What it reads and writes while
components run goes through a second thread (home_thread.py): a home that hangs must not stop the supervision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import locked, write_json
from slurmlet.base.host_addresses import LOOPBACK, free_port
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import cluster_config as configs
from slurmlet.controlplane import kubeconfigs, network_config
from slurmlet.controlplane.api_probe import ApiProbe
from slurmlet.controlplane.cluster_config import ClusterConfig, now
from slurmlet.controlplane.component_process import Child, adopt_orphans, kill_adopted, reap_orphans
from slurmlet.controlplane.components import HUB, Component, components
from slurmlet.controlplane.heartbeat import Heartbeat, TakenError
from slurmlet.controlplane.home_thread import HomeThread
from slurmlet.controlplane.installed_code import installed_code
from slurmlet.controlplane.run_files import ProcessIdentity, run_files, write_supervisor

_WAKING = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
_API_POLL_S = 0.05
_HOUSEKEEPING_S = 60.0
_LOG_CAP_BYTES = 32 << 20
# A sign of life that is later than this is soon taken for none by other hosts.
_LATE_S = 10.0
# How long the end of the supervisor waits for a home that hangs.
_LAST_WRITES_S = 10.0
_HOME_POLL_S = 0.5
_PORT_TAKEN = "address already in use"


def main(arguments: list[str]) -> int:
    root, binaries = arguments
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Blocked before anybody can know our pid: an early SIGUSR1 would otherwise end us.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
    files = ClusterFiles(Path(root))
    with locked(run_files(files).supervisor_lock, wait=False) as ours:
        if not ours:
            _log("another supervisor has this cluster; leaving")
            return 1
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None
        heartbeat = Heartbeat(run_files(files).heartbeat, identity.host, identity.pid)
        heartbeat.claim()
        Supervisor(files, Path(binaries), identity, heartbeat).run()
    return 0


class Supervisor:
    def __init__(
        self, files: ClusterFiles, binaries: Path, identity: ProcessIdentity, heartbeat: Heartbeat
    ) -> None:
        self._files = files
        self._binaries = binaries
        self._identity, self._heartbeat = identity, heartbeat
        self._home = HomeThread()
        self._home_is_late = False
        self._lines = 0
        self._since = now()
        # Of this process, whatever is installed later.
        self._code = installed_code()
        self._config = configs.load_existing(files)
        self._api_answers = False
        self._probe = ApiProbe(files, timeout_s=1.0)
        self._children = {
            component.name: Child(component, files.logs / f"{component.name}.log")
            for component in self._plan(self._config)
        }

    def _plan(self, config: ClusterConfig) -> list[Component]:
        cpus = len(os.sched_getaffinity(0))
        return components(self._files, config, self._binaries, os.environ, cpus)

    def run(self) -> None:
        adopt_orphans()
        for child in self._children.values():
            try:
                rotate(child.log)
            except OSError as error:
                _log(f"cannot rotate {child.log}: {error}")
        write_supervisor(run_files(self._files), self._identity, self._since, self._code)
        self._log(f"supervisor {self._identity.pid} of cluster {self._config.name} ({self._config.id})")
        try:
            self._watch()
        except TakenError as error:
            self._log(f"{error.message}; ending")
        finally:
            self._stop_all()
            self._home.ask("release", self._release)
            self._log("all components ended")
            with contextlib.suppress(TakenError):
                self._home.settle(_LAST_WRITES_S)

    def _release(self) -> None:
        if self._heartbeat.release():
            run_files(self._files).supervisor.unlink(missing_ok=True)

    def _watch(self) -> None:
        housekeeping_s = time.monotonic() + _HOUSEKEEPING_S
        while True:
            answers = self._beat()
            # Whatever is started needs the home: starting it would hang, and so would we.
            if answers:
                self._start_due()
            woken = signal.sigtimedwait(_WAKING, self._pause_s() if answers else _HOME_POLL_S)
            # Some sites' Slurm signals every process of a job. Inside one, the workload comes first: whoever started this
            # cluster there ends it, and this process with it.
            ends = not self._config.ephemeral
            if woken is not None and woken.si_signo in (signal.SIGTERM, signal.SIGINT) and ends:
                return
            if woken is not None and woken.si_signo == signal.SIGUSR1:
                self._hold(self._children[HUB])
            self._notice_deaths()
            if time.monotonic() > housekeeping_s:
                housekeeping_s = time.monotonic() + _HOUSEKEEPING_S
                self._home.ask("logs", self._cap_logs)

    def _beat(self) -> bool:
        """Renew the sign of life when it is time; False while the home hangs. Raises TakenError when somebody took the
        cluster over."""
        if self._heartbeat.pause_s() == 0:
            self._home.ask("heartbeat", self._heartbeat.beat)
        answers = self._home.settle()
        silent_s = self._home.silent_s()
        if silent_s > _LATE_S and not self._home_is_late:
            self._home_is_late = True
            self._log(
                f"the home has not answered for {silent_s:.0f} s: other hosts may take this cluster for dead, "
                "and nothing is started until it answers"
            )
        elif answers and self._home_is_late:
            self._home_is_late = False
            self._log("the home answers again")
        return answers

    def _cap_logs(self) -> None:
        for child in self._children.values():
            cap(child.log)

    def _log(self, text: str) -> None:
        # The log is in the home too. Every line counts, so each has a name of its own.
        self._lines += 1
        line = f"{now()} {text}"
        self._home.ask(f"log line {self._lines}", lambda: _print(line))

    def _start_due(self) -> None:
        started = False
        for child in self._children.values():
            if child.process is None and not child.held and time.monotonic() >= child.due_s:
                if not self._may_start(child.component):
                    continue
                self._start(child)
                started = True
        if started:
            self._record()

    def _may_start(self, component: Component) -> bool:
        if component.needs_api and not self._api_is_up():
            return False
        return not component.needs_hub or self._files.hub.exists()

    def _start(self, child: Child) -> None:
        try:
            if child.component.name == HUB and child.restarts:
                self._renew_runner()
            child.start()
            self._log(f"started {child.component.name}, pid {child.process.pid if child.process else '-'}")
        except OSError as error:
            child.restarts += 1
            child.due_s = time.monotonic() + 5
            self._log(f"cannot start {child.component.name}: {error}")

    def _renew_runner(self) -> None:
        """slurmlet may have been upgraded meanwhile: a new hub and the runners it starts must be of one kind."""
        # Rarely needed, and not small.
        from slurmlet.controlplane import runner_archive

        runner_archive.write_runner(self._files.runner)

    def _api_is_up(self) -> bool:
        if not self._api_answers:
            # The API server binds its port long before it serves, so a mere connection says nothing.
            self._api_answers = self._probe.ready()
            self._probe.close()
        return self._api_answers

    def _pause_s(self) -> float:
        waiting = [child for child in self._children.values() if child.process is None and not child.held]
        due_s = self._heartbeat.pause_s()
        if waiting:
            due_s = min(due_s, min(child.due_s for child in waiting) - time.monotonic())
        return max(_API_POLL_S, due_s)

    def _notice_deaths(self) -> None:
        reap_orphans(self._pids())
        dead = [child for child in self._children.values() if child.died()]
        for child in dead:
            name = child.component.name
            self._log(f"{name} ended ({child.last_exit}); next start in {child.backoff_s:g} s")
            if name == "kube-apiserver":
                self._api_answers = False
            if name == HUB:
                # An sbatch that outlives its hub could submit after the next hub has looked for the job in vain.
                kill_adopted(self._pids())
            if _PORT_TAKEN in self._home.answer(child.said_since_start, ""):
                self._take_other_port(name)
        if dead:
            self._record()

    def _take_other_port(self, name: str) -> None:
        """Somebody bound the port first: choose another, and restart whoever knows the old one."""
        if name == "etcd":
            changed = dataclasses.replace(
                self._config, etcd_port=free_port(LOOPBACK), etcd_peer_port=free_port(LOOPBACK)
            )
            affected = ["kube-apiserver"]
        elif name == "kube-apiserver":
            changed = dataclasses.replace(self._config, api_port=free_port("0.0.0.0"))
            affected = ["kube-controller-manager", "kube-scheduler", "coredns", HUB]
        elif name == "coredns":
            # The gateway looks up the port each time it connects.
            changed = dataclasses.replace(self._config, dns_port=free_port(LOOPBACK))
            affected = []
        else:
            return  # the hub and the gateway choose their own ports at each start
        self._log(f"{name}: its port was taken; choosing another")
        try:
            changed.save(self._files)
            kubeconfigs.write_all(self._files, changed)
            network_config.write_all(self._files, changed)
        except OSError as error:
            # It will find its port taken again after the back-off; the home may be well by then.
            self._log(f"cannot write the new port down: {error}")
            return
        self._config = changed
        for component in self._plan(changed):
            self._children[component.name].component = component
        for other in affected:
            # No grace: an API server without its etcd would use all of it.
            self._children[other].stop(grace_s=0)
            self._children[other].due_s = 0.0

    def _hold(self, child: Child) -> None:
        self._log(f"stopping {child.component.name} for good")
        child.held = True
        child.stop()
        kill_adopted(self._pids())
        self._record()

    def _stop_all(self) -> None:
        for child in reversed(self._children.values()):
            child.held = True
            began_s = time.monotonic()
            child.stop()
            self._log(f"stopped {child.component.name} in {time.monotonic() - began_s:.1f} s")
        kill_adopted(set())
        self._record()

    def _pids(self) -> set[int]:
        return {child.process.pid for child in self._children.values() if child.process is not None}

    def _record(self) -> None:
        described = {name: child.describe() for name, child in self._children.items()}

        def write() -> None:
            if self._heartbeat.lost:
                return  # the file is another supervisor's by now
            try:
                write_json(run_files(self._files).components, described)
            except OSError as error:
                # A full disk or a purged directory must not take the cluster down.
                _log(f"cannot write the components' state: {error}")

        self._home.ask("components", write)


def rotate(log: Path) -> None:
    """A new start, a new log; the one before stays beside it."""
    if log.exists():
        log.replace(log.with_name(log.name + ".1"))


def cap(log: Path) -> None:
    """Copy and truncate a log that grew too big; its writer appends, so it goes on at the new end.

    A home that is full or away must not take the cluster down: the next round tries again. What cannot be copied because
    the disk is full is let go when it is twice too big, for it may be what fills the disk.
    """
    copy = log.with_name(log.name + ".1")
    try:
        if not log.exists() or (size := log.stat().st_size) <= _LOG_CAP_BYTES:
            return
        try:
            shutil.copyfile(log, copy)
        except OSError as error:
            _log(f"cannot copy {log}: {error}")
            copy.unlink(missing_ok=True)
            if size <= 2 * _LOG_CAP_BYTES:
                return
        os.truncate(log, 0)
    except OSError as error:
        _log(f"cannot cap {log}: {error}")


def _log(text: str) -> None:
    _print(f"{now()} {text}")


def _print(line: str) -> None:
    # A full disk must not take the cluster down.
    with contextlib.suppress(OSError):
        print(line, flush=True)


def run_as_program() -> None:
    try:
        sys.exit(main(sys.argv[1:]))
    except SlurmletError as error:
        _log(f"{error.message} {error.hint}")
        sys.exit(1)
