"""Machines that boot and go: testbed hosts without any configuration, on the cable of a running testbed.

A machine knows nothing of Slurm before its cloud-init says so: an /etc of its own as the packages left it, no key, no
slurm.conf, no name of the controller. Its hostname and its files come from what it is booted with (cloud_init.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.errors import SlurmletError
from slurmlet.base.processes import Completed, run
from slurmlet.testbed import bridge
from slurmlet.testbed.host_namespaces import Init, end, enter_argv, find_init, launch
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.rootfs import remove_tree
from slurmlet.testbed.testbed_plan import MARKER, NETWORK, SCRATCH_BYTES, SWITCH

_ENV = {"PATH": "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/"}
# Compute hosts of other testbeds end at .74; the last octet of a machine is above.
_FIRST_OCTET = 100
MAX_MACHINES = 120


@dataclass(frozen=True)
class MachineHosts:
    """The machines of one testbed. A machine is known by a number; its hostname changes with each boot."""

    bed: Testbed

    def address(self, number: int) -> str:
        return f"{NETWORK}.{_FIRST_OCTET + number}"

    def init(self, number: int) -> Init | None:
        """None: it is off."""
        return find_init(self.bed.paths, _record(number))

    def boot(self, number: int, hostname: str) -> Init:
        """Switch it on under the name; what it had on its disk before is gone."""
        if self.init(number) is not None:
            raise SlurmletError(f"machine {number} is on already")
        own = self.bed.paths.host_dir(_record(number))
        if own.exists():
            remove_tree(own)
        binds = self._disk(own, number, hostname)
        spec = {
            "name": hostname,
            "root": str(self.bed.paths.root(self.bed.plan)),
            "binds": binds,
            "scratch_bytes": SCRATCH_BYTES,
            "gpus": 0,
            "machine_proc": False,
            "marker": [MARKER, str(self.bed.paths.run)],
        }
        init = launch(self.bed.paths, _record(number), spec)
        bridge.plug_address(self._switch(), _record(number), init, self.address(number))
        return init

    def power_off(self, number: int) -> None:
        """As by its power button: whatever runs there ends at once. Nothing happens to one that is off."""
        init = self.init(number)
        if init is not None:
            end([init])
        self.bed.paths.host_record(_record(number)).unlink(missing_ok=True)

    def run(
        self, number: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> Completed:
        """As root on the machine."""
        init = self.init(number)
        if init is None:
            raise SlurmletError(f"machine {number} is off", reason="MachineOff")
        return run(
            enter_argv(init, "root", argv), env={**_ENV, **(env or {})}, timeout_s=timeout_s, check=False
        )

    def log(self, number: int) -> Path:
        """What its cloud-init said; its slurmd's log lies beside."""
        return self.bed.paths.host_dir(_record(number)) / "log" / "cloud-init-output.log"

    def _switch(self) -> Init:
        switch = find_init(self.bed.paths, SWITCH)
        if switch is None:
            raise SlurmletError("the testbed's switch is off", hint="Run: slurmlet testbed up")
        return switch

    def _disk(self, own: Path, number: int, hostname: str) -> list[tuple[str, str, bool]]:
        etc, tools = own / "etc", own / "tools"
        for folder in (own / "lib", own / "log" / "slurm", own / "opt", tools):
            folder.mkdir(parents=True, mode=0o755)
        run(["cp", "-a", "--", str(self.bed.paths.root(self.bed.plan) / "etc"), str(etc)])
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{self.address(number)} {hostname}\n")
        (etc / "resolv.conf").write_text("")
        return [
            (str(etc), "/etc", False),
            (str(self.bed.paths.home), "/home", False),
            (str(own / "opt"), "/opt", False),
            (str(own / "lib"), "/var/lib/slurm", False),
            (str(own / "log"), "/var/log", False),
            (str(tools), "/usr/local/sbin", False),
        ]


def _record(number: int) -> str:
    """Its name among the testbed's hosts, and of its cable: the kernel allows 15 characters there."""
    return f"machine{number}"
