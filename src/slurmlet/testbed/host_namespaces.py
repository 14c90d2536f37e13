"""Hosts as the kernel sees them: booting, entering, watching and ending a set of namespaces.

A host is known by its init process: pid, start time (a pid alone may have been given to a stranger since) and pid
namespace. Ending a host means killing that init: the kernel then ends every process of the namespace, and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import read_json, write_json
from slurmlet.base.processes import run
from slurmlet.testbed import host_boot
from slurmlet.testbed.testbed_plan import GPUS, MARKER, SCRATCH_BYTES, SWITCH, Paths, Plan

_PROC = Path("/proc")


@dataclass(frozen=True)
class Init:
    """The init process of a host, as seen from the machine."""

    pid: int
    started_ticks: int
    pid_namespace: str

    @property
    def root(self) -> Path:
        """The host's own file system, from outside."""
        return _PROC / str(self.pid) / "root"


def _started_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None for one that is gone or a zombie."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _pid_namespace(pid: int) -> str | None:
    try:
        return str((_PROC / str(pid) / "ns" / "pid").readlink())
    except OSError:
        return None


def _identify(pid: int) -> Init | None:
    ticks, namespace = _started_ticks(pid), _pid_namespace(pid)
    return None if ticks is None or namespace is None else Init(pid, ticks, namespace)


def find_init(paths: Paths, host: str) -> Init | None:
    """The running init of a host, or None when the host is off (or its record stale)."""
    record = read_json(paths.host_record(host))
    if not isinstance(record, dict):
        return None
    now = _identify(int(record["pid"]))
    return now if now is not None and now.started_ticks == record["started_ticks"] else None


def boot(paths: Paths, plan: Plan, host: str) -> Init:
    """Start a host: namespaces, mounts and an idle init. Network and services come after."""
    spec = {
        "name": host,
        "root": str(paths.root(plan)),
        "binds": _binds(paths, plan, host),
        "scratch_bytes": SCRATCH_BYTES,
        "gpus": GPUS if host == plan.gpu_host else 0,
        # `ip link … netns PID` looks the pid up in /proc, and cables lead to pids of the machine.
        "machine_proc": host == SWITCH,
        "marker": [MARKER, str(paths.run)],
    }
    return launch(paths, host, spec)


def launch(paths: Paths, host: str, spec: Mapping[str, Any]) -> Init:
    """Start a host from a whole description (host_boot.py) and write down its init."""
    said = run(
        [sys.executable, "-I", "-S", str(host_boot.__file__)], stdin=json.dumps(spec), timeout_s=30
    ).stdout
    init = _identify(int(said))
    if init is None:
        raise SlurmletError(f"host {host} ended as soon as it was started", hint="See the kernel log: dmesg")
    write_json(paths.host_record(host), {"pid": init.pid, "started_ticks": init.started_ticks})
    return init


def _binds(paths: Paths, plan: Plan, host: str) -> list[tuple[str, str, bool]]:
    if host == SWITCH:
        return []
    own = paths.host_dir(host)
    kept = (paths.venv(plan), paths.wheels(plan), paths.images(plan))
    for folder in (own / "lib", own / "log", own / "mysql", *kept):
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        folder.chmod(0o755)
    return [
        (str(paths.etc), "/etc", True),
        (str(paths.home), "/home", False),
        (str(paths.opt), "/opt/slurmlet", False),
        (str(paths.venv(plan)), "/opt/slurmlet/venv", False),
        (str(paths.wheels(plan)), "/opt/slurmlet/wheels", True),
        (str(paths.images(plan)), "/opt/slurmlet/images", True),
        (str(own / "lib"), "/var/lib/slurm", False),
        (str(own / "log"), "/var/log", False),
        (str(own / "mysql"), "/var/lib/mysql", False),
    ]


def enter_argv(init: Init, user: str, argv: Sequence[str], *, directory: str = "/") -> list[str]:
    """The command line that runs argv in the host as the user; argv stays argv, no shell sees it."""
    spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--root", f"--wd={init.root}{directory}"]
    become = [] if user == "root" else ["setpriv", "--reuid", user, "--regid", user, "--init-groups", "--"]
    return ["nsenter", f"--target={init.pid}", *spaces, "--", *become, *argv]


def processes_in(init: Init) -> dict[int, str]:
    """pid → name of every process of the host, zombies left out."""
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and _pid_namespace(int(entry.name)) == init.pid_namespace:
            try:
                found[int(entry.name)] = (entry / "comm").read_text().strip()
            except OSError:
                continue
    return found


def listens(init: Init, port: int) -> bool:
    """Whether something in the host listens on the TCP port; asked of the kernel, so no connection disturbs it."""
    suffix = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        try:
            lines = (_PROC / str(init.pid) / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        if any(fields[1].endswith(suffix) and fields[3] == "0A" for fields in map(str.split, lines)):
            return True
    return False


def links_of(init: Init) -> set[str]:
    try:
        lines = (_PROC / str(init.pid) / "net" / "dev").read_text().splitlines()[2:]
    except OSError:
        return set()
    return {line.partition(":")[0].strip() for line in lines}


def strays(paths: Paths) -> list[Init]:
    """Every init that carries our mark, whether or not a record of it is left."""
    return [init for init, run_dir in _marked() if run_dir == str(paths.run)]


def neighbours(paths: Paths) -> set[str]:
    """The names of other testbeds that run from the same cache."""
    places = {Path(run_dir) for _, run_dir in _marked()}
    return {place.name for place in places if place.parent == paths.base and place.name != paths.name}


def _marked() -> Iterator[tuple[Init, str]]:
    prefix = f"{MARKER}=".encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            mark = next(
                (v for v in (entry / "environ").read_bytes().split(b"\0") if v.startswith(prefix)), None
            )
            ranks = (entry / "status").read_text().partition("NSpid:")[2].splitlines()[0].split()
        except (OSError, IndexError):
            continue
        init = _identify(int(entry.name))
        # Only an init (pid 1 of a namespace below ours): whatever else inherited the mark dies with it.
        if mark and len(ranks) > 1 and ranks[-1] == "1" and init is not None:
            yield init, mark.removeprefix(prefix).decode(errors="replace")


def end(inits: Sequence[Init]) -> None:
    """Power off: kill each init and wait until every process of its namespace is gone."""
    for init in inits:
        if _started_ticks(init.pid) == init.started_ticks:
            os.kill(init.pid, signal.SIGKILL)
    wait_until(lambda: not any(processes_in(init) for init in inits), 20, "the processes of the hosts to end")


def leftovers(paths: Paths) -> list[str]:
    """What a finished `down` must not leave: processes with our mark, mounts of our files in the machine's view."""
    found = [f"process {init.pid}" for init in strays(paths)]
    mounts = (_PROC / "self" / "mountinfo").read_text().splitlines()
    return found + [f"mount {m.split()[4]}" for m in mounts if m.split()[4].startswith(str(paths.base) + "/")]


def wait_until(ready: Callable[[], bool], limit_s: float, what: str, *, pause_s: float = 0.02) -> None:
    deadline_s = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > deadline_s:
            raise SlurmletError(f"waited {limit_s:g} s for {what}", reason="Timeout", transient=True)
        time.sleep(pause_s)
