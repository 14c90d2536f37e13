"""The testbed as its users hold it: run something on a host as a user, start something there, ask how it stands.

    bed = Testbed.running()                                   # raises SiteError when none is up
    bed.run(["sbatch", "--wrap", "hostname"]).stdout          # user1 on login; raises CommandError when it fails
    bed.run(["cat"], host="c1", user="user2", stdin="hello", timeout_s=5, check=False).code
    process = bed.popen(["slurmlet", "kubectl", "logs", "-f", "pod"])        # a Popen; end it with bed.stop(process)
    bed.status().hosts["c1"].services

Everything is argv: no shell sees it. The environment is the user's (settings.user_environment) plus `env`.
Needs root, as the whole room does. Never changes the testbed: that is for `lifecycle` and `faults`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

from slurmlet.base.errors import SiteError, UserError
from slurmlet.base.files import read_json
from slurmlet.base.processes import CommandError, Completed, run, stop_group
from slurmlet.testbed import host_namespaces
from slurmlet.testbed.daemons import missing, services_of
from slurmlet.testbed.testbed_plan import LOGIN, USERS, Paths, Plan, user_environment

DEFAULT_USER = "user1"
Stream = IO[bytes] | int | None


@dataclass(frozen=True)
class HostStatus:
    on: bool
    services: dict[str, bool]
    slurm: str  # the node's state as Slurm has it; empty for login


@dataclass(frozen=True)
class Status:
    up: bool
    plan: dict[str, Any] | None
    hosts: dict[str, HostStatus]

    @property
    def healthy(self) -> bool:
        return self.up and all(host.on and all(host.services.values()) for host in self.hosts.values())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def require_root() -> None:
    if os.geteuid() != 0:
        raise SiteError(
            "the testbed needs root to create namespaces, mounts and a network",
            hint="Run it as root on a machine of your own. Only the testbed needs root; slurmlet itself never does.",
        )


def recorded_plan(paths: Paths) -> Plan | None:
    """The plan of a testbed that came up completely; None for none, or one that broke on the way."""
    record = read_json(paths.plan)
    return Plan(**record["plan"]) if isinstance(record, dict) and record.get("complete") else None


@dataclass(frozen=True)
class Testbed:
    """A testbed that is up."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    paths: Paths
    plan: Plan

    @classmethod
    def running(cls, paths: Paths | None = None) -> Testbed:
        require_root()
        where = paths or Paths.default()
        plan = recorded_plan(where)
        if plan is None:
            raise SiteError("no testbed is up", hint="Start one: slurmlet testbed up")
        return cls(where, plan)

    def init(self, host: str) -> host_namespaces.Init:
        if host not in self.plan.hosts:
            raise UserError(
                f"the testbed has no host {host!r}", hint=f"Its hosts: {', '.join(self.plan.hosts)}."
            )
        found = host_namespaces.find_init(self.paths, host)
        if found is None:
            raise SiteError(
                f"host {host} is off",
                hint=f"Run: slurmlet testbed fault return-host {host} (or: slurmlet testbed up)",
            )
        return found

    def argv(self, argv: Sequence[str], *, host: str = LOGIN, user: str = DEFAULT_USER) -> list[str]:
        """The command line that runs argv there; to be started with `environment(user)`."""
        if user != "root" and user not in USERS:
            raise UserError(f"the testbed has no user {user!r}", hint=f"Its users: root, {', '.join(USERS)}.")
        return host_namespaces.enter_argv(
            self.init(host), user, argv, directory=user_environment(user)["HOME"]
        )

    def environment(self, user: str = DEFAULT_USER, env: Mapping[str, str] | None = None) -> dict[str, str]:
        return {**user_environment(user, os.environ.get("TERM", "dumb")), **(env or {})}

    def run(
        self,
        argv: Sequence[str],
        *,
        host: str = LOGIN,
        user: str = DEFAULT_USER,
        stdin: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        check: bool = True,
    ) -> Completed:
        """Run argv to its end. `Completed.argv` (and the error) name what was asked for, not how we got there."""
        full, around = self.argv(argv, host=host, user=user), self.environment(user, env)
        try:
            done = run(full, stdin=stdin, timeout_s=timeout_s, env=around, check=False)
        except CommandError as error:
            raise CommandError(argv, error.code, error.stderr, transient=error.transient) from error
        if check and not done.ok:
            raise CommandError(argv, done.code, done.stderr or done.stdout)
        return Completed(tuple(argv), done.code, done.stdout, done.stderr)

    def popen(
        self,
        argv: Sequence[str],
        *,
        host: str = LOGIN,
        user: str = DEFAULT_USER,
        env: Mapping[str, str] | None = None,
        stdin: Stream = subprocess.PIPE,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
    ) -> subprocess.Popen[bytes]:
        """Start argv and leave it running, in a session of its own. End it with `stop`."""
        return subprocess.Popen(
            self.argv(argv, host=host, user=user),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=self.environment(user, env),
            start_new_session=True,
        )

    def stop(self, process: subprocess.Popen[bytes], grace_s: float = 2.0) -> None:
        """End what `popen` started, and its children."""
        stop_group(process, grace_s)

    def status(self) -> Status:
        return status(self.paths)


def status(paths: Paths) -> Status:
    """How the testbed stands; also works where none is up."""
    plan = recorded_plan(paths)
    if plan is None:
        return Status(False, None, {})
    states = _node_states(Testbed(paths, plan))
    hosts = {}
    for host in plan.hosts:
        init = host_namespaces.find_init(paths, host)
        absent = missing(plan, host, init) if init else services_of(plan, host)
        services = {service: service not in absent for service in services_of(plan, host)}
        hosts[host] = HostStatus(init is not None, services, states.get(host, ""))
    return Status(True, plan.as_json(), hosts)


def _node_states(bed: Testbed) -> dict[str, str]:
    try:
        said = bed.run(["sinfo", "--noheader", "--Node", "--format=%N %T"], timeout_s=5, check=False).stdout
    except (CommandError, SiteError):
        return {}
    return dict(line.split(maxsplit=1) for line in said.splitlines() if " " in line)
