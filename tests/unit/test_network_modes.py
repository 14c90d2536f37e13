"""Whole pod networks, as the runner makes them: pods with and without the fast path speak TCP to each other."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAMS = """
import hashlib, os, socket, sys

SIZE = 1 << 20

def serve():
    listener = socket.create_server(("", 80))
    listener.settimeout(15)
    open(sys.argv[2], "w").close()
    while True:
        connection, peer = listener.accept()
        received = b""
        while len(received) < SIZE:
            received += connection.recv(1 << 20)
        assert connection.recv(1) == b""
        connection.sendall(hashlib.sha256(received).hexdigest().encode() + b" " + peer[0].encode())
        connection.close()

def ask():
    payload = os.urandom(SIZE)
    for ip in ("10.244.0.7", "10.96.0.10"):
        with socket.create_connection((ip, 80), 10) as connection:
            assert connection.getpeername() == (ip, 80)
            assert connection.getsockname()[0] == "10.244.0.8"
            connection.sendall(payload)
            connection.shutdown(socket.SHUT_WR)
            said = b""
            while chunk := connection.recv(1000):
                said += chunk
            assert said.decode().split() == [hashlib.sha256(payload).hexdigest(), "10.244.0.8"], said
    try:
        socket.create_connection(("10.244.0.7", 81), 5)
    except ConnectionRefusedError:
        print("all is well", flush=True)

{"serve": serve, "ask": ask}[sys.argv[1]]()
"""

PODS = """
import json, os, signal, sys, types
from slurmlet.linux import syscalls as linux
from slurmlet.runner.host import sandbox
from slurmlet.protocol import wire
from slurmlet.runner.host.child_processes import Children
from slurmlet.linux.event_loop import Loop

server_mode, client_mode, directory, programs = sys.argv[1:5]
ready = os.path.join(directory, "ready")

def make(loop, children, ip, mode):
    from slurmlet.runner.network import network_attachment as attaching
    from slurmlet.podnet.fast import seccomp_filter as filtering
    real = filtering.missing
    if mode == "packets":
        filtering.missing = lambda: "left out by the test"
    # The limit is that of our own user namespace: below it, this node is as sites without network namespaces are.
    with open("/proc/sys/user/max_net_namespaces", "r+") as limit:
        before = limit.read()
        limit.seek(0)
        limit.write("0" if mode == "no-netns" else before)
    said = []
    def say(frame):
        said.extend(json.loads(each.payload) for each in wire.Decoder().feed(frame))
    def private_dir(name):
        os.makedirs(os.path.join(directory, ip, name), mode=0o700)
        return os.path.join(directory, ip, name)
    plan = {"ip": ip, "pod_range": "10.244.0.0/16", "service_range": "10.96.0.0/16", "key": "5e" * 32, "node": "n"}
    parts = attaching.Parts(loop, children, types.SimpleNamespace(private_dir=private_dir), say)
    made = attaching.PodNetwork(parts, {"network": plan}, "127.0.0.1")
    filtering.missing = real
    with open("/proc/sys/user/max_net_namespaces", "w") as limit:
        limit.write(before)
    made.introduce()
    # "stray" is a pod of the fast path with a program that its filter does not see.
    assert made.mode == ("fast" if mode == "stray" else mode), made.why
    assert mode != "no-netns" or "max_net_namespaces" in made.why, made.why
    return made, said[0]["overlay_port"]

def start(network, mode, program):
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            if mode == "stray":
                linux.setns(network._space.netns_fd, linux.CLONE_NEWNET)
            else:
                network.enter()
            # Only what was executed is open to netd; a fork of the runner is closed to everybody, as the runner is.
            os.execv(sys.executable, [sys.executable, "-c", programs, program, ready])
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid

def work(inside):
    loop = Loop()

    def listens():
        loop.later(0.01, lambda: None)
        return os.path.exists(ready)

    children = Children(loop)
    if sys.argv[5:] == ["crowded"]:
        refusals, fork = 3 * [None], children.fork
        def crowded(*arguments):
            if refusals:
                refusals.pop()
                raise BlockingIOError(11, "no room for another process")
            return fork(*arguments)
        children.fork = crowded
    pods = {}
    for ip, mode in (("10.244.0.7", server_mode), ("10.244.0.8", client_mode)):
        pods[ip] = make(loop, children, ip, mode)
    tables = {
        "type": "network",
        "reset": True,
        "pods": {ip: ["127.0.0.1", port, {}] for ip, (_, port) in pods.items()},
        "services": {"10.96.0.10 tcp 80": {"to": [["10.244.0.7", 80, "n"]]}},
    }
    for network, _ in pods.values():
        network.told(json.dumps(tables).encode(), tables)
    start(pods["10.244.0.7"][0], server_mode, "serve")
    assert loop.run_until(listens, 15)
    ended = []
    children.adopt(start(pods["10.244.0.8"][0], client_mode, "ask"), lambda *how: ended.append(how))
    loop.run_until(lambda: bool(ended), 20)
    return 0

sys.exit(sandbox.enter(work))
"""


def run_pods(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PODS, *words], capture_output=True, text=True, timeout=60
    )
    for missing in ("SandboxError", "NoNetwork", "AssertionError: this node", "AssertionError: seccomp"):
        if missing in done.stderr:
            pytest.skip(f"this machine does not give us what a compute host would: {done.stderr[-300:]}")
    return done


@pytest.mark.parametrize(
    ("server", "client"),
    [
        *(
            ("packets", "packets"),
            ("packets", "fast"),
            ("fast", "packets"),
            ("fast", "stray"),
            ("fast", "fast"),
        ),
        *(("no-netns", "no-netns"), ("no-netns", "fast"), ("fast", "no-netns")),
        *(("no-netns", "packets"), ("packets", "no-netns"), ("no-netns", "stray")),
    ],
)
def test_pods_of_all_kinds_speak_to_each_other(server: str, client: str, tmp_path: object) -> None:
    done = run_pods(server, client, str(tmp_path), PROGRAMS)
    assert done.stdout == "all is well\n", done.stderr


def test_a_netd_that_cannot_start_at_first_is_waited_for(tmp_path: object) -> None:
    done = run_pods("fast", "fast", str(tmp_path), PROGRAMS, "crowded")
    assert done.stdout == "all is well\n", done.stderr
    assert done.stderr.count("netd cannot be started") == 3
