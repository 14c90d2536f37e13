"""A cluster of the testbed seen from outside: its processes, its Slurm jobs, what it left on the hosts.

Reads through the hosts' own tools and /proc, never through the product, so that the product cannot vouch for itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import eventually

# States in which Slurm holds nothing for a job any more.
OVER = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
}

# Arguments come in sys.argv, never in the text. Prints "pid ppid uid command line" of what has one of the words.
PROCESSES = """
import os, sys
for entry in os.listdir("/proc"):
    if not entry.isdigit() or int(entry) == os.getpid():
        continue
    try:
        line = open(f"/proc/{entry}/cmdline", "rb").read().replace(b"\\0", b" ").decode(errors="replace")
        status = dict(l.split(":", 1) for l in open(f"/proc/{entry}/status").read().splitlines() if ":" in l)
    except OSError:
        continue
    if any(word in line for word in sys.argv[1:]):
        print(entry, status["PPid"].strip(), status["Uid"].split()[0], " ".join(line.split()))
"""


@dataclass(frozen=True)
class Job:
    job_id: str
    state: str

    @property
    def over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True)
class Process:
    pid: str
    parent: str
    uid: str
    line: str


@dataclass(frozen=True)
class Cluster:
    testbed: Testbed
    name: str
    user: str = "user1"

    @property
    def root(self) -> str:
        return f"/home/{self.user}/.slurmlet/{self.name}"

    def read(self, path: str) -> Any:
        return json.loads(self.testbed.run(["cat", f"{self.root}/{path}"], user=self.user).stdout)

    @property
    def id(self) -> str:
        return str(self.read("cluster.json")["id"])

    def pid(self, component: str) -> str:
        """Of a component that runs now."""
        return str(eventually(lambda: self.read("run/components.json")[component]["pid"], 60))

    @property
    def supervisor(self) -> str:
        return str(self.read("run/supervisor.json")["pid"])

    def signal(self, pid: str, name: str) -> None:
        self.testbed.run(["kill", f"-{name}", pid], user=self.user)

    def jobs(self) -> dict[str, list[Job]]:
        """Every job slurmctld remembers for this cluster, by pod UID."""
        listed = self.testbed.run(
            ["squeue", "--noheader", "--states=all", "-u", self.user, "-o", "%A|%T|%N|%k"], user=self.user
        )
        found: dict[str, list[Job]] = {}
        for line in listed.stdout.splitlines():
            job_id, state, nodes, comment = line.split("|", 3)
            parts = comment.split(" ")[0].split(":")
            # A request to start at once that Slurm refuses leaves a job that failed without a node.
            refused = state == "FAILED" and not nodes
            if not refused and len(parts) == 3 and parts[:2] == ["slurmlet", self.id]:
                found.setdefault(parts[2], []).append(Job(job_id, state.split()[0]))
        return found

    def live_jobs(self) -> dict[str, list[Job]]:
        alive = {uid: [job for job in jobs if not job.over] for uid, jobs in self.jobs().items()}
        return {uid: jobs for uid, jobs in alive.items() if jobs}

    def pod_uids(self) -> set[str]:
        argv = ["slurmlet", "kubectl", "--cluster", self.name, "get", "pods", "-A", "-o", "json"]
        listed = json.loads(self.testbed.run(argv, user=self.user).stdout)
        return {item["metadata"]["uid"] for item in listed["items"]}

    def check_jobs(self, *, at_once: bool = False) -> None:
        """Nothing submitted twice; every live job has a pod. A start at once that a dying hub broke off is cancelled."""
        ended = {"CANCELLED"} if at_once else set()
        jobs = {uid: [one for one in jobs if one.state not in ended] for uid, jobs in self.jobs().items()}
        twice = {uid: ran for uid, ran in jobs.items() if len(ran) > 1}
        assert not twice, f"pods with more than one job: {twice}"
        eventually(lambda: not (set(self.live_jobs()) - self.pod_uids()), 20)


def processes(testbed: Testbed, host: str, *words: str) -> list[Process]:
    """Processes of a host whose command line has one of the words."""
    said = testbed.run(["python3", "-c", PROCESSES, *words], host=host, user="root").stdout
    return [Process(*line.split(" ", 3)) for line in said.splitlines()]


def exists(testbed: Testbed, host: str, path: str) -> bool:
    return testbed.run(["test", "-e", path], host=host, user="root", check=False).ok


def traces(testbed: Testbed, marker: str, places: Sequence[str] = ("/tmp", "/var/tmp", "/home")) -> list[str]:
    """Files named after the marker, on any host: what a command hidden in data would have left."""
    # An unpacked image holds what the image holds.
    argv = [
        "find",
        *places,
        "-xdev",
        "-path",
        "/tmp/slurmlet-*/images",
        "-prune",
        "-o",
        "-name",
        f"*{marker}*",
        "-print",
    ]
    found = []
    for host in testbed.plan.hosts:
        said = testbed.run(argv, host=host, user="root", check=False).stdout
        found += [f"{host}:{line}" for line in said.splitlines()]
    return found
