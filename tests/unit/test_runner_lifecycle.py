"""A pod from its first container to its exit code, with real processes behind the runtime seam."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.linux.event_loop import Loop
from slurmlet.protocol import wire
from slurmlet.runner.containers.container_runtime import unsupported
from slurmlet.runner.containers.oom import KillCounter
from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.host.sandbox import SINGLE, Mapping
from slurmlet.runner.host.scratch import Scratch
from slurmlet.runner.link.reporter import Reporter
from slurmlet.runner.network.network_view import HostNetwork
from slurmlet.runner.pod.pod_lifecycle import Lifecycle
from slurmlet.runner.volumes.etc_files import write_etc
from slurmlet.runner.volumes.pod_volumes import Volumes
from tests.unit.process_runtime import MISSING_IMAGE, ProcessRuntime


def container(name: str, script: str, **fields: Any) -> Any:
    plan = {
        "name": name, "image": "busybox:1", "image_id": "busybox@sha256:00", "image_dir": "/store/sha256-00",
        "argv": ["/bin/sh", "-c", script], "env": [["PATH", "/usr/bin:/bin"]], "env_files": [], "cwd": "/",
        "user": {"uid": None, "gid": None, "groups": [], "name": ""}, "mounts": [],
        "tty": False, "stdin": False, "stdin_once": False,
        "termination_message_path": "", "termination_message_policy": "File", "stop_signal": "SIGTERM",
        "sidecar": False, "restart_policy": "", "restart_rules": [], "probes": {}, "post_start": None, "pre_stop": None,
        "gpus": False, "read_only_root": False, "add_caps": [], "drop_caps": [], "no_new_privs": False,
        "privileged": False, "unmasked_proc": False, "selinux": False, "seccomp": "Unconfined",
    }  # fmt: skip
    return {**plan, **fields}


def pod(*containers: Any, init: list[Any] | None = None, **fields: Any) -> Any:
    plan = {
        "uid": "u", "name": "pod1", "namespace": "default", "cluster": "default", "hostname": "pod1",
        "host_names": ["pod1"], "host_network": False, "host_ipc": False, "sysctls": [], "restart_policy": "Never",
        "grace_s": 5, "share_pid": False, "hosts": [], "init_containers": init or [], "containers": list(containers),
        "volumes": {}, "storage_limits": {"containers": {}, "pod": None}, "fs_group": None, "network": None,
        "resolv_conf": None,
    }  # fmt: skip
    return {**plan, **fields}


class Pod:
    """A lifecycle with what is around it in a runner, and what it told."""

    def __init__(self, loop: Loop, directory: Path, plan: Any) -> None:
        self.loop = loop
        self.exit_code: int | None = None
        self.events: list[tuple[str, str]] = []
        self._decoder = wire.Decoder()
        children = Children(loop)
        self.runtime = ProcessRuntime(children)
        scratch = Scratch(str(directory / "scratch"), "u")
        network = HostNetwork(plan, "127.0.0.1")
        write_etc(scratch, network, plan)
        self.reporter = Reporter(loop, str(directory / "report.json"), self._heard)
        self.logs = directory / "logs"
        self.context = PodContext(
            loop=loop,
            children=children,
            runtime=self.runtime,
            volumes=Volumes(plan, scratch, Mapping(SINGLE, 1, 1)),
            scratch=scratch,
            reporter=self.reporter,
            network=network,
            logs=str(self.logs),
            plan=plan,
            oom=KillCounter(),
        )
        self.lifecycle = Lifecycle(self.context, self._done)
        self.lifecycle.start()

    def _heard(self, sent: bytes) -> None:
        for frame in self._decoder.feed(sent):
            message: Any = json.loads(frame.payload)
            if message["type"] == "event":
                self.events.append((message["reason"], message["message"]))

    def _done(self, code: int) -> None:
        self.exit_code = code

    def until(self, done: Callable[[], Any]) -> None:
        assert self.loop.run_until(lambda: bool(done()), 10), self.reporter.report

    def end(self) -> int:
        self.until(lambda: self.exit_code is not None)
        # Run directories are removed by forks: let them end here and not in another test.
        self.loop.run_until(lambda: False, 0.1)
        assert self.exit_code is not None
        return self.exit_code

    def report(self, name: str) -> Any:
        return {**self.reporter.report["init_containers"], **self.reporter.report["containers"]}[name]

    def log(self, name: str, run: int = 0) -> str:
        lines = (self.logs / name / f"{run}.log").read_text().splitlines()
        return "\n".join(line.split(" ", 3)[3] for line in lines)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Any], Pod]]:
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    loop = Loop()
    yield lambda plan: Pod(loop, tmp_path, plan)
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)
    loop.close()


def test_what_a_container_says_and_how_it_ends_is_reported(start: Callable[[Any], Pod]) -> None:
    running = start(pod(container("main", "echo said; exit 7")))
    assert running.end() == 7
    found = running.report("main")
    assert (found["state"], found["exit_code"], found["reason"]) == ("terminated", 7, "Error")
    assert found["container_id"].startswith("process://")
    assert running.log("main") == "said"
    assert [reason for reason, _ in running.events] == ["Created", "Started"]
    assert running.runtime.deleted == [found["container_id"].removeprefix("process://")]


def test_init_containers_run_one_after_another_before_the_others(
    start: Callable[[Any], Pod], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    running = start(
        pod(
            container("main", f"echo main >> {trace}"),
            init=[
                container("one", f"sleep 0.2; echo one >> {trace}"),
                container("two", f"echo two >> {trace}"),
            ],
        )
    )
    assert running.end() == 0
    assert trace.read_text().split() == ["one", "two", "main"]


def test_an_init_container_that_fails_ends_a_pod_that_never_restarts(start: Callable[[Any], Pod]) -> None:
    running = start(pod(container("main", "true"), init=[container("one", "exit 3")]))
    assert running.end() == 3
    assert running.report("main")["state"] == "waiting"


def test_sidecars_end_after_the_others(start: Callable[[Any], Pod], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    wait = f"trap 'echo sidecar >> {trace}; exit 0' TERM; while :; do sleep 0.05; done"
    running = start(
        pod(
            container("main", f"sleep 0.3; echo main >> {trace}"),
            init=[container("side", wait, sidecar=True)],
        )
    )
    assert running.end() == 0
    assert trace.read_text().split() == ["main", "sidecar"]


def test_what_failed_starts_again(start: Callable[[Any], Pod], tmp_path: Path) -> None:
    once = tmp_path / "once"
    script = f"echo run; [ -e {once} ] && exit 0; touch {once}; exit 1"
    running = start(pod(container("main", script), restart_policy="OnFailure"))
    assert running.end() == 0
    found = running.report("main")
    assert (found["restart_count"], found["last"]["exit_code"]) == (1, 1)
    assert running.log("main", 1) == "run"


def test_a_stop_asks_first_and_kills_when_the_grace_is_over(start: Callable[[Any], Pod]) -> None:
    running = start(pod(container("main", "trap '' TERM; echo up; while :; do sleep 0.05; done")))
    running.until(lambda: running.report("main")["state"] == "running" and "up" in running.log("main"))
    running.lifecycle.stop(0.3)
    assert running.end() == 137
    assert running.report("main")["signal"] == signal.SIGKILL


def test_a_hook_that_fails_ends_its_container(start: Callable[[Any], Pod]) -> None:
    hook = {"kind": "exec", "argv": ["/bin/sh", "-c", "echo no; exit 9"]}
    running = start(pod(container("main", "exec sleep 30", post_start=hook)))
    assert running.end() == 143
    assert ("FailedPostStartHook", "PostStartHook failed: no\n") in running.events


def test_a_probe_by_command_makes_a_container_ready(start: Callable[[Any], Pod]) -> None:
    probe = {
        "action": {"kind": "exec", "argv": ["/bin/true"]}, "initial_delay_s": 0, "period_s": 1, "timeout_s": 1,
        "success": 1, "failure": 3, "grace_s": None,
    }  # fmt: skip
    running = start(pod(container("main", "exec sleep 30", probes={"readiness": probe})))
    running.until(lambda: running.report("main")["ready"])
    running.lifecycle.stop(0)
    running.end()


def test_a_program_that_cannot_be_started_is_a_start_error(start: Callable[[Any], Pod]) -> None:
    running = start(pod(container("main", "", argv=["/no/such/program"])))
    assert running.end() == 128
    assert running.report("main")["reason"] == "StartError"
    assert "No such file" in running.report("main")["message"]


@pytest.mark.parametrize(
    ("fields", "reason", "message"),
    [
        ({"image_dir": MISSING_IMAGE}, "CreateContainerError", "no such image"),
        (
            {"tty": True},
            "CreateContainerConfigError",
            "tty: there are none; remove it",
        ),
        (
            {"user": {"uid": 5, "gid": None, "groups": [], "name": ""}},
            "CreateContainerConfigError",
            "securityContext.runAsUser: processes run as you; remove it",
        ),
    ],
)
def test_what_cannot_be_created_waits_with_the_reason_and_tells_the_field(
    start: Callable[[Any], Pod], fields: dict[str, Any], reason: str, message: str
) -> None:
    running = start(pod(container("main", "true", **fields)))
    running.until(lambda: running.report("main")["reason"] == reason)
    assert running.report("main")["message"] == message
    assert ("Failed", f"Error: {message}") in running.events
    assert running.runtime.pids == {}
    running.lifecycle.stop(0)
    running.end()


def test_what_a_runtime_lacks_is_told_only_to_who_asks_for_it() -> None:
    exec_probe = {"liveness": {"action": {"kind": "exec", "argv": ["true"]}}}
    asking = {
        "seccomp": ({"seccomp": "RuntimeDefault"}, "securityContext.seccompProfile"),
        "selinux": ({"selinux": True}, "securityContext.seLinuxOptions"),
        "capabilities": ({"add_caps": ["NET_ADMIN"]}, "securityContext.capabilities.add"),
        "privileged": ({"privileged": True}, "securityContext.privileged"),
        "target": ({"target": "main"}, "targetContainerName"),
        "exec": ({"probes": exec_probe}, "livenessProbe.exec"),
    }
    for feature, (fields, field) in asking.items():
        lacks = {feature: "not here"}
        assert unsupported(pod(), container("c", "true"), lacks) == ""
        assert unsupported(pod(), container("c", "true", **fields), {}) == ""
        assert unsupported(pod(), container("c", "true", **fields), lacks) == f"{field}: not here"
    # As a kubelet has it, a privileged container is never confined.
    confined = container("c", "true", seccomp="RuntimeDefault", privileged=True)
    assert unsupported(pod(), confined, {"seccomp": "not here"}) == ""
    shared = unsupported(pod(share_pid=True), container("c", "true"), {"shared-pids": "not here"})
    assert shared == "spec.shareProcessNamespace: not here"
