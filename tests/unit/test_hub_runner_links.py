"""Runners' connections over real TLS on loopback: who is let in, frames, flow control both ways, ends."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.controlplane import pki
from slurmlet.controlplane.pki import Leaf
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.runner_credentials import RunnerAuthority
from slurmlet.hub.runner_links import LinkLost, LinkServer, RunnerLink
from slurmlet.protocol import wire
from tests.unit.hub_making import make_settings
from tests.unit.loopback import make_keys, until
from tests.unit.recorded_messages import OF_RUNNERS, REPORT, RUNNER_HELLO
from tests.unit.reports import pod_report

UID = "0b5e4c2a-7c1f-4d57-9d2c-3f2d5b6a7e01"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    root = tmp_path_factory.mktemp("cluster")
    make_keys(root / "pki")
    return make_settings(root)


def control(type_: str, **fields: Any) -> bytes:
    """As a runner would, or one that says whatever it likes."""
    message: Any = {**fields, "type": type_}
    return wire.control(message)


def event(reason: str) -> bytes:
    return control("event", kind="Normal", reason=reason, message="", container="")


def opening(what: str, **fields: Any) -> Callable[[int], Any]:
    return lambda stream: {"type": "open", "stream": stream, "what": what, "container": "c", **fields}


class Hub:
    """A link server that writes down what happens."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.links: list[RunnerLink] = []
        self.messages: list[dict[str, Any]] = []
        self.ended: list[RunnerLink] = []
        self.refused: list[tuple[str, str]] = []
        self.port = 0

    async def came(self, link: RunnerLink) -> None:
        self.links.append(link)

    async def said(self, link: RunnerLink, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def went(self, link: RunnerLink) -> None:
        self.ended.append(link)

    def sent_away(self, uid: str, why: str) -> None:
        self.refused.append((uid, why))


class Runner:
    """The other end, in as many lines as the protocol needs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, frame: bytes) -> None:
        self.writer.write(frame)
        await self.writer.drain()

    async def hello(self, **fields: Any) -> None:
        given = {
            "protocol": wire.MAJOR, "minor": wire.MINOR, "pod_uid": UID, "job_id": "7", "version": "0", "has_pod": False,
            "host": "c1", "host_ip": "192.0.2.5", "report": None,
        }  # fmt: skip
        await self.send(control("hello", **{**given, **fields}))

    async def frame(self) -> wire.Frame:
        header = await self.reader.readexactly(wire.HEADER_BYTES)
        length, kind, stream = wire.parse_header(header)
        return wire.Frame(kind, stream, await self.reader.readexactly(length))

    async def refused(self) -> bool:
        """Whether the hub ends the connection without a word."""
        try:
            return await asyncio.wait_for(self.reader.read(1), 1) == b""
        except (ConnectionError, ssl.SSLError):
            return True

    def close(self) -> None:
        self.writer.close()


def context(settings: Settings, credential: bytes | None, where: Path) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(settings.pki("hub-ca.crt")))
    if credential is not None:
        file = where / "runner.pem"
        file.write_bytes(credential)
        made.load_cert_chain(str(file))
    return made


async def dial(hub: Hub, where: Path, credential: bytes | None = None, *, own: bool = True) -> Runner:
    if own and credential is None:
        credential = RunnerAuthority(hub.settings).issue(UID)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", hub.port, ssl=context(hub.settings, credential, where), server_hostname="hub.slurmlet"
    )
    return Runner(reader, writer)


def serve(settings: Settings, scenario: Callable[[Hub], Awaitable[None]]) -> None:
    async def run() -> None:
        hub = Hub(settings)
        server = await LinkServer(settings, hub.came, hub.said, hub.went, None, hub.sent_away).start(0)
        hub.port = server.sockets[0].getsockname()[1]
        try:
            await asyncio.wait_for(scenario(hub), 5)
        finally:
            server.close()
            for link in hub.links:
                link.end()
            await asyncio.sleep(0.01)

    asyncio.run(run())


def linked(
    settings: Settings, where: Path, scenario: Callable[[Hub, Runner, RunnerLink], Awaitable[None]]
) -> None:
    """A scenario that begins with a runner let in."""

    async def run(hub: Hub) -> None:
        runner = await dial(hub, where)
        await runner.hello()
        await until(lambda: hub.links)
        try:
            await scenario(hub, runner, hub.links[0])
        finally:
            runner.close()
            await until(lambda: hub.ended)

    serve(settings, run)


# Who is let in


def test_a_runner_with_its_pods_certificate_is_let_in(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        assert (link.uid, link.alive, link.has_pod, link.hello["host"]) == (UID, True, False, "c1")

    linked(settings, tmp_path, scenario)


def foreign_credential(directory: Path, common_name: str) -> bytes:
    """Signed by another installation's hub-ca, under the same name."""
    pki.ensure(directory, [Leaf("other", "hub-ca", common_name, client=True)])
    return (directory / "other.crt").read_bytes() + (directory / "other.key").read_bytes()


def test_a_certificate_of_another_authority_is_refused(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub) -> None:
        runner = await dial(hub, tmp_path, foreign_credential(tmp_path / "pki", f"slurmlet:pod:{UID}"))
        assert await runner.refused()
        runner.close()
        assert hub.links == []

    serve(settings, scenario)


def test_a_caller_without_a_certificate_is_refused(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub) -> None:
        runner = await dial(hub, tmp_path, own=False)
        assert await runner.refused()
        runner.close()
        assert hub.links == []

    serve(settings, scenario)


def test_our_own_certificates_that_name_no_pod_are_refused(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub) -> None:
        api_server = (
            settings.pki("kubelet-client.crt").read_bytes() + settings.pki("kubelet-client.key").read_bytes()
        )
        runner = await dial(hub, tmp_path, api_server)
        await runner.hello()
        assert await runner.refused()
        runner.close()
        assert hub.links == []

    serve(settings, scenario)


@pytest.mark.parametrize(
    "greeting",
    [
        control("hello", protocol=wire.MAJOR, pod_uid="another-pod"),
        control("hello", protocol=wire.MAJOR),
        control("hello", protocol=wire.MAJOR, minor=wire.MINOR, pod_uid=UID),
        control("report", protocol=wire.MAJOR, pod_uid=UID),
        wire.data(1, wire.STDOUT, b"x"),
        wire.pack(wire.CONTROL, 0, b"no json"),
        wire.pack(wire.CONTROL, 0, b"\xff\xfe"),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["another pod", "no pod", "half a hello", "no hello", "data", "no json", "no text", "http"],
)
def test_a_wrong_greeting_is_refused(settings: Settings, tmp_path: Path, greeting: bytes) -> None:
    async def scenario(hub: Hub) -> None:
        runner = await dial(hub, tmp_path)
        await runner.send(greeting)
        assert await runner.refused()
        runner.close()
        assert hub.links == []

    serve(settings, scenario)


@pytest.mark.parametrize("minor", [wire.MINOR + 1, -1])
def test_a_runner_of_another_version_is_told_why_it_is_refused(
    settings: Settings, tmp_path: Path, minor: int
) -> None:
    async def scenario(hub: Hub) -> None:
        runner = await dial(hub, tmp_path)
        await runner.hello(minor=minor)
        told = json.loads((await runner.frame()).payload)
        why = f"it speaks protocol 1.{minor}; this hub understands 1.0 to 1.1"
        assert told == {"type": "refused", "reason": why}
        assert await runner.refused()
        runner.close()
        assert (hub.links, hub.refused) == ([], [(UID, why)])

    serve(settings, scenario)


def test_a_runner_of_the_version_before_is_let_in(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub) -> None:
        runner = await dial(hub, tmp_path)
        await runner.send(control(**{"type_": "hello", **RUNNER_HELLO, "pod_uid": UID}))
        for message in OF_RUNNERS:
            await runner.send(control(**{"type_": message["type"], **message}))
        # Answers are for who asked.
        expected = [message for message in OF_RUNNERS if message["type"] != "answer"]
        await until(lambda: len(hub.messages) == len(expected))
        assert hub.messages == expected
        assert hub.links[0].runner["report"] == REPORT
        runner.close()

    serve(settings, scenario)


def test_a_runner_that_talks_nonsense_is_cut_off_and_named(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        await runner.send(control("thoughts", deep=True))  # of a newer version
        await runner.send(control("report", seq=1, report={"phase": "Running"}))
        assert await runner.refused()
        assert hub.messages == []
        assert (
            f"the connection of {UID} was ended: ProtocolError: report.report has no containers"
            in caplog.text
        )

    linked(settings, tmp_path, scenario)


def test_a_caller_that_says_nothing_is_let_go(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmlet.hub.runner_links.HELLO_TIMEOUT_S", 0.05)

    async def scenario(hub: Hub) -> None:
        runner = await dial(hub, tmp_path)
        assert await runner.refused()
        runner.close()

    serve(settings, scenario)


# Frames


def test_control_messages_go_both_ways(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        await runner.send(control("report", seq=1, report=pod_report()))
        # Two in one piece, the second cut in two
        pieces = event("A") + event("B")
        await runner.send(pieces[:-5])
        await runner.send(pieces[-5:])
        await until(lambda: len(hub.messages) == 3)
        assert [message.get("reason") for message in hub.messages] == [None, "A", "B"]
        await link.tell({"type": "ack", "seq": 1})
        frame = await runner.frame()
        assert (frame.kind, json.loads(frame.payload)) == (wire.CONTROL, {"type": "ack", "seq": 1})

    linked(settings, tmp_path, scenario)


@pytest.mark.parametrize(
    "broken", [wire.pack(9, 0), wire.pack(wire.CONTROL, 0, b"{"), wire._HEADER.pack((1 << 20) + 1, wire.DATA, 1)],
    ids=["unknown kind", "broken json", "too long"],
)  # fmt: skip
def test_a_peer_that_breaks_the_framing_is_cut_off(settings: Settings, tmp_path: Path, broken: bytes) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        await runner.send(broken)
        await until(lambda: hub.ended)
        assert not link.alive
        with pytest.raises(LinkLost):
            await link.tell({"type": "stop", "grace_s": 0, "reason": ""})

    linked(settings, tmp_path, scenario)


def test_streams_have_numbers_of_their_own_and_do_not_mix(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        first = await link.open(opening("exec", command=["id"]))
        second = await link.open(opening("logs"))
        opened = [json.loads((await runner.frame()).payload) for _ in range(2)]
        assert [(one["stream"], one["what"]) for one in opened] == [(1, "exec"), (2, "logs")]
        await runner.send(wire.data(2, wire.STDOUT, b"two") + wire.data(1, wire.STDERR, b"one"))
        assert await first.receive() == (wire.STDERR, b"one")
        assert await second.receive() == (wire.STDOUT, b"two")
        await first.send(wire.STDIN, b"in")
        assert await runner.frame() == wire.Frame(wire.DATA, 1, bytes((wire.STDIN,)) + b"in")

    linked(settings, tmp_path, scenario)


def test_a_stream_the_runner_closes_ends_after_its_last_bytes(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        stream = await link.open(opening("logs"))
        await runner.send(
            wire.data(1, wire.STDOUT, b"last") + wire.pack(wire.CLOSE, 1) + wire.data(1, wire.STDOUT, b"late")
        )
        assert await stream.receive() == (wire.STDOUT, b"last")
        assert await stream.receive() is None
        assert link._streams == {}

    linked(settings, tmp_path, scenario)


def test_closing_a_stream_tells_the_runner_once_and_later_bytes_are_dropped(
    settings: Settings, tmp_path: Path
) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        stream = await link.open(opening("logs"))
        await runner.frame()
        await stream.close()
        await stream.close()
        await link.tell({"type": "ack", "seq": 1})
        assert await runner.frame() == wire.Frame(wire.CLOSE, 1, b"")
        assert (await runner.frame()).kind == wire.CONTROL
        await runner.send(wire.data(1, wire.STDOUT, b"late") + control("report", seq=2, report=pod_report()))
        await until(lambda: hub.messages)
        assert stream._incoming.empty()

    linked(settings, tmp_path, scenario)


def test_a_runner_that_goes_away_ends_its_streams(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        stream = await link.open(opening("logs"))
        runner.close()
        assert await stream.receive() is None
        await until(lambda: hub.ended == [link])
        with pytest.raises(LinkLost):
            await link.open(opening("exec"))

    linked(settings, tmp_path, scenario)


# Flow control


def test_what_goes_to_a_slow_runner_waits_for_its_credit(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        stream = await link.open(opening("exec"))
        await runner.frame()
        sending = asyncio.create_task(stream.send(wire.STDIN, b"x" * (3 * wire.INITIAL_WINDOW)))
        received = 0
        while received < wire.INITIAL_WINDOW:
            received += len((await runner.frame()).payload) - 1
        await asyncio.sleep(0.02)
        assert received == wire.INITIAL_WINDOW
        assert not sending.done()
        await runner.send(wire.window(1, 2 * wire.INITIAL_WINDOW))
        while received < 3 * wire.INITIAL_WINDOW:
            received += len((await runner.frame()).payload) - 1
        await sending

    linked(settings, tmp_path, scenario)


def test_what_is_no_bulk_data_needs_no_credit(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        stream = await link.open(opening("exec"))
        await runner.frame()
        await stream.send(wire.STDIN, b"x" * wire.INITIAL_WINDOW)
        await asyncio.wait_for(stream.send(wire.RESIZE, b'{"Width":1,"Height":2}'), 1)
        await asyncio.wait_for(stream.send(wire.END, bytes((wire.STDIN,))), 1)

    linked(settings, tmp_path, scenario)


def test_a_sender_that_waits_for_credit_learns_that_the_runner_is_gone(
    settings: Settings, tmp_path: Path
) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        stream = await link.open(opening("exec"))
        await runner.frame()
        sending = asyncio.create_task(stream.send(wire.STDIN, b"x" * (2 * wire.INITIAL_WINDOW)))
        received = 0
        while received < wire.INITIAL_WINDOW:
            received += len((await runner.frame()).payload) - 1
        runner.close()
        with pytest.raises(LinkLost):
            await sending

    linked(settings, tmp_path, scenario)


def test_a_slow_reader_of_a_stream_bounds_what_the_hub_keeps(settings: Settings, tmp_path: Path) -> None:
    """A runner that keeps to the window can have no more than one window under way; reading gives the credit back."""

    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        stream = await link.open(opening("logs"))
        await runner.frame()
        piece, credit = b"y" * (32 << 10), wire.INITIAL_WINDOW
        while credit > 0:
            await runner.send(wire.data(1, wire.STDOUT, piece))
            credit -= len(piece)
        # Nobody reads: no credit comes, whatever else goes over the link.
        await link.tell({"type": "ack", "seq": 1})
        assert (await runner.frame()).kind == wire.CONTROL
        kept = stream._incoming.qsize() * len(piece)
        assert kept <= wire.INITIAL_WINDOW
        taken = 0
        while taken < wire.INITIAL_WINDOW:
            item = await stream.receive()
            assert item is not None
            taken += len(item[1])
        given = 0
        while given < wire.INITIAL_WINDOW:
            frame = await runner.frame()
            assert frame.kind == wire.WINDOW
            given += int.from_bytes(frame.payload, "big")
        assert given == wire.INITIAL_WINDOW

    linked(settings, tmp_path, scenario)


def test_one_stuck_stream_does_not_hold_up_the_others(settings: Settings, tmp_path: Path) -> None:
    async def scenario(hub: Hub, runner: Runner, link: RunnerLink) -> None:
        await link.open(opening("logs"))
        second = await link.open(opening("logs"))
        for _ in range(wire.INITIAL_WINDOW >> 15):
            await runner.send(wire.data(1, wire.STDOUT, b"y" * (32 << 10)))
        await runner.send(wire.data(2, wire.STDOUT, b"through"))
        assert await second.receive() == (wire.STDOUT, b"through")

    linked(settings, tmp_path, scenario)
