"""The pod's namespaces: user, mount and PID. The network is the host's.

Two processes: the outer one, started by Slurm, only waits and forwards SIGTERM; the inner one is PID 1 of the sandbox
and the real runner. When the outer dies for any reason the kernel kills PID 1, and with it every process of the
pod: nothing outlives the job, whatever process tracking Slurm uses.

With a single mapping the user's own uid is 0 inside and no other uid exists. Where the site gave the user subordinate
ids (/etc/subuid and newuidmap), 0 is the user and 1… are those.
"""

from __future__ import annotations

import os

from slurmlet.runner import linux
from slurmlet.runner.lean import signal
from slurmlet.runner.lean.typing import Any, Callable, List, NamedTuple, Optional, Tuple
from slurmlet.runner.programs import find_program

SINGLE, SUBUID = "single", "subuid"
Range = Tuple[int, int]


class Mapping(NamedTuple):
    kind: str
    # How many uids and gids exist inside: 0 … n-1.
    uids: int
    gids: int


class Inside(NamedTuple):
    """What the inner process is told."""

    mapping: Mapping
    # Reads end-of-file when the outer process is gone: a second net below PR_SET_PDEATHSIG.
    lifeline: int


class SandboxError(Exception):
    """This node does not let the user make the namespaces a pod needs."""


def enter(work: Callable[[Inside], int]) -> int:
    """Run `work` as PID 1 of new namespaces and return its exit code. The caller is the outer process."""
    mapping = _unshare_and_map()
    lifeline, held = os.pipe2(os.O_CLOEXEC)
    # Blocked across the fork: a SIGTERM in between must reach a process that knows what to do with it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid == 0:
        os.close(held)
        code = 1
        try:
            linux.die_with_parent(signal.SIGKILL)
            _own_mounts()
            linux.forbid_inspection()
            code = work(Inside(mapping, lifeline))
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(lifeline)
    return _wait_for(pid)


def _wait_for(pid: int) -> int:
    def forward(number: int, _frame: Any) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    while True:
        found, status = os.waitpid(pid, 0)
        if found == pid:
            break
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def take_ids() -> Mapping:
    """Enter namespaces in which the user's ids are ours to use, for good: for a process that removes their files."""
    return _unshare_and_map()


def _unshare_and_map() -> Mapping:
    uid, gid = os.geteuid(), os.getegid()
    ranges = subordinate_ranges(uid)
    flags = linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID
    if ranges is None:
        _unshare(flags)
    else:
        helper, go = _helper_outside(ranges, uid, gid)
        _unshare(flags)
        if _let_helper_map(helper, go):
            return Mapping(SUBUID, 1 + ranges[0][1], 1 + ranges[1][1])
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")
    return Mapping(SINGLE, 1, 1)


def _unshare(flags: int) -> None:
    try:
        linux.unshare(flags)
    except OSError as error:
        raise SandboxError(
            f"this node gives no user namespaces ({error}); `slurmlet doctor` says more"
        ) from error


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def _helper_outside(ranges: Tuple[Range, Range], uid: int, gid: int) -> Tuple[int, int]:
    """Fork a process that stays in the host's user namespace; newuidmap refuses to work from inside."""
    target = os.getpid()
    ready, go = os.pipe2(os.O_CLOEXEC)
    helper = os.fork()
    if helper:
        os.close(ready)
        return helper, go
    code = 1
    try:
        os.close(go)
        # Nothing to read: the outer process failed or went away, there is nobody to map.
        if os.read(ready, 1):
            code = 0
            for tool, own, (first, count) in (("newuidmap", uid, ranges[0]), ("newgidmap", gid, ranges[1])):
                argv = [tool, str(target), "0", str(own), "1", "1", str(first), str(count)]
                code = code or os.spawnv(os.P_WAIT, find_program(tool), argv)  # noqa: S606 - in a fork of our own
    finally:
        os._exit(1 if code else 0)


def _let_helper_map(helper: int, go: int) -> bool:
    os.write(go, b"1")
    os.close(go)
    _, status = os.waitpid(helper, 0)
    if status == 0:
        return True
    # newuidmap may have mapped uids before newgidmap failed: nothing can be mapped twice.
    with open("/proc/self/uid_map", encoding="ascii") as file:
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
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_SLAVE)
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
