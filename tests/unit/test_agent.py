"""The agent of an allocation node: what it does with each word of the hub, each end of a runner, each loss of the link."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.agent import agent, runner_forks
from slurmlet.protocol import checks
from slurmlet.runner.pod.claim import PodDir
from tests.unit.runner_pod import FakeHubLink, VirtualRunnerLoop


class Host:
    """The agent with the processes it would start: they run until they are ended here, or killed."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, run: bool) -> None:
        self.loop = VirtualRunnerLoop()
        self.signals: list[tuple[str, int]] = []
        self._pids: dict[int, str] = {}
        self._zombies: list[tuple[int, int]] = []
        patch.setattr(agent, "Loop", lambda: self.loop)
        patch.setattr(agent, "Link", FakeHubLink)
        patch.setattr(time, "monotonic", lambda: self.loop.now_s)
        patch.setattr(runner_forks, "start_runner", self._start)
        patch.setattr(runner_forks, "remove_scratch", lambda _uid: 0)
        patch.setattr(os, "kill", self._kill)
        patch.setattr(os, "waitpid", self._wait)
        node = directory / "nodes" / "n1"
        node.mkdir(parents=True)
        self.cluster = directory
        self.agent = agent.Agent(PodDir(str(node)), run)
        self.link: FakeHubLink = self.agent._link  # type: ignore[assignment]

    def _start(self, directory: str) -> int:
        pid = 1_000_000_000 + len(self._pids)
        self._pids[pid] = Path(directory).name
        return pid

    def _kill(self, pid: int, number: int) -> None:
        self.signals.append((self._pids[pid], number))
        if number == signal.SIGKILL:
            self.ends(self._pids[pid], number)

    def _wait(self, _pid: int, _options: int) -> tuple[int, int]:
        if self._zombies:
            return self._zombies.pop(0)
        if self.agent._running:
            return 0, 0
        raise ChildProcessError

    def ends(self, uid: str, status: int) -> None:
        """As waitpid would tell: an exit code shifted by 8, or a signal."""
        pid = next(pid for pid, name in self._pids.items() if name == uid)
        self._zombies.append((pid, status))
        self.loop.soon(self.loop.signals[signal.SIGCHLD])

    def come_up(self) -> Any:
        (self.cluster / "hub.json").write_text("{}")
        self.agent._dial_when_there()
        self.loop.advance()
        self.link.comes_up()
        return self.link.said("hello")[-1]


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


@pytest.fixture
def host(tmp_path: Path, patch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, patch, run=False)


@pytest.fixture
def run(tmp_path: Path, patch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, patch, run=True)


def start(host: Host, uid: str) -> None:
    host.link.hear({"type": "start-pod", "uid": uid})


def test_it_dials_when_the_hub_is_there(host: Host) -> None:
    host.agent._dial_when_there()
    host.loop.advance(5)
    assert host.link.started == 0
    (host.cluster / "hub.json").write_text("{}")
    host.loop.advance(5)
    assert host.link.started == 1


def test_its_hello_is_one_the_hub_takes(host: Host) -> None:
    hello = host.come_up()
    assert checks.agent_hello(hello)["pods"] == []


def test_a_pod_is_started_once_however_often_it_is_asked_for(host: Host) -> None:
    host.come_up()
    start(host, "u-1")
    start(host, "u-1")
    assert len(host._pids) == 1


def test_the_end_of_a_runner_is_told_and_never_started_again(host: Host) -> None:
    host.come_up()
    start(host, "u-1")
    host.ends("u-1", 3 << 8)
    host.loop.advance()
    assert host.link.said("pod-ended") == [{"type": "pod-ended", "uid": "u-1", "exit_code": 3}]
    start(host, "u-1")
    assert len(host._pids) == 1
    assert len(host.link.said("pod-ended")) == 2


def test_ends_are_not_remembered_without_bound(host: Host, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent, "_REMEMBERED", 2)
    host.come_up()
    for uid in ("u-1", "u-2", "u-3"):
        start(host, uid)
        host.ends(uid, 0)
        host.loop.advance()
    host.link.goes_down()
    assert list(host.come_up()["ended"]) == ["u-2", "u-3"]


def test_a_hub_that_comes_later_hears_of_all_that_runs_and_ended(host: Host) -> None:
    host.come_up()
    start(host, "u-1")
    start(host, "u-2")
    host.link.goes_down()
    host.ends("u-1", 9)
    host.loop.advance()
    hello = host.come_up()
    assert hello["pods"] == ["u-2"]
    assert hello["ended"] == {"u-1": 137}


def test_a_name_that_leads_elsewhere_is_not_started(host: Host) -> None:
    host.come_up()
    start(host, "../evil")
    assert host._pids == {}
    assert host.link.said("pod-ended")[0]["exit_code"] == 1


def test_a_pod_is_killed_on_request_and_only_that_one(host: Host) -> None:
    host.come_up()
    start(host, "u-1")
    start(host, "u-2")
    host.link.hear({"type": "kill-pod", "uid": "u-1"})
    host.link.hear({"type": "kill-pod", "uid": "nobody"})
    host.loop.advance()
    assert host.signals == [("u-1", signal.SIGKILL)]
    assert list(host.agent._running) == ["u-2"]


def test_an_end_gives_pods_their_grace_and_then_leaves(host: Host) -> None:
    host.come_up()
    start(host, "u-1")
    host.link.hear({"type": "end", "grace_s": 10})
    host.loop.advance(1)
    assert host.signals == [("u-1", signal.SIGTERM)]
    assert not host.loop.stopped
    start(host, "u-2")
    assert "u-2" not in host.agent._running, "nothing new begins in the end"
    host.loop.advance(10)
    assert host.signals[-1] == ("u-1", signal.SIGKILL)
    assert host.loop.stopped


def test_an_end_without_pods_is_at_once(host: Host) -> None:
    host.come_up()
    host.link.hear({"type": "end", "grace_s": 10})
    assert host.loop.stopped


def test_what_cannot_be_killed_is_left_to_slurm(host: Host, patch: pytest.MonkeyPatch) -> None:
    host.come_up()
    start(host, "u-1")
    patch.setattr(os, "kill", lambda _pid, _number: None)
    host.link.hear({"type": "end", "grace_s": 1})
    host.loop.advance(10)
    assert host.loop.stopped


def test_the_jobs_signal_ends_the_pods_of_a_pool(host: Host) -> None:
    host.come_up()
    start(host, "u-1")
    host.loop.signals[signal.SIGTERM]()
    host.loop.advance(1)
    assert host.signals == [("u-1", signal.SIGTERM)]


def test_a_lost_hub_does_not_end_a_pool(host: Host) -> None:
    host.come_up()
    start(host, "u-1")
    host.link.goes_down()
    host.loop.advance(3600)
    assert host.signals == []


def test_a_run_whose_directory_is_gone_is_over(run: Host) -> None:
    run.come_up()
    start(run, "u-1")
    run.link.goes_down()
    run.loop.advance(5)
    assert run.signals == []
    Path(run.agent._node.path).rmdir()
    run.loop.advance(5)
    assert ("u-1", signal.SIGTERM) in run.signals


def test_a_run_whose_hub_stays_away_is_over(run: Host) -> None:
    run.come_up()
    start(run, "u-1")
    run.link.goes_down()
    run.loop.advance(15)
    run.link.comes_up()
    run.loop.advance(60)
    assert run.signals == [], "it came back in time"
    run.link.goes_down()
    run.loop.advance(25)
    assert ("u-1", signal.SIGKILL) in run.signals


def test_the_jobs_signal_in_a_run_is_for_the_workload_first(run: Host) -> None:
    run.come_up()
    start(run, "u-1")
    run.loop.signals[signal.SIGINT]()
    run.loop.signals[signal.SIGTERM]()
    run.loop.advance(5)
    assert run.signals == []
    run.link.goes_down()
    run.loop.advance(3)
    assert ("u-1", signal.SIGTERM) in run.signals


def test_a_signalled_run_without_a_hub_ends_at_once(run: Host) -> None:
    run.agent._start("u-1")
    run.loop.signals[signal.SIGTERM]()
    run.loop.advance(2)
    assert run.signals[0] == ("u-1", signal.SIGTERM)


def test_a_hub_that_refuses_is_told_of_in_the_log(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.come_up()
    host.link.hear({"type": "refused", "reason": "too old"})
    assert "too old" in capsys.readouterr().err


def test_run_leaves_when_all_is_done(host: Host) -> None:
    (host.cluster / "hub.json").write_text("{}")
    host.loop.script = [host.link.comes_up, lambda: host.link.hear({"type": "end", "grace_s": 0})]
    assert host.agent.run() == 0
    assert host.link.closed


@pytest.mark.parametrize("arguments", [[], ["--run"], ["a", "b"]])
def test_a_wrong_command_line_is_an_error(arguments: list[str]) -> None:
    assert agent.main(arguments) == 2


def test_the_nodes_name_stands_in_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "c7")
    options = agent.Options(["--run", "/cluster/nodes/run-%N"])
    assert (options.run, options.directory) == (True, "/cluster/nodes/run-c7")


def test_facts_are_what_slurm_says_of_this_hosts_part() -> None:
    told = agent.facts(
        {
            "SLURM_CPUS_ON_NODE": "4", "SLURM_MEM_PER_CPU": "1000", "SLURM_JOB_ID": "17", "SLURM_JOB_PARTITION": "batch",
            "SLURMD_NODENAME": "c7", "SLURM_JOB_GPUS": "0,1",
        }
    )  # fmt: skip
    assert (told["cpus"], told["memory_mb"], told["gpus"], told["host"]) == (4, 4000, 2, "c7")
    assert told["host_memory_mb"] > 0
