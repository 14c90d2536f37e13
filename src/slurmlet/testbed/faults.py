"""Faults on purpose: what happens to real clusters, done to the testbed one at a time, each with its way back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurmlet.base.errors import SiteError, UserError
from slurmlet.base.files import locked
from slurmlet.base.processes import run
from slurmlet.testbed import bridge, host_namespaces
from slurmlet.testbed.daemons import Daemons, missing, services_of
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.lifecycle import start_on
from slurmlet.testbed.testbed_plan import LOGIN, OPT, SCRATCH_BYTES, SWITCH


@dataclass(frozen=True)
class Fault:
    help: str
    act: Callable[[Testbed, str], None]
    host: bool = True  # whether it takes a host


def _daemons(bed: Testbed, host: str) -> Daemons:
    return Daemons(bed.paths, host, bed.init(host))


def _stop_slurmctld(bed: Testbed, _host: str) -> None:
    _daemons(bed, LOGIN).stop("slurmctld")


def _start_slurmctld(bed: Testbed, _host: str) -> None:
    _start_missing(bed, LOGIN, ("slurmctld",))


def _kill_slurmd(bed: Testbed, host: str) -> None:
    _daemons(bed, host).stop("slurmd", signal.SIGKILL)


def _start_slurmd(bed: Testbed, host: str) -> None:
    _start_missing(bed, host, ("slurmd",))


def _start_missing(bed: Testbed, host: str, wanted: Sequence[str]) -> None:
    daemons = _daemons(bed, host)
    for service in missing(bed.plan, host, daemons.init):
        if service in wanted:
            daemons.start(service)


def _take_host(bed: Testbed, host: str) -> None:
    host_namespaces.end([bed.init(host)])


def _return_host(bed: Testbed, host: str) -> None:
    if host_namespaces.find_init(bed.paths, host) is not None:
        return
    init = host_namespaces.boot(bed.paths, bed.plan, host)
    bridge.plug(_switch(bed), {host: init})
    start_on(bed.paths, bed.plan, host, init, services_of(bed.plan, host))


def _switch(bed: Testbed) -> host_namespaces.Init:
    found = host_namespaces.find_init(bed.paths, SWITCH)
    if found is None:
        raise SiteError("the testbed's bridge does not exist", hint="Repair it: slurmlet testbed up")
    return found


def _cut_network(bed: Testbed, host: str) -> None:
    bed.init(host)
    bridge.set_cable(_switch(bed), host, connected=False)


def _mend_network(bed: Testbed, host: str) -> None:
    bed.init(host)
    bridge.set_cable(_switch(bed), host, connected=True)


def _resize_scratch(bed: Testbed, host: str, size: str) -> None:
    _as_root(bed, host, ["mount", "-o", f"remount,size={size}", "/tmp"])


def _fill_scratch(bed: Testbed, host: str) -> None:
    # Shrunk to what it holds: full at once, and no memory of the machine is spent on filling it.
    scratch = os.statvfs(bed.init(host).root / "tmp")
    used_bytes = (scratch.f_blocks - scratch.f_bfree) * scratch.f_frsize
    # A size of 0 would mean "no limit".
    _resize_scratch(bed, host, str(max(used_bytes, scratch.f_frsize)))


def _free_scratch(bed: Testbed, host: str) -> None:
    _resize_scratch(bed, host, str(SCRATCH_BYTES))


def _runtimes(bed: Testbed) -> list[str]:
    """All container runtimes that users find on their PATH."""
    places = ("/usr/bin/crun", "/usr/bin/runc", "/usr/sbin/runc", f"{OPT}/upstream/runc")
    return [path for path in places if (bed.paths.root(bed.plan) / path.lstrip("/")).exists() or OPT in path]


def _hide_runtimes(bed: Testbed, host: str) -> None:
    for path in _runtimes(bed):
        _as_root(bed, host, ["mount", "--bind", "/dev/null", path])


def _show_runtimes(bed: Testbed, host: str) -> None:
    for path in _runtimes(bed):
        _as_root(bed, host, ["umount", path])


def _as_root(bed: Testbed, host: str, argv: Sequence[str]) -> None:
    run(
        host_namespaces.enter_argv(bed.init(host), "root", argv),
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )


FAULTS = {
    "stop-slurmctld": Fault("Stop the Slurm controller.", _stop_slurmctld, host=False),
    "start-slurmctld": Fault("Start it again.", _start_slurmctld, host=False),
    "kill-slurmd": Fault("Kill slurmd of a host; its job steps live on.", _kill_slurmd),
    "start-slurmd": Fault("Start it again.", _start_slurmd),
    "take-host": Fault("Power off: every process of the host dies at once.", _take_host),
    "return-host": Fault("Power it on again, with its daemons.", _return_host),
    "cut-network": Fault("Pull the network cable of a host.", _cut_network),
    "mend-network": Fault("Plug it in again.", _mend_network),
    "fill-scratch": Fault("Leave no byte free in /tmp of a host.", _fill_scratch),
    "free-scratch": Fault("Give it back its space.", _free_scratch),
    "hide-runtimes": Fault("Take crun and runc off a host.", _hide_runtimes),
    "show-runtimes": Fault("Put them back.", _show_runtimes),
}


def inject(bed: Testbed, verb: str, *arguments: str) -> None:
    fault = FAULTS.get(verb)
    if fault is None:
        raise UserError(f"{verb!r} is not a fault", hint=f"One of: {', '.join(FAULTS)}.")
    if len(arguments) != int(fault.host):
        wants = "one host" if fault.host else "no argument"
        raise UserError(f"{verb} takes {wants}", hint=f"Hosts: {', '.join(bed.plan.hosts)}.")
    if fault.host and arguments[0] not in bed.plan.hosts:
        raise UserError(
            f"the testbed has no host {arguments[0]!r}", hint=f"Hosts: {', '.join(bed.plan.hosts)}."
        )
    with locked(bed.paths.lock):
        fault.act(bed, arguments[0] if fault.host else "")
