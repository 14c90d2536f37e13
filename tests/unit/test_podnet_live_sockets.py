"""Knowing which sockets still exist, from the real kernel."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys

from slurmlet.podnet.fast import live_sockets


def cookie(sock: socket.socket) -> int:
    return int(struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, 57, 8))[0])


def test_a_listener_lives_until_it_is_closed() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        listener = socket.create_server((host, 0), family=family)
        known = cookie(listener)
        assert known in live_sockets.living(live_sockets.LISTENING)
        assert known not in live_sockets.living(live_sockets.CONNECTED)
        listener.close()
        assert known not in live_sockets.living(live_sockets.LISTENING)


def test_a_connection_lives_until_its_holder_closes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        both = {cookie(client), cookie(server)}
        assert both <= live_sockets.living(live_sockets.CONNECTED)
        client.close()
        # The other end has been closed but not this one; the kernel's rest of the first is nobody's.
        assert live_sockets.living(live_sockets.CONNECTED) & both == {cookie(server)}
        server.close()
        assert not live_sockets.living(live_sockets.CONNECTED) & both


def test_more_than_one_message_of_the_kernel() -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(700)]
    assert {cookie(each) for each in listeners} <= live_sockets.living(live_sockets.LISTENING)
    for each in listeners:
        each.close()


def test_a_bound_socket_is_found_in_the_process_that_holds_it() -> None:
    code = "import socket,sys,os; s=socket.socket(); s.bind(('127.0.0.1',0)); "
    code += "print(os.fstat(s.fileno()).st_ino, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        inode = int(child.stdout.readline())
        assert inode in live_sockets.held_sockets()
        child.communicate()
    assert inode not in live_sockets.held_sockets()


def test_our_own_sockets_do_not_count() -> None:
    with socket.socket() as own:
        assert os.fstat(own.fileno()).st_ino not in live_sockets.held_sockets()
