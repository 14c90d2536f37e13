"""A `slurmlet run` seen from outside: started, waited for, and what it left on every host."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slurmlet.base.processes import Completed
from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import IMAGE, eventually
from tests.e2e.inspecting import Process, processes

READY = "the-workload-is-here"
# A pod that ends when it is told to, on whichever host it lands.
SLEEPER = f"kubectl run sleeper-$i --image={IMAGE} --restart=Never -- sleep 1000"
ON_EVERY_NODE = f"""
for i in 1 2 3; do {SLEEPER} >/dev/null; done
kubectl wait --for=condition=Ready pod --all --timeout=60s >/dev/null || exit 99
"""


def run(
    testbed: Testbed, *words: str, user: str = "user1", timeout_s: float = 90, host: str = "login"
) -> Completed:
    return testbed.run(["slurmlet", "run", *words], user=user, host=host, timeout_s=timeout_s, check=False)


@dataclass
class Background:
    """A run that goes on while the test does something to it."""

    testbed: Testbed
    process: subprocess.Popen[bytes]
    job_id: str
    uids: list[str]
    user: str

    def wait(self, timeout_s: float = 60) -> tuple[int, str]:
        """(exit code, all it said on stderr)."""
        _, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, err.decode()

    def processes(self, host: str, *words: str) -> list[Process]:
        """Of this run, on a host, whose command line has all of the words."""
        found = processes(self.testbed, host, f"runs/run-{self.job_id}-", f"_runs/{self.job_id}-")
        return [one for one in found if all(word in one.line for word in words)]

    @property
    def first_host(self) -> str:
        return next(host for host in self.testbed.plan.hosts if self.processes(host, "slurmlet.hub"))

    def chain(self) -> dict[str, str]:
        """The pids above the hub on the first host."""
        host = self.first_host
        pid = self.processes(host, "slurmlet.hub")[0].parent
        found = {"supervisor": pid}
        for name in ("driver", "guard"):
            said = self.testbed.run(["ps", "-o", "ppid=", "-p", pid], host=host, user="root").stdout
            found[name] = pid = said.strip()
        return found

    def kill(self, host: str, pid: str, signal: str = "KILL") -> None:
        self.testbed.run(["kill", f"-{signal}", pid], host=host, user="root")


@contextmanager
def started(
    testbed: Testbed, script: str, *words: str, setup: str = ON_EVERY_NODE, user: str = "user1"
) -> Iterator[Background]:
    """Start `script` in a run; goes on when its `setup` (pods on every node, unless told otherwise) is done."""
    told = f"echo {READY} $SLURM_JOB_ID $(kubectl get pods -o jsonpath='{{.items[*].metadata.uid}}' | tr '\\n' ' ')"
    argv = ["slurmlet", "run", *words, "--", "sh", "-c", f"{setup}\n{told}\n{script}"]
    process = testbed.popen(argv, user=user)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    if READY not in line:
        testbed.stop(process)
        raise AssertionError(f"{line}{process.communicate()[1].decode()}")
    job_id, *uids = line.split()[1:]
    try:
        yield Background(testbed, process, job_id, uids, user)
    finally:
        testbed.run(["scancel", "--quiet", job_id], user=user, check=False)
        testbed.stop(process)


def leftovers(testbed: Testbed, job_id: str, uids: Sequence[str] = (), user: str = "user1") -> list[str]:
    """Everything of a run that is still on some host: processes, directories, mounts, the job itself."""
    found = []
    marks = (f"runs/run-{job_id}-", f"_runs/{job_id}-", *uids)
    for host in testbed.plan.hosts:
        found += [f"{host}: {one.line}" for one in processes(testbed, host, *marks)]
        seen = testbed.run(
            [
                "sh",
                "-c",
                "find /dev/shm /tmp/slurmlet-*/runs /tmp/slurmlet-*/pods -maxdepth 3; cat /proc/mounts",
            ],
            host=host,
            user="root",
            check=False,
        ).stdout
        found += [f"{host}: {line}" for line in seen.splitlines() if any(mark in line for mark in marks)]
    shared = testbed.run(
        ["sh", "-c", f"ls -d /home/{user}/.slurmlet/_runs/{job_id}-*"], user=user, check=False
    )
    queued = testbed.run(["squeue", "--noheader", "-j", job_id, "-o", "%A %T"], user=user, check=False)
    return found + shared.stdout.splitlines() + queued.stdout.splitlines()


def all_gone(
    testbed: Testbed, job_id: str, uids: Sequence[str] = (), user: str = "user1", within_s: float = 20
) -> None:
    deadline_s = time.monotonic() + within_s
    while left := leftovers(testbed, job_id, uids, user):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.5)


def accounted(testbed: Testbed, job_id: str, user: str = "user1") -> str:
    """State and exit code as Slurm has them, once the job is over: "FAILED 7:0"."""
    # Not sacct, which takes 128 off a larger exit code: it shows 137 as 9.
    argv = ["scontrol", "--oneliner", "show", "job", job_id]

    def over() -> str:
        said = testbed.run(argv, user=user).stdout
        found = dict(word.split("=", 1) for word in said.split() if "=" in word)
        is_over = found["JobState"] not in ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING")
        return f"{found['JobState']} {found['ExitCode']}" if is_over else ""

    return str(eventually(over, 30))
