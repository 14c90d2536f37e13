# ruff: noqa: PTH103, PTH118, PTH123, PTH211, SIM115
"""A stand-in for the hub that drives one real runner: standard library only, so that it runs on any host as any user.

Run as a script inside a testbed host it plays one scenario (scenarios in runner_scenarios.py) and exits 0 or shows what
went wrong. Certificates are given, not made: making them needs more than the standard library.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from slurmlet.protocol import wire

# For facts that come soon; long only for a machine with much else to do.
WAIT_S = 120.0


class Rig:
    """One pod directory, one listening hub, one runner process."""

    def __init__(self, work: str, runner: list[str], image_dir: str, certificates: str) -> None:
        self.work, self.image_dir = work, image_dir
        self._runner, self._certificates = runner, certificates
        self.uid = str(uuid.uuid4())
        self.cluster_dir = os.path.join(work, "cluster")
        self.pod_dir = os.path.join(self.cluster_dir, "pods", self.uid)
        os.makedirs(self.pod_dir, mode=0o700)
        if os.environ.get("RIG_RUNC"):
            # As `slurmlet up` lays it into the cluster's directory.
            os.makedirs(os.path.join(self.cluster_dir, "bin"))
            os.symlink(os.environ["RIG_RUNC"], os.path.join(self.cluster_dir, "bin", "runc"))
        self.scratch = tempfile.mkdtemp(prefix="rig-")
        for source, target in (("runner.pem", "runner.pem"), ("ca.pem", "hub-ca.pem")):
            with (
                open(os.path.join(certificates, source), "rb") as have,
                open(os.path.join(self.pod_dir, target), "wb") as out,
            ):
                out.write(have.read())
        self.hub_certificate = "hub.pem"
        self.process: subprocess.Popen[bytes] | None = None
        self.plan: dict[str, Any] = {}
        self.hellos: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.byes: list[dict[str, Any]] = []
        self.streams: dict[int, HubStream] = {}
        self.changed = threading.Condition()
        self._next_stream = 0
        self._listener: socket.socket | None = None
        self._link: ssl.SSLSocket | None = None
        self._link_lock = threading.Lock()

    # The hub.

    def listen(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(os.path.join(self._certificates, self.hub_certificate))
        context.load_verify_locations(os.path.join(self._certificates, "ca.pem"))
        context.verify_mode = ssl.CERT_REQUIRED
        self._listener = listener = socket.create_server(("127.0.0.1", 0))
        hub = {
            "addresses": ["127.0.0.1"],
            "runner_port": listener.getsockname()[1],
            "server_name": "hub.slurmlet",
        }
        with open(os.path.join(self.cluster_dir, "hub.json"), "w") as file:
            json.dump(hub, file)
        threading.Thread(target=self._accept, args=(listener, context), daemon=True).start()

    def vanish(self) -> None:
        """The hub dies: listener and connection are gone at once."""
        assert self._listener is not None
        # shutdown wakes the thread in accept(); close alone would leave the port open under it.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._link is not None:
            try:
                self._link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            self._link.close()

    def _accept(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                link = context.wrap_socket(plain, server_side=True)
            except OSError:
                plain.close()
                continue
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._link = link
            threading.Thread(target=self._read, args=(link,), daemon=True).start()

    def _read(self, link: ssl.SSLSocket) -> None:
        decoder = wire.Decoder()
        while True:
            try:
                received = link.recv(65536)
            except (OSError, ValueError):
                return
            if not received:
                return
            for frame in decoder.feed(received):
                with self.changed:
                    self._take(frame)
                    self.changed.notify_all()

    def _take(self, frame: wire.Frame) -> None:
        if frame.kind != wire.CONTROL:
            stream = self.streams.get(frame.stream)
            if stream is not None:
                stream.take(frame)
            return
        message = json.loads(frame.payload)
        kind = message["type"]
        if kind == "hello":
            self.hellos.append(message)
            if not message["has_pod"]:
                self.send(wire.control({"type": "pod", "pod": self.plan}))
        elif kind in ("report", "bye"):
            (self.reports if kind == "report" else self.byes).append(message["report"])
            self.send(wire.control({"type": "ack", "seq": message["seq"]}))
        elif kind == "event":
            self.events.append(message)

    def send(self, frame: bytes) -> None:
        assert self._link is not None
        with self._link_lock:
            self._link.sendall(frame)

    def wait(self, probe: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            while True:
                found = probe()
                if found:
                    return found
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    last = self.reports[-1:] or self.hellos
                    shown = {number: bytes(stream.out[-500:]) for number, stream in self.streams.items()}
                    raise AssertionError(
                        f"not within {timeout_s} s: {what}\nstreams: {shown}\nlast: {json.dumps(last)}\n{self.said()}"
                    )
                self.changed.wait(min(left_s, 0.2))

    # The runner.

    def start(self, plan: dict[str, Any], *, listen: bool = True) -> None:
        self.plan = plan
        if listen:
            self.listen()
        environ = {**os.environ, "SLURM_JOB_ID": "42", "TMPDIR": self.scratch}
        log = open(os.path.join(self.pod_dir, "job.log"), "ab")
        self.process = subprocess.Popen(
            [*self._runner, self.pod_dir], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
        )
        log.close()

    def said(self) -> str:
        with open(os.path.join(self.pod_dir, "job.log"), errors="replace") as file:
            return "runner said:\n" + file.read()

    def exit_code(self, timeout_s: float = WAIT_S) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    # What scenarios ask.

    def container(self, name: str) -> dict[str, Any]:
        report = (self.byes or self.reports or [{}])[-1]
        found: dict[str, Any] = {**report.get("init_containers", {}), **report.get("containers", {})}.get(
            name, {}
        )
        return found

    def wait_state(self, name: str, state: str, timeout_s: float = WAIT_S) -> dict[str, Any]:
        self.wait(lambda: self.container(name).get("state") == state, f"{name} {state}", timeout_s)
        return self.container(name)

    def open(self, what: str, **fields: Any) -> HubStream:
        with self.changed:
            self._next_stream += 1
            stream = self.streams[self._next_stream] = HubStream(self, self._next_stream)
        self.send(wire.control({"type": "open", "stream": stream.number, "what": what, **fields}))
        return stream

    def execute(
        self, container: str, command: list[str], stdin: bytes | None = None, tty: bool = False
    ) -> tuple[dict[str, Any], bytes, bytes]:
        stream = self.open(
            "exec",
            container=container,
            command=command,
            stdin=stdin is not None,
            stdout=True,
            stderr=not tty,
            tty=tty,
        )
        if stdin is not None:
            stream.feed(stdin)
        stream.wait_closed()
        return stream.status, bytes(stream.out), bytes(stream.err)

    def logs(self, container: str, **options: Any) -> bytes:
        stream = self.open("logs", container=container, **options)
        stream.wait_closed()
        if stream.status:
            raise AssertionError(stream.status)
        return bytes(stream.out)


class HubStream:
    """The hub's end of a stream, with credit both ways."""

    def __init__(self, rig: Rig, number: int) -> None:
        self.rig, self.number = rig, number
        self.out, self.err = bytearray(), bytearray()
        self.status: dict[str, Any] = {}
        self.closed = False
        self.granting = True
        self._credit = wire.INITIAL_WINDOW
        self.received_unpaid = 0

    def take(self, frame: wire.Frame) -> None:
        if frame.kind == wire.WINDOW:
            self._credit += int.from_bytes(frame.payload, "big")
        elif frame.kind == wire.CLOSE:
            self.closed = True
        elif frame.payload[0] == wire.STATUS:
            self.status = json.loads(frame.payload[1:])
        else:
            (self.out if frame.payload[0] == wire.STDOUT else self.err).extend(frame.payload[1:])
            self.received_unpaid += len(frame.payload) - 1
            assert self.received_unpaid <= wire.INITIAL_WINDOW, "the runner sent more than its credit"
            if self.granting:
                self.grant()

    def grant(self) -> None:
        paid, self.received_unpaid = self.received_unpaid, 0
        self.rig.send(wire.window(self.number, paid))

    def send(self, channel: int, payload: bytes) -> None:
        self.rig.send(wire.data(self.number, channel, payload))

    def feed(self, stdin: bytes) -> None:
        """All of it, as credit comes, then the end of input."""
        while stdin:
            self.rig.wait(lambda: self._credit > 0 or self.closed, "credit for stdin")
            if self.closed:
                return
            with self.rig.changed:
                size = min(self._credit, 65536)
                self._credit -= size
            self.send(wire.STDIN, stdin[:size])
            stdin = stdin[size:]
        self.send(wire.END, bytes((wire.STDIN,)))

    def wait_closed(self, timeout_s: float = WAIT_S) -> None:
        self.rig.wait(lambda: self.closed, f"end of stream {self.number}", timeout_s)
