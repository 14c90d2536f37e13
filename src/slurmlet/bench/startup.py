"""How long from the request to the first instruction: a raw `sbatch` and a pod, one after the other, many times.

Both make a mark (marks.py) as their first act. The clock starts before the client program (`sbatch`, `kubectl create`) is
started, so that its own start counts too.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.errors import UserError
from slurmlet.base.layout import ClusterFiles
from slurmlet.base.processes import run
from slurmlet.bench import bench_image, start_marks
from slurmlet.bench.statistics import Summary, summary
from slurmlet.model.launch_mode import BATCH, LAUNCH_ANNOTATION
from slurmlet.model.slurm_values import JobSpec
from slurmlet.slurm.commands import CommandSlurm
from slurmlet.upstream.binaries import find


@dataclass(frozen=True)
class Comparison:
    sbatch: Summary
    pod: Summary

    def as_json(self) -> dict[str, Any]:
        return {
            "sbatch": self.sbatch.as_json(),
            "pod": self.pod.as_json(),
            "difference_s": round(self.pod.median_s - self.sbatch.median_s, 4),
            "ratio": round(self.pod.median_s / self.sbatch.median_s, 3),
        }


class StartupBench:
    """Needs a running cluster of this user and an image with a shell."""

    def __init__(
        self, cluster: str, image: str, *, validate: bool = True, launch: str = BATCH, runtime_class: str = ""
    ) -> None:
        kubectl = find("kubectl")
        files = ClusterFiles.named(cluster)
        if kubectl is None or not files.kubeconfig.exists():
            raise UserError(f"cluster {cluster!r} does not exist", hint=f"Run: slurmlet up -c {cluster}")
        self._kubectl = [str(kubectl), "--kubeconfig", str(files.kubeconfig)]
        self._slurm = CommandSlurm()
        self._image, self._launch, self._runtime_class = image, launch, runtime_class
        # kubectl reads the server's whole schema to check a manifest: more than a third of what it costs.
        self._create = ["create", "-f", "-"] if validate else ["create", "--validate=false", "-f", "-"]

    def compare(self, runs: int, on_run: Callable[[int, float, float], None]) -> Comparison:
        raw_s: list[float] = []
        pod_s: list[float] = []
        bench_image.have(self._image)
        with start_marks.workspace() as directory:
            self._pod(directory, "warm")
            for number, phase in enumerate(_phases(runs)):
                _wait_for(phase)
                raw_s.append(self._sbatch(directory, f"raw-{number}"))
                _wait_for(phase)
                pod_s.append(self._pod(directory, f"pod-{number}"))
                on_run(number, raw_s[-1], pod_s[-1])
        return Comparison(summary(raw_s), summary(pod_s))

    def _sbatch(self, directory: Path, name: str) -> float:
        mark = directory / name
        script = f"#!/bin/sh\n: > {shlex.quote(str(mark))}\n"
        began_s = time.time()
        asyncio.run(self._slurm.submit(JobSpec(name, script, output="/dev/null", tasks=1, memory_mb=32)))
        return start_marks.moment_s(mark) - began_s

    def _pod(self, directory: Path, name: str) -> float:
        pod = f"bench-{os.getpid()}-{name}"
        manifest = json.dumps(self._manifest(pod, directory, name))
        began_s = time.time()
        run([*self._kubectl, *self._create], stdin=manifest)
        try:
            return start_marks.moment_s(directory / name) - began_s
        finally:
            run([*self._kubectl, "delete", "pod", pod, "--wait=true"], timeout_s=start_marks.PATIENCE_S)

    def _manifest(self, pod: str, directory: Path, name: str) -> dict[str, Any]:
        container = {
            "name": "main",
            "image": self._image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", ': > "/bench/$MARK"'],
            "env": [{"name": "MARK", "value": name}],
            "resources": {"requests": {"cpu": "1", "memory": "32Mi"}},
            "volumeMounts": [{"name": "bench", "mountPath": "/bench"}],
        }
        chosen = {"runtimeClassName": self._runtime_class} if self._runtime_class else {}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod, "annotations": {LAUNCH_ANNOTATION: self._launch}},
            "spec": {
                **chosen,
                "restartPolicy": "Never",
                "containers": [container],
                "volumes": [{"name": "bench", "hostPath": {"path": str(directory)}}],
            },
        }


def _phases(runs: int) -> list[float]:
    """slurmctld starts batch jobs once a second, so what a run costs depends on where in the second it begins. Both kinds
    begin at the same places, spread evenly over it; their medians are then comparable after few runs."""
    phases = [(number + 0.5) / runs for number in range(runs)]
    random.shuffle(phases)
    return phases


def _wait_for(phase: float) -> None:
    time.sleep((phase - time.time()) % 1.0)
