"""What Linux promises of sockets, checked from inside: `python3 - [case …] < this file`, with POD_IP in the environment.

Each function `case_…` is one promise. Prints a JSON object: case → "" or what went wrong. Standard library only and one
file, because it runs in a container; it knows nothing of slurmlet, so the same file must pass on a bare host as well
(where POD_IP is the host's address): that is what makes it a judge of the pod network.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing

ME = os.environ.get("POD_IP", "127.0.0.1")
LIMIT_S = 20
Address = tuple[str, int]
libc = ctypes.CDLL(None, use_errno=True)


def listener(
    host: str = "0.0.0.0",
    port: int = 0,
    family: int = socket.AF_INET,
    backlog: int = 16,
    reuse_port: bool = False,
) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host, port))
    made.listen(backlog)
    made.settimeout(LIMIT_S)
    return made


def pair(host: str | None = None) -> tuple[socket.socket, socket.socket, socket.socket]:
    """(client, accepted, listener), connected by way of `host`."""
    listening = listener()
    client = socket.create_connection((host or ME, listening.getsockname()[1]), LIMIT_S)
    accepted, _ = listening.accept()
    accepted.settimeout(LIMIT_S)
    return client, accepted, listening


def error_of(act: Callable[[], object]) -> int | None:
    try:
        act()
    except OSError as error:
        return error.errno
    return None


def expect(seen: object, wanted: object) -> None:
    assert seen == wanted, f"saw {seen!r}, not {wanted!r}"


def expect_error(act: Callable[[], object], *numbers: int) -> None:
    names = [errno.errorcode[number] for number in numbers]
    number = error_of(act)
    assert number in numbers, f"saw {errno.errorcode.get(number or 0, number)}, not {' or '.join(names)}"


def exact(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
    return data


# --- names ---------------------------------------------------------------------------------------------------------


def case_both_ends_agree_on_addresses() -> None:
    client, accepted, listening = pair()
    port = listening.getsockname()[1]
    expect(client.getpeername(), (ME, port))
    expect(accepted.getsockname(), (ME, port))
    expect(accepted.getpeername(), client.getsockname())
    expect(client.getsockname()[0], ME)


def case_accept_tells_the_peer() -> None:
    with closing(listener()) as listening:
        client = socket.create_connection((ME, listening.getsockname()[1]), LIMIT_S)
        _, peer = listening.accept()
        expect(peer, client.getsockname())


def case_accept_without_an_address() -> None:
    with closing(listener()) as listening:
        listening.settimeout(None)
        client = socket.create_connection((ME, listening.getsockname()[1]), LIMIT_S)
        number = libc.accept(listening.fileno(), None, None)
        assert number >= 0
        accepted = socket.socket(fileno=number)
        expect(accepted.getpeername(), client.getsockname())
        client.sendall(b"x")
        expect(accepted.recv(1), b"x")


def case_a_truncated_address_tells_its_length() -> None:
    with closing(listener()) as listening:
        storage, length = ctypes.create_string_buffer(4), ctypes.c_uint32(4)
        expect(libc.getsockname(listening.fileno(), storage, ctypes.byref(length)), 0)
        expect(length.value, 16)
        expect(struct.unpack("=H", storage.raw[:2])[0], socket.AF_INET)


def case_wildcard_listener_says_wildcard() -> None:
    with closing(listener()) as listening:
        expect(listening.getsockname()[0], "0.0.0.0")


def case_loopback_shows_loopback_addresses() -> None:
    client, accepted, listening = pair("127.0.0.1")
    expect(accepted.getsockname(), ("127.0.0.1", listening.getsockname()[1]))
    expect(client.getsockname()[0], "127.0.0.1")
    expect(accepted.getpeername(), client.getsockname())


def case_loopback_is_a_whole_network() -> None:
    with closing(listener("127.0.0.5")) as listening:
        client = socket.create_connection(listening.getsockname(), LIMIT_S)
        accepted, _ = listening.accept()
        expect(accepted.getsockname()[0], "127.0.0.5")
        expect(client.getpeername()[0], "127.0.0.5")


def case_connect_to_the_wildcard_means_this_host() -> None:
    with closing(listener()) as listening:
        client = socket.create_connection(("0.0.0.0", listening.getsockname()[1]), LIMIT_S)
        accepted, _ = listening.accept()
        expect(accepted.getpeername(), client.getsockname())


def case_unconnected_has_no_peer() -> None:
    with socket.socket() as fresh:
        expect_error(fresh.getpeername, errno.ENOTCONN)
        expect(fresh.getsockname(), ("0.0.0.0", 0))


# --- bind and listen -----------------------------------------------------------------------------------------------


def case_bind_to_port_0_gives_a_port_that_answers() -> None:
    ports = set()
    with ExitStack() as kept:
        for _ in range(20):
            listening = kept.enter_context(closing(listener()))
            port = listening.getsockname()[1]
            ports.add(port)
            kept.enter_context(closing(socket.create_connection((ME, port), LIMIT_S)))
            listening.accept()[0].close()
    assert len(ports) == 20, ports
    assert 0 not in ports


def case_listen_without_bind_gives_a_port() -> None:
    with socket.socket() as listening:
        listening.listen()
        port = listening.getsockname()[1]
        assert port
        socket.create_connection((ME, port), LIMIT_S).close()


def case_the_chosen_port_is_the_port() -> None:
    with closing(listener(port=34567)) as listening:
        expect(listening.getsockname()[1], 34567)
        socket.create_connection((ME, 34567), LIMIT_S).close()


def case_a_taken_port_is_in_use() -> None:
    with closing(listener()) as listening, socket.socket() as other:
        expect_error(lambda: other.bind(("0.0.0.0", listening.getsockname()[1])), errno.EADDRINUSE)
        expect_error(lambda: other.bind((ME, listening.getsockname()[1])), errno.EADDRINUSE)


def case_reuseaddr_does_not_share_a_listening_port() -> None:
    with closing(listener()) as listening, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        expect_error(lambda: other.bind(("0.0.0.0", listening.getsockname()[1])), errno.EADDRINUSE)


def case_two_addresses_share_a_port_number() -> None:
    with closing(listener("127.0.0.1")) as one, closing(listener(ME, one.getsockname()[1])) as two:
        socket.create_connection(one.getsockname(), LIMIT_S).close()
        expect(one.accept()[0].getsockname()[0], "127.0.0.1")
        socket.create_connection(two.getsockname(), LIMIT_S).close()
        expect(two.accept()[0].getsockname()[0], ME)


def case_a_closed_port_can_be_bound_again_at_once() -> None:
    client, accepted, listening = pair()
    port = listening.getsockname()[1]
    for each in (accepted, client, listening):
        each.close()
    with closing(listener(port=port)):
        socket.create_connection((ME, port), LIMIT_S).close()


def case_a_strange_address_cannot_be_bound() -> None:
    with socket.socket() as fresh:
        expect_error(lambda: fresh.bind(("192.0.2.7", 0)), errno.EADDRNOTAVAIL)


def case_binding_twice_is_invalid() -> None:
    with socket.socket() as fresh:
        fresh.bind((ME, 0))
        expect_error(lambda: fresh.bind((ME, 0)), errno.EINVAL)


def case_a_listener_on_loopback_is_not_outside() -> None:
    with closing(listener("127.0.0.1")) as listening:
        port = listening.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), LIMIT_S).close()
        expect_error(lambda: socket.create_connection((ME, port), LIMIT_S), errno.ECONNREFUSED)


def case_a_listener_on_the_address_is_not_on_loopback() -> None:
    with closing(listener(ME)) as listening:
        port = listening.getsockname()[1]
        expect(listening.getsockname(), (ME, port))
        socket.create_connection((ME, port), LIMIT_S).close()
        expect_error(lambda: socket.create_connection(("127.0.0.1", port), LIMIT_S), errno.ECONNREFUSED)


def case_a_free_port_refuses() -> None:
    for host in (ME, "127.0.0.1"):
        expect_error(lambda host=host: socket.create_connection((host, 1), LIMIT_S), errno.ECONNREFUSED)  # type: ignore[misc]


def case_a_bound_port_that_does_not_listen_refuses() -> None:
    with socket.socket() as bound:
        bound.bind((ME, 0))
        expect_error(lambda: socket.create_connection(bound.getsockname(), LIMIT_S), errno.ECONNREFUSED)


def case_a_closed_listener_refuses() -> None:
    listening = listener()
    port = listening.getsockname()[1]
    socket.create_connection((ME, port), LIMIT_S).close()
    listening.close()
    expect_error(lambda: socket.create_connection((ME, port), LIMIT_S), errno.ECONNREFUSED)


def case_the_source_port_can_be_chosen() -> None:
    with closing(listener()) as listening, socket.socket() as client:
        client.settimeout(LIMIT_S)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind((ME, 34568))
        client.connect((ME, listening.getsockname()[1]))
        expect(client.getsockname(), (ME, 34568))
        expect(listening.accept()[1], (ME, 34568))


def case_reuseport_spreads_over_two_listeners() -> None:
    with closing(listener(reuse_port=True, backlog=64)) as one:
        port = one.getsockname()[1]
        with closing(listener(port=port, reuse_port=True, backlog=64)) as two:
            clients = [socket.create_connection((ME, port), LIMIT_S) for _ in range(40)]
            counts = {one: 0, two: 0}
            deadline_s = time.monotonic() + 5
            while sum(counts.values()) < len(clients) and time.monotonic() < deadline_s:
                for ready in select.select([one, two], [], [], 1)[0]:
                    ready.accept()[0].close()
                    counts[ready] += 1
            expect(sum(counts.values()), len(clients))
            assert min(counts.values()) > 0, counts.values()
            expect(error_of(lambda: listener(port=port)), errno.EADDRINUSE)


def case_ss_shows_the_listener() -> None:
    with closing(listener()) as listening:
        port = listening.getsockname()[1]
        said = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
        assert re.search(rf"0\.0\.0\.0:{port}\b", said), said


# --- IPv6 ----------------------------------------------------------------------------------------------------------


def case_dual_stack_listener_hears_ipv4() -> None:
    with closing(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)) as listening:
        for host in (ME, "127.0.0.1"):
            client = socket.create_connection((host, listening.getsockname()[1]), LIMIT_S)
            accepted, peer = listening.accept()
            expect(peer[:2], (f"::ffff:{host}", client.getsockname()[1]))
            expect(accepted.getsockname()[0], f"::ffff:{host}")
            expect(accepted.family, socket.AF_INET6)


def case_ipv6_socket_connects_to_a_mapped_address() -> None:
    with closing(listener()) as listening, socket.socket(socket.AF_INET6) as client:
        client.settimeout(LIMIT_S)
        client.connect((f"::ffff:{ME}", listening.getsockname()[1]))
        expect(client.getpeername()[:2], (f"::ffff:{ME}", listening.getsockname()[1]))
        expect(client.getsockname()[0], f"::ffff:{ME}")
        expect(listening.accept()[1], (ME, client.getsockname()[1]))


def case_ipv6_loopback() -> None:
    with closing(listener("::1", family=socket.AF_INET6)) as listening:
        client = socket.create_connection(("::1", listening.getsockname()[1]), LIMIT_S)
        accepted, peer = listening.accept()
        expect(peer[:2], ("::1", client.getsockname()[1]))
        expect(accepted.getsockname()[0], "::1")


def case_v6only_leaves_the_port_to_ipv4() -> None:
    with socket.socket(socket.AF_INET6) as six:
        six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        six.bind(("::", 0))
        six.listen()
        port = six.getsockname()[1]
        expect_error(lambda: socket.create_connection((ME, port), LIMIT_S), errno.ECONNREFUSED)
        with closing(listener(port=port)):
            socket.create_connection((ME, port), LIMIT_S).close()
            socket.create_connection(("::1", port), LIMIT_S).close()


def case_dual_stack_takes_the_port_of_both() -> None:
    with closing(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)) as listening:
        with socket.socket() as other:
            expect_error(lambda: other.bind(("0.0.0.0", listening.getsockname()[1])), errno.EADDRINUSE)


# --- connecting ----------------------------------------------------------------------------------------------------


def case_nonblocking_connect_becomes_writable() -> None:
    with closing(listener()) as listening, socket.socket() as client, select.epoll() as poller:
        client.setblocking(False)
        # Before connect, as event loops do: a socket exchanged at connect would be lost to the poller.
        poller.register(client, select.EPOLLOUT | select.EPOLLIN | select.EPOLLET)
        assert error_of(lambda: client.connect((ME, listening.getsockname()[1]))) in (None, errno.EINPROGRESS)
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            if any(event & select.EPOLLOUT and not event & select.EPOLLHUP for _, event in poller.poll(1)):
                break
        expect(client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), 0)
        accepted, _ = listening.accept()
        accepted.sendall(b"x")
        assert any(event & select.EPOLLIN for _, event in poller.poll(5))


def case_nonblocking_connect_hears_a_refusal() -> None:
    with socket.socket() as client, select.epoll() as poller:
        client.setblocking(False)
        number = error_of(lambda: client.connect((ME, 1)))
        if number == errno.EINPROGRESS:
            poller.register(client, select.EPOLLOUT)
            assert poller.poll(5)
            number = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        expect(number, errno.ECONNREFUSED)


def case_connecting_twice_is_an_error() -> None:
    with closing(listener()) as listening, socket.socket() as client:
        client.connect((ME, listening.getsockname()[1]))
        # By the C library: Python takes this error for success.
        address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", listening.getsockname()[1])
        address += socket.inet_aton(ME) + bytes(8)
        expect(libc.connect(client.fileno(), address, len(address)), -1)
        expect(ctypes.get_errno(), errno.EISCONN)


def case_a_refused_socket_can_try_again() -> None:
    with closing(listener()) as listening, socket.socket() as client:
        expect_error(lambda: client.connect((ME, 1)), errno.ECONNREFUSED)
        client.connect((ME, listening.getsockname()[1]))
        expect(client.getpeername()[0], ME)


def case_connect_gives_up_after_its_timeout() -> None:
    """A full backlog: the handshake is not answered."""
    with closing(listener(backlog=0)) as listening, ExitStack() as kept:
        began_s = time.monotonic()
        for _ in range(4):
            client = kept.enter_context(socket.socket())
            client.settimeout(0.5)
            try:
                client.connect((ME, listening.getsockname()[1]))
            except TimeoutError:
                break
        else:
            raise AssertionError("a backlog of 0 took 4 connections")
        assert time.monotonic() - began_s < 5


def case_sndtimeo_limits_a_blocking_connect() -> None:
    with closing(listener(backlog=0)) as listening, ExitStack() as kept:
        for _ in range(4):
            client = kept.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 300_000))
            if error_of(lambda client=client: client.connect((ME, listening.getsockname()[1]))):  # type: ignore[misc]
                return
        raise AssertionError("a backlog of 0 took 4 connections")


def case_an_unspecified_family_disconnects() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((ME, 9))
        nothing = ctypes.create_string_buffer(16)
        expect(libc.connect(client.fileno(), nothing, 16), 0)
        expect_error(client.getpeername, errno.ENOTCONN)


def case_a_wrong_family_is_not_supported() -> None:
    with socket.socket() as client:
        wrong = ctypes.create_string_buffer(struct.pack("=H14x", socket.AF_UNIX), 16)
        expect(libc.connect(client.fileno(), wrong, 16), -1)
        assert ctypes.get_errno() in (errno.EAFNOSUPPORT, errno.EINVAL), errno.errorcode[ctypes.get_errno()]


def case_a_bad_pointer_is_a_fault() -> None:
    with socket.socket() as client:
        expect(libc.connect(client.fileno(), ctypes.c_void_p(1), 16), -1)
        expect(ctypes.get_errno(), errno.EFAULT)


# --- accepting -----------------------------------------------------------------------------------------------------


def case_nonblocking_accept_has_nothing_yet() -> None:
    with closing(listener()) as listening:
        listening.setblocking(False)
        expect_error(listening.accept, errno.EAGAIN)


def case_rcvtimeo_limits_a_blocking_accept() -> None:
    with closing(listener()) as listening:
        listening.settimeout(None)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 200_000))
        began_s = time.monotonic()
        expect_error(listening.accept, errno.EAGAIN)
        assert 0.15 < time.monotonic() - began_s < 5


def case_a_listener_becomes_readable() -> None:
    with closing(listener()) as listening, select.epoll() as poller:
        poller.register(listening, select.EPOLLIN)
        expect(poller.poll(0), [])
        client = socket.create_connection((ME, listening.getsockname()[1]), LIMIT_S)
        expect(poller.poll(5), [(listening.fileno(), select.EPOLLIN)])
        client.close()


def case_shutdown_wakes_a_blocked_accept() -> None:
    with closing(listener()) as listening:
        listening.settimeout(None)
        seen: list[int | None] = []
        waiting = threading.Thread(target=lambda: seen.append(error_of(listening.accept)))
        waiting.start()
        time.sleep(0.2)
        listening.shutdown(socket.SHUT_RDWR)
        waiting.join(5)
        expect(seen, [errno.EINVAL])


def case_accept_on_what_does_not_listen_is_invalid() -> None:
    with socket.socket() as fresh:
        expect_error(fresh.accept, errno.EINVAL)


def case_getsockname_works_while_accept_blocks() -> None:
    with closing(listener()) as listening:
        listening.settimeout(None)
        waiting = threading.Thread(target=listening.accept)
        waiting.start()
        time.sleep(0.1)
        began_s = time.monotonic()
        port = listening.getsockname()[1]
        assert time.monotonic() - began_s < 1
        socket.create_connection((ME, port), LIMIT_S).close()
        waiting.join(5)
        assert not waiting.is_alive()


def case_many_threads_accept_from_one_listener() -> None:
    with closing(listener(backlog=64)) as listening:
        listening.settimeout(None)
        seen: list[Address] = []
        threads = [threading.Thread(target=lambda: seen.append(listening.accept()[1])) for _ in range(24)]
        for thread in threads:
            thread.start()
        clients = [socket.create_connection((ME, listening.getsockname()[1]), LIMIT_S) for _ in threads]
        for thread in threads:
            thread.join(10)
        expect(sorted(seen), sorted(client.getsockname() for client in clients))


def case_a_signal_is_handled_while_accept_blocks() -> None:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        listener().accept()
        os._exit(1)
    time.sleep(0.5)
    began_s = time.monotonic()
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    expect(os.waitstatus_to_exitcode(status), 7)
    assert time.monotonic() - began_s < 2


def case_a_process_is_killed_while_accept_blocks() -> None:
    child = os.fork()
    if not child:
        listener().accept()
        os._exit(1)
    time.sleep(0.3)
    os.kill(child, signal.SIGKILL)
    began_s = time.monotonic()
    os.waitpid(child, 0)
    assert time.monotonic() - began_s < 2


def case_the_port_of_a_killed_process_is_free_again() -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        held = listener(port=34569)
        os.write(tell, b"!")
        held.accept()
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    listener(port=34569).close()


# --- sharing -------------------------------------------------------------------------------------------------------


def case_a_duplicate_is_the_same_socket() -> None:
    with closing(listener()) as listening:
        copy = listening.dup()
        port = listening.getsockname()[1]
        listening.close()
        expect(copy.getsockname()[1], port)
        client = socket.create_connection((ME, port), LIMIT_S)
        accepted, peer = copy.accept()
        expect(peer, client.getsockname())
        expect(accepted.dup().getpeername(), client.getsockname())
        copy.close()


def case_a_child_accepts_from_its_parents_listener() -> None:
    with closing(listener()) as listening:
        child = os.fork()
        if not child:
            accepted, peer = listening.accept()
            accepted.sendall(f"{peer[0]} {peer[1]}".encode())
            os._exit(0)
        client = socket.create_connection((ME, listening.getsockname()[1]), LIMIT_S)
        expect(client.recv(100).decode(), "{} {}".format(*client.getsockname()))
        os.waitpid(child, 0)


def case_a_listener_outlives_the_process_that_made_it() -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        made = listener()
        send_descriptor(theirs, made)
        os._exit(0)
    received = receive_descriptor(ours)
    os.waitpid(child, 0)
    received.settimeout(LIMIT_S)
    client = socket.create_connection((ME, received.getsockname()[1]), LIMIT_S)
    expect(received.accept()[1], client.getsockname())


def send_descriptor(channel: socket.socket, what: socket.socket) -> None:
    channel.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [what.fileno()]))])


def receive_descriptor(channel: socket.socket) -> socket.socket:
    _, control, _, _ = channel.recvmsg(1, 1024)
    return socket.socket(fileno=struct.unpack("i", control[0][2][:4])[0])


def case_a_passed_connection_keeps_its_names() -> None:
    client, accepted, _ = pair()
    ours, theirs = socket.socketpair()
    send_descriptor(ours, accepted)
    passed = receive_descriptor(theirs)
    accepted.close()
    expect(passed.getpeername(), client.getsockname())
    client.sendall(b"x")
    expect(passed.recv(1), b"x")


def case_close_on_exec_is_kept() -> None:
    """Asked of socket() and accept4(), and only then."""
    with closing(listener()) as listening:
        assert fcntl.fcntl(listening, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        client = socket.create_connection((ME, listening.getsockname()[1]), LIMIT_S)
        accepted, _ = listening.accept()
        assert fcntl.fcntl(accepted, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        client.close()
    number = libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
    assert not fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(number)
    number = libc.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0)
    assert fcntl.fcntl(number, fcntl.F_GETFL) & os.O_NONBLOCK
    os.close(number)


def case_a_program_inherits_a_connection() -> None:
    """As inetd does it."""
    client, accepted, _ = pair()
    program = "import socket; s = socket.socket(fileno=0); print(*s.getpeername(), *s.getsockname())"
    said = subprocess.run(
        [sys.executable, "-c", program], stdin=accepted.fileno(), capture_output=True, text=True, check=True
    )
    expect(said.stdout.split(), [str(part) for part in (*client.getsockname(), *client.getpeername())])


def case_the_lowest_free_descriptor_is_used() -> None:
    with socket.socket() as first:
        number = first.fileno()
    with socket.socket() as second:
        expect(second.fileno(), number)


# --- data ----------------------------------------------------------------------------------------------------------


def case_a_large_transfer_arrives_whole() -> None:
    client, accepted, _ = pair()
    data = os.urandom(1 << 20) * 16
    digest = hashlib.sha256()

    def take() -> None:
        while piece := accepted.recv(1 << 18):
            digest.update(piece)

    taking = threading.Thread(target=take)
    taking.start()
    client.sendall(data)
    client.shutdown(socket.SHUT_WR)
    taking.join(30)
    expect(digest.hexdigest(), hashlib.sha256(data).hexdigest())


def case_a_half_closed_connection_still_answers() -> None:
    client, accepted, _ = pair()
    client.sendall(b"question")
    client.shutdown(socket.SHUT_WR)
    expect(exact(accepted, 9), b"question")
    accepted.sendall(b"answer")
    accepted.close()
    expect(exact(client, 7), b"answer")


def case_an_abortive_close_is_seen_as_a_reset() -> None:
    client, accepted, _ = pair()
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()
    expect_error(lambda: client.recv(1), errno.ECONNRESET)


def case_writing_to_the_gone_is_a_broken_pipe() -> None:
    client, accepted, _ = pair()
    accepted.close()

    def write() -> None:
        for _ in range(100):
            client.send(b"x" * 1000)
            time.sleep(0.01)

    expect_error(write, errno.EPIPE, errno.ECONNRESET)


def case_out_of_band_data() -> None:
    client, accepted, _ = pair()
    client.sendall(b"plain")
    client.send(b"!", socket.MSG_OOB)
    assert select.select([], [], [accepted], 5)[2]
    expect(accepted.recv(1, socket.MSG_OOB), b"!")


def case_sendfile_and_splice() -> None:
    client, accepted, _ = pair()
    with open("/proc/self/exe", "rb") as file:  # noqa: PTH123
        sent = os.sendfile(client.fileno(), file.fileno(), 0, 60000)
        expect(exact(accepted, sent), os.pread(file.fileno(), sent, 0))


def case_vectors_and_peeking() -> None:
    client, accepted, _ = pair()
    client.sendmsg([b"ab", b"cd"])
    deadline_s = time.monotonic() + 5
    while accepted.recv(4, socket.MSG_PEEK) != b"abcd":
        assert time.monotonic() < deadline_s
    expect(accepted.recv(4), b"abcd")


def case_options_of_tcp() -> None:
    client, accepted, listening = pair()
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 33),
        (socket.TCP_KEEPINTVL, 7),
        (socket.TCP_KEEPCNT, 4),
    ):
        client.setsockopt(socket.IPPROTO_TCP, option, value)
        expect(client.getsockopt(socket.IPPROTO_TCP, option), value)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    expect(client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1)
    for each, state in ((client, 1), (accepted, 1), (listening, 10)):
        expect(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0], state)


def case_what_a_socket_says_of_itself() -> None:
    _, accepted, listening = pair()
    level = socket.SOL_SOCKET
    expect(listening.getsockopt(level, socket.SO_ACCEPTCONN), 1)
    expect(accepted.getsockopt(level, socket.SO_ACCEPTCONN), 0)
    for option, value in (
        (socket.SO_TYPE, socket.SOCK_STREAM),
        (socket.SO_DOMAIN, socket.AF_INET),
        (socket.SO_PROTOCOL, 6),
    ):
        expect(accepted.getsockopt(level, option), value)


def case_keep_alive_probes_are_answered() -> None:
    client, accepted, _ = pair()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        client.setsockopt(socket.IPPROTO_TCP, option, 1)
    time.sleep(2.5)
    client.sendall(b"still there")
    expect(exact(accepted, 11), b"still there")


def case_five_hundred_connections_in_turn() -> None:
    with closing(listener(backlog=64)) as listening:
        for _ in range(500):
            client = socket.create_connection((ME, listening.getsockname()[1]), LIMIT_S)
            accepted, peer = listening.accept()
            expect(peer, client.getsockname())
            client.close()
            accepted.close()


def case_two_hundred_connections_at_once() -> None:
    with closing(listener(backlog=256)) as listening, ExitStack() as kept:
        port = listening.getsockname()[1]
        clients = [kept.enter_context(socket.create_connection((ME, port), LIMIT_S)) for _ in range(200)]
        found = [listening.accept() for _ in clients]
        expect(sorted(peer for _, peer in found), sorted(client.getsockname() for client in clients))
        for accepted, _ in found:
            accepted.close()


def case_asyncio_streams() -> None:
    async def main() -> bytes:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.read(100)).upper())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(echo, "0.0.0.0", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(ME, port)
            writer.write(b"hello")
            writer.write_eof()
            answer = await reader.read()
            writer.close()
            return answer

    expect(asyncio.run(asyncio.wait_for(main(), LIMIT_S)), b"HELLO")


# --- UDP and others ------------------------------------------------------------------------------------------------


def udp(host: str = "0.0.0.0") -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((host, 0))
    made.settimeout(LIMIT_S)
    return made


def case_datagrams_tell_their_sender() -> None:
    one, two = udp(ME), udp(ME)
    one.sendto(b"x" * 9000, two.getsockname())
    expect(two.recvfrom(10000), (b"x" * 9000, one.getsockname()))


def case_a_connected_datagram_socket_has_names() -> None:
    one, two = udp(ME), udp()
    two.connect(one.getsockname())
    expect(two.getpeername(), one.getsockname())
    expect(two.getsockname()[0], ME)
    two.send(b"x")
    expect(one.recvfrom(10), (b"x", two.getsockname()))


def case_a_datagram_to_nobody_is_refused() -> None:
    gone = udp(ME)
    address = gone.getsockname()
    gone.close()
    client = udp()
    client.connect(address)
    client.send(b"x")
    expect_error(lambda: client.recv(1), errno.ECONNREFUSED)


def case_tcp_and_udp_share_a_port_number() -> None:
    with closing(listener()) as listening, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        number = listening.getsockname()[1]
        other.bind((ME, number))
        socket.create_connection((ME, number), LIMIT_S).close()


def case_unix_sockets_are_untouched() -> None:
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
        listening.bind("\0slurmlet-test")
        listening.listen()
        client.connect("\0slurmlet-test")
        listening.accept()[0].sendall(b"x")
        expect(client.recv(1), b"x")


def case_netlink_answers() -> None:
    said = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    assert f" {ME}/" in said, said
    assert " 127.0.0.1/8 " in said, said


def judged(case: Callable[[], None]) -> str:
    def late(*_: object) -> None:
        raise TimeoutError("not done in time")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S + 5)
    try:
        case()
    except BaseException:
        return "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
    finally:
        signal.alarm(0)
    return ""


def cases() -> dict[str, Callable[[], None]]:
    return {
        name.removeprefix("case_"): value for name, value in globals().items() if name.startswith("case_")
    }


if __name__ == "__main__":
    wanted = sys.argv[1:] or list(cases())
    print(json.dumps({name: judged(cases()[name]) for name in wanted}))
