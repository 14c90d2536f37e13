"""The daemons of each host: how each is started, how one sees that it runs, how it is stopped.

Each start returns when the daemon answers. Must never start a second one: ask `missing` first.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.errors import SlurmletError
from slurmlet.base.processes import run
from slurmlet.testbed.config_files import REST_PORT
from slurmlet.testbed.host_namespaces import Init, enter_argv, listens, processes_in, wait_until
from slurmlet.testbed.testbed_plan import LOGIN, OPT, REGISTRY, Paths, Plan

_DAEMON_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/"}
_START_LIMIT_S = 30.0
# Service → the name of its process (as the kernel cuts it: 15 characters).
PROCESS_NAMES = {
    "munge": "munged",
    "mariadb": "mariadbd",
    "slurmdbd": "slurmdbd",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmrestd": "slurmrestd",
    "registry": "crane",
}
# Packages give service accounts other uids in each release: ask the root, not the machine.
Accounts = dict[str, tuple[int, int]]


def services_of(plan: Plan, host: str) -> tuple[str, ...]:
    """In the order of starting."""
    if host != LOGIN:
        return ("munge", "slurmd")
    if plan.dynamic:
        return ("slurmctld", *(("slurmrestd",) if plan.rest else ()))
    accounting = ("mariadb", "slurmdbd") if plan.accounting else ()
    return ("munge", *accounting, "slurmctld", *(("slurmrestd",) if plan.rest else ()), "registry")


def missing(plan: Plan, host: str, init: Init) -> tuple[str, ...]:
    running = set(processes_in(init).values())
    return tuple(service for service in services_of(plan, host) if PROCESS_NAMES[service] not in running)


def accounts(etc: Path) -> Accounts:
    lines = (etc / "passwd").read_text().splitlines()
    return {f[0]: (int(f[2]), int(f[3])) for f in (line.split(":") for line in lines)}


@dataclass(frozen=True)
class Daemons:
    """The daemons of one host."""

    paths: Paths
    host: str
    init: Init

    def start(self, service: str) -> None:
        try:
            getattr(self, f"_start_{service}")()
        except SlurmletError as error:
            raise SlurmletError(
                f"{service} did not start on {self.host}: {error.message}",
                hint=f"Its log is under {self.paths.host_dir(self.host) / 'log'}.",
            ) from error

    def stop(self, service: str, sign: signal.Signals = signal.SIGTERM) -> None:
        """Signal the daemon itself, and wait for it; what it started (job steps) is left alone."""
        name = PROCESS_NAMES[service]
        for pid, comm in processes_in(self.init).items():
            if comm == name:
                os.kill(pid, sign)
        wait_until(lambda: name not in processes_in(self.init).values(), _START_LIMIT_S, f"{service} to end")

    def _dir(self, path: str, owner: str, mode: int = 0o755) -> None:
        """Made from outside: no process is needed to prepare a host."""
        # lstat semantics matter little here: only root and service accounts can write to the parents.
        target = self.init.root / path.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        target.chmod(mode)
        os.chown(target, *accounts(self.paths.etc)[owner])

    def _run(self, argv: Sequence[str], user: str = "root") -> None:
        run(enter_argv(self.init, user, argv), env=_DAEMON_ENV, timeout_s=_START_LIMIT_S)

    def _detach(self, name: str, argv: Sequence[str], user: str, **env: str) -> None:
        """Start a program that does not go to the background by itself; its words go to /var/log/<name>.log."""
        with (self.paths.host_dir(self.host) / "log" / f"{name}.log").open("ab") as log:
            subprocess.run(
                enter_argv(self.init, user, ["setsid", "--fork", *argv]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_DAEMON_ENV, **env},
                check=True,
                timeout=_START_LIMIT_S,
            )

    def _await_port(self, service: str, port: int) -> None:
        # `setsid --fork` returns before its child has become the daemon: until then the child bears its name.
        names = {PROCESS_NAMES[service], "setsid"}

        def ready() -> bool:
            if listens(self.init, port):
                return True
            if names.isdisjoint(processes_in(self.init).values()):
                raise SlurmletError("it exited immediately")
            return False

        wait_until(ready, _START_LIMIT_S, f"port {port}")

    def _start_munge(self) -> None:
        self._dir("/run/munge", "munge")
        self._dir("/var/log/munge", "munge", 0o700)
        self._run(["munged", "--force", "--seed-file=/run/munge/munge.seed"], "munge")

    def _start_mariadb(self) -> None:
        self._dir("/run/mysqld", "mysql")
        self._dir("/var/lib/mysql", "mysql", 0o700)
        (self.init.root / "run/mysqld/mysqld.sock").unlink(missing_ok=True)
        conf = "--defaults-file=/etc/mysql/testbed.cnf"
        self._detach("mariadb-console", ["mariadbd", conf, "--init-file=/etc/mysql/grants.sql"], "mysql")
        socket = self.init.root / "run/mysqld/mysqld.sock"
        wait_until(socket.exists, _START_LIMIT_S, "its socket")

    def _start_slurmdbd(self) -> None:
        self._dir("/run/slurmdbd", "slurm")
        self._dir("/var/log/slurm", "slurm")
        self._run(["slurmdbd"])
        self._await_port("slurmdbd", 6819)

    def _start_slurmctld(self) -> None:
        self._dir("/var/log/slurm", "slurm")
        self._dir("/var/lib/slurm", "slurm")
        self._dir("/var/lib/slurm/ctld", "slurm", 0o700)
        self._run(["slurmctld"])
        self._await_port("slurmctld", 6817)

    def _start_slurmd(self) -> None:
        self._dir("/var/log/slurm", "slurm")
        self._dir("/var/lib/slurm/slurmd", "root")
        self._run(["slurmd"])
        self._await_port("slurmd", 6818)

    def _start_slurmrestd(self) -> None:
        # Without a database it refuses to start with the part that speaks for one.
        accounting = "AccountingStorageType" in (self.paths.etc / "slurm/slurm.conf").read_text()
        parts = [] if accounting else ["-s", "slurmctld"]
        argv = ["slurmrestd", "-a", "rest_auth/jwt", *parts, f":{REST_PORT}"]
        self._detach("slurmrestd", argv, "restd", SLURM_JWT="daemon")
        self._await_port("slurmrestd", REST_PORT)

    def _start_registry(self) -> None:
        address = REGISTRY.replace("localhost", "127.0.0.1")
        self._detach(
            "registry", [f"{OPT}/upstream/crane", "registry", "serve", "--address", address], "registry"
        )
        self._await_port("registry", int(REGISTRY.rpartition(":")[2]))
