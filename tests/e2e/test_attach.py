"""`kubectl attach` and `kubectl run -it`, and exec and cp of clients that speak SPDY."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import IMAGE, eventually, pod
from tests.e2e.streaming import SPDY, WEBSOCKET, Speaking, fresh_namespace
from tests.e2e.terminals import Terminal

pytestmark = pytest.mark.e2e

LARGE_BYTES = 6 << 20
STALLED_S = 10


@pytest.fixture(scope="module")
def namespace(testbed: Any, cluster: str) -> Iterator[str]:
    """A namespace with running pods: `ticker` writes, `reader` answers each line, `shell` has a terminal."""
    with fresh_namespace(testbed) as name:
        kubectl = Speaking(testbed, name, WEBSOCKET)
        answering = f"""
            while read line; do
              case "$line" in
                large) head -c {LARGE_BYTES} /dev/urandom | tee /large ;;
                *) echo "got $line"; echo "err $line" >&2 ;;
              esac
            done
            echo no more >/over"""
        kubectl.apply(
            pod("ticker", "n=0; while sleep 0.2; do n=$((n+1)); echo tick $n; done"),
            pod("reader", answering, container={"stdin": True}),
            pod("shell", ["sh"], container={"stdin": True, "tty": True}),
        )
        kubectl("wait", "--for=condition=Ready", "pod", "--all", "--timeout=60s")
        yield name


@pytest.fixture(scope="module", params=[WEBSOCKET, SPDY])
def speaker(request: pytest.FixtureRequest, testbed: Any, namespace: str) -> Speaking:
    return Speaking(testbed, namespace, request.param)


def restarts(kubectl: Speaking, name: str) -> int:
    return int(kubectl.pod(name)["status"]["containerStatuses"][0]["restartCount"])


def run_argv(name: str, *options: str, command: str) -> list[str]:
    return ["run", name, f"--image={IMAGE}", "--restart=Never", "-q", *options, "--", "sh", "-c", command]


# Attach.


def test_output_from_now_on_for_everybody_who_attaches(speaker: Speaking) -> None:
    time.sleep(1)
    watchers = [speaker.start("attach", "ticker") for _ in range(2)]
    try:
        seen = [[watcher.stdout.readline() for _ in range(8)] for watcher in watchers if watcher.stdout]
    finally:
        for watcher in watchers:
            speaker.testbed.stop(watcher, grace_s=0)
    assert all(line.startswith(b"tick ") for lines in seen for line in lines)
    assert b"tick 1\n" not in seen[0]
    assert len(set(seen[0]) & set(seen[1])) >= 3
    # Nobody watches now, and it goes on.
    last = int(seen[1][-1].split()[1])
    eventually(lambda: f"tick {last + 5}\n" in speaker("logs", "ticker").stdout, 10)
    assert restarts(speaker, "ticker") == 0


def test_input_for_the_process_and_an_input_that_stays_open(speaker: Speaking) -> None:
    for word in (b"one", b"two"):
        code, out, err = speaker.raw("attach", "-q", "-i", "reader", stdin=word + b"\n", timeout_s=20)
        assert (code, out, err) == (0, b"got " + word + b"\n", b"err " + word + b"\n")
    assert speaker("exec", "reader", "--", "ls", "/over", check=False).code == 1


def test_large_output_byte_for_byte(speaker: Speaking) -> None:
    watcher = speaker.start("attach", "-q", "-i", "reader")
    try:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        watcher.stdin.write(b"large\n")
        watcher.stdin.flush()
        got = watcher.stdout.read(LARGE_BYTES)
    finally:
        speaker.testbed.stop(watcher, grace_s=0)
    wrote = speaker("exec", "reader", "--", "sha256sum", "/large").stdout.split()[0]
    assert hashlib.sha256(got).hexdigest() == wrote


def test_a_terminal_on_the_containers_own_shell(speaker: Speaking) -> None:
    first, second = (
        Terminal(speaker.testbed, *speaker.argv("attach", "-q", "-it", "shell")) for _ in range(2)
    )
    try:
        eventually(lambda: _answers(first, "stty size", "24 80"), 10)
        # Attached too: what is written before that it does not see.
        eventually(lambda: _answers(second, "echo second $((1+1))", "second 2"), 10)
        first.type("echo for all of $((40+2))\n")
        second.until("for all of 42\r\n")
        first.resize(40, 132)
        eventually(lambda: _answers(first, "stty size", "40 132"), 10)
        first.type("sleep 300\n")
        time.sleep(0.5)
        second.type("\x03echo slept $?\n")
        first.until("slept 130\r\n")
    finally:
        first.close()
        second.close()
    again = Terminal(speaker.testbed, *speaker.argv("attach", "-q", "-it", "shell"))
    try:
        eventually(lambda: _answers(again, "echo still $((1+1)) here", "still 2 here"), 10)
        # The keys that leave without ending anything.
        again.type("\x10\x11")
        assert again.process.wait(15) == 0
    finally:
        again.close()
    assert restarts(speaker, "shell") == 0


def _answers(terminal: Terminal, command: str, answer: str) -> bool:
    terminal.type(f"{command}; echo end-of-$((1+0))\n")
    return answer in terminal.until("end-of-1\r\n")


def test_what_cannot_be_attached_to(speaker: Speaking) -> None:
    speaker.apply(pod(f"over-{speaker.protocol}", "true"))
    speaker.wait_phase(f"over-{speaker.protocol}", "Succeeded")
    refused = speaker("attach", f"over-{speaker.protocol}", check=False, timeout_s=20)
    assert (refused.code, "completed pod" in refused.stderr) == (1, True)


def test_a_watcher_that_does_not_look_is_cut_off(testbed: Any, namespace: str) -> None:
    """In one protocol only: it takes its time, and the runner, which does it, knows neither."""
    kubectl = Speaking(testbed, namespace, WEBSOCKET)
    talking = "read go; head -c 30000000 /dev/zero | tr '\\\\0' x; touch /done; sleep 600"
    kubectl.apply(pod("talker", talking, container={"stdin": True}))
    kubectl("wait", "--for=condition=Ready", "pod/talker", "--timeout=60s")
    watcher = kubectl.start("attach", "-i", "talker")
    try:
        assert watcher.stdin is not None
        watcher.stdin.write(b"go\n")
        watcher.stdin.flush()
        began_s = time.monotonic()
        done = ("exec", "talker", "--", "ls", "/done")
        eventually(lambda: kubectl(*done, check=False).code == 0, STALLED_S + 20, every_s=1)
        # For a while it had to wait, as for any slow terminal: nothing is thrown away early.
        assert time.monotonic() - began_s > STALLED_S / 2
    finally:
        kubectl.testbed.stop(watcher, grace_s=0)


# Run.


def test_run_with_input_that_ends(speaker: Speaking) -> None:
    """`kubectl run -i` asks for stdinOnce: the end of the client's input is the end of the container's."""
    argv = run_argv(f"once-{speaker.protocol}", "-i", "--rm", command='cat; echo "over $?"; exit 5')
    code, out, _ = speaker.raw(*argv, stdin=b"some\nlines\n", timeout_s=40)
    assert (code, out) == (5, b"some\nlines\nover 0\n")
    assert speaker("get", "pod", f"once-{speaker.protocol}", check=False).code == 1


def test_run_whose_client_vanishes(speaker: Speaking) -> None:
    name = f"vanished-{speaker.protocol}"
    client = speaker.start(*run_argv(name, "-i", command="echo up; cat; echo input is over; sleep 600"))
    try:
        assert client.stdout is not None
        # What was written before the client came is not its to see.
        eventually(lambda: "up" in speaker("logs", name, check=False).stdout)
        time.sleep(1)
    finally:
        speaker.testbed.stop(client, grace_s=0)
    eventually(lambda: "input is over" in speaker("logs", name).stdout, 10)


def test_run_with_a_terminal(speaker: Speaking) -> None:
    name = f"interactive-{speaker.protocol}"
    argv = ["run", name, f"--image={IMAGE}", "--restart=Never", "-q", "-it", "--rm", "--", "sh"]
    terminal = Terminal(speaker.testbed, *speaker.argv(*argv))
    try:
        terminal.type("\n")
        terminal.until("# ", 40)
        assert _answers(terminal, "tty", "/dev/pts/") or _answers(terminal, "tty", "/dev/console")
        terminal.type("exit 3\n")
        assert terminal.process.wait(30) == 3
    finally:
        terminal.close()


# Exec and cp of old clients. What WebSockets do is in test_exec.py.


@pytest.fixture
def old(testbed: Any, namespace: str) -> Speaking:
    return Speaking(testbed, namespace, SPDY)


def test_exec_over_spdy(old: Speaking) -> None:
    done = old("exec", "ticker", "--", "sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    assert (done.code, done.stdout) == (7, "out\n")
    assert done.stderr.splitlines()[0] == "err"
    data = os.urandom(LARGE_BYTES)
    assert old.raw("exec", "-i", "ticker", "--", "cat", stdin=data) == (0, data, b"")
    bored = ("exec", "-i", "ticker", "--", "sh", "-c", "echo bored; exit 3")
    code, out, _ = old.raw(*bored, stdin=data, timeout_s=30)
    assert (code, out) == (3, b"bored\n")
    missing = old("exec", "ticker", "--", "no-such-program", check=False)
    assert (missing.code, "no-such-program" in missing.stderr) == (127, True)


def test_a_terminal_over_spdy(old: Speaking) -> None:
    terminal = Terminal(old.testbed, *old.argv("exec", "-it", "ticker", "--", "sh"))
    try:
        terminal.until("# ")
        assert _answers(terminal, "stty size", "24 80")
        terminal.resize(40, 132)
        eventually(lambda: _answers(terminal, "stty size", "40 132"), 10)
        terminal.type("exit 9\n")
        assert terminal.process.wait(15) == 9
    finally:
        terminal.close()


def test_a_client_of_spdy_that_vanishes_leaves_nothing_behind(old: Speaking) -> None:
    def processes() -> str:
        return old("exec", "ticker", "--", "ps", "-o", "args").stdout

    client = old.start("exec", "-i", "ticker", "--", "sh", "-c", "cat; true 4321")
    try:
        eventually(lambda: "true 4321" in processes())
    finally:
        old.testbed.stop(client, grace_s=0)
    eventually(lambda: "true 4321" not in processes(), 15)


def test_copying_a_tree_there_and_back(speaker: Speaking) -> None:
    run = speaker.testbed.run
    home = run(["mktemp", "-d"]).stdout.strip()
    make = (
        'mkdir -p "$1/in/sub/empty" && head -c 3000000 /dev/urandom >"$1/in/sub/data" && echo x >"$1/in/a b"'
    )
    run(["sh", "-c", make, "sh", home])
    there = f"/tmp/copied-{speaker.protocol}"
    speaker("cp", f"{home}/in", f"ticker:{there}")
    speaker("cp", f"ticker:{there}", f"{home}/out")
    assert run(["diff", "-r", f"{home}/in", f"{home}/out"]).stdout == ""
    sums = speaker("exec", "ticker", "--", "sha256sum", f"{there}/sub/data").stdout.split()[0]
    assert sums == run(["sha256sum", f"{home}/in/sub/data"]).stdout.split()[0]
    run(["rm", "-rf", home])
