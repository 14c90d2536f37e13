"""What one host offers a pod's own network, tried out for real. Fed to `python3 -` right after probe.py, on a compute node.

Standard library only, syntax of Python 3.6. It shares no names with probe.py: what it needs of it is passed in.
"""

# ruff: noqa: PTH123
# Plain os calls, for the reasons that probe.py gives.

import array
import ctypes
import fcntl
import os
import platform
import socket
import struct
from typing import Any

# socket(2) and seccomp(2) on the machines whose filter the runner knows. The other two have one number everywhere.
CALLS = {"x86_64": (41, 317), "aarch64": (198, 277)}
PIDFD_OPEN, PIDFD_GETFD = 434, 438
NEW_NETWORK = 0x40000000
RECEIVE, ADD_FD, ADD_AND_SEND = 0xC0502100, 0x40182103, 2
HELLO = b"probe"


class Filter(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    ]


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]


def system_call(*arguments: Any) -> int:
    result = ctypes.CDLL(None, use_errno=True).syscall(*map(ctypes.c_long, arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def trap_sockets() -> int:
    """A filter on ourselves that hands every socket() to whoever holds the descriptor we return."""
    if platform.machine() not in CALLS:
        raise OSError("system call numbers are not known for " + platform.machine())
    socket_call, seccomp_call = CALLS[platform.machine()]
    steps = (Filter * 4)(
        Filter(0x20, 0, 0, 0),  # load the number of the call
        Filter(0x15, 0, 1, socket_call),
        Filter(0x06, 0, 0, 0x7FC00000),  # ask the supervisor
        Filter(0x06, 0, 0, 0x7FFF0000),  # allow
    )
    program = Program(len(steps), ctypes.cast(steps, ctypes.POINTER(Filter)))
    return system_call(seccomp_call, 1, 8, ctypes.addressof(program))


def send_descriptor(channel: Any, descriptor: int) -> None:
    channel.sendmsg([b"d"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])


def be_trapped(channel: Any) -> None:
    """The container's part: its socket() must give what the supervisor put there."""
    try:
        listener = trap_sockets()
    except OSError as error:
        channel.sendall(("!" + str(error)).encode())
        return
    send_descriptor(channel, listener)
    os.close(listener)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as given:
        channel.sendall(HELLO if given.recv(10) == HELLO else b"another socket came")


def answer_one(channel: Any) -> None:
    """netd's part: take one trapped call and answer it with a descriptor of ours, in one step."""
    said, extra, _, _ = channel.recvmsg(200, socket.CMSG_SPACE(4))
    if not extra:
        raise OSError("seccomp listener: " + said.decode("utf-8", "replace").lstrip("!"))
    listener = struct.unpack("i", extra[0][2][:4])[0]
    notice = fcntl.ioctl(listener, RECEIVE, bytes(80))
    number = struct.unpack_from("Q", notice)[0]
    ours, theirs = socket.socketpair()
    ours.sendall(HELLO)
    request = struct.pack("QIIII", number, ADD_AND_SEND, theirs.fileno(), 0, 0)
    try:
        fcntl.ioctl(listener, ADD_FD, request)
    except OSError as error:
        raise OSError("SECCOMP_ADDFD_FLAG_SEND, of Linux 5.14: " + (error.strerror or "")) from None
    if channel.recv(100) != HELLO:
        raise OSError("the program did not get the descriptor")


def try_notification(enter: Any) -> None:
    """As the runner does it: root of an own user namespace, the filter in one process, its answers from another."""
    enter(0)
    container, netd = socket.socketpair()
    child = os.fork()
    if child == 0:
        netd.close()
        try:
            be_trapped(container)
        finally:
            os._exit(0)
    container.close()
    answer_one(netd)


def try_borrowing(enter: Any) -> None:
    """pidfd_getfd on a process that is not our child: what Yama and container profiles may forbid."""
    enter(0)
    ours, theirs = socket.socketpair()
    sibling = os.fork()
    if sibling == 0:
        ours.close()
        theirs.recv(1)
        os._exit(0)
    # Only now: the sibling must not hold the pipe open whose end we wait for.
    reader, writer = os.pipe()
    borrower = os.fork()
    if borrower == 0:
        try:
            handle = system_call(PIDFD_GETFD, system_call(PIDFD_OPEN, sibling, 0), theirs.fileno(), 0)
            os.write(
                writer,
                b"" if os.fstat(handle).st_ino == os.fstat(theirs.fileno()).st_ino else b"another file",
            )
        except OSError as error:
            os.write(writer, (error.strerror or str(error)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    said = os.read(reader, 200).decode("utf-8", "replace")
    ours.close()
    if said:
        raise OSError("pidfd_getfd: " + said)


def try_ports(enter: Any) -> None:
    """In a network namespace of our own: port 80 and ping without any right."""
    enter(NEW_NETWORK)
    for name, value in (("ip_unprivileged_port_start", "0"), ("ping_group_range", "0 0")):
        with open("/proc/sys/net/ipv4/" + name, "w") as file:
            file.write(value)
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP).close()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("0.0.0.0", 80))


def try_ping() -> None:
    """In the host's network, as ourselves: what a pod's ping to a host outside the cluster is sent through."""
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP).close()


def read_number(path: str) -> Any:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def network_facts(trial: Any, enter: Any) -> Any:
    return {
        "seccomp": trial(try_notification, enter),
        "pidfd_getfd": trial(try_borrowing, enter),
        "own_ports": trial(try_ports, enter),
        "host_ping": trial(try_ping),
        "max_net_namespaces": read_number("/proc/sys/user/max_net_namespaces"),
    }
