"""The pod's network namespace and its TUN device, made by an unprivileged user.

Only a fork may enter a new network namespace: the way back to the host's is closed to everybody but the host's root. The
runner is not dumpable, so it cannot look at its own child's namespaces either; the child hands them over itself.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import struct
from fcntl import ioctl

from slurmlet.linux import syscalls
from slurmlet.linux.record import Record
from slurmlet.podnet import addresses, netlink
from slurmlet.podnet.overlay_datagrams import MAX_PACKET_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, List


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


class PodNamespace(Record):
    netns_fd: int
    tun_fd: int
    # Where a /sys of the namespace is mounted, or "" where the kernel refused.
    sysfs: str


class Making:
    """A namespace that a fork makes while we do other things; whose it will be is told at the end.

    The fork waits for that, whatever it has met. So nobody else reaps it, unless we end without a pod. `look` is for
    what else should be known of this node by then: called there, and what it says is `seen` after `finish`.
    """

    def __init__(self, look: Callable[[], str] = str) -> None:
        self.seen, self._look = "", look
        self._begin()

    def _begin(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._channel.close()
            _in_child(theirs, self._look)
        theirs.close()

    def _lives(self) -> bool:
        try:
            return os.waitpid(self._pid, os.WNOHANG)[0] == 0
        except ChildProcessError:
            # The loop has reaped it.
            return False

    def finish(self, ip: str, sysfs: str = "") -> PodNamespace:
        """For a pod with this address; the namespace's /sys is mounted at the directory `sysfs`, made for it."""
        if not self._lives():
            # A pod may have waited long for its hub, and somebody killed what waited with it.
            self._channel.close()
            self._begin()
        with self._channel as channel:
            channel.send(json.dumps([ip, sysfs]).encode())
            said, fds, _, _ = socket.recv_fds(channel, _MAX_MESSAGE_BYTES, 2)
        # The loop, which reaps, does not turn while we are here.
        os.waitpid(self._pid, 0)
        answer = json.loads(said) if said else {"error": "the process that made the namespace vanished"}
        self.seen = answer.get("seen", "")
        if len(fds) != 2:
            raise NoNetwork(answer["error"])
        for fd in fds:
            os.set_inheritable(fd, False)
        return PodNamespace(fds[0], fds[1], answer["sysfs"])

    def abandon(self) -> None:
        self._channel.close()


def _in_child(channel: socket.socket, look: Callable[[], str]) -> None:
    try:
        # The runner's handlers write to a pipe it shares with us.
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        fds, problem, seen = [], "", look()
        try:
            fds = _build()
        except OSError as error:
            problem = _reason(error)
        asked = channel.recv(_MAX_MESSAGE_BYTES)
        if not asked:
            return
        ip, sysfs = json.loads(asked)
        answer = {"seen": seen}
        if not problem:
            try:
                _configure(ip)
                answer["sysfs"] = _mount_sysfs(sysfs) if sysfs else ""
            except OSError as error:
                problem = _reason(error)
        if problem:
            fds, answer["error"] = [], problem
        socket.send_fds(channel, [json.dumps(answer).encode()], fds)
    finally:
        os._exit(0)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error))[:_MAX_REASON_CHARS]


def _build() -> List[int]:
    _step(
        "users of this node cannot create network namespaces", lambda: syscalls.unshare(syscalls.CLONE_NEWNET)
    )
    tun = _step(f"users of this node cannot open {_TUN}", lambda: os.open(_TUN, os.O_RDWR | os.O_NONBLOCK))
    request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    _step("the kernel made no TUN device", lambda: ioctl(tun, _TUNSETIFF, request))
    # Any port, and ping, for everybody.
    _set("net/ipv4/ip_unprivileged_port_start", "0")
    _set("net/ipv4/ping_group_range", f"0 {_last_group()}")
    return [os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC), tun]


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
    with open("/proc/self/gid_map", encoding="utf-8") as file:
        ranges = [line.split() for line in file]
    last = max((int(inside) + int(count) - 1 for inside, _, count in ranges), default=0)
    return min(last, 2147483647)


def _set(name: str, value: str) -> None:
    try:
        with open(f"/proc/sys/{name}", "w", encoding="utf-8") as file:
            file.write(value)
    except OSError:
        # Each of them is a comfort, and a kernel without IPv6 has no such file.
        pass


def _mount_sysfs(path: str) -> str:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        syscalls.mount("sysfs", path, "sysfs", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    except OSError:
        return ""
    return path
