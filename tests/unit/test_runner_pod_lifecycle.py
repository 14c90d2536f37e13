"""The pod as its runner runs it: order of starts, restarts, back-off, the end. In virtual time, without containers."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.unit.runner_pod import RunnerPod, container_plan, making_pod, pod_plan

Made = Callable[..., AbstractContextManager[RunnerPod]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(*containers: dict[str, Any], **more: Any) -> AbstractContextManager[RunnerPod]:
        return making_pod(tmp_path, pod_plan(*containers, **more))

    return make


def test_a_pod_that_succeeds(made: Made) -> None:
    with made(container_plan("a")) as pod:
        assert pod.report["phase"] == "Running"
        assert pod.of("a")["state"] == "running"
        assert pod.of("a")["ready"]
        pod.runtime["a"].write(b"hello\n")
        pod.advance(5)
        pod.runtime["a"].exit(0)
        pod.advance()
        assert pod.done == [0]
        assert (pod.report["phase"], pod.report["exit_code"]) == ("Done", 0)
        assert pod.of("a")["reason"] == "Completed"
        assert json.loads(pod.report_file.read_text())["phase"] == "Done"
        assert (Path(pod.context.logs) / "a" / "0.log").read_text().endswith(" stdout F hello\n")
        assert [reason for _, reason in pod.events] == ["Created", "Started"]


def test_the_first_failure_is_the_pods_exit_code(made: Made) -> None:
    with made(container_plan("a"), container_plan("b")) as pod:
        pod.runtime["b"].exit(7)
        pod.advance()
        assert pod.done == []
        pod.runtime["a"].exit(3)
        pod.advance()
        assert pod.done == [3]


def test_init_containers_run_one_after_another_and_then_all_others(made: Made) -> None:
    init = (container_plan("i1"), container_plan("i2"))
    with made(container_plan("a"), container_plan("b"), init=init) as pod:
        assert pod.of("a")["reason"] == "PodInitializing"
        assert pod.runtime.names == ["i1"]
        pod.runtime["i1"].exit(0)
        pod.advance()
        assert pod.runtime.names == ["i2"]
        assert pod.report["phase"] == "Starting"
        pod.runtime["i2"].exit(0)
        pod.advance()
        assert pod.runtime.names == ["a", "b"]
        assert pod.report["phase"] == "Running"


def test_an_init_container_that_fails_fails_a_pod_that_is_never_restarted(made: Made) -> None:
    with made(container_plan("a"), init=(container_plan("i"),)) as pod:
        pod.runtime["i"].exit(9)
        pod.advance()
        assert pod.done == [9]
        assert pod.runtime.began == ["i"]


def test_an_init_container_that_fails_is_tried_again_where_the_policy_says_so(made: Made) -> None:
    with made(container_plan("a"), init=(container_plan("i"),), restart_policy="Always") as pod:
        pod.runtime["i"].exit(9)
        pod.advance(1)
        assert pod.runtime.began == ["i", "i"], "the first restart does not wait"
        pod.runtime["i"].exit(0)
        pod.advance()
        assert pod.runtime.names == ["a"]


def test_a_sidecar_runs_along_and_is_stopped_last(made: Made) -> None:
    with made(container_plan("a"), init=(container_plan("s", sidecar=True), container_plan("i"))) as pod:
        assert pod.runtime.names == ["s", "i"]
        pod.runtime["i"].exit(0)
        pod.advance()
        assert pod.runtime.names == ["s", "a"]
        pod.runtime["s"].exit(1)
        pod.advance(1)
        assert pod.runtime.names == ["a", "s"], "a sidecar is started again whatever the policy"
        sidecar = pod.runtime["s"]
        pod.runtime["a"].exit(0)
        pod.advance()
        assert sidecar.signals == [signal.SIGTERM]
        assert pod.done == [0]


def test_restarts_back_off_as_a_kubelets(made: Made) -> None:
    with made(container_plan("a"), restart_policy="Always") as pod:
        starts = [pod.loop.now_s]
        for _ in range(7):
            pod.runtime["a"].exit(1)
            while not pod.runtime.processes:
                if pod.of("a")["reason"] == "CrashLoopBackOff":
                    assert pod.of("a")["last"]["exit_code"] == 1
                pod.advance(1)
            starts.append(pod.loop.now_s)
        waits = [round(after - before) for before, after in pairwise(starts)]
        assert waits[0] <= 1, "the first restart does not wait"
        assert waits[1:] == [10, 20, 40, 80, 160, 300]
        assert pod.of("a")["restart_count"] == 7
        assert ("a", "BackOff") in pod.events


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [
        ("Always", 0, True),
        ("Always", 1, True),
        ("OnFailure", 0, False),
        ("OnFailure", 1, True),
        ("Never", 1, False),
    ],
)
def test_the_policy_decides_about_restarts(made: Made, policy: str, code: int, again: bool) -> None:
    with made(container_plan("a"), restart_policy=policy) as pod:
        pod.runtime["a"].exit(code)
        pod.advance(1)
        assert bool(pod.runtime.processes) == again
        assert pod.done == ([] if again else [code])


def test_a_containers_own_rules_come_before_the_policy(made: Made) -> None:
    rules = [{"action": "Restart", "operator": "In", "values": [42]}]
    with made(container_plan("a", restart_rules=rules), container_plan("b")) as pod:
        pod.runtime["a"].exit(42)
        pod.advance(1)
        assert sorted(pod.runtime.names) == ["a", "b"]
        pod.runtime["a"].exit(1)
        pod.runtime["b"].exit(0)
        pod.advance(1)
        assert pod.done == [1]


def test_a_rule_may_restart_all_containers(made: Made) -> None:
    rules = [{"action": "RestartAllContainers", "operator": "In", "values": [42]}]
    with made(
        container_plan("a", restart_rules=rules), container_plan("b"), init=(container_plan("i"),)
    ) as pod:
        pod.runtime["i"].exit(0)
        pod.advance()
        pod.runtime["a"].exit(42)
        pod.advance()
        assert pod.report["restarting_all"] in (True, False)
        pod.advance(15)
        assert pod.runtime.began == ["i", "a", "b", "i"]
        pod.runtime["i"].exit(0)
        pod.advance(15)
        assert pod.runtime.began[-2:] == ["a", "b"]


def test_a_stop_gives_the_grace_and_then_kills(made: Made) -> None:
    with made(container_plan("a"), container_plan("b")) as pod:
        a, b = pod.runtime["a"], pod.runtime["b"]
        b.on_term = None
        pod.lifecycle.stop(10)
        pod.advance()
        assert pod.report["phase"] == "Stopping"
        assert a.signals == [signal.SIGTERM]
        pod.advance(9)
        assert pod.done == []
        pod.advance(2)
        assert b.signals == [signal.SIGTERM, signal.SIGKILL]
        assert pod.done == [143]
        assert pod.of("b")["reason"] == "Error"


def test_a_second_stop_may_only_shorten_the_time(made: Made) -> None:
    with made(container_plan("a")) as pod:
        pod.runtime["a"].on_term = None
        pod.lifecycle.stop(30)
        pod.advance(1)
        pod.lifecycle.stop(2)
        pod.lifecycle.stop(60)
        pod.advance(3)
        assert pod.done == [137]


def test_a_stop_that_comes_after_the_end_changes_nothing(made: Made) -> None:
    with made(container_plan("a")) as pod:
        pod.runtime["a"].exit(0)
        pod.advance()
        pod.lifecycle.stop(5)
        pod.advance()
        assert pod.report["phase"] == "Done"
        assert json.loads(pod.report_file.read_text())["phase"] == "Done"
        assert pod.done == [0]


def test_a_stop_without_grace_asks_nobody(made: Made) -> None:
    with made(container_plan("a")) as pod:
        process = pod.runtime["a"]
        pod.lifecycle.stop(0)
        pod.advance()
        assert process.signals == [signal.SIGKILL]
        assert pod.done == [137]


def test_a_stop_while_a_container_waits_to_start_again_ends_with_its_last_run(made: Made) -> None:
    with made(container_plan("a"), restart_policy="Always") as pod:
        pod.runtime["a"].exit(5)
        pod.advance(1)
        pod.runtime["a"].exit(6)
        pod.advance(1)
        assert pod.of("a")["reason"] == "CrashLoopBackOff"
        pod.lifecycle.stop(5)
        pod.advance()
        assert pod.done == [6]
        assert (pod.of("a")["state"], pod.of("a")["exit_code"]) == ("terminated", 6)


def test_a_stop_while_a_container_is_being_started_waits_for_it_and_kills_it(made: Made) -> None:
    with made(container_plan("a"), container_plan("b"), init=(container_plan("i"),)) as pod:
        pod.runtime.at_once = False
        pod.runtime["i"].exit(0)
        pod.advance()
        assert len(pod.runtime.asked) == 2
        pod.lifecycle.stop(10)
        pod.advance()
        assert pod.done == []
        first = pod.runtime.begin()
        second = pod.runtime.begin()
        pod.advance()
        assert first is not None
        assert second is not None
        assert signal.SIGKILL in first.signals
        assert pod.done == [137]


def test_a_runtime_that_refuses_fails_the_container_with_its_words(made: Made) -> None:
    with made(container_plan("a"), init=(container_plan("i"),)) as pod:
        pod.runtime.refuse = "exec: no such file"
        pod.runtime["i"].exit(0)
        pod.advance()
        assert pod.done == [128]
        assert pod.of("a")["reason"] == "StartError"
        assert "no such file" in pod.of("a")["message"]


def test_a_container_that_can_never_be_created_ends_the_pod(made: Made) -> None:
    with made(container_plan("a"), init=(container_plan("i"),), restart_policy="Always") as pod:
        pod.runtime.cannot_create = "no space"
        pod.runtime["i"].exit(0)
        pod.advance(2000)
        assert pod.report["problem"]["reason"] == "CreateContainerError"
        assert pod.done == [1]
        assert ("a", "Failed") in pod.events


def test_a_kill_for_want_of_memory_is_told_as_such(made: Made) -> None:
    with made(container_plan("a")) as pod:
        pod.kills.number += 1
        pod.runtime["a"].exit(137, 9)
        pod.advance()
        assert pod.of("a")["reason"] == "OOMKilled"


def test_last_words_are_the_message(made: Made) -> None:
    with made(container_plan("a", termination_message_policy="FallbackToLogsOnError")) as pod:
        pod.runtime["a"].write(b"it broke\n")
        pod.runtime["a"].exit(1)
        pod.advance()
        assert pod.of("a")["message"] == "it broke\n"


def test_an_ephemeral_container_counts_for_nothing_but_itself(made: Made) -> None:
    with made(container_plan("a")) as pod:
        debug = container_plan("debug", target="a")
        pod.lifecycle.add_ephemeral(debug)  # type: ignore[arg-type]
        pod.lifecycle.add_ephemeral(debug)  # type: ignore[arg-type]
        pod.advance()
        assert pod.runtime.names == ["a", "debug"]
        pod.runtime["debug"].exit(1)
        pod.advance()
        assert pod.of("debug")["state"] == "terminated"
        pod.lifecycle.add_ephemeral(container_plan("again"))  # type: ignore[arg-type]
        pod.advance()
        again = pod.runtime["again"]
        pod.runtime["a"].exit(0)
        pod.advance()
        assert signal.SIGTERM in again.signals
        assert pod.done == [0]


def test_another_image_starts_the_container_again_whatever_its_policy(made: Made) -> None:
    with made(container_plan("a")) as pod:
        pod.lifecycle.redefine(container_plan("a", image="busybox:2"))  # type: ignore[arg-type]
        pod.advance(1)
        assert pod.of("a")["image"] == "busybox:2"
        assert pod.of("a")["restart_count"] == 1
        assert pod.done == []
        pod.runtime["a"].exit(0)
        pod.advance()
        assert pod.done == [0]


def test_another_image_for_a_container_that_is_being_made_waits(made: Made) -> None:
    with made(container_plan("a"), init=(container_plan("i"),)) as pod:
        pod.runtime.at_once = False
        pod.runtime["i"].exit(0)
        pod.advance()
        pod.lifecycle.redefine(container_plan("a", image="busybox:2"))  # type: ignore[arg-type]
        pod.lifecycle.redefine(container_plan("nobody"))  # type: ignore[arg-type]
        pod.advance(1)
        assert pod.of("a")["image"] == "busybox"
        pod.runtime.at_once = True
        pod.runtime.begin()
        pod.advance(1)
        assert pod.of("a")["image"] == "busybox:2"


def test_another_image_ends_a_back_off(made: Made) -> None:
    with made(container_plan("a"), restart_policy="Always") as pod:
        pod.runtime["a"].exit(1)
        pod.advance(1)
        pod.runtime["a"].exit(1)
        pod.advance(1)
        assert pod.runtime.names == []
        pod.lifecycle.redefine(container_plan("a", image="busybox:2"))  # type: ignore[arg-type]
        pod.advance(1)
        assert pod.runtime.names == ["a"]


def test_hub_hears_every_change_once_and_the_last_word_is_on_disk(made: Made) -> None:
    with made(container_plan("a"), container_plan("b")) as pod:
        seqs = [one["seq"] for one in pod.sent if one["type"] == "report"]
        assert seqs == sorted(set(seqs))
        pod.reporter.acked(seqs[-1])
        assert pod.reporter.all_acked
        pod.lifecycle.stop(0)
        pod.advance()
        assert not pod.reporter.all_acked
        pod.reporter.bye()
        assert pod.sent[-1]["type"] == "bye"
        assert pod.sent[-1]["report"]["phase"] == "Done"


# Probes and hooks


def probe(**more: Any) -> dict[str, Any]:
    return {
        "action": {"kind": "exec", "argv": ["check"]}, "initial_delay_s": 0, "period_s": 10, "timeout_s": 1, "success": 1,
        "failure": 2, "grace_s": None, **more,
    }  # fmt: skip


def run_probe(pod: RunnerPod, code: int, within_s: float = 11) -> None:
    for _ in range(round(within_s * 2)):
        if pod.runtime.executed:
            break
        pod.advance(0.5)
    assert pod.runtime.answer(code, b"told") == ["check"]
    pod.advance()


def test_a_container_is_ready_when_its_probe_says_so(made: Made) -> None:
    with made(container_plan("a", probes={"readiness": probe()})) as pod:
        assert not pod.of("a")["ready"]
        run_probe(pod, 0)
        assert pod.of("a")["ready"]
        run_probe(pod, 1)
        assert pod.of("a")["ready"], "one failure is not enough"
        run_probe(pod, 1)
        assert not pod.of("a")["ready"]
        assert ("a", "Unhealthy") in pod.events


def test_an_unhealthy_container_is_killed_and_started_again(made: Made) -> None:
    with made(container_plan("a", probes={"liveness": probe(grace_s=3)}), restart_policy="Always") as pod:
        process = pod.runtime["a"]
        process.on_term = None
        run_probe(pod, 1)
        run_probe(pod, 1)
        assert process.signals == [signal.SIGTERM]
        pod.advance(4)
        assert process.signals == [signal.SIGTERM, signal.SIGKILL]
        pod.advance(1)
        assert pod.of("a")["restart_count"] == 1
        assert pod.runtime.names == ["a"]


def test_other_probes_wait_for_the_startup_probe(made: Made) -> None:
    probes = {"startup": probe(failure=3), "liveness": probe(), "readiness": probe()}
    with made(container_plan("a", probes=probes)) as pod:
        assert not pod.of("a")["started"]
        run_probe(pod, 1)
        assert not pod.of("a")["started"]
        run_probe(pod, 0)
        assert pod.of("a")["started"]
        pod.advance(11)
        assert len(pod.runtime.executed) >= 2


def test_a_probe_that_says_nothing_in_time_has_failed(made: Made) -> None:
    with made(container_plan("a", probes={"readiness": probe(failure=1)})) as pod:
        run_probe(pod, 0)
        assert pod.of("a")["ready"]
        for _ in range(24):
            if pod.runtime.executed:
                break
            pod.advance(0.5)
        pod.advance(2)
        assert not pod.of("a")["ready"]
        pod.runtime.answer(0)
        pod.advance()
        assert not pod.of("a")["ready"], "an answer that comes too late counts for nothing"


def test_a_sidecar_lets_the_others_start_when_its_startup_probe_has_succeeded(made: Made) -> None:
    sidecar = container_plan("s", sidecar=True, probes={"startup": probe()})
    with made(container_plan("a"), init=(sidecar,)) as pod:
        assert pod.runtime.names == ["s"]
        run_probe(pod, 0)
        assert pod.runtime.names == ["s", "a"]


HOOK = {"kind": "exec", "argv": ["hook"]}


def test_a_container_runs_when_its_post_start_hook_is_done(made: Made) -> None:
    with made(container_plan("a", post_start=HOOK)) as pod:
        assert pod.of("a")["state"] == "waiting"
        assert pod.runtime.answer(0) == ["hook"]
        pod.advance()
        assert pod.of("a")["state"] == "running"


def test_a_post_start_hook_that_fails_ends_the_container(made: Made) -> None:
    with made(container_plan("a", post_start=HOOK)) as pod:
        pod.runtime.answer(1, b"no")
        pod.advance()
        assert ("a", "FailedPostStartHook") in pod.events
        assert pod.done == [143]


def test_a_pre_stop_hook_comes_before_the_signal(made: Made) -> None:
    with made(container_plan("a", pre_stop=HOOK)) as pod:
        process = pod.runtime["a"]
        pod.lifecycle.stop(10)
        pod.advance(3)
        assert process.signals == []
        pod.runtime.answer(1)
        pod.advance()
        assert process.signals == [signal.SIGTERM]
        assert ("a", "FailedPreStopHook") in pod.events
        assert pod.done == [143]


def test_a_pre_stop_hook_that_takes_all_of_the_grace_leaves_two_seconds(made: Made) -> None:
    with made(container_plan("a", pre_stop={"kind": "sleep", "seconds": 60})) as pod:
        process = pod.runtime["a"]
        process.on_term = None
        pod.lifecycle.stop(5)
        pod.advance(5.6)
        assert process.signals[:1] in ([signal.SIGTERM], [signal.SIGKILL])
        pod.advance(3)
        assert pod.done == [137]


def test_a_stop_while_a_hook_runs_cancels_it(made: Made) -> None:
    with made(container_plan("a", post_start=HOOK)) as pod:
        pod.lifecycle.stop(0)
        pod.advance()
        assert pod.done == [137]
        pod.runtime.answer(0)
        pod.advance()
        assert pod.of("a")["state"] == "terminated"
