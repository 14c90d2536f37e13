"""The files under run/, and the proof that a recorded process is still that very process.

A pid alone proves nothing: numbers are reused, and another login host of the same site has its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.console import say
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import locked, private_dir, read_json, write_json
from slurmlet.base.host_addresses import host_name
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import heartbeat


@dataclass(frozen=True)
class RunFiles:
    root: Path

    @property
    def lock(self) -> Path:
        """Held by `up` and `down` for as long as they change something."""
        return self.root / "lock"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor for as long as it lives; the kernel lets go of it even after kill -9. It holds among
        the processes of one host only: on many shared file systems flock is local (heartbeat.py)."""
        return self.root / "supervisor.lock"

    @property
    def supervisor(self) -> Path:
        return self.root / "supervisor.json"

    @property
    def heartbeat(self) -> Path:
        """Renewed by the supervisor, read by other hosts."""
        return self.root / "heartbeat.json"

    @property
    def components(self) -> Path:
        return self.root / "components.json"

    @property
    def corefile(self) -> Path:
        return self.root / "Corefile"

    @property
    def hosts(self) -> Path:
        """What CoreDNS answers from this host's own file of names."""
        return self.root / "hosts"

    @property
    def empty_zone(self) -> Path:
        return self.root / "empty.zone"

    @property
    def proxy(self) -> Path:
        """The `slurmlet proxy` that runs."""
        return self.root / "proxy.json"

    @property
    def egress(self) -> Path:
        """How the API server reaches pods, Services and the hub."""
        return self.root / "egress.json"

    def kubeconfig(self, component: str) -> Path:
        return self.root / f"{component}.kubeconfig"


@dataclass(frozen=True)
class ProcessIdentity:
    pid: int
    start_ticks: int
    boot_id: str
    host: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        ticks = start_ticks(pid)
        return None if ticks is None else cls(pid, ticks, boot_id(), host_name())

    @property
    def elsewhere(self) -> bool:
        return self.host != host_name()

    def alive(self) -> bool:
        """True when this very process runs on this host."""
        return not self.elsewhere and self.boot_id == boot_id() and start_ticks(self.pid) == self.start_ticks

    def send(self, number: int) -> None:
        # The pidfd pins the process: between the check and the signal its number cannot change hands.
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive():
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)


def run_files(files: ClusterFiles) -> RunFiles:
    return RunFiles(files.run)


def start_ticks(pid: int) -> int | None:
    """Clock ticks since boot at which the process began; None when there is none, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold spaces and brackets; the fields begin behind its last bracket.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_supervisor(run: RunFiles, identity: ProcessIdentity, since: str, code: str = "") -> None:
    """`code`: which slurmlet it is of (installed_code.py)."""
    write_json(run.supervisor, {**dataclasses.asdict(identity), "since": since, "code": code})


def supervisor_code(run: RunFiles) -> str:
    """Which slurmlet the recorded supervisor is of; "" for one that did not say yet."""
    raw = read_json(run.supervisor)
    return str(raw.get("code") or "") if isinstance(raw, dict) else ""


def read_supervisor(run: RunFiles) -> tuple[ProcessIdentity, str] | None:
    """The recorded supervisor and when it began; it may be dead or on another host."""
    raw = read_json(run.supervisor)
    try:
        identity = ProcessIdentity(int(raw["pid"]), int(raw["start_ticks"]), raw["boot_id"], raw["host"])
        return identity, str(raw["since"])
    except (KeyError, TypeError, ValueError):
        return None


def read_components(run: RunFiles) -> dict[str, dict[str, Any]]:
    raw = read_json(run.components)
    return raw if isinstance(raw, dict) else {}


class ElsewhereError(SlurmletError):
    """The cluster runs on another login host of this site, which shares our home directory."""

    reason = "RunsElsewhere"

    def __init__(self, files: ClusterFiles, host: str, command: str) -> None:
        super().__init__(
            f"cluster {files.name!r} runs on {host}, and this is {host_name()}",
            hint=f"Use: ssh {host} slurmlet {command} -c {files.name}\n"
            f"  If {host} is gone for good: slurmlet down --force -c {files.name}",
        )


def running_supervisor(files: ClusterFiles, command: str) -> tuple[ProcessIdentity, str] | None:
    """The supervisor alive on this host; raises ElsewhereError when the record names another host."""
    run = run_files(files)
    found = read_supervisor(run)
    if found is None:
        # Its record may be lost; that it lives is seen all the same.
        sign = heartbeat.read(run.heartbeat)
        if sign is not None and sign.host != host_name() and heartbeat.is_fresh(run.heartbeat):
            raise ElsewhereError(files, sign.host, command)
        return None
    if found[0].elsewhere:
        raise ElsewhereError(files, found[0].host, command)
    return found if found[0].alive() else None


class AliveElsewhereError(SlurmletError):
    """The cluster is to be forgotten by force, but its supervisor lives on another host."""

    reason = "RunsElsewhere"

    def __init__(self, files: ClusterFiles, host: str) -> None:
        super().__init__(
            f"cluster {files.name!r} is alive on {host}: its supervisor gives signs of life, and this is {host_name()}",
            hint=f"Stop it there: ssh {host} slurmlet down -c {files.name}\n"
            f"  If {host} was lost just now, try again in {heartbeat.FRESH_S:g} s.",
        )


def refuse_if_alive_elsewhere(files: ClusterFiles) -> None:
    """Raises AliveElsewhereError. Takes some seconds where the last sign of life from another host is old."""
    path = run_files(files).heartbeat
    sign = heartbeat.read(path)
    if sign is not None and sign.host != host_name() and heartbeat.is_alive(path):
        raise AliveElsewhereError(files, sign.host)


@contextlib.contextmanager
def lifecycle_lock(files: ClusterFiles) -> Iterator[None]:
    """One `up` or `down` at a time per cluster.

    A `down --purge` removes the lock with the rest: who waited for it then holds a file that nobody else sees. That is
    harmless, because the supervisor has a lock of its own, and across hosts its heartbeat.
    """
    make_dirs(files)
    path = run_files(files).lock
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(locked(path, wait=False)):
            say(f"  another `slurmlet up` or `down` of {files.name!r} is running; waiting for it")
            stack.enter_context(locked(path))
        yield


def make_dirs(files: ClusterFiles) -> None:
    for path in (files.root.parent, files.root, files.run, files.logs, files.etcd, files.pods):
        private_dir(path)
