"""The pod's network namespace and its TUN device, made by an unprivileged user; and sockets inside of it.

Only a fork may enter a new network namespace: the way back to the host's is closed to everybody but the host's root. The
runner is not dumpable, so it cannot look at its own child's namespaces either; the child hands them over itself.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import socket
import struct
import threading
from fcntl import ioctl
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from slurmlet.runner import linux
from slurmlet.runner.network import addresses, netlink
from slurmlet.runner.network.overlay import MAX_PACKET_BYTES

DEVICE = "eth0"
# As large as one datagram of the overlay carries. A datagram of a program is then one packet to us, whatever its size, and
# the host's kernel fragments it for the wire. Loopback's 65536 has long made sure that programs bear such an MTU.
MTU = MAX_PACKET_BYTES
# Packets that wait for netd; more are lost, as on any network.
_QUEUE_PACKETS = 1000
_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MAX_MESSAGE_BYTES, _MAX_REASON_CHARS = 4096, 500


class NoNetwork(OSError):
    """This node does not let the user make a network for a pod; the message says what is missing."""


class PodNamespace(NamedTuple):
    netns_fd: int
    tun_fd: int
    # Where a /sys of the namespace is mounted, or "" where the kernel refused.
    sysfs: str


def make(ip: str, sysfs: str = "") -> PodNamespace:
    """The namespace of a pod with this address; its /sys is mounted at the directory `sysfs`, made for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        _in_child(theirs, ip, sysfs)
    with ours:
        theirs.close()
        said, fds, _, _ = socket.recv_fds(ours, _MAX_MESSAGE_BYTES, 2)
    # Nobody reaps in between: only the loop does, and it does not turn while we are here.
    os.waitpid(pid, 0)
    answer = json.loads(said) if said else {"error": "the process that made the namespace vanished"}
    if len(fds) != 2:
        raise NoNetwork(answer["error"])
    for fd in fds:
        os.set_inheritable(fd, False)
    return PodNamespace(fds[0], fds[1], answer["sysfs"])


def _in_child(channel: socket.socket, ip: str, sysfs: str) -> None:
    try:
        # The runner's handlers write to a pipe it shares with us.
        signal.set_wakeup_fd(-1)
        try:
            fds, answer = _build(ip, sysfs)
        except OSError as error:
            reason = {"error": (error.strerror or str(error))[:_MAX_REASON_CHARS]}
            socket.send_fds(channel, [json.dumps(reason).encode()], [])
        else:
            socket.send_fds(channel, [json.dumps(answer).encode()], fds)
    finally:
        os._exit(0)


def _build(ip: str, sysfs: str) -> Tuple[List[int], Any]:
    _step("this node gives users no network namespaces", lambda: linux.unshare(linux.CLONE_NEWNET))
    tun = _step(f"this node gives users no {_TUN}", lambda: os.open(_TUN, os.O_RDWR | os.O_NONBLOCK))
    request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    _step("the kernel made no TUN device", lambda: ioctl(tun, _TUNSETIFF, request))
    _configure(ip)
    # Any port, and ping, for everybody.
    _set("net/ipv4/ip_unprivileged_port_start", "0")
    _set("net/ipv4/ping_group_range", f"0 {_last_group()}")
    netns = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    return [netns, tun], {"sysfs": _mount_sysfs(sysfs) if sysfs else ""}


def _step(refused: str, act: Callable[[], Any]) -> Any:
    try:
        return act()
    except OSError as error:
        # "No space left on device" would send people to their quotas.
        full = "the sysctl user.max_net_namespaces is 0 or used up"
        why = full if error.errno == errno.ENOSPC else os.strerror(error.errno or 0)
        raise OSError(error.errno, f"{refused} ({why})") from error


def _configure(ip: str) -> None:
    with netlink.RouteSocket() as route:
        device = socket.if_nametoindex(DEVICE)
        route.set_link(socket.if_nametoindex("lo"), up=True)
        # There is no IPv6 beyond the pod. First off, then up: an interface that comes up takes an address at once.
        _set(f"net/ipv6/conf/{DEVICE}/disable_ipv6", "1")
        route.set_link(device, up=True, mtu=MTU, queue_packets=_QUEUE_PACKETS)
        route.add_address(device, addresses.number(ip), 32)
        route.add_default(device, addresses.number(ip))


def _last_group() -> int:
    """The kernel takes only ids that exist in our user namespace."""
    with open("/proc/self/gid_map", encoding="ascii") as file:
        ranges = [line.split() for line in file]
    last = max((int(inside) + int(count) - 1 for inside, _, count in ranges), default=0)
    return min(last, 2147483647)


def _set(name: str, value: str) -> None:
    try:
        with open(f"/proc/sys/{name}", "w", encoding="ascii") as file:
            file.write(value)
    except OSError:
        # Each of them is a comfort, and a kernel without IPv6 has no such file.
        pass


def _mount_sysfs(path: str) -> str:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        linux.mount("sysfs", path, "sysfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    except OSError:
        return ""
    return path


class PodSockets:
    """Makes sockets in the pod's namespace for a process that stays outside: descriptors belong to all threads.

    One thread enters the namespace for good, since it could not come back. It does nothing but this.
    """

    def __init__(self, netns_fd: int) -> None:
        self._wanted: queue.SimpleQueue[Optional[Tuple[int, int]]] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(netns_fd,), name="pod-sockets", daemon=True).start()
        self._take()

    def tcp(self, family: int = socket.AF_INET) -> socket.socket:
        return self._make(family, socket.SOCK_STREAM)

    def udp(self, family: int = socket.AF_INET) -> socket.socket:
        return self._make(family, socket.SOCK_DGRAM)

    def close(self) -> None:
        self._wanted.put(None)

    def _make(self, family: int, kind: int) -> socket.socket:
        self._wanted.put((family, kind))
        made = self._take()
        assert isinstance(made, socket.socket)
        return made

    def _take(self) -> Any:
        made = self._made.get()
        if isinstance(made, OSError):
            raise made
        return made

    def _serve(self, netns_fd: int) -> None:
        # Signals are the main thread's; here they would only interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            linux.setns(netns_fd, linux.CLONE_NEWNET)
        except OSError as error:
            self._made.put(error)
            return
        self._made.put(None)
        while True:
            wanted = self._wanted.get()
            if wanted is None:
                return
            try:
                self._made.put(socket.socket(*wanted))
            except OSError as error:
                self._made.put(error)
