"""The pod's namespaces, in processes of their own: whom they map, what is told where a node does not give them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BEGIN = """
import errno, json, os, signal, sys
from slurmlet.linux import syscalls
from slurmlet.runner.host import sandbox

def answer(**value):
    print(json.dumps(value), flush=True)

def outer():
    code = sandbox.enter(inner)
    answer(code=code)

def main():
    try:
        outer()
    except sandbox.SandboxError as error:
        answer(error=str(error))
"""


def play(script: str, *arguments: str, **environ: str) -> list[Any]:
    """What the script answered, line by line."""
    argv = [sys.executable, "-c", BEGIN + script + "\nmain()\n", *arguments]
    around = {**os.environ, **environ}
    done = subprocess.run(argv, env=around, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def tools(directory: Path, **scripts: str) -> str:
    """A PATH with these programs first."""
    for name, script in scripts.items():
        path = directory / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def test_the_inner_process_is_pid_1_and_root_with_mounts_of_its_own() -> None:
    script = """
def inner(told):
    import tempfile
    place = tempfile.mkdtemp()
    syscalls.mount("tmpfs", place, "tmpfs")
    open(place + "/inside", "w").close()
    answer(pid=os.getpid(), uid=os.getuid(), gid=os.getgid(), kind=told.mapping.kind, place=place)
    return 3
"""
    inside, after = play(script)
    assert (inside["pid"], inside["uid"], inside["gid"]) == (1, 0, 0)
    assert after == {"code": 3}
    assert list(Path(inside["place"]).iterdir()) == []
    Path(inside["place"]).rmdir()


def test_a_signal_is_handed_on_and_its_death_is_told_as_a_shell_does() -> None:
    script = """
def inner(told):
    # PID 1 is killed by no signal from inside; only one that it handles reaches it from outside.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, sandbox.SIGNALS)
    answer(ready=True)
    signal.pause()
    return 0
"""
    argv = [sys.executable, "-c", BEGIN + script + "\nmain()\n"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"ready": True}
        process.terminate()
        assert json.loads(process.stdout.readline()) == {"code": 7}
        assert process.wait(60) == 0


def test_what_raises_inside_is_a_code_outside() -> None:
    assert play("def inner(told):\n    raise ValueError('broken')\n") == [{"code": 1}]


def test_a_node_without_user_namespaces_is_named() -> None:
    script = """
def refuse(_flags):
    raise OSError(errno.EPERM, "clone: Operation not permitted")

syscalls.fork_into = refuse
inner = None
"""
    (told,) = play(script)
    assert "this node gives no user namespaces" in told["error"]
    assert "slurmlet doctor" in told["error"]


RANGES = """
sandbox.parse_ranges = lambda path, names: [(100000, 65536)]

def inner(told):
    answer(kind=told.mapping.kind, uids=told.mapping.uids)
    return 0
"""


def test_subordinate_ids_that_cannot_be_mapped_leave_one(tmp_path: Path) -> None:
    path = tools(tmp_path, newuidmap="exit 1", newgidmap="exit 1")
    assert play(RANGES, PATH=path) == [{"kind": "single", "uids": 1}, {"code": 0}]


def test_uids_without_gids_are_an_error(tmp_path: Path) -> None:
    path = tools(tmp_path, newuidmap='echo "0 $3 1" > /proc/$1/uid_map', newgidmap="exit 1")
    (told,) = play(RANGES, PATH=path)
    assert "check /etc/subgid on this node" in told["error"]


def test_ranges_are_those_of_the_user_by_name_or_number(tmp_path: Path) -> None:
    path = tools(tmp_path, newuidmap="exit 1", newgidmap="exit 1")
    script = """
asked = []
def parse(path, names):
    asked.append((path, names))
    return [(1000, 10)] if path.endswith("subuid") else [(2000, 20)]

sandbox.parse_ranges = parse
def main():
    answer(found=sandbox.subordinate_ranges(0), nobody=sandbox.subordinate_ranges(4000000000), asked=asked)
"""
    (told,) = play(script, PATH=path)
    assert told["found"] == told["nobody"] == [[1000, 10], [2000, 20]]
    assert told["asked"][0] == ["/etc/subuid", ["0", "root"]]
    assert told["asked"][3] == ["/etc/subgid", ["4000000000"]]


def test_a_pod_that_gets_no_sandbox_says_so_in_its_report(tmp_path: Path) -> None:
    script = """
def refuse(_flags):
    raise OSError(errno.ENOSPC, "clone: No space left on device")

def main():
    from slurmlet.runner.pod import pod_main
    syscalls.fork_into = refuse
    answer(code=pod_main.run(sys.argv[1]))
"""
    assert play(script, str(tmp_path)) == [{"code": 1}]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["phase"], report["exit_code"]) == ("Done", 1)
    assert report["problem"]["reason"] == "NoSandbox"
    assert "No space left on device" in report["problem"]["message"]


def test_files_of_the_sandboxs_own_ids_can_be_removed() -> None:
    assert play("def main():\n    answer(code=sandbox.with_ids(lambda: 6))\n") == [{"code": 6}]


FAKED = """
def inner(told):
    from slurmlet.runner.containers import fake_syscalls
    faked = fake_syscalls.fake_for_all_children()
    path = sys.argv[1]
    os.chown(path, 5, 5)
    os.mknod(path + ".device", 0o020600, os.makedev(1, 3))
    os.mkfifo(path + ".fifo")
    pid = os.fork()
    if pid == 0:
        os.setgid(77)
        os._exit(0)
    answer(
        faked=faked, owner=os.stat(path).st_uid, device=os.path.exists(path + ".device"),
        fifo=os.path.exists(path + ".fifo"), child=os.waitpid(pid, 0)[1],
    )
    return 0
"""


def test_what_one_uid_cannot_do_succeeds_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told, after = play(FAKED, str(tmp_path / "file"))
    assert told == {"faked": True, "owner": 0, "device": False, "fifo": True, "child": 0}
    assert after == {"code": 0}


IPC = """
def inner(told):
    from slurmlet.runner.host.scratch import Scratch
    from slurmlet.runner.pod import shared_namespaces
    scratch = Scratch(sys.argv[1], "u-1")
    plan = json.loads(sys.argv[2])
    try:
        directory = shared_namespaces.share_ipc(plan, scratch)
    except shared_namespaces.Forbidden as error:
        answer(forbidden=str(error))
        return 0
    open(directory + "/shm/inside", "w").close()
    answer(names=sorted(os.listdir(directory)), value=open("/proc/sys/kernel/shm_rmid_forced").read().strip())
    os.unlink(directory + "/shm/inside")
    return 0
"""


def test_a_pod_has_an_ipc_namespace_with_its_sysctls(tmp_path: Path) -> None:
    plan = json.dumps({"host_ipc": False, "sysctls": [["kernel.shm_rmid_forced", "1"]]})
    told, _ = play(IPC, str(tmp_path), plan)
    assert told == {"names": ["mqueue", "shm"], "value": "1"}


def test_a_sysctl_that_is_not_the_users_to_set_is_named(tmp_path: Path) -> None:
    plan = json.dumps({"host_ipc": False, "sysctls": [["kernel.no_such_thing", "1"]]})
    told, _ = play(IPC, str(tmp_path), plan)
    assert "does not let a user set kernel.no_such_thing" in told["forbidden"]


def test_a_pod_of_the_hosts_ipc_sees_the_hosts_shared_memory(tmp_path: Path) -> None:
    script = IPC.replace(
        'open("/proc/sys/kernel/shm_rmid_forced").read().strip()', "os.path.exists('/dev/shm/inside')"
    )
    told, _ = play(script, str(tmp_path), json.dumps({"host_ipc": True, "sysctls": []}))
    assert told == {"names": ["mqueue", "shm"], "value": True}


PAUSE = """
def inner(told):
    from slurmlet.linux.event_loop import Loop
    from slurmlet.runner.host.child_processes import Children
    from slurmlet.runner.pod.pause_process import start_pause
    empty, name = sys.argv[1], sys.argv[2]
    children = Children(Loop())
    try:
        path = start_pause(children, empty, name)
    except OSError as error:
        answer(error=str(error))
        return 0
    handle = os.open(path, os.O_RDONLY)
    syscalls.setns(handle, syscalls.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        answer(own=os.getpid())
        os._exit(0)
    os.waitpid(pid, 0)
    return 0
"""


def test_a_shared_pid_namespace_has_a_first_process_that_only_waits(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    told, after = play(PAUSE, str(empty), str(tmp_path / "pidns"))
    assert told["own"] == 2, "the pause is the first"
    assert after == {"code": 0}


def test_a_pause_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    told, _ = play(PAUSE, str(tmp_path / "missing"), str(tmp_path / "pidns"))
    assert "no shared PID namespace" in told["error"]
