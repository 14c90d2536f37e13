"""A pod as its runner sees it, without containers: a runtime whose processes start and end when a test says so.

Time is virtual. Lifecycle, containers, termination, back-off, probes and report are the real ones.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slurmlet.linux.event_loop import Timer
from slurmlet.protocol import checks, wire
from slurmlet.runner.containers.container import Container
from slurmlet.runner.containers.container_runtime import CREATE_ERROR, Start
from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.host.scratch import Scratch
from slurmlet.runner.link.reporter import Reporter
from slurmlet.runner.pod.pod_lifecycle import Lifecycle


class VirtualRunnerLoop:
    """As linux.event_loop.Loop, but time passes only in `advance`."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._soon: list[Callable[[], None]] = []
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self.signals: dict[int, Callable[[], None]] = {}
        self.stopped = False
        # What happens while the loop runs, one after another; each may let time pass.
        self.script: list[Callable[[], None]] = []

    def on_signal(self, number: int, callback: Callable[[], None]) -> None:
        self.signals[number] = callback

    def stop(self) -> None:
        self.stopped = True

    def run(self) -> None:
        self.advance()
        for act in self.script:
            act()
            self.advance()
        assert self.stopped, "nothing ended the loop"

    def run_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        until_s = self.now_s + timeout_s
        while not done() and self.now_s < until_s:
            self.advance(min(0.1, until_s - self.now_s))
        return done()

    def soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now_s + delay_s, callback)
        heapq.heappush(self._timers, (timer.due_s, next(self._order), timer))
        return timer

    def reading(self, fd: int, callback: Callable[[], None] | None) -> None:
        _set(self._readers, fd, callback)

    def writing(self, fd: int, callback: Callable[[], None] | None) -> None:
        _set(self._writers, fd, callback)

    def forget(self, fd: int) -> None:
        self._readers.pop(fd, None)
        self._writers.pop(fd, None)

    def advance(self, seconds: float = 0.0) -> None:
        until_s = self.now_s + seconds
        while True:
            self._turn()
            if not self._timers or self._timers[0][0] > until_s:
                break
            due_s, _, timer = heapq.heappop(self._timers)
            self.now_s = max(self.now_s, due_s)
            if timer.callback is not None:
                timer.callback()
        self.now_s = until_s

    def _turn(self) -> None:
        while True:
            ready, self._soon = self._soon, []
            for callback in ready:
                callback()
            readable, writable, _ = select.select(list(self._readers), list(self._writers), [], 0)
            for fd in readable:
                if fd in self._readers:
                    self._readers[fd]()
            for fd in writable:
                if fd in self._writers:
                    self._writers[fd]()
            if not ready and not readable and not writable and not self._soon:
                return


def _set(callbacks: dict[int, Callable[[], None]], fd: int, callback: Callable[[], None] | None) -> None:
    if callback is None:
        callbacks.pop(fd, None)
    else:
        callbacks[fd] = callback


class Process:
    """A container's first process."""

    def __init__(self, runtime: FakeRuntime, pid: int, name: str, start: Start) -> None:
        self.runtime, self.pid, self.name, self._start = runtime, pid, name, start
        self._stdout = start.stdio[1]
        self.signals: list[int] = []
        # What it does with SIGTERM: its exit code, or None for nothing.
        self.on_term: int | None = 143
        self.alive = True

    def write(self, text: bytes) -> None:
        os.write(self._stdout, text)

    def exit(self, code: int, number: int = 0) -> None:
        if self.alive:
            self.alive = False
            self.runtime.processes.remove(self)
            os.close(self._stdout)
            self._start.on_exit(code, number)

    def kill(self, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.runtime.loop.soon(lambda: self.exit(137, 9))
        elif self.on_term is not None:
            code = self.on_term
            self.runtime.loop.soon(lambda: self.exit(code))


class FakeRuntime:
    """Containers that are asked for wait in `asked` until a test starts them, or `at_once`."""

    name = "crun"

    def __init__(self, loop: VirtualRunnerLoop) -> None:
        self.loop = loop
        self.at_once = True
        self.asked: list[tuple[str, Start]] = []
        self.processes: list[Process] = []
        self.began: list[str] = []  # names, in order
        self.deleted: list[str] = []
        self.executed: list[tuple[list[str], Start]] = []
        self.cannot_create = self.refuse = ""
        self.created: dict[str, str] = {}  # id → name
        self._by_id: dict[str, Process] = {}
        self.lacks: dict[str, str] = {}
        self._pids = itertools.count(1_000_000_000)

    def create(
        self, container_id: str, plan: Any, run_dir: str, on_created: Callable[[str, str], None]
    ) -> None:
        self.created[container_id] = str(plan["name"])
        on_created(self.cannot_create, CREATE_ERROR if self.cannot_create else "")

    def start(self, container_id: str, mounts: list[Any], start: Start) -> None:
        name = self.created[container_id]
        self.began.append(name)
        # The runtime's child has descriptors of its own.
        self.asked.append((container_id, start._replace(stdio=(-1, os.dup(start.stdio[1]), -1))))
        if self.at_once:
            self.loop.soon(self.begin)

    def begin(self, error: str = "") -> Process | None:
        """The oldest of those asked for."""
        if not self.asked:
            return None
        container_id, start = self.asked.pop(0)
        error = error or self.refuse
        if error:
            os.close(start.stdio[1])
            start.on_started(0, -1, error)
            return None
        process = Process(self, next(self._pids), self.created[container_id], start)
        self._by_id[container_id] = process
        self.processes.append(process)
        start.on_started(process.pid, -1, "")
        return process

    def exec(self, container_id: str, argv: list[str], start: Start) -> None:
        self.executed.append((argv, start))

    def answer(self, code: int, says: bytes = b"", error: str = "") -> list[str]:
        """The oldest command that was to be executed in a container runs and ends; its words."""
        argv, start = self.executed.pop(0)
        if says:
            os.write(start.stdio[1], says)
        start.on_started(0 if error else next(self._pids), -1, error)
        if not error:
            start.on_exit(code, 0)
        return argv

    def delete(self, container_id: str) -> None:
        self.deleted.append(container_id)

    def signal(self, container_id: str, number: int) -> None:
        process = self._by_id.get(container_id)
        if process is not None and process.alive:
            process.kill(number)

    def user(self, container_id: str) -> Any:
        return {"uid": 0, "gid": 0, "groups": []}

    def __getitem__(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    @property
    def names(self) -> list[str]:
        return [process.name for process in self.processes]

    @property
    def asked_names(self) -> list[str]:
        return [self.created[container_id] for container_id, _ in self.asked]


class FakeHubLink:
    """The runner's or agent's end of its connection, without one: a test says when it is up, and what the hub says."""

    def __init__(self, _loop: Any, _access: Any, on_up: Any, on_frame: Any, on_down: Any) -> None:
        self._on_up, self._on_frame, self._on_down = on_up, on_frame, on_down
        self.up = self.closed = False
        self.started = 0
        self.sent: list[Any] = []
        self.acks = True

    def start(self) -> None:
        self.started += 1

    def send(self, frame: bytes) -> None:
        if self.up:
            for one in wire.Decoder().feed(frame):
                message = wire.parse(one.payload)
                self.sent.append(message)
                if self.acks and message["type"] in ("report", "bye"):
                    self.hear({"type": "ack", "seq": message["seq"]})

    def flushed(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    # The hub.

    def comes_up(self) -> None:
        self.up = True
        self._on_up("127.0.0.1")

    def goes_down(self) -> None:
        self.up = False
        self._on_down()

    def hear(self, message: Any) -> None:
        self._on_frame(wire.Frame(wire.CONTROL, 0, json.dumps(message).encode()))

    def said(self, type_: str) -> list[Any]:
        return [message for message in self.sent if message["type"] == type_]


class FakeChildren:
    def __init__(self, loop: VirtualRunnerLoop) -> None:
        self._loop = loop

    def call(self, work: Callable[[], Any], done: Callable[[Any, str], None]) -> None:
        """At once instead of in a fork; the answer comes in a turn of its own, as there."""
        try:
            value, error = work(), ""
        except Exception as problem:
            value, error = None, str(problem)
        self._loop.soon(lambda: done(value, error))


class FakeVolumes:
    limited: dict[str, Any] = {}  # noqa: RUF012
    refreshed: list[Any]

    def __init__(self) -> None:
        self.refreshed = []

    def prepare(self, _children: Any, prepared: Callable[[str], None]) -> None:
        prepared("")

    def refresh(self, volumes: Any) -> None:
        self.refreshed.append(volumes)

    def mounts(self, plan: Any) -> list[Any]:
        return []

    def path(self, name: str) -> str:
        raise KeyError(name)


class FakeNetwork:
    sysfs = ""
    ip = "10.244.0.7"

    def hostname(self) -> str:
        return "p"

    def address(self) -> str:
        return self.ip


class Kills:
    def __init__(self) -> None:
        self.number = 0

    def count(self) -> int:
        return self.number


def container_plan(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "image": "busybox", "image_id": "busybox@sha256:1", "image_dir": "/store/sha256-1", "argv": [name],
        "env": [], "cwd": "/", "env_files": [], "user": {"uid": 0, "gid": 0, "groups": [], "name": "", "strict": False},
        "mounts": [], "tty": False, "stdin": False, "stdin_once": False, "read_only_root": False,
        "termination_message_path": "/dev/termination-log", "termination_message_policy": "File", "stop_signal": "SIGTERM",
        "sidecar": False, "restart_policy": "", "restart_rules": [], "probes": {}, "post_start": None, "pre_stop": None,
        "gpus": False, "add_caps": [], "drop_caps": [], "no_new_privs": False, "privileged": False, "unmasked_proc": False,
        "selinux": False, "seccomp": "Unconfined", "target": "", **more,
    }  # fmt: skip


def pod_plan(
    *containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **more: Any
) -> dict[str, Any]:
    return {
        "uid": "u-1", "name": "p", "namespace": "ns", "cluster": "default", "restart_policy": "Never", "grace_s": 10,
        "share_pid": False, "host_network": False, "host_ipc": False, "hostname": "p", "host_names": ["p"], "hosts": [],
        "sysctls": [], "storage_limits": {"containers": {}, "pod": None}, "init_containers": list(init),
        "containers": list(containers), "network": None, "resolv_conf": None, "fs_group": None, "volumes": {}, **more,
    }  # fmt: skip


class RunnerPod:
    """One pod with its lifecycle; `sent` is what the hub would hear."""

    def __init__(
        self,
        directory: Path,
        plan: dict[str, Any],
        loop: VirtualRunnerLoop | None = None,
        reporter: Reporter | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self.loop = loop or VirtualRunnerLoop()
        self.runtime = FakeRuntime(self.loop)
        self.sent: list[dict[str, Any]] = []
        scratch = scratch or Scratch(str(directory / "scratch"), "u-1")
        self._lock = scratch._lock
        self.kills = Kills()
        self.report_file = directory / "report.json"
        self.reporter = reporter or Reporter(self.loop, str(self.report_file), self._send)  # type: ignore[arg-type]
        parts: dict[str, Any] = {
            "loop": self.loop, "children": FakeChildren(self.loop), "runtime": self.runtime, "volumes": FakeVolumes(),
            "scratch": scratch, "reporter": self.reporter, "network": FakeNetwork(), "logs": str(directory / "logs"),
            "plan": plan, "oom": self.kills,
        }  # fmt: skip
        self.context = PodContext(**parts)
        self.done: list[int] = []
        self.lifecycle = Lifecycle(self.context, self.done.append)

    def start(self) -> None:
        self.lifecycle.start()
        self.advance()

    def advance(self, seconds: float = 0.0) -> None:
        self.loop.advance(seconds)
        checks.pod_report(self.report)

    def close(self) -> None:
        os.close(self._lock)
        self.lifecycle.stop(0)
        for _ in range(3):
            while self.runtime.asked:
                self.runtime.begin()
            self.loop.advance(1)

    @property
    def report(self) -> Any:
        return self.reporter.report

    def of(self, name: str) -> Any:
        kinds = ("init_containers", "containers", "ephemeral_containers")
        return next(self.report[kind][name] for kind in kinds if name in self.report.get(kind, {}))

    def container(self, name: str) -> Container:
        found = self.lifecycle.find(name)
        assert found is not None
        return found

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(one["container"], one["reason"]) for one in self.sent if one["type"] == "event"]

    def _send(self, frame: bytes) -> None:
        decoder = wire.Decoder()
        self.sent += [wire.parse(one.payload) for one in decoder.feed(frame)]


@contextmanager
def making_pod(directory: Path, plan: dict[str, Any]) -> Iterator[RunnerPod]:
    """The clock of everything is the pod's."""
    made = RunnerPod(directory, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: made.loop.now_s)
        made.start()
        try:
            yield made
        finally:
            made.close()
