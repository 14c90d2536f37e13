"""What tests of the pod's network share: pods in one process, their netds' parts on loopback, their devices real or not.

A real device needs what a compute host gives its users: a network namespace and a TUN device.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurmlet.linux import syscalls
from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import (
    addresses,
    namespace_sockets,
    netd_setup,
    netlink,
    network_namespace,
    overlay_datagrams,
    overlay_socket,
)
from slurmlet.podnet.slow import packets
from slurmlet.podnet.slow.packet_forwarder import Forwarder
from slurmlet.podnet.tables import Tables

HOST = "127.0.0.1"
PATIENCE_S = 5.0
_SKIP = "skipped: "
_SIOCSIFADDR = 0x8916


@contextmanager
def making_loop() -> Iterator[Loop]:
    before = signal.getsignal(signal.SIGCHLD)
    yield Loop()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


class Pod:
    """One pod's forwarder; `device` is our end of it where it is not real."""

    def __init__(self, loop: Loop, ip: str, real: bool) -> None:
        self.loop, self.ip = loop, ip
        plan = {
            "ip": ip,
            "pod_range": "10.244.0.0/16",
            "service_range": "10.96.0.0/16",
            "key": "5e" * 32,
            "node": "node",
        }
        self.setup = netd_setup.from_plan(plan, HOST)
        self.tables = Tables(self.setup)
        self.udp_socket = overlay_datagrams.open_socket(self.setup.host_ip)
        self.overlay = overlay_socket.Overlay(loop, self.setup, self.tables, self.udp_socket)
        self.space: network_namespace.PodNamespace | None = None
        self._open: list[socket.socket] = []
        # Called before the pod ends.
        self.closing: list[Callable[[], None]] = []
        self.device, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.device.setblocking(False)
        theirs.setblocking(False)
        self._tun = theirs.detach()
        if real:
            self.space = make_space(ip)
            os.close(self._tun)
            self._tun = self.space.tun_fd
            self.sockets = namespace_sockets.PodSockets(self.space.netns_fd)
        self.forwarder = Forwarder(loop, self.setup, self.tables, self.overlay, self._tun)

    def close(self) -> None:
        for each in self.closing:
            each()
        for flows in self.forwarder._flows.values():
            for flow in list(flows.out.values()):
                flows.close(flow)
        self.loop.forget(self._tun)
        self.loop.forget(self.udp_socket.fileno())
        for opened in (self.udp_socket, *self._open):
            opened.close()
        self.device.close()
        os.close(self._tun)
        if self.space is not None:
            self.sockets.close()
            os.close(self.space.netns_fd)

    # A device that is not real.

    def send(self, packet: bytes) -> None:
        """As the pod's kernel would."""
        self.device.send(packet)

    def received(self) -> bytes:
        """What the pod's kernel would get next."""
        return receive(self.loop, self.device)

    # A real one.

    def udp(self, port: int = 0) -> socket.socket:
        made = self.sockets.udp(socket.AF_INET)
        made.setblocking(False)
        made.bind(("", port))
        self._open.append(made)
        return made

    def count(self, name: str) -> int:
        return self.forwarder.counts[name]


def make_space(ip: str) -> network_namespace.PodNamespace:
    try:
        return network_namespace.Making().finish(ip)
    except network_namespace.NoNetwork as error:
        pytest.skip(f"this machine does not give us what a compute host would: {error}")


@dataclass
class Cluster:
    loop: Loop
    pods: list[Pod] = field(default_factory=list)

    def add(self, ip: str, real: bool) -> Pod:
        made = Pod(self.loop, ip, real)
        self.pods.append(made)
        self.tell()
        return made

    def tell(self, **more: Any) -> None:
        """Where all pods are, and more of the hub's tables."""
        where = {pod.ip: [HOST, pod.overlay.port, {}] for pod in self.pods}
        for pod in self.pods:
            pod.tables.apply({"pods": where, **more})

    def settle(self, seconds: float = 0.05) -> None:
        """Long enough for everything that is going to happen on loopback."""
        self.loop.run_until(lambda: False, seconds)


@contextmanager
def making_cluster() -> Iterator[Cluster]:
    with making_loop() as loop:
        cluster = Cluster(loop)
        try:
            yield cluster
        finally:
            for pod in cluster.pods:
                pod.close()


def pods_on_a_host_of_its_own(act: Callable[[Cluster], None], ip: str, *, ping: bool = False) -> None:
    def work() -> None:
        with making_cluster() as cluster:
            act(cluster)

    on_a_host_of_its_own(work, ip, ping=ping)


def on_a_host_of_its_own(act: Callable[[], None], ip: str, *, six: str = "", ping: bool = False) -> None:
    """Run it in a fork with a network of its own: addresses besides loopback's, and whether users may send echoes."""
    said, said_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            _make_host(ip, six, ping)
            act()
        except pytest.skip.Exception as reason:
            os.write(said_end, f"{_SKIP}{reason}".encode())
        except BaseException:
            os.write(said_end, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(said_end)
    with os.fdopen(said) as file:
        failure = file.read()
    os.waitpid(pid, 0)
    if failure.startswith(_SKIP):
        pytest.skip(failure.removeprefix(_SKIP))
    assert not failure, failure


def _make_host(ip: str, six: str, ping: bool) -> None:
    uid, gid = os.getuid(), os.getgid()
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNET)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path("/proc/self", name).write_text(text)
    with netlink.RouteSocket() as route:
        loopback = socket.if_nametoindex("lo")
        route.set_link(loopback, up=True)
        route.add_address(loopback, addresses.number(ip), 32)
    if six:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as control:
            wanted = struct.pack("@16sIi", socket.inet_pton(socket.AF_INET6, six), 128, loopback)
            fcntl.ioctl(control, _SIOCSIFADDR, wanted)
            _await_address(control, six)
    if ping:
        # A new namespace lets nobody.
        Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 0")


def _await_address(sock: socket.socket, six: str) -> None:
    """The kernel makes an IPv6 address usable in its own time, milliseconds later."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            sock.bind((six, 0))
        except OSError:
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
        else:
            return


def wait(loop: Loop, true: Callable[[], Any]) -> None:
    assert loop.run_until(lambda: bool(true()), PATIENCE_S), "waited in vain"


def receive(loop: Loop, sock: socket.socket) -> bytes:
    return receive_from(loop, sock)[0]


def receive_from(loop: Loop, sock: socket.socket) -> tuple[bytes, Any]:
    """The next datagram, while the loop turns. Errors of the socket are raised."""
    found: list[tuple[bytes, Any]] = []

    def readable() -> bool:
        if found:
            return True
        try:
            found.append(sock.recvfrom(70000))
        except BlockingIOError:
            # The loop has something to do soon, so that it never sleeps through the answer.
            loop.later(0.001, lambda: None)
            return False
        return True

    wait(loop, readable)
    return found[0]


def datagram(source: str, source_port: int, to: str, port: int, payload: bytes = b"x") -> bytes:
    return packets.udp(addresses.number(source), source_port, addresses.number(to), port, payload)
