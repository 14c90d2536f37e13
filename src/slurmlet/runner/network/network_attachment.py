"""The runner's side of a pod's own network: makes it, keeps netd alive, sends every process of the pod into it.

What must outlive a netd is held here: the namespace, the TUN device, the overlay's socket, the listeners of the pod's
processes (while one is open, a trapped call waits for the next netd instead of failing) and the hub's tables.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys

from slurmlet.linux import syscalls
from slurmlet.linux.event_loop import Loop
from slurmlet.linux.record import Record
from slurmlet.podnet import addresses, network_namespace, overlay_datagrams
from slurmlet.podnet.channel import Channel
from slurmlet.podnet.fast import seccomp_filter
from slurmlet.podnet.netd_setup import FAST, FROM_HOST, NO_NETNS, PACKETS, Setup, from_plan
from slurmlet.podnet.table_log import TableLog
from slurmlet.protocol import wire
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.host.scratch import Scratch
from slurmlet.runner.network.network_view import dial_host
from slurmlet.runner.network.resolver_config import resolv_conf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Optional

    from slurmlet.protocol.messages import NetdToRunner
    from slurmlet.protocol.network_tables import NetworkUpdate
    from slurmlet.protocol.pod_plan import PodPlan
    from slurmlet.runner.network.network_view import Cancel, OnDialled


_FIRST_RESTART_S, _MAX_RESTART_S = 0.0, 5.0
_NUMBER_BYTES = 8
_ERRNO_BYTES = 4
# The fast path is the kernel's own TCP between hosts, in which nobody can encrypt.
_NOT_FAST = "encryption between hosts was asked for"


class NoNetwork(OSError):
    """This node can give the pod no network of its own; the message says what is missing."""


class Parts(Record):
    loop: Loop
    children: Children
    scratch: Scratch
    # Sends a control message to the hub.
    say: Callable[[bytes], None]
    # Where netd's native library may be: native/library.py.
    libraries: str = ""
    # The namespace, if it was begun before the plan was known.
    making: Optional[network_namespace.Making] = None


class PodNetwork:
    def __init__(self, parts: Parts, plan: PodPlan, host_ip: str) -> None:
        self._parts, self._plan = parts, plan
        network = plan["network"]
        assert network is not None
        self._setup: Setup = from_plan(network, host_ip)
        directory = parts.scratch.private_dir("network")
        # By which other netds know this one; where the pod has its host's network it is shown to nobody.
        self._overlay_ip = addresses.text(self._setup.ip)
        if network.get("from_host"):
            if parts.making is not None:
                parts.making.abandon()
            self._setup = self._setup._replace(ip=self._setup.host_ip)
            self._space, self.mode = None, FROM_HOST
            self.why = seccomp_filter.missing() if self._setup.tls is None else _NOT_FAST
        else:
            self._space, self.mode, self.why = _choose(self._setup, directory, parts.making)
        self._contexts = _contexts(self._setup, directory)
        self.sysfs = self._space.sysfs if self._space is not None else ""
        self._journal = os.path.join(directory, "journal")
        self._overlay = overlay_datagrams.open_socket(self._setup.host_ip)
        self._dial = _listen(directory, "dial")
        self._directory = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        # Listeners arrive from children that are about to become a runtime.
        self._notify_socket, self._notify_socket_end = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._notify_socket.setblocking(False)
        parts.loop.reading(self._notify_socket.fileno(), self._notifier_came)
        self._tables = TableLog()
        policy = network.get("policy")
        if policy is not None:
            # Holds from the first packet on; what the hub pushes comes a moment later.
            self._tables.apply({"policy": policy})
        self._listeners: Dict[int, int] = {}
        self._numbers = 0
        self._ports: Dict[str, int] = {}
        self._netd: Optional[_Netd] = None
        self._delay_s = _FIRST_RESTART_S
        # After what is under way now, mostly the start of a container: its calls and packets wait for netd, and a fork
        # would make it wait.
        parts.loop.soon(self._begin)

    # As the pod and its runner see it.

    def address(self) -> str:
        return addresses.text(self._setup.ip)

    def hostname(self) -> str:
        return str(self._plan.get("hostname") or socket.gethostname())

    def resolv_conf(self) -> str:
        plan = self._plan.get("resolv_conf")
        text = resolv_conf(plan)
        only_tcp = self.mode == NO_NETNS or (self.mode == FROM_HOST and not self.why)
        if only_tcp and plan is not None and plan.get("base") is not None:
            # Only TCP is translated there: glibc and Go then ask the cluster's DNS by TCP. (musl knows no such option.)
            text += "options use-vc\n"
        return text

    @property
    def enter(self) -> Callable[[], None]:
        return self._enter

    def _enter(self) -> None:
        if self._space is not None:
            syscalls.setns(self._space.netns_fd, syscalls.CLONE_NEWNET)
        if self.mode != PACKETS and not (self.mode == FROM_HOST and self.why):
            listener = seccomp_filter.install(from_host=self.mode == FROM_HOST)
            socket.send_fds(self._notify_socket_end, [b"l"], [listener])

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        if not self._is_own(address):
            return socket.create_connection((address, port), timeout_s)
        with self._ask(address, port) as asked:
            asked.settimeout(timeout_s)
            made = _answer(asked)
        made.settimeout(timeout_s)
        return made

    def dial(self, loop: Loop, address: str, port: int, done: OnDialled) -> Cancel:
        if not self._is_own(address):
            return dial_host(loop, address, port, done)
        return _Dialling(loop, self._ask(address, port), done).cancel

    def _is_own(self, address: str) -> bool:
        if self.mode == FROM_HOST:
            return False
        return address in (self.address(), "::1", "localhost") or address.startswith("127.")

    def _ask(self, address: str, port: int) -> socket.socket:
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asking.connect(f"/proc/self/fd/{self._directory}/dial")
        ip = address if address[0].isdigit() and ":" not in address else "127.0.0.1"
        asking.send(json.dumps({"ip": ip, "port": port}).encode())
        return asking

    # The hub.

    def told(self, frame: bytes, message: NetworkUpdate) -> None:
        """The hub's "network" message, parsed and as it came."""
        self._tables.apply(message)
        if self._netd is not None:
            self._netd.channel.send_frame(wire.pack(wire.CONTROL, 0, frame))

    def introduce(self) -> None:
        """Tell the hub where the pod is: when the network is made, and after each new connection to it."""
        self._parts.say(
            wire.control(
                {
                    "type": "attached",
                    "ip": self._overlay_ip,
                    "overlay_port": self._overlay.getsockname()[1],
                    "mode": self.mode,
                    "why": self.why,
                    "listeners": self._ports,
                }
            )
        )

    # netd.

    def _begin(self) -> None:
        control, control_end = socket.socketpair()
        notify_socket, notify_socket_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def work() -> None:
            from slurmlet.podnet import netd

            ends = (control_end, notify_socket_end, self._overlay, self._dial)
            netd.run(
                netd.Start(
                    *(self._setup, self.mode, *ends, self._space, self._journal, dict(self._listeners)),
                    self._parts.libraries,
                    self._contexts,
                )
            )

        try:
            self._parts.children.fork(work, self._netd_ended)
        except OSError as error:
            # Such as too many processes of this user. What is asked of netd meanwhile waits.
            for end in (control, control_end, notify_socket, notify_socket_end):
                end.close()
            print(f"netd cannot be started: {error}; trying again", file=sys.stderr, flush=True)
            self._begin_again()
            return
        control_end.close()
        notify_socket_end.close()
        channel = Channel(self._parts.loop, control, self._heard, lambda: None)
        self._netd = _Netd(channel, notify_socket)
        for message in self._tables.messages():
            channel.send(message)

    def _netd_ended(self, code: int, _signal: int) -> None:
        print(f"netd ended with {code}; starting another", file=sys.stderr, flush=True)
        if self._netd is not None:
            self._netd.channel.close()
            self._netd.notify_socket.close()
            self._netd = None
        self._begin_again()

    def _begin_again(self) -> None:
        self._parts.loop.later(self._delay_s, self._begin)
        self._delay_s = min(_MAX_RESTART_S, max(0.1, 2 * self._delay_s))

    def _heard(self, message: NetdToRunner) -> None:
        if message["type"] == "ready":
            self._parts.loop.later(_MAX_RESTART_S, self._calm_down)
        elif message["type"] == "listeners":
            self._ports = message["listeners"]
            self._parts.say(wire.control(message))
        elif message["type"] == "counts":
            self._parts.say(wire.control({"type": "network-counts", "counts": message["counts"]}))
        elif message["type"] == "ports-taken":
            self._parts.say(wire.control(message))
        elif message["type"] == "gone":
            fd = self._listeners.pop(message["number"], None)
            if fd is not None:
                os.close(fd)

    def _calm_down(self) -> None:
        self._delay_s = _FIRST_RESTART_S

    def _notifier_came(self) -> None:
        try:
            _, fds, _, _ = socket.recv_fds(self._notify_socket, 16, 1)
        except OSError:
            return
        for fd in fds:
            os.set_inheritable(fd, False)
            self._numbers += 1
            self._listeners[self._numbers] = fd
            self._hand_over(self._numbers, fd)

    def _hand_over(self, number: int, fd: int) -> None:
        if self._netd is None:
            return
        try:
            socket.send_fds(self._netd.notify_socket, [number.to_bytes(_NUMBER_BYTES, "big")], [fd])
        except OSError:
            # It is just gone; the next one gets all of them.
            pass


class _Netd(Record):
    channel: Channel
    notify_socket: socket.socket


class _Dialling:
    """One question to netd, in the loop."""

    def __init__(self, loop: Loop, asking: socket.socket, done: OnDialled) -> None:
        self._loop, self._asking, self._done = loop, asking, done
        asking.setblocking(False)
        loop.reading(asking.fileno(), self._readable)

    def cancel(self) -> None:
        if self._asking.fileno() >= 0:
            self._loop.forget(self._asking.fileno())
            self._asking.close()

    def _readable(self) -> None:
        try:
            made = _answer(self._asking)
        except BlockingIOError:
            return
        except OSError as error:
            self.cancel()
            self._done(None, error.errno or errno.EIO)
            return
        self.cancel()
        made.setblocking(False)
        self._done(made, 0)


def _answer(asking: socket.socket) -> socket.socket:
    """netd's answer: a connected socket, or the OSError that it met."""
    said, fds, _, _ = socket.recv_fds(asking, _ERRNO_BYTES, 1)
    if fds:
        return socket.socket(fileno=fds[0])
    code = int.from_bytes(said, "big") if said else errno.ECONNRESET
    raise OSError(code, os.strerror(code))


def _listen(directory: str, name: str) -> socket.socket:
    """Made here and inherited: while there is no netd, those who ask wait."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Scratch paths can be longer than a socket's name may be.
    handle = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    made.bind(f"/proc/self/fd/{handle}/{name}")
    os.close(handle)
    made.listen(64)
    made.setblocking(False)
    return made


def _contexts(setup: Setup, directory: str) -> Any:
    if setup.tls is None:
        return None
    from slurmlet.podnet.encryption import tls_contexts

    return tls_contexts.make(setup.tls, directory)


def begin() -> network_namespace.Making:
    """What can be made and found out before the plan is known."""
    return network_namespace.Making(seccomp_filter.missing)


def _choose(setup: Setup, directory: str, making: Optional[network_namespace.Making]) -> Any:
    """(namespace or None, mode, why not the best of them)."""
    making = making or begin()
    try:
        space: Optional[network_namespace.PodNamespace] = making.finish(
            addresses.text(setup.ip), os.path.join(directory, "sys")
        )
        no_space = ""
    except network_namespace.NoNetwork as error:
        space, no_space = None, str(error)
    no_filter = making.seen if setup.tls is None else _NOT_FAST
    if space is not None:
        return space, PACKETS if no_filter else FAST, no_filter
    if setup.tls is not None:
        raise NoNetwork(
            f"this node can give a pod no network of its own: {no_space}. Without one nothing that the pod says could be "
            "encrypted, which this cluster asks for. `slurmlet doctor --node` says more"
        )
    if no_filter:
        raise NoNetwork(
            f"this node can give a pod no network of its own: {no_space}; {no_filter}. "
            "Ask for `hostNetwork: true`; `slurmlet doctor --node` says more"
        )
    return None, NO_NETNS, no_space
