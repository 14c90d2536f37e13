"""The pod's network namespace, made inside the sandbox that a runner has, and what is said where a site forbids it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROLOGUE = """
import json, os, socket, sys
from slurmlet.linux import syscalls as linux
from slurmlet.runner.host import sandbox
from slurmlet.podnet import namespace_sockets as podsockets

def answer(value):
    print(json.dumps(value), flush=True)

def work(inside):
    from slurmlet.podnet import network_namespace as namespaces
    try:
        look(namespaces)
    except namespaces.NoNetwork as error:
        answer({"no_network": str(error)})
    return 0
"""

LOOK = """
def look(namespaces):
    directory = sys.argv[1]
    space = namespaces.Making().finish("10.244.0.7", os.path.join(directory, "sys"))
    sockets = podsockets.PodSockets(space.netns_fd)
    web = sockets.tcp(socket.AF_INET)
    web.bind(("10.244.0.7", 80))
    web.listen()
    client = sockets.tcp(socket.AF_INET)
    client.connect(("10.244.0.7", 80))
    client.close()
    sockets.udp(socket.AF_INET6).bind(("::1", 53))
    # Outside nothing has changed.
    host = socket.socket()
    try:
        host.bind(("10.244.0.7", 80))
    except OSError:
        outside = "host"
    pid = os.fork()
    if pid == 0:
        linux.setns(space.netns_fd, linux.CLONE_NEWNET)
        answer({
            "names": [name for _, name in socket.if_nameindex()],
            "sysfs": sorted(os.listdir(space.sysfs + "/class/net")) if space.sysfs else None,
            "mtu": open(space.sysfs + "/class/net/eth0/mtu").read().strip() if space.sysfs else None,
            "routes": open("/proc/self/net/route").read().split("\\n")[1].split()[:3],
            "six": open("/proc/self/net/if_inet6").read() if os.path.exists("/proc/self/net/if_inet6") else "",
            "blocking": os.get_blocking(space.tun_fd),
            "inheritable": [os.get_inheritable(fd) for fd in space[:2]],
            "outside": outside,
        })
        os._exit(0)
    os.waitpid(pid, 0)
"""

KILLED = """
import signal, time
def look(namespaces):
    making = namespaces.Making(lambda: "looked")
    os.kill(making._pid, signal.SIGKILL)
    if sys.argv[1] == "reaped":
        os.waitpid(making._pid, 0)
    else:
        os.waitid(os.P_PID, making._pid, os.WEXITED | os.WNOWAIT)
    space = making.finish("10.244.0.7")
    answer({"fds": len({space.netns_fd, space.tun_fd}), "seen": making.seen})
"""

NO_NAMESPACES = """
def look(namespaces):
    with open("/proc/sys/user/max_net_namespaces", "w") as file:
        file.write("0")
    namespaces.Making().finish("10.244.0.7")
"""

NO_DEVICE = """
def look(namespaces):
    linux.mount("tmpfs", "/dev/net", "tmpfs")
    namespaces.Making().finish("10.244.0.7")
"""


def in_sandbox(script: str, *arguments: str) -> dict[str, Any]:
    code = f"{PROLOGUE}{script}\nsys.exit(sandbox.enter(work))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments], capture_output=True, text=True, timeout=20
    )
    if "SandboxError" in done.stderr:
        pytest.skip(f"this machine gives us no user namespace: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_pod_has_a_network_of_its_own(tmp_path: Any) -> None:
    seen = in_sandbox(LOOK, str(tmp_path))
    if "no_network" in seen:
        pytest.skip(f"this machine does not give us what a compute host would: {seen['no_network']}")
    assert sorted(seen["names"]) == ["eth0", "lo"]
    assert seen["sysfs"] in (None, ["eth0", "lo"])
    assert seen["mtu"] in (None, "65482")
    assert seen["routes"] == ["eth0", "00000000", "00000000"]
    assert "eth0" not in seen["six"]
    assert not seen["blocking"]
    assert seen["inheritable"] == [False, False]
    assert seen["outside"] == "host"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            NO_NAMESPACES,
            "users of this node cannot create network namespaces (the sysctl user.max_net_namespaces is 0 or used up)",
        ),
        (NO_DEVICE, "users of this node cannot open /dev/net/tun (No such file or directory)"),
    ],
)
def test_says_what_is_missing(script: str, reason: str) -> None:
    assert in_sandbox(script) == {"no_network": reason}


@pytest.mark.parametrize("by", ["reaped", "left"])
def test_a_fork_that_was_killed_is_replaced(by: str) -> None:
    assert in_sandbox(KILLED, by) == {"fds": 2, "seen": "looked"}
