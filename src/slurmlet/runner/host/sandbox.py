"""The pod's namespaces: user, mount and PID. The network is the host's.

Two processes: the outer one, started by Slurm, only waits and forwards SIGTERM; the inner one is PID 1 of the sandbox
and the real runner. When the outer dies for any reason the kernel kills PID 1, and with it every process of the
pod: nothing outlives the job, whatever process tracking Slurm uses.

With a single mapping the user's own uid is 0 inside and no other uid exists. Where the site gave the user subordinate
ids (/etc/subuid and newuidmap), 0 is the user and 1… are those.
"""

from __future__ import annotations

import os
import signal

from slurmlet.linux import syscalls
from slurmlet.linux.programs import find_program
from slurmlet.linux.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, List, Optional, Tuple

    Range = Tuple[int, int]


SINGLE, SUBUID = "single", "subuid"
# Those that end a pod: the outer process hands them on.
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ONE, _MANY = b"1", b"n"
_NO_NAMESPACES = "this node gives no user namespaces ({}); `slurmlet doctor` says more"


class Mapping(Record):
    kind: str
    # How many uids and gids exist inside: 0 … n-1.
    uids: int
    gids: int


class Inside(Record):
    """What the inner process is told."""

    mapping: Mapping
    # Reads end-of-file when the outer process is gone: a second net below PR_SET_PDEATHSIG.
    lifeline: int


class SandboxError(Exception):
    """This node does not let the user make the namespaces a pod needs."""


def enter(work: Callable[[Inside], int]) -> int:
    """Run `work` as PID 1 of new namespaces and return its exit code. The caller is the outer process."""

    def inside(told: Inside) -> int:
        _own_mounts()
        syscalls.forbid_inspection()
        return work(told)

    return _run_inside(inside)


def with_ids(work: Callable[[], int]) -> int:
    """Run `work` where all ids that the user has are ours to use: for whoever removes their files."""
    return _run_inside(lambda _told: work())


def _run_inside(work: Callable[[Inside], int]) -> int:
    ranges = subordinate_ranges(os.geteuid())
    lifeline, held = os.pipe2(os.O_CLOEXEC)
    mapped, tell = os.pipe2(os.O_CLOEXEC)
    # Blocked across the fork: a signal in between must reach a process that knows what to do with it.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = _fork_inside()
    if pid == 0:
        os.close(held)
        os.close(tell)
        code = 1
        try:
            syscalls.die_with_parent(signal.SIGKILL)
            told = os.read(mapped, 1)
            os.close(mapped)
            if told:
                code = work(Inside(_mapping(ranges if told == _MANY else None), lifeline))
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(lifeline)
    os.close(mapped)
    try:
        os.write(tell, _map(pid, ranges))
    finally:
        # With nothing written the child leaves.
        os.close(tell)
        code = _wait_for(pid)
    return code


def _wait_for(pid: int) -> int:
    def forward(number: int, _frame: Any) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    for number in SIGNALS:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while True:
        found, status = os.waitpid(pid, 0)
        if found == pid:
            break
    # The number may be another's from now on.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _fork_inside() -> int:
    try:
        return syscalls.fork_into(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID)
    except OSError as error:
        raise SandboxError(_NO_NAMESPACES.format(error)) from error


def _mapping(ranges: Optional[Tuple[Range, Range]]) -> Mapping:
    return Mapping(SINGLE, 1, 1) if ranges is None else Mapping(SUBUID, 1 + ranges[0][1], 1 + ranges[1][1])


def _map(pid: int, ranges: Optional[Tuple[Range, Range]]) -> bytes:
    """Give the namespace of a child its ids, from outside: newuidmap refuses to work from inside."""
    uid, gid = os.geteuid(), os.getegid()
    if ranges is not None and _map_ranges(pid, (uid, gid), ranges):
        return _MANY
    try:
        _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/uid_map", f"0 {uid} 1")
        _write(f"/proc/{pid}/gid_map", f"0 {gid} 1")
    except OSError as error:
        raise SandboxError(_NO_NAMESPACES.format(error)) from error
    return _ONE


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def _map_ranges(pid: int, own: Tuple[int, int], ranges: Tuple[Range, Range]) -> bool:
    for tool, own_id, (first, count) in zip(("newuidmap", "newgidmap"), own, ranges):
        argv = [tool, str(pid), "0", str(own_id), "1", "1", str(first), str(count)]
        if os.spawnv(os.P_WAIT, find_program(tool), argv) != 0:  # noqa: S606 - no shell is what is wanted
            break
    else:
        return True
    # newuidmap may have mapped uids before newgidmap failed: nothing can be mapped twice.
    with open(f"/proc/{pid}/uid_map", encoding="ascii") as file:
        if file.read().strip():
            raise SandboxError("newuidmap worked but newgidmap did not; check /etc/subgid on this node")
    return False


def subordinate_ranges(uid: int) -> Optional[Tuple[Range, Range]]:
    """The first usable range of uids and of gids of this user, or None."""
    if not (find_program("newuidmap") and find_program("newgidmap")):
        return None
    names = [str(uid)]
    try:
        import pwd

        names.append(pwd.getpwuid(uid).pw_name)
    except KeyError:
        pass
    found = [parse_ranges(path, names) for path in ("/etc/subuid", "/etc/subgid")]
    return (found[0][0], found[1][0]) if found[0] and found[1] else None


def parse_ranges(path: str, names: List[str]) -> List[Range]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        fields = line.strip().split(":")
        if len(fields) == 3 and fields[0] in names and fields[1].isdigit() and fields[2].isdigit():
            found.append((int(fields[1]), int(fields[2])))
    return [(first, count) for first, count in found if count > 0]


def _own_mounts() -> None:
    # Slave and not private: what an automounter mounts on the host later must still appear here.
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_SLAVE)
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
