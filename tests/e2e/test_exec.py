"""`kubectl exec` as people and scripts use it: streams byte for byte, exit codes, a terminal, clients that vanish."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import IMAGE, Kubectl, eventually, pod
from tests.e2e.terminals import Terminal

pytestmark = pytest.mark.e2e

LARGE_BYTES = 6 << 20


@pytest.fixture(scope="module")
def box(testbed: Any, cluster: str) -> Iterator[Kubectl]:
    """A namespace with one running pod `box` of two containers, for all tests here."""
    here = Kubectl(testbed, f"t-{uuid.uuid4().hex[:8]}")
    here("create", "namespace", here.namespace)
    eventually(lambda: here("get", "serviceaccount", "default", check=False).ok)
    second = {
        "name": "second",
        "image": IMAGE,
        "command": ["sleep", "3600"],
        "env": [{"name": "WHO", "value": "2"}],
    }
    main = {"workingDir": "/var/tmp", "env": [{"name": "WHO", "value": 'it\'s "me" $HOME'}]}
    here.apply(pod("box", container=main, more_containers=[second]))
    here("wait", "--for=condition=Ready", "pod/box", "--timeout=60s")
    yield here
    here("delete", "namespace", here.namespace, "--wait=false", check=False)


def processes(box: Kubectl) -> str:
    return box("exec", "box", "-c", "main", "--", "ps", "-o", "args").stdout


@pytest.fixture
def terminal(box: Kubectl) -> Iterator[Terminal]:
    opened = Terminal(box.testbed, *box.argv("exec", "-it", "box", "-c", "main", "--", "sh"))
    yield opened
    opened.close()


def test_streams_stay_apart_and_the_process_is_at_home(box: Kubectl) -> None:
    script = 'echo out; echo err >&2; pwd; echo "$WHO"; id -u; hostname'
    done = box("exec", "box", "-c", "main", "--", "sh", "-c", script)
    assert done.stdout.splitlines() == ["out", "/var/tmp", 'it\'s "me" $HOME', "0", "box"]
    assert done.stderr == "err\n"


def test_containers_are_told_apart(box: Kubectl) -> None:
    assert box("exec", "box", "-c", "second", "--", "sh", "-c", "echo $WHO; pwd").stdout == "2\n/\n"
    box("exec", "box", "-c", "second", "--", "touch", "/only-in-second")
    assert box("exec", "box", "-c", "main", "--", "ls", "/only-in-second", check=False).code == 1
    wrong = box("exec", "box", "-c", "third", "--", "true", check=False)
    assert wrong.code == 1
    assert "container third is not valid for pod box" in wrong.stderr


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["sh", "-c", "exit 0"], 0, ""),
        (["sh", "-c", "exit 7"], 7, "command terminated with exit code 7"),
        (["sh", "-c", "exit 255"], 255, "exit code 255"),
        (["sh", "-c", "kill -9 $$"], 137, "exit code 137"),
        (["sh", "-c", "kill -TERM $$"], 143, "exit code 143"),
        (["no-such-program"], 127, "no-such-program"),
        (["/no/such/program"], 127, "/no/such/program"),
        (["/etc/passwd"], 126, "/etc/passwd"),
    ],
)
def test_exit_codes(box: Kubectl, command: list[str], code: int, words: str) -> None:
    done = box("exec", "box", "-c", "main", "--", *command, check=False)
    assert (done.code, words in done.stderr) == (code, True), done.stderr
    assert done.stdout == ""


def test_bytes_arrive_untouched_both_ways(box: Kubectl) -> None:
    data = os.urandom(LARGE_BYTES)
    code, out, err = box.raw("exec", "-i", "box", "-c", "main", "--", "cat", stdin=data)
    assert (code, err) == (0, b"")
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()
    code, out, _ = box.raw("exec", "-i", "box", "-c", "main", "--", "sha256sum", stdin=data)
    assert (code, out.split()[0].decode()) == (0, hashlib.sha256(data).hexdigest())
    noise = f"head -c {LARGE_BYTES} /dev/urandom >/tmp/noise; sha256sum </tmp/noise >&2; cat /tmp/noise"
    code, out, err = box.raw("exec", "box", "-c", "main", "--", "sh", "-c", noise)
    assert (code, len(out)) == (0, LARGE_BYTES)
    assert err.split()[0].decode() == hashlib.sha256(out).hexdigest()


def test_end_of_input_is_passed_on_and_unread_input_does_no_harm(box: Kubectl) -> None:
    asked = ("exec", "-i", "box", "-c", "main", "--", "sh", "-c")
    assert box.raw(*asked, "cat; echo end", stdin=b"") == (0, b"end\n", b"")
    assert box.raw(*asked, "read line; echo got $line; cat", stdin=b"a\nb") == (0, b"got a\nb", b"")
    code, out, _ = box.raw(*asked, "echo bored; exit 3", stdin=os.urandom(LARGE_BYTES), timeout_s=30)
    assert (code, out) == (3, b"bored\n")
    # Without -i the process must see an empty input at once, not wait.
    assert box("exec", "box", "-c", "main", "--", "cat", timeout_s=15).stdout == ""


def test_output_of_a_child_left_behind_does_not_hold_the_client(box: Kubectl) -> None:
    done = box("exec", "box", "-c", "main", "--", "sh", "-c", "sleep 600 & echo left", timeout_s=15)
    assert done.stdout == "left\n"


def test_copying_a_tree_there_and_back(box: Kubectl) -> None:
    home = box.testbed.run(["mktemp", "-d"]).stdout.strip()
    box.testbed.run(
        ["sh", "-c", 'mkdir -p "$1/in/sub" && head -c 300000 /dev/urandom > "$1/in/sub/data"', "sh", home]
    )
    box("cp", "-c", "main", f"{home}/in", "box:/tmp/copied")
    box("cp", "-c", "main", "box:/tmp/copied", f"{home}/out")
    assert box.testbed.run(["diff", "-r", f"{home}/in", f"{home}/out"]).stdout == ""
    box.testbed.run(["rm", "-rf", home])


def test_a_terminal_with_a_shell_in_it(box: Kubectl, terminal: Terminal) -> None:
    terminal.until("# ")
    terminal.type("tty; stty size; echo TERM=$TERM\n")
    said = terminal.until("TERM=xterm\r\n")
    assert "/dev/pts/" in said
    assert "24 80" in said

    terminal.resize(40, 132)
    terminal.until("# ")

    def size() -> bool:
        terminal.type("stty size; echo -done\n")
        return "40 132" in terminal.until("\n-done\r\n")

    eventually(size, 10)

    terminal.type("sleep 4711\n")
    eventually(lambda: "sleep 4711" in processes(box))
    terminal.type("\x03echo slept $?\n")
    terminal.until("slept 130\r\n")
    assert "sleep 4711" not in processes(box)

    terminal.type("exit 9\n")
    assert terminal.process.wait(15) == 9


def test_a_terminal_ends_with_its_input(box: Kubectl, terminal: Terminal) -> None:
    terminal.until("# ")
    terminal.type("\x04")
    assert terminal.process.wait(15) == 0


def test_a_client_that_vanishes_leaves_nothing_behind(box: Kubectl) -> None:
    reader = box.start("exec", "-i", "box", "-c", "main", "--", "sh", "-c", "echo up; cat; true 1234")
    shell = Terminal(
        box.testbed, *box.argv("exec", "-it", "box", "-c", "main", "--", "sh", "-c", "echo up; sleep 5678")
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"up\n"
        shell.until("up")
        eventually(lambda: "true 1234" in processes(box) and "sleep 5678" in processes(box))
    finally:
        box.testbed.stop(reader, grace_s=0)
        shell.close()
    eventually(lambda: "true 1234" not in (seen := processes(box)) and "sleep 5678" not in seen, 15)


def test_a_client_that_vanishes_in_the_middle_of_output_blocks_nobody(box: Kubectl) -> None:
    readers = [box.start("exec", "box", "-c", "main", "--", "yes", f"line {number}") for number in range(4)]
    for number, reader in enumerate(readers):
        assert reader.stdout is not None
        assert reader.stdout.read(8) == f"line {number}\nl".encode()[:8]
    assert processes(box).count("yes line") == 4
    for reader in readers:
        box.testbed.stop(reader, grace_s=0)
    # Each writes into a pipe that nobody reads any more, and is told so.
    eventually(lambda: "yes line" not in processes(box), 15)


def test_twenty_at_once(box: Kubectl) -> None:
    def one(number: int) -> tuple[int, bytes, bytes]:
        text = f"{number}\n".encode() * 20_000
        script = f"cat; echo e{number} >&2; exit {number}"
        code, out, err = box.raw("exec", "-i", "box", "-c", "main", "--", "sh", "-c", script, stdin=text)
        return code, out.replace(text, b"same"), err.splitlines()[0]

    with ThreadPoolExecutor(20) as pool:
        done = list(pool.map(one, range(20)))
    assert done == [(number, b"same", f"e{number}".encode()) for number in range(20)]


def test_a_pod_that_does_not_run_refuses(kubectl: Kubectl) -> None:
    kubectl.apply(
        pod("over", "true"),
        pod("held", metadata={"annotations": {"slurmlet.io/sbatch": "--hold"}}),
    )
    kubectl.wait_phase("over", "Succeeded")
    kubectl.job_id("held")
    for name, words in (("over", "completed pod"), ("held", "container not found")):
        refused = kubectl("exec", name, "--", "true", check=False, timeout_s=20)
        assert refused.code == 1
        assert words in refused.stderr, refused.stderr
