"""Programs under the real filter, served by real supervisors in this process: pods without Slurm, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.linux import syscalls
from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.fast import seccomp_filter
from slurmlet.podnet.fast.native import native_library as native
from slurmlet.podnet.fast.substitution import Supervisor
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_datagrams import open_socket
from slurmlet.podnet.overlay_socket import Overlay
from slurmlet.podnet.tables import Tables
from slurmlet.upstream import netfast_build

# Ends a test that hangs; nothing is measured by it.
TIMEOUT_S = 120.0
KEY = b"k" * 32


def reason_to_skip() -> str:
    """Why this machine cannot run these tests, or ""."""
    try:
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(OSError):
                become_pod()
                seccomp_filter.install()
                code = 0
            os._exit(code)
        return (
            ""
            if os.waitpid(pid, 0)[1] == 0
            else "the kernel gives no seccomp notifications to a new user namespace"
        )
    except OSError as error:
        return str(error)


def become_pod() -> None:
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNET)
    # The test, an ordinary user perhaps, has to look into this process as netd looks into a pod's.
    syscalls._check(syscalls._libc().prctl(4, 1, 0, 0, 0), "prctl")


def enter_pod() -> int:
    become_pod()
    return seccomp_filter.install()


needs_notifications = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())


class Program:
    """A forked child of a pod; `result` is what its function returned."""

    def __init__(self, pod: Any, function: Callable[[], Any], enter: Callable[[], int] = enter_pod) -> None:
        self.result: Any = None
        self.error = ""
        self.done = False
        self._loop = pod.world.loop
        self._said = b""
        notify_socket, notify_socket_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._out, out_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _in_child(notify_socket_end, out_end, function, enter)
        notify_socket_end.close()
        os.close(out_end)
        _, (self.notify_fd,), _, _ = socket.recv_fds(notify_socket, 1, 1)
        notify_socket.close()
        pod.supervisor.add_listener(os.dup(self.notify_fd), lambda: None)
        self._loop.reading(self._out, self._readable)

    def _readable(self) -> None:
        data = os.read(self._out, 65536)
        self._said += data
        if data:
            return
        self._loop.forget(self._out)
        os.close(self._out)
        os.close(self.notify_fd)
        os.waitpid(self.pid, 0)
        self.done = True
        if self._said:
            self.result, self.error = json.loads(self._said)

    def kill(self) -> None:
        if not self.done:
            os.kill(self.pid, signal.SIGKILL)


def _in_child(
    notify_socket: socket.socket, out: int, function: Callable[[], Any], enter: Callable[[], int]
) -> None:
    try:
        signal.set_wakeup_fd(-1)
        socket.send_fds(notify_socket, [b"l"], [enter()])
        try:
            answer = [function(), ""]
        except BaseException:
            answer = [None, traceback.format_exc()]
        os.write(out, json.dumps(answer).encode())
    finally:
        os._exit(0)


class Pod:
    def __init__(self, world: World, ip: str, host_ip: str, pod_sockets: Any = None) -> None:
        self.library = world.library
        self.world, self.ip = world, ip
        self.setup = Setup(
            addresses.number(ip),
            addresses.network("10.244.0.0/16"),
            addresses.network("10.96.0.0/16"),
            KEY,
            "node",
            addresses.number(host_ip),
            [],
        )
        self.published: list[dict[int, int]] = []
        self.pod_sockets = pod_sockets
        self.socket = open_socket(self.setup.host_ip)
        self.journal = str(world.directory / f"journal-{ip}")
        self.begin()

    def begin(self) -> None:
        """A netd: the first, or the next one after the first is no more."""
        self.tables = Tables(self.setup)
        self.overlay = Overlay(self.world.loop, self.setup, self.tables, self.socket)
        self.supervisor = Supervisor(
            self.world.loop,
            self.setup,
            self.tables,
            self.overlay,
            self.pod_sockets,
            self.published.append,
            self.journal,
            self.library,
        )

    def die(self) -> None:
        """As after kill -9: the loop hears nothing more of this netd, and programs wait."""
        self.world.loop.forget(self.socket.fileno())
        self.supervisor.close()

    def adopt(self, *programs: Program) -> None:
        """What the runner does for a new netd."""
        for program in programs:
            self.supervisor.add_listener(os.dup(program.notify_fd), lambda: None)

    def start(self, function: Callable[[], Any]) -> Program:
        program = Program(self, function)
        self.world.programs.append(program)
        return program

    def serve(self, function: Callable[[], Any]) -> Program:
        """Start a server and wait until it listens."""
        before = len(self.published)
        program = self.start(function)
        self.world.until(lambda: len(self.published) > before or program.done)
        assert not program.error, program.error
        return program

    def run(self, function: Callable[[], Any]) -> Any:
        return self.world.finish(self.start(function))[0]


class World:
    """Two pods on two "hosts" (loopback addresses) and one loop for both netds."""

    def __init__(self, directory: Path, library: Any = None) -> None:
        self.directory, self.library = directory, library
        self.loop = Loop()
        self.programs: list[Program] = []
        self.one = Pod(self, "10.244.0.1", "127.0.1.1")
        self.two = Pod(self, "10.244.0.2", "127.0.1.2")
        self.push()

    def push(self, **message: Any) -> None:
        for pod in (self.one, self.two):
            where = {
                each.ip: [addresses.text(each.setup.host_ip), each.overlay.port, {}]
                for each in (self.one, self.two)
            }
            pod.tables.apply({"pods": where, **message})

    def finish(self, *programs: Program) -> list[Any]:
        """Turn the loop until they are done; their results, or their first failure."""
        assert self.loop.run_until(lambda: all(each.done for each in programs), TIMEOUT_S), "a program hangs"
        for each in programs:
            assert not each.error, each.error
        return [each.result for each in programs]

    def until(self, condition: Callable[[], bool]) -> None:
        assert self.loop.run_until(condition, TIMEOUT_S)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """netfast, or why there is none."""
    directory = tmp_path_factory.mktemp("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURMLET_CACHE", str(directory / "cache"))
        patch.delenv("SLURMLET_NO_NATIVE", raising=False)
        return netfast_build.write_library(directory) or native.load(str(directory))


@pytest.fixture(params=["python", "native"])
def world(request: pytest.FixtureRequest, tmp_path: Path, compiled: Any) -> Iterator[World]:
    if request.param == "native" and isinstance(compiled, str):
        pytest.skip(compiled)
    made = World(tmp_path, compiled if request.param == "native" else None)
    yield made
    for program in made.programs:
        program.kill()
    made.loop.run_until(lambda: all(each.done for each in made.programs), 5.0)
    for pod in (made.one, made.two):
        pod.die()
        pod.socket.close()
    signal.set_wakeup_fd(-1)
    made.loop.close()
