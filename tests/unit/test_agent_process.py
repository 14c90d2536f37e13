"""The agent as Slurm starts it: a process with real forks, a real connection, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurmlet.agent import runner_forks
from slurmlet.protocol import checks
from tests.unit.hub_port import HubPort, hub_port

WAIT_S = 60.0


class Node:
    """A host of an allocation with its scratch, and the cluster's directory that it shares."""

    def __init__(self, directory: Path) -> None:
        self.cluster, self.scratch = directory / "cluster", directory / "scratch"
        self.directory = self.cluster / "nodes" / "n1"
        self.directory.mkdir(parents=True)
        self.scratch.mkdir()
        self.left_behind = self.scratch / f"slurmlet-{os.geteuid()}" / "pods"
        self.left_behind.mkdir(parents=True, mode=0o700)
        self.left_behind.parent.chmod(0o700)
        self.log = directory / "agent.log"

    def pod(self, uid: str, **files: str) -> Path:
        made = self.cluster / "pods" / uid
        made.mkdir(parents=True)
        for name, text in files.items():
            (made / name.replace("_", ".")).write_text(text)
        return made

    def leave(self, uid: str) -> Path:
        """What a runner that was killed leaves on the node."""
        made = self.left_behind / uid / "containers"
        made.mkdir(parents=True)
        (made / "file").write_text("rest")
        return made.parent

    @contextmanager
    def agent(self, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "slurmlet.entrypoint", "agent", *flags, str(self.directory)]
        environ = {**os.environ, "TMPDIR": str(self.scratch), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "c7"}
        environ.pop("SLURM_TMPDIR", None)
        with (
            self.log.open("ab") as log,
            subprocess.Popen(argv, env=environ, stdout=log, stderr=log) as process,
        ):
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def hub(node: Node) -> Iterator[HubPort]:
    with hub_port(node.cluster) as made:
        made.credential(node.directory)
        yield made


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_runners_are_forks_whose_end_is_told_and_whose_rest_is_removed(node: Node, hub: HubPort) -> None:
    mine, broken = node.pod("u-1", claim="6\n"), "u-without-a-directory"
    left = node.leave("u-1")
    with node.agent() as process:
        call = hub.take()
        hello = checks.agent_hello(call.hear("hello"))
        assert (hello["node"], hello["job_id"], hello["host"]) == ("n1", "7", "c7")
        call.say(type="start-pod", uid="u-1")
        assert call.hear("pod-ended") == {"type": "pod-ended", "uid": "u-1", "exit_code": 0}
        call.say(type="start-pod", uid=broken)
        assert call.hear("pod-ended")["exit_code"] == 1
        call.say(type="end", grace_s=5)
        assert process.wait(WAIT_S) == 0
    # The pod is another job's; the runner has said so where a pod's runner writes.
    assert "belongs to Slurm job 6" in (mine / "job.log").read_text()
    assert not left.exists()
    assert "FileNotFoundError" in node.log.read_text()


def test_an_agent_that_was_killed_is_started_again_and_its_runners_rest_removed(
    node: Node, hub: HubPort
) -> None:
    node.pod("u-mine", job_json=json.dumps({"node": "n1"}))
    node.pod("u-of-another", job_json=json.dumps({"node": "n2"}))
    node.pod("u-of-a-job", job_json="{}")
    node.pod("u-unreadable", job_json="[")
    left = {
        name: node.leave(name)
        for name in ("u-mine", "u-of-another", "u-of-a-job", "u-unreadable", "u-unknown")
    }
    with node.agent() as process:
        hub.take().hear("hello")
        (agent,) = children(process.pid)
        os.kill(agent, signal.SIGKILL)
        hello = hub.take().hear("hello")
        assert hello["pods"] == []
        assert {name for name, path in left.items() if not path.exists()} == {"u-mine"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert "the agent was ended by signal 9; starting it again" in node.log.read_text()


def test_an_agent_whose_node_is_gone_is_not_started_again(node: Node, hub: HubPort) -> None:
    with node.agent() as process:
        hub.take().hear("hello")
        for path in node.directory.iterdir():
            path.unlink()
        node.directory.rmdir()
        (agent,) = children(process.pid)
        os.kill(agent, signal.SIGKILL)
        assert process.wait(WAIT_S) == 0
    assert "starting it again" not in node.log.read_text()


def test_a_run_that_is_over_ends_its_agent(node: Node, hub: HubPort) -> None:
    with node.agent("--run") as process:
        call = hub.take()
        call.hear("hello")
        for path in node.directory.iterdir():
            path.unlink()
        node.directory.rmdir()
        call.close()
        assert process.wait(WAIT_S) == 0
    assert "the run is over; ending" in node.log.read_text()


def test_exit_codes_are_a_shells() -> None:
    assert [runner_forks.exit_code(status) for status in (0, 3 << 8, 9)] == [0, 3, 137]


def test_what_breaks_in_a_fork_is_told_there_and_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks() -> int:
        raise KeyboardInterrupt

    assert runner_forks.guarded(breaks) == 1
    assert runner_forks.guarded(lambda: 4) == 4
    assert "KeyboardInterrupt" in capsys.readouterr().err
