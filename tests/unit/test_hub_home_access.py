"""Whatever the hub does for a pod, it touches the home in threads only: a stalled home must not stop leases and exec."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.clock import rfc3339
from tests.unit.hub_site import POOL_NODE, Runner, Site
from tests.unit.virtual_time import EPOCH_S

_CALLS = (
    "open", "stat", "lstat", "mkdir", "unlink", "remove", "rename", "replace", "listdir", "scandir", "rmdir", "chmod",
    "access", "link", "symlink",
)  # fmt: skip


class HomeGuard:
    """Notes each access to the site's directory that is made by the event loop itself."""

    def __init__(self, site: Site, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._site, self._root, self._threads = site, str(root), 0
        self.accesses: list[str] = []
        self.in_threads = 0
        for name in _CALLS:
            patch.setattr(os, name, self._guarded(f"os.{name}", getattr(os, name)))
        patch.setattr(io, "open", self._guarded("open", io.open))
        plain = site.loop.run_in_executor

        def in_thread(executor: Any, work: Callable[..., Any], *args: Any) -> Any:
            self._threads += 1
            try:
                return plain(executor, work, *args)
            finally:
                self._threads -= 1

        patch.setattr(site.loop, "run_in_executor", in_thread)

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **more: Any) -> Any:
            if args and str(args[0]).startswith(self._root) and self._site.loop.is_running():
                where = _caller()
                if self._threads:
                    self.in_threads += 1
                elif "/slurmlet/hub/" in where:
                    self.accesses.append(f"{name}({args[0]}) at {where}")
            return call(*args, **more)

        return guarded


def _caller() -> str:
    """Who wanted it: part of the hub, or of the site around it, which may do as it likes."""
    frames = [
        f"{one.filename}:{one.lineno}"
        for one in traceback.extract_stack()
        if ("/slurmlet/" in one.filename or "/tests/" in one.filename) and one.filename != __file__
    ]
    return next(one for one in reversed(frames) if "/slurmlet/base/" not in one)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


@pytest.fixture
def guard(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HomeGuard]:
    made = HomeGuard(site, tmp_path, monkeypatch)
    site.start_hub()
    site.settle(1)
    yield made
    assert made.in_threads, "a guard that sees nothing proves nothing"
    assert made.accesses == []


def running(site: Site, **more: Any) -> tuple[str, Runner]:
    uid = site.create(**more)
    site.settle(1)
    runner = site.start_job(uid)
    assert runner is not None
    site.settle(1)
    runner.say("Running", "running")
    site.settle(1)
    assert site.phase(uid) == "Running"
    return uid, runner


def test_from_submission_to_the_end_and_the_removal(site: Site, guard: HomeGuard) -> None:
    uid, runner = running(site)
    runner.end(0)
    site.settle(5)
    assert site.phase(uid) == "Succeeded"
    site.delete(uid)
    site.settle(60)
    assert site.phase(uid) == "gone"


def test_a_deletion_while_it_runs(site: Site, guard: HomeGuard) -> None:
    uid, runner = running(site)
    site.delete(uid)
    site.settle(2)
    runner.end(143)
    site.settle(30)
    assert site.phase(uid) == "gone"


def test_a_deletion_by_force_in_the_queue(site: Site, guard: HomeGuard) -> None:
    uid = site.create()
    site.settle(1)
    site.delete(uid, grace_s=0)
    site.settle(30)
    assert site.live(uid) == []


def test_a_hub_that_takes_over_what_another_left(site: Site, guard: HomeGuard) -> None:
    running(site)
    site.create()
    site.settle(1)
    site.kill_hub()
    site.start_hub()
    site.settle(120)


def test_a_job_that_vanishes_with_its_runner(site: Site, guard: HomeGuard) -> None:
    uid, runner = running(site)
    runner.hang_up()
    site.slurm.finish(runner.job_id, "NODE_FAIL")
    site.settle(120)
    assert site.phase(uid) == "Failed"


def test_a_deadline_that_passes(site: Site, guard: HomeGuard) -> None:
    uid, runner = running(site, activeDeadlineSeconds=20)
    pod = site.pod(uid)
    assert pod is not None
    started = rfc3339(datetime.fromtimestamp(EPOCH_S + site.loop.time(), UTC))
    site.api.put({**pod, "status": {**pod["status"], "startTime": started}})
    site.settle(60)
    assert runner.job_id in site.slurm.cancelled


def test_a_pod_on_a_node_of_the_pool(site: Site, guard: HomeGuard) -> None:
    site.start_agent()
    site.settle(1)
    uid = site.create(node=POOL_NODE)
    site.settle(2)
    runner = site.runners[uid]
    runner.say("Running", "running")
    site.settle(1)
    assert site.phase(uid) == "Running"
    runner.end(0)
    site.settle(2)
    site.delete(uid)
    site.settle(30)
    assert site.phase(uid) == "gone"
