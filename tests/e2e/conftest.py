"""Fixtures of the e2e tests: one testbed and one control plane for all, a namespace of its own for each test.

The testbed must be up (`make e2e` sees to it). Everything runs as user1 on host login unless a test says otherwise.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shlex
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from slurmlet.base.processes import Completed
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.limits import association_limits
from tests.e2e.reading import Reader

IMAGE = "localhost:5000/busybox:1"
# Another name lets two people try tests on one testbed at the same time.
CLUSTER = os.environ.get("E2E_CLUSTER", "default")


USER = "user1"
_READERS: list[Reader] = []


def pytest_sessionfinish() -> None:
    for reader in _READERS:
        reader.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Seconds by file, the longest first: what to look at, and what to put into which lane of `tests/e2e/run`."""
    total_s: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "when"):
                total_s[report.nodeid.partition("::")[0]] += report.duration
    if len(total_s) > 1:
        terminalreporter.section("seconds by file")
        for name, seconds in total_s.most_common():
            terminalreporter.write_line(f"{seconds:7.1f} {name}")


class Kubectl:
    """kubectl of user1 in one namespace."""

    def __init__(self, testbed: Testbed, namespace: str, user: str = USER, cluster: str = CLUSTER) -> None:
        self.testbed = testbed
        self.cluster = cluster
        self.namespace = namespace
        self.user = user

    def argv(self, *arguments: str) -> list[str]:
        # Not `slurmlet kubectl`, which has tests of its own: a Python less to start for each of thousands of calls.
        return [*self._plain, "-n", self.namespace, *arguments]

    @property
    def _plain(self) -> list[str]:
        home = self.testbed.environment(self.user)["HOME"]
        return ["kubectl", f"--kubeconfig={home}/.slurmlet/{self.cluster}/kubeconfig"]

    def __call__(
        self, *arguments: str, stdin: str | bytes | None = None, check: bool = True, timeout_s: float = 90
    ) -> Completed:
        return self.testbed.run(
            self.argv(*arguments), user=self.user, stdin=stdin, check=check, timeout_s=timeout_s
        )

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
        """A kubectl that goes on; the test ends it with `testbed.stop`."""
        return self.testbed.popen(self.argv(*arguments), user=self.user, **streams)

    def raw(self, *arguments: str, stdin: bytes = b"", timeout_s: float = 90) -> tuple[int, bytes, bytes]:
        """(exit code, stdout, stderr), byte for byte."""
        process = self.start(*arguments)
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        finally:
            self.testbed.stop(process)
        return process.returncode, out, err

    def apply(self, *objects: dict[str, Any]) -> None:
        documents = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self("apply", "-f", "-", stdin=json.dumps(documents))

    @property
    def reader(self) -> Reader | None:
        """For the cluster that all tests share: the others come and go."""
        if (self.user, self.cluster) != (USER, CLUSTER):
            return None
        if not _READERS:
            _READERS.append(Reader(self.testbed, self._plain, USER))
        return _READERS[0]

    def get(self, kind: str, name: str | None = None, *more: str) -> Any:
        found = self.reader.get(kind, name, self.namespace, *more) if self.reader is not None else None
        if found is not None:
            return found
        words = [kind, name] if name else [kind]
        return json.loads(self("get", *words, "-o", "json", *more).stdout)

    def pod(self, name: str) -> Any:
        return self.get("pod", name)

    def phase(self, name: str) -> str:
        return str(self.pod(name)["status"].get("phase", ""))

    def wait_phase(self, name: str, *phases: str, timeout_s: float = 60) -> Any:
        """The pod once it is in one of the phases."""
        return eventually(
            lambda: (p := self.pod(name))["status"].get("phase") in phases and p, timeout_s, 0.1
        )

    def events(self, name: str) -> list[tuple[str, str]]:
        """(reason, message) of everything told about a pod."""
        listed = self.get("events", None, "--field-selector", f"involvedObject.name={name}")
        return [(item["reason"], item["message"]) for item in listed["items"]]

    def told(self, name: str, reason: str, words: str) -> bool:
        """Whether an event about a pod has this reason and these words."""
        return any(why == reason and words in text for why, text in self.events(name))

    def tells(self, name: str, *reasons: str, words: str = "") -> None:
        """Wait for events about a pod with these reasons, the words in each; they may come a moment after the fact."""
        for reason in reasons:
            eventually(lambda reason=reason: self.told(name, reason, words), 10)  # type: ignore[misc]

    def waiting(self, name: str) -> tuple[str, str]:
        """(reason, message) the pod's first container waits for."""
        statuses = self.pod(name)["status"].get("containerStatuses") or [{}]
        found = (statuses[0].get("state") or {}).get("waiting") or {}
        return found.get("reason", ""), found.get("message", "")

    def job_id(self, name: str) -> str:
        """The Slurm job of a pod, once it is submitted."""
        return str(
            eventually(lambda: self.pod(name)["metadata"].get("annotations", {}).get("slurmlet.io/job-id"))
        )


def eventually(probe: Callable[[], Any], timeout_s: float = 60, every_s: float = 0.2) -> Any:
    """What `probe` returns once it is true; fails with its last answer."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        last = probe()
        if last:
            return last
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s; last answer: {last!r}"
        time.sleep(every_s)


def pod(name: str, command: str | Sequence[str] = "sleep 3600", **changes: Any) -> dict[str, Any]:
    """A pod of one busybox container; a string runs in its shell. `container` changes that, the rest changes the spec."""
    words = ["sh", "-c", command] if isinstance(command, str) else list(command)
    container = {"name": "main", "image": IMAGE, "command": words, **changes.pop("container", {})}
    metadata = {"name": name, **changes.pop("metadata", {})}
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container, *changes.pop("more_containers", [])],
        **changes,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def secret(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}


def jobs_of(testbed: Testbed, user: str = "user1") -> list[str]:
    """What `squeue` shows a person: jobs that are not over."""
    return testbed.run(["squeue", "--noheader", "-u", user, "-o", "%A %j %T"], user=user).stdout.splitlines()


Limits = Callable[..., None]


@pytest.fixture
def limits(testbed: Testbed) -> Iterator[Limits]:
    """Sets limits of a user's association, `limits("user1", MaxSubmitJobs=5)`; they are reset at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda user, **wanted: stack.enter_context(association_limits(testbed, user, **wanted))


@pytest.fixture(scope="session")
def testbed() -> Testbed:
    return Testbed.running()


@pytest.fixture(scope="session")
def cluster(testbed: Testbed) -> str:
    """The cluster of user1 that all tests share, left to `testbed down`."""
    testbed.run(["slurmlet", "up", "-c", CLUSTER], timeout_s=180)
    return CLUSTER


@pytest.fixture(scope="session")
def leaving(testbed: Testbed) -> Iterator[list[subprocess.Popen[bytes]]]:
    """What tidies up behind tests while the next ones run; its end is waited for at the end of all."""
    under_way: list[subprocess.Popen[bytes]] = []
    yield under_way
    for process in under_way:
        try:
            process.wait(60)
        finally:
            testbed.stop(process)


@pytest.fixture
def kubectl(testbed: Testbed, cluster: str, leaving: list[subprocess.Popen[bytes]]) -> Iterator[Kubectl]:
    """kubectl in a fresh namespace that goes with the test, and all its pods with it."""
    namespace = f"t-{uuid.uuid4().hex[:8]}"
    here = Kubectl(testbed, namespace)
    reader = here.reader
    assert reader is not None
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    if reader.ask("POST", "/api/v1/namespaces", made) is None:
        here("create", "namespace", namespace)
    # Pods created before the account exists would be refused.
    eventually(lambda: reader.get("serviceaccount", "default", namespace), every_s=0.05)
    yield here
    path, now = f"/api/v1/namespaces/{namespace}", {"gracePeriodSeconds": 0}
    if reader.ask("DELETE", f"{path}/pods", now) is not None and reader.ask("DELETE", path) is not None:
        return
    pods = here.argv("delete", "pods", "--all", "--grace-period=0", "--force", "--wait=false")
    rest = here.argv("delete", "namespace", namespace, "--wait=false")
    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    leaving.append(testbed.popen(["sh", "-c", f"{shlex.join(pods)}; {shlex.join(rest)}"], **silent))
