"""Pods that outgrow what they may write to disk: looked at from time to time, ended in the kubelet's words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.runner.host.sandbox import SINGLE, Mapping
from slurmlet.runner.pod import volume_updates
from slurmlet.runner.pod.pod_lifecycle import Lifecycle
from slurmlet.runner.volumes.pod_volumes import MountFailed, Volumes
from tests.unit.runner_pod import RunnerPod, VirtualRunnerLoop, container_plan, pod_plan

EMPTY = {"kind": "empty", "medium": "", "size_bytes": 64 << 10, "limit": "64Ki"}


class Pod:
    """A pod whose volumes are real directories."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, **more: Any) -> None:
        plan: Any = pod_plan(container_plan("a"), **more)
        self.pod = RunnerPod(directory, plan, VirtualRunnerLoop())
        patch.setattr("time.monotonic", lambda: self.pod.loop.now_s)
        self.volumes = Volumes(plan, self.pod.context.scratch, Mapping(SINGLE, 1, 1))
        self.pod.context = self.pod.context._replace(volumes=self.volumes)
        self.pod.lifecycle = Lifecycle(self.pod.context, self.pod.done.append)
        self.image = directory / "sha256-1"

    def begin(self) -> RunnerPod:
        volume_updates.begin(self.pod.context, self.pod.lifecycle)
        self.pod.advance()
        return self.pod


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


def test_an_empty_dir_over_its_limit_ends_the_pod(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    made = Pod(tmp_path, patch, volumes={"desk": EMPTY}, grace_s=600)
    pod = made.begin()
    desk = Path(made.volumes.path("desk"))
    (desk / "small").write_bytes(bytes(16 << 10))
    pod.advance(60)
    assert pod.runtime.names == ["a"], "within its limit it is left alone"
    (desk / "big").write_bytes(bytes(80 << 10))
    pod.runtime["a"].on_term = None
    pod.advance(12)
    assert pod.report["problem"]["reason"] == "Evicted"
    assert pod.report["problem"]["message"] == 'Usage of EmptyDir volume "desk" exceeds the limit "64Ki". '
    assert ("", "Evicted") in pod.events
    # Its own grace of ten minutes does not count.
    assert pod.runtime.names == []
    pod.close()


def test_writable_layers_and_logs_count_against_a_containers_limit(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    limits = {"containers": {"a": [64 << 10, "64Ki"]}, "pod": None}
    made = Pod(tmp_path, patch, storage_limits=limits)
    pod = made.begin()
    pod.advance(30)
    assert pod.report["problem"] is None
    (Path(pod.container("a").log_dir) / "more.log").write_bytes(bytes(80 << 10))
    pod.advance(15)
    sentence = 'Container a exceeded its local ephemeral storage limit "64Ki". '
    assert pod.report["problem"] == {"reason": "Evicted", "message": sentence}
    pod.close()


def test_volumes_count_against_the_limit_of_the_whole_pod(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    unlimited = {**EMPTY, "size_bytes": None, "limit": ""}
    limits = {"containers": {}, "pod": [64 << 10, "64Ki"]}
    made = Pod(tmp_path, patch, storage_limits=limits, volumes={"desk": unlimited})
    pod = made.begin()
    (Path(made.volumes.path("desk")) / "big").write_bytes(bytes(80 << 10))
    pod.advance(15)
    assert "exceeds the total limit of containers 64Ki" in pod.report["problem"]["message"]
    pod.close()


def test_a_look_that_fails_is_taken_again(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    made = Pod(tmp_path, patch, volumes={"desk": EMPTY})
    pod = made.begin()
    (Path(made.volumes.path("desk")) / "big").write_bytes(bytes(80 << 10))
    looks: list[float] = []

    def failing(work: Any, done: Any) -> None:
        looks.append(pod.loop.now_s)
        done(None, "the worker process ended with 9")

    with pytest.MonkeyPatch.context() as short:
        short.setattr(type(pod.context.children), "call", lambda _self, work, done: failing(work, done))
        pod.advance(35)
    assert len(looks) == 3
    assert pod.report["problem"] is None
    pod.advance(15)
    assert pod.report["problem"]["reason"] == "Evicted"
    pod.close()


def test_an_image_volume_that_cannot_be_unpacked_ends_the_pod(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "sha256-1"
    image.mkdir()
    (image / "rootfs.tar").write_bytes(b"no archive")
    made = Pod(tmp_path, patch, volumes={"data": {"kind": "image", "image_dir": str(image)}})
    pod = made.begin()
    assert pod.runtime.began == []
    assert pod.report["problem"]["reason"] == "FailedMount"
    assert ("", "FailedMount") in pod.events
    assert pod.done == [1]
    pod.close()


def test_newer_contents_that_cannot_be_written_are_told_and_the_pod_goes_on(
    tmp_path: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Pod(tmp_path, patch, volumes={"desk": EMPTY})
    pod = made.begin()

    def fails(_volumes: Any) -> None:
        raise MountFailed("words", "no space left on device")

    patch.setattr(made.volumes, "refresh", fails)
    volume_updates.refresh(pod.context, {"type": "volumes", "volumes": {}})
    pod.advance()
    assert ("", "FailedMount") in pod.events
    assert 'MountVolume.SetUp failed for volume "words"' in capsys.readouterr().err
    assert pod.runtime.names == ["a"]
    pod.close()
