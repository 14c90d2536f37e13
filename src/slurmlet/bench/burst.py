"""Latency of interactive requests while very many pods are created at once.

A pod that stands by is asked (`kubectl exec`, `kubectl logs`) again and again: while nothing else happens, while as many raw
jobs go through Slurm, and while a Job's pods do, all on the same machine. What the raw jobs take of it is nobody's fault;
what the pods take beyond that is ours. The node's lease is watched too: one that grows old loses the node.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.base.layout import ClusterFiles
from slurmlet.base.processes import run
from slurmlet.bench import bench_image
from slurmlet.bench.statistics import summary
from slurmlet.model.job_states import holds_resources
from slurmlet.model.slurm_values import JobSpec
from slurmlet.slurm.commands import CommandSlurm
from slurmlet.upstream.binaries import find

CALM, JOBS, PODS = "nothing else", "raw jobs", "pods"
_CALM_ASKS = 10
_ASK_LIMIT_S = 120.0
_PATIENCE_S = 900.0
_PAUSE_S = 0.5
_SBATCH_AT_ONCE = 8


@dataclass
class Phase:
    name: str
    count: int = 0
    took_s: float = 0.0
    exec_s: list[float] = field(default_factory=list)
    logs_s: list[float] = field(default_factory=list)
    lease_s: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "while": self.name,
            "count": self.count,
            "took_s": round(self.took_s, 2),
            "exec": {**summary(self.exec_s).as_json(), "worst_s": round(max(self.exec_s), 4)},
            "logs": {**summary(self.logs_s).as_json(), "worst_s": round(max(self.logs_s), 4)},
            "lease_worst_age_s": round(max(self.lease_s), 2),
        }


class BurstBench:
    """Needs a running cluster of this user and an image with a shell."""

    def __init__(self, cluster: str, image: str) -> None:
        kubectl = find("kubectl")
        files = ClusterFiles.named(cluster)
        if kubectl is None or not files.kubeconfig.exists():
            raise UserError(f"cluster {cluster!r} does not exist", hint=f"Run: slurmlet up -c {cluster}")
        self._kubectl = [str(kubectl), "--kubeconfig", str(files.kubeconfig)]
        self._image = image
        self._name = f"burst-{os.getpid()}"
        self._node = ""
        self._slurm = CommandSlurm()

    def measure(self, count: int, on_ask: Callable[[str, float, int], None]) -> list[Phase]:
        """`on_ask` gets the phase, the last exec's seconds, and how many are through."""
        bench_image.have(self._image)
        with self._steady():
            calm = Phase(CALM)
            for number in range(_CALM_ASKS):
                self._ask(calm)
                on_ask(CALM, calm.exec_s[-1], number + 1)
            return [calm, self._jobs(count, on_ask), self._pods(count, on_ask)]

    @contextmanager
    def _steady(self) -> Iterator[None]:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self._name},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [self._container("sleep 100000")]},
        }
        try:
            self._create(pod)
            self._do("wait", "--for=condition=Ready", "pod", self._name, f"--timeout={_ASK_LIMIT_S:g}s")
            self._node = self._do("get", "pod", self._name, "-o", "jsonpath={.spec.nodeName}")
            yield
        finally:
            for kind in ("job", "pod"):
                run(
                    [*self._kubectl, "delete", kind, self._name, "--ignore-not-found"],
                    check=False,
                    timeout_s=_PATIENCE_S,
                )

    def _container(self, script: str) -> dict[str, Any]:
        return {
            "name": "main",
            "image": self._image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", script],
            "resources": {"requests": {"cpu": "1", "memory": "16Mi"}},
        }

    # Asking.

    def _ask(self, phase: Phase) -> None:
        phase.exec_s.append(self._timed("exec", self._name, "--", "true"))
        phase.logs_s.append(self._timed("logs", self._name))
        renewed = self._do(
            "get", "lease", "-n", "kube-node-lease", self._node, "-o", "jsonpath={.spec.renewTime}"
        )
        age = datetime.now(UTC) - datetime.fromisoformat(renewed)
        phase.lease_s.append(age.total_seconds())

    def _timed(self, *arguments: str) -> float:
        began_s = time.monotonic()
        self._do(*arguments)
        return time.monotonic() - began_s

    def _do(self, *arguments: str) -> str:
        return run([*self._kubectl, *arguments], timeout_s=_ASK_LIMIT_S).stdout

    def _create(self, manifest: dict[str, Any]) -> None:
        run([*self._kubectl, "create", "-f", "-"], stdin=json.dumps(manifest))

    # What goes on meanwhile.

    def _jobs(self, count: int, on_ask: Callable[[str, float, int], None]) -> Phase:
        spec = JobSpec(self._name, "#!/bin/sh\ntrue\n", output="/dev/null", cpus_per_task=1, memory_mb=16)
        began_s = time.monotonic()
        with ThreadPoolExecutor(_SBATCH_AT_ONCE) as pool:
            sent = [pool.submit(asyncio.run, self._slurm.submit(spec)) for _ in range(count)]

            def through() -> int:
                accepted = sum(each.done() and bool(each.result()) for each in sent)
                queue = asyncio.run(self._slurm.jobs())
                live = [job for job in queue if job.name == self._name and holds_resources(job.state)]
                return max(0, accepted - len(live))

            return self._until(Phase(JOBS, count), began_s, through, on_ask)

    def _pods(self, count: int, on_ask: Callable[[str, float, int], None]) -> Phase:
        template = {"spec": {"restartPolicy": "Never", "containers": [self._container("true")]}}
        began_s = time.monotonic()
        self._create(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": self._name},
                "spec": {"completions": count, "parallelism": count, "template": template},
            }
        )

        def through() -> int:
            return int(self._do("get", "job", self._name, "-o", "jsonpath={.status.succeeded}") or 0)

        return self._until(Phase(PODS, count), began_s, through, on_ask)

    def _until(
        self,
        phase: Phase,
        began_s: float,
        through: Callable[[], int],
        on_ask: Callable[[str, float, int], None],
    ) -> Phase:
        while True:
            self._ask(phase)
            done = through()
            on_ask(phase.name, phase.exec_s[-1], done)
            phase.took_s = time.monotonic() - began_s
            if done >= phase.count:
                return phase
            if phase.took_s > _PATIENCE_S:
                raise SlurmletError(
                    f"{done} of {phase.count} {phase.name} were done after {_PATIENCE_S:g} s",
                    hint="Run: squeue; slurmlet kubectl get pods",
                )
            time.sleep(_PAUSE_S)
