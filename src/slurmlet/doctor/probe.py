"""What one host offers, tried out for real. Fed to `python3 -` on a compute node, so it stands alone.

Standard library only, and syntax of Python 3.6: a node with too old a Python must still be able to say so.
Every trial that could leave a trace runs in a child process with namespaces of its own. Prints one line: MARK, JSON.
"""

# ruff: noqa: PTH100, PTH101, PTH102, PTH108, PTH112, PTH118, PTH123, PTH208
# Plain os calls: pathlib would cost import time in a program that is fed through a pipe.

import ctypes
import fcntl
import json
import os
import pwd
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any

MARK = "slurmlet-probe "
NEWNS, NEWUSER, NEWNET = 0x00020000, 0x10000000, 0x40000000
TRIAL_TIMEOUT_S = 5
RUNTIMES = ("crun", "runc", "apptainer", "singularity", "podman")


def trial(function: Any, *arguments: Any) -> str:
    """Run it in a child; "" when it worked, else what went wrong."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        # Neither the parent's buffered output nor its exit handlers may run twice.
        said = ""
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(TRIAL_TIMEOUT_S)
            function(*arguments)
        except BaseException as error:
            said = str(error) or type(error).__name__
        os.write(writer, said.encode("utf-8", "replace")[:2000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode("utf-8", "replace")
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"timed out after {TRIAL_TIMEOUT_S} s"
    return said


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(f"{what}: {os.strerror(number)}")


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def enter(flags: int) -> None:
    """New namespaces with ourselves as root inside, as the runner makes them."""
    uid, gid = os.geteuid(), os.getegid()
    check(libc().unshare(NEWUSER | flags), "unshare")
    for path, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open("/proc/self/" + path, "w") as file:
            file.write(text)
    if os.getuid() != 0:
        raise OSError("the mapping to uid 0 has no effect")


def mount(source: str, target: str, kind: str, options: str) -> None:
    result = libc().mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(0), options.encode()
    )
    check(result, "mount " + kind)


def try_overlay(directory: str) -> None:
    enter(NEWNS)
    paths = [os.path.join(directory, name) for name in ("lower", "upper", "work", "root")]
    for path in paths:
        os.mkdir(path)
    lower, upper, work, root = paths
    with open(os.path.join(lower, "below"), "w") as file:
        file.write("below")
    mount("overlay", root, "overlay", f"lowerdir={lower},upperdir={upper},workdir={work},userxattr")
    os.unlink(os.path.join(root, "below"))
    with open(os.path.join(root, "above"), "w") as file:
        file.write("above")
    if os.listdir(root) != ["above"]:
        raise OSError("the overlay does not show what was written")


def try_tun() -> None:
    enter(NEWNET)
    handle = os.open("/dev/net/tun", os.O_RDWR)
    # TUNSETIFF with IFF_TUN | IFF_NO_PI
    fcntl.ioctl(handle, 0x400454CA, struct.pack("16sH22x", b"probe0", 0x1001))


def try_fuse() -> None:
    os.close(os.open("/dev/fuse", os.O_RDWR))


def subordinate_ids() -> Any:
    """How many ids the site gave the user, and whether newuidmap really maps them."""
    (start, uids), (_, gids) = subordinate_range("/etc/subuid"), subordinate_range("/etc/subgid")
    count = min(uids, gids)
    return {"count": count, "problem": trial(map_subordinate, start, count) if count else ""}


def subordinate_range(path: str) -> Any:
    try:
        names = [str(os.getuid()), pwd.getpwuid(os.getuid()).pw_name]
    except KeyError:
        names = [str(os.getuid())]
    try:
        with open(path) as file:
            lines = [line.strip().split(":") for line in file]
    except OSError:
        lines = []
    for fields in lines:
        if len(fields) == 3 and fields[0] in names and fields[1].isdigit() and fields[2].isdigit():
            return int(fields[1]), int(fields[2])
    return 0, 0


def map_subordinate(start: int, count: int) -> None:
    program = find("newuidmap")
    if program is None:
        raise OSError("newuidmap is not installed")
    ready, go = os.pipe()
    done, finish = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(finish)
        libc().unshare(NEWUSER)
        os.write(go, b"x")
        os.read(done, 1)
        os._exit(0)
    os.read(ready, 1)
    arguments = [program, str(child), "0", str(os.getuid()), "1", "1", str(start), str(count)]
    mapping = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = mapping.communicate()[0].decode("utf-8", "replace").strip()
    os.write(finish, b"x")
    os.waitpid(child, 0)
    if mapping.returncode:
        raise OSError(said or "newuidmap failed")


def find(program: str) -> Any:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin:/usr/local/sbin")


def versions() -> Any:
    # crun wants a place for its state even to tell its version; jobs often have no XDG_RUNTIME_DIR.
    place = tempfile.mkdtemp(prefix="slurmlet-doctor-")
    environment = dict(os.environ, XDG_RUNTIME_DIR=place)
    found = {name: version(find(name), environment) for name in RUNTIMES if find(name)}
    shutil.rmtree(place, ignore_errors=True)
    return found


def version(path: str, environment: Any) -> str:
    try:
        said = subprocess.check_output(
            [path, "--version"], stderr=subprocess.STDOUT, timeout=TRIAL_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return "does not start"
    words = said.decode("utf-8", "replace").split("\n")[0].split()
    return words[-1] if words else "?"


def scratch() -> Any:
    """The place the runner would choose (see runner/host/scratch.py), with room and the right to execute."""
    for place in (os.environ.get("SLURM_TMPDIR"), os.environ.get("TMPDIR"), "/tmp"):
        if place and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            break
    else:
        return {
            "path": "",
            "free_bytes": 0,
            "problem": "no writable directory",
            "overlay": "no scratch to try it on",
        }
    sizes = os.statvfs(place)
    facts: Any = {"path": os.path.abspath(place), "free_bytes": sizes.f_bavail * sizes.f_frsize}
    directory = tempfile.mkdtemp(prefix="slurmlet-doctor-", dir=place)
    try:
        facts["problem"] = trial(try_execute, os.path.join(directory, "program"))
        facts["overlay"] = trial(try_overlay, directory)
    finally:
        # The kernel leaves work/work without permissions.
        leftover = os.path.join(directory, "work", "work")
        if os.path.isdir(leftover):
            os.chmod(leftover, 0o700)
        shutil.rmtree(directory, ignore_errors=True)
    return facts


def try_execute(path: str) -> None:
    with open(path, "w") as file:
        file.write("#!/bin/sh\nexit 0\n")
    os.chmod(path, 0o700)
    subprocess.check_call([path])


def see_home(wanted: Any) -> Any:
    """Is the file that the login host just wrote here too, with the same content?"""
    if not wanted:
        return None
    problem = "?"
    # NFS may take a moment to forget that the name did not exist.
    for _ in range(20):
        try:
            with open(wanted["path"]) as file:
                problem = "" if file.read() == wanted["content"] else "has other content here"
            break
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(0.2)
    return {"path": wanted["path"], "problem": problem}


def reach(wanted: Any) -> Any:
    """The first address of the login host that answers with the right word."""
    if not wanted:
        return None
    problems = []
    for address in wanted["addresses"]:
        try:
            began = time.time()
            with socket.create_connection((address, wanted["port"]), timeout=2) as peer:
                peer.sendall(wanted["token"].encode())
                if peer.recv(100).decode("utf-8", "replace") == wanted["answer"]:
                    return {
                        "address": address,
                        "milliseconds": round((time.time() - began) * 1000, 1),
                        "problem": "",
                    }
            problems.append(address + ": somebody else answers")
        except OSError as error:
            problems.append(f"{address}: {error.strerror or error}")
    return {"address": "", "milliseconds": 0, "problem": "; ".join(problems) or "no address to try"}


def seccomp_actions() -> Any:
    try:
        with open("/proc/sys/kernel/seccomp/actions_avail") as file:
            return file.read().split()
    except OSError:
        return []


def limits() -> Any:
    names = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    return {name: list(resource.getrlimit(kind)) for name, kind in names.items()}


def facts(wanted: Any) -> Any:
    return {
        "host": socket.gethostname(),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "python": list(sys.version_info[:3]),
        "python_path": sys.executable,
        "user_namespace": trial(enter, 0),
        "network_namespace": trial(enter, NEWNET),
        "subuids": subordinate_ids(),
        "tun": trial(try_tun),
        "fuse": trial(try_fuse),
        "fuse_overlayfs": find("fuse-overlayfs") or "",
        "compiler": find("cc") or find("gcc") or find("clang") or "",
        "seccomp_actions": seccomp_actions(),
        "runtimes": versions(),
        "scratch": scratch(),
        "limits": limits(),
        "home": see_home(wanted.get("home")),
        "login": reach(wanted.get("login")),
    }


def main(wanted: Any, network_facts: Any) -> None:
    found = dict(facts(wanted), **network_facts(trial, enter))
    sys.stdout.write("\n" + MARK + json.dumps(found) + "\n")
