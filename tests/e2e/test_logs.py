"""`kubectl logs` with every flag people use, of pods that wait, run, crash and are long over."""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.e2e.conftest import IMAGE, Kubectl, eventually, jobs_of, pod

pytestmark = pytest.mark.e2e

STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{9})Z (.*)")
# Lines more than a second apart: kubectl sends --since-time in whole seconds.
TALK = "for i in 1 2 3; do echo line $i; sleep 1.1; done; sleep 3600"
LONG_BYTES = 70_000


@pytest.fixture(scope="module")
def space(testbed: Any, cluster: str) -> Iterator[Kubectl]:
    """A namespace whose pods are begun together, so that their waits overlap."""
    here = Kubectl(testbed, f"t-{uuid.uuid4().hex[:8]}")
    here("create", "namespace", here.namespace)
    eventually(lambda: here("get", "serviceaccount", "default", check=False).ok)
    second = {"name": "second", "image": IMAGE, "command": ["sh", "-c", "echo from second; sleep 3600"]}
    crash = (
        "if [ -e /keep/seen ]; then echo second run; sleep 3600; fi; touch /keep/seen; echo first run; exit 4"
    )
    keep = {"volumeMounts": [{"name": "keep", "mountPath": "/keep"}]}
    odd = (
        f"head -c {LONG_BYTES} /dev/zero | tr '\\0' x; echo; "
        "printf 'bytes \\000\\001\\033\\377\\376\\n'; echo to stderr >&2; sleep 0.2; printf 'no newline'"
    )
    here.apply(
        pod("talk", TALK, more_containers=[second]),
        pod(
            "crash",
            crash,
            container=keep,
            volumes=[{"name": "keep", "emptyDir": {}}],
            restartPolicy="OnFailure",
        ),
        pod("odd", odd),
        pod("many", "seq 1 200000; exit 5"),
        pod("held", metadata={"annotations": {"slurmlet.io/sbatch": "--hold"}}),
        pod("unpullable", container={"image": "localhost:5000/no-such-image:1"}),
    )
    yield here
    here("delete", "namespace", here.namespace, "--wait=false", check=False)


@pytest.fixture(scope="module")
def talk(space: Kubectl) -> list[tuple[float, str, str]]:
    """(when, timestamp, line) of a pod that said three lines and goes on."""
    space("wait", "--for=condition=Ready", "pod/talk", "--timeout=60s")
    eventually(lambda: len(space("logs", "talk", "-c", "main").stdout.splitlines()) == 3)
    said = []
    for line in space("logs", "talk", "-c", "main", "--timestamps").stdout.splitlines():
        found = STAMP.fullmatch(line)
        assert found, line
        second = datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()
        said.append((second + int(found[2]) / 1e9, found[1], found[3]))
    return said


def test_all_lines_with_their_times(space: Kubectl, talk: list[tuple[float, str, str]]) -> None:
    assert [line for _, _, line in talk] == ["line 1", "line 2", "line 3"]
    assert space("logs", "talk", "-c", "main").stdout == "line 1\nline 2\nline 3\n"
    times = [when for when, _, _ in talk]
    assert 1.0 < times[1] - times[0] < 3
    started = space.pod("talk")["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    assert abs(datetime.fromisoformat(started).timestamp() - times[0]) < 2


@pytest.mark.parametrize(
    ("lines", "expected"), [(0, []), (1, ["line 3"]), (2, ["line 2", "line 3"]), (9, None)]
)
def test_tail(
    space: Kubectl, talk: list[tuple[float, str, str]], lines: int, expected: list[str] | None
) -> None:
    said = space("logs", "talk", "-c", "main", f"--tail={lines}").stdout.splitlines()
    assert said == (["line 1", "line 2", "line 3"] if expected is None else expected)


def test_since_and_limits(space: Kubectl, talk: list[tuple[float, str, str]]) -> None:
    def logs(*flags: str) -> str:
        return space("logs", "talk", "-c", "main", *flags).stdout

    assert logs(f"--since-time={talk[1][1]}Z") == "line 2\nline 3\n"
    assert logs("--since-time=2001-02-03T04:05:06Z", "--tail=2") == "line 2\nline 3\n"
    assert logs("--since=1h") == "line 1\nline 2\nline 3\n"
    assert logs("--limit-bytes=9") == "line 1\nli"
    eventually(lambda: time.time() - talk[2][0] > 2)
    assert logs("--since=1s") == ""


def test_containers(space: Kubectl, talk: list[tuple[float, str, str]]) -> None:
    assert space("logs", "talk", "-c", "second").stdout == "from second\n"
    both = space("logs", "talk", "--all-containers", "--prefix", "--tail=1").stdout.splitlines()
    assert sorted(both) == ["[pod/talk/main] line 3", "[pod/talk/second] from second"]
    wrong = space("logs", "talk", "-c", "third", check=False)
    assert (wrong.code, "container third is not valid for pod talk" in wrong.stderr) == (1, True)


def test_follow_is_live_and_ends_with_the_container(kubectl: Kubectl) -> None:
    kubectl.apply(
        pod("ticks", "for i in 1 2 3 4 5 6; do echo tick $i; sleep 0.5; done; echo last words >&2; exit 2")
    )
    kubectl.wait_phase("ticks", "Running")
    follower = kubectl.start("logs", "-f", "ticks")
    try:
        assert follower.stdout is not None
        heard = [(line, time.monotonic()) for line in follower.stdout]
        assert follower.wait(15) == 0
    finally:
        kubectl.testbed.stop(follower)
    assert [line for line, _ in heard] == [*(f"tick {i}\n".encode() for i in range(1, 7)), b"last words\n"]
    live = [when for line, when in heard if line.startswith(b"tick")]
    assert live[-1] - live[-2] > 0.3
    kubectl.wait_phase("ticks", "Failed")
    # Of a pod that is over, following is reading.
    assert kubectl("logs", "-f", "ticks", "--tail=1", timeout_s=15).stdout == "last words\n"


def test_a_follower_that_goes_away_harms_nobody(space: Kubectl, talk: list[tuple[float, str, str]]) -> None:
    followers = [space.start("logs", "-f", "talk", "-c", "main") for _ in range(3)]
    for each in followers:
        assert each.stdout is not None
        assert each.stdout.readline() == b"line 1\n"
        space.testbed.stop(each, grace_s=0)
    assert space("logs", "talk", "-c", "main", "--tail=1").stdout == "line 3\n"
    assert space.phase("talk") == "Running"


def test_previous_run_of_a_container_that_crashed(space: Kubectl, talk: list[tuple[float, str, str]]) -> None:
    def restarted() -> Any:
        found = space.pod("crash")["status"]["containerStatuses"][0]
        return found["restartCount"] == 1 and "running" in found["state"] and found

    found = eventually(restarted, 30)
    assert found["lastState"]["terminated"]["exitCode"] == 4
    assert eventually(lambda: space("logs", "crash").stdout) == "second run\n"
    assert space("logs", "crash", "--previous").stdout == "first run\n"
    never = space("logs", "talk", "-c", "main", "--previous", check=False)
    assert never.code == 1
    assert 'previous terminated container "main" in pod "talk" not found' in never.stderr


def test_odd_bytes_and_long_lines_of_a_pod_that_is_over(space: Kubectl) -> None:
    space.wait_phase("odd", "Succeeded")
    job_id = space.job_id("odd")
    eventually(lambda: not any(line.split()[0] == job_id for line in jobs_of(space.testbed)))
    code, out, _ = space.raw("logs", "odd")
    lines = out.split(b"\n")
    # The two streams are two pipes: their order among each other is not promised.
    assert lines.pop(lines.index(b"to stderr")) == b"to stderr"
    assert (code, lines) == (0, [b"x" * LONG_BYTES, b"bytes \x00\x01\x1b\xff\xfe", b"no newline"])
    stamped = space("logs", "odd", "--timestamps").stdout.splitlines()
    assert len(stamped) == 4
    assert all(STAMP.match(line) for line in stamped)
    assert space("logs", "odd", "--tail=1").stdout == "no newline"
    assert space("logs", "odd", f"--limit-bytes={LONG_BYTES - 5000}").stdout == "x" * (LONG_BYTES - 5000)


def test_a_lot_of_output_is_complete(space: Kubectl) -> None:
    space.wait_phase("many", "Failed")
    expected = "".join(f"{number}\n" for number in range(1, 200_001)).encode()
    for flags in ((), ("-f",)):
        code, out, _ = space.raw("logs", "many", *flags)
        assert (code, len(out)) == (0, len(expected))
        assert hashlib.sha256(out).digest() == hashlib.sha256(expected).digest()
    assert space("logs", "many", "--tail=2").stdout == "199999\n200000\n"


def test_a_container_that_waits_says_for_what(space: Kubectl) -> None:
    space.job_id("held")
    for name, words in (
        ("held", "is waiting to start: Queued"),
        ("unpullable", "is waiting to start: trying and failing to pull image"),
    ):
        wanted = f'container "main" in pod "{name}" {words}'

        def told(name: str = name, wanted: str = wanted) -> bool:
            refused = space("logs", name, check=False, timeout_s=20)
            return refused.code == 1 and wanted in refused.stderr

        eventually(told, 20)
    missing = space("logs", "nobody", check=False)
    assert (missing.code, 'pods "nobody" not found' in missing.stderr) == (1, True)
