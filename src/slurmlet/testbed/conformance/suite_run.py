"""Runs the suite as an ordinary user of the testbed against a cluster of theirs: in slices, a few at a time.

The suite lies at /opt/slurmlet/conformance of every host; reports go to the user's home, which this side sees too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmlet.base.console import Steps, say
from slurmlet.base.errors import SiteError
from slurmlet.base.files import read_json, write_json
from slurmlet.testbed.conformance import suite_images, suite_results
from slurmlet.testbed.conformance.pod_spread import spread
from slurmlet.testbed.conformance.suite_build import SUITE, Built
from slurmlet.testbed.conformance.suite_results import Outcome
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.server_images import NETTOOLS, ensure
from slurmlet.testbed.testbed_plan import OPT, USERS

_SHOWN = "conformance"  # the directory's name in /opt/slurmlet and in the user's home
_LOAD_TIMEOUT_S = 300
_END_GRACE_S = 60
_LOOK_S = 0.5


@dataclass(frozen=True)
class Run:
    """One user, one cluster, one directory of logs."""

    bed: Testbed
    built: Built
    user: str
    cluster: str
    logs: Path
    spec_timeout_s: int = 360
    stopped: threading.Event = field(default_factory=threading.Event)

    def prepare(self) -> None:
        """A host for each pod, the suite in the hosts, the images in the user's store, the cluster up."""
        spread(self.bed)
        shown = self.bed.paths.opt / _SHOWN
        shown.mkdir(mode=0o755, exist_ok=True)
        _place(self.built.suite, shown / SUITE)
        self._reports.mkdir(mode=0o700, exist_ok=True)
        os.chown(self._reports, USERS[self.user], USERS[self.user])
        self._load_images()
        self.bed.run(["slurmlet", "up", "-c", self.cluster], user=self.user, timeout_s=180)

    def specs(self, focus: str, skip: str) -> list[str]:
        """The names of the specs that the suite would run."""
        options = [f"--ginkgo.focus={focus}", *([f"--ginkgo.skip={skip}"] if skip else [])]
        report = self._suite("list", ["--ginkgo.dry-run", *options], timeout_s=120)
        if report is None:
            raise SiteError("the suite did not list its specs", hint=f"See {self.logs / 'list.log'}")
        return suite_results.names(report)

    def run(self, specs: Sequence[str], workers: int, size: int) -> Iterator[Outcome]:
        """Every spec's outcome, as it comes."""
        groups = suite_results.slices(specs, size)
        beside = [group for group in groups if suite_results.SERIAL not in group[0]]
        alone = [group for group in groups if suite_results.SERIAL in group[0]]
        pool = ThreadPoolExecutor(max_workers=workers)
        try:
            for found in pool.map(self._slice, range(len(beside)), beside):
                yield from found
        except BaseException:
            # An interrupt ends what runs: the suite would go on by itself for hours.
            self.stopped.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        for number, group in enumerate(alone, start=len(beside)):
            yield from self._slice(number, group)

    @property
    def _reports(self) -> Path:
        return self.bed.paths.home / self.user / _SHOWN

    def _slice(self, number: int, specs: Sequence[str]) -> list[Outcome]:
        limit_s = self.spec_timeout_s * len(specs)
        options = [f"--ginkgo.focus={suite_results.focus(specs)}", f"--ginkgo.timeout={limit_s}s"]
        report = self._suite(f"slice-{number}", options, timeout_s=limit_s + _END_GRACE_S)
        problem = suite_results.suite_problem(report)
        if problem:
            say(f"  slice {number}: {problem}")
        found = suite_results.merged(suite_results.outcomes(report), specs)
        for outcome in found:
            say(f"  {outcome.state:8}{outcome.seconds:7.1f} s  {outcome.name}")
        return found

    def _suite(self, name: str, options: Sequence[str], timeout_s: float) -> Any:
        """Run the suite; its report as parsed JSON, None where it left none. What it said is kept in `logs`."""
        home = self.bed.environment(self.user)["HOME"]
        report = self._reports / f"{self.logs.name}-{name}.json"
        argv = [
            f"{OPT}/{_SHOWN}/{SUITE}",
            f"--kubeconfig={home}/.slurmlet/{self.cluster}/kubeconfig",
            "--provider=skeleton",
            "--dump-logs-on-failure=false",
            "--ginkgo.no-color",
            "--ginkgo.v",
            f"--ginkgo.json-report={home}/{_SHOWN}/{report.name}",
            *options,
        ]
        code = self._follow(argv, self.logs / f"{name}.log", timeout_s)
        read = read_json(report)
        if read is None:
            raise SiteError(
                f"the suite left no report (exit code {code})", hint=f"See {self.logs / name}.log"
            )
        # It lists the thousands of specs that were not asked for too.
        report.unlink()
        return read

    def _follow(self, argv: Sequence[str], log: Path, timeout_s: float) -> int | None:
        """Run it with its talk in a file, to be read while it runs; it never outlives this process's interest."""
        with log.open("wb") as file:
            process = self.bed.popen(
                argv, user=self.user, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
            deadline_s = time.monotonic() + timeout_s
            try:
                while (
                    process.poll() is None
                    and time.monotonic() < deadline_s
                    and not self.stopped.wait(_LOOK_S)
                ):
                    pass
                return process.poll()
            finally:
                self.bed.stop(process)

    def _load_images(self) -> None:
        """Those the store lacks, or has in an older making."""
        listed = self.bed.run([f"{OPT}/{_SHOWN}/{SUITE}", "--list-images"], user=self.user).stdout
        have = self.bed.run(["slurmlet", "image", "ls"], user=self.user).stdout.split()
        nettools = ensure(self.bed.paths, self.bed.plan, Steps(), [NETTOOLS])[NETTOOLS.name]
        tools = suite_images.Tools.of(self.bed.paths.root(self.bed.plan), nettools)
        file, record = self._reports / "image.tar", self._reports / "images.json"
        loaded = read_json(record) or {}
        for reference, recipe in suite_images.wanted(listed).items():
            archive = suite_images.archive(recipe, self.built, tools)
            digest = hashlib.sha256(archive).hexdigest()
            if reference in have and loaded.get(reference) == digest:
                continue
            say(f"  image {reference}")
            file.write_bytes(archive)
            file.chmod(0o644)
            path = f"{self.bed.environment(self.user)['HOME']}/{_SHOWN}/{file.name}"
            argv = ["slurmlet", "image", "load", path, "--name", reference]
            self.bed.run(argv, user=self.user, timeout_s=_LOAD_TIMEOUT_S)
            file.unlink()
            loaded[reference] = digest
            write_json(record, loaded)


def _place(source: Path, target: Path) -> None:
    """A readable copy in the hosts' tree; a link where one file system holds both."""
    if target.exists() and target.stat().st_size == source.stat().st_size:
        return
    target.unlink(missing_ok=True)
    source.chmod(0o755)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
        target.chmod(0o755)
