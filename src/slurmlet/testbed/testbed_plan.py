"""What a testbed is made of: its plan, its names and addresses, and where its files lie.

Pure values; every other module of the room reads them from here. Must never touch the machine.

    <cache>/testbed/
      <suite>/root/            the hosts' root file system (kept)      <suite>/venv/    slurmlet for its users (kept)
      <suite>/wheels/          dependency wheels (kept)                <suite>/mariadb/ an initialised database (kept)
      <suite>/images/          test images (kept)                      downloads/       .deb files (kept)
      run/                     all that lives and dies with one testbed; `down` removes it (SLURMLET_TESTBED_NAME
                               names another one beside it)
        plan.json              what was asked for, and whether it came up
        hosts/<name>.json      the init process of each host           hosts/<name>/log, lib: its /var/log, /var/lib/slurm
        etc/  home/  opt/      /etc, /home, /opt/slurmlet of all hosts
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.errors import UserError
from slurmlet.base.layout import cache_dir

SUITES = {"24.11": "trixie", "22.05": "bookworm"}
DEFAULT_SLURM = "24.11"
MAX_NODES = 64

LOGIN = "login"
SWITCH = "switch"  # holds the bridge; no Slurm, no user ever gets there
USERS = {"user1": 1001, "user2": 1002}
# user1 has a single uid, the common case on real sites; user2 shows the other way.
SUBUID_RANGES = {"user2": (200000, 65536)}

# All hosts hang on a bridge in a network namespace of its own, so this range cannot meet one of the machine.
NETWORK = "10.213.77"
CPUS_PER_NODE = 16
GPUS = 2
MEMORY_PER_NODE_MB = 6000
SCRATCH_BYTES = 2 << 30

# Testbeds of several names run side by side: each has namespaces, and so a network, of its own.
DEFAULT_NAME = "run"
NAME_VARIABLE = "SLURMLET_TESTBED_NAME"
MARKER = "SLURMLET_TESTBED"  # in the environment of each host's init, so that leftovers are found without our files
OPT = "/opt/slurmlet"
USER_PATH = f"{OPT}/venv/bin:{OPT}/upstream:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
REGISTRY = "localhost:5000"


@dataclass(frozen=True)
class Plan:
    """What `testbed up` was asked for."""

    nodes: int = 3
    slurm: str = DEFAULT_SLURM
    accounting: bool = True
    rest: bool = True
    # No compute hosts, auth/slurm instead of munge: nodes register themselves (`slurmd -Z`), see testbed/provisioning.
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.slurm not in SUITES:
            raise UserError(
                f"the testbed has no Slurm {self.slurm}", hint=f"Choose one of {', '.join(SUITES)}."
            )
        if not 1 <= self.nodes <= MAX_NODES:
            raise UserError(
                f"{self.nodes} is not a possible number of nodes", hint=f"Choose 1 to {MAX_NODES}."
            )
        if self.dynamic and (self.accounting or self.slurm != DEFAULT_SLURM):
            raise UserError(f"a testbed of dynamic nodes has Slurm {DEFAULT_SLURM} and no accounting")

    @property
    def suite(self) -> str:
        return SUITES[self.slurm]

    @property
    def compute_hosts(self) -> tuple[str, ...]:
        return () if self.dynamic else tuple(f"c{number}" for number in range(1, self.nodes + 1))

    @property
    def gpu_host(self) -> str | None:
        """The one with generic resources; the devices behind them are /dev/null by another name."""
        return self.compute_hosts[-1] if self.compute_hosts else None

    @property
    def hosts(self) -> tuple[str, ...]:
        return (LOGIN, *self.compute_hosts)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def address_of(host: str) -> str:
    return f"{NETWORK}.1" if host == LOGIN else f"{NETWORK}.{10 + int(host.removeprefix('c'))}"


def user_environment(user: str, term: str = "dumb") -> dict[str, str]:
    """What a login shell of the user would have; nothing of the machine's own environment leaks in."""
    return {
        "HOME": "/root" if user == "root" else f"/home/{user}",
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "PATH": USER_PATH,
        "LANG": "C.UTF-8",
        "TERM": term,
        "SLURMLET_UPSTREAM_DIR": f"{OPT}/upstream",
    }


@dataclass(frozen=True)
class Paths:
    """Where one testbed keeps its files."""

    base: Path
    name: str = DEFAULT_NAME

    @classmethod
    def default(cls) -> Paths:
        name = os.environ.get(NAME_VARIABLE) or DEFAULT_NAME
        if not re.fullmatch(r"run(-[a-z0-9]{1,20})?", name):
            raise UserError(
                f"{NAME_VARIABLE}={name!r} is not valid",
                hint="Use run-<letters and digits>, such as run-mine.",
            )
        return cls(cache_dir() / "testbed", name)

    @property
    def lock(self) -> Path:
        return self.base / f"{self.name}.lock"

    @property
    def run(self) -> Path:
        return self.base / self.name

    @property
    def plan(self) -> Path:
        return self.run / "plan.json"

    @property
    def etc(self) -> Path:
        return self.run / "etc"

    @property
    def home(self) -> Path:
        return self.run / "home"

    @property
    def opt(self) -> Path:
        return self.run / "opt"

    @property
    def hosts(self) -> Path:
        return self.run / "hosts"

    def suite(self, plan: Plan) -> Path:
        return self.base / plan.suite

    def root(self, plan: Plan) -> Path:
        return self.suite(plan) / "root"

    def venv(self, plan: Plan) -> Path:
        return self.suite(plan) / "venv"

    def wheels(self, plan: Plan) -> Path:
        return self.suite(plan) / "wheels"

    def database(self, plan: Plan) -> Path:
        return self.suite(plan) / "mariadb"

    def images(self, plan: Plan) -> Path:
        return self.suite(plan) / "images"

    def host_record(self, host: str) -> Path:
        return self.hosts / f"{host}.json"

    def host_dir(self, host: str) -> Path:
        return self.hosts / host
