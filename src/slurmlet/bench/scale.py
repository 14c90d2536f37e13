"""How many pods a second, beside raw sbatch in the same run, and what they cost the hub.

Batches of both kinds take turns, so that a busy host or a slow slurmctld meets both alike. Each job writes an empty file
on the shared file system as its first act and ends; a batch has started when all files are there, and is gone when
neither Slurm nor the API server has anything of it. The hub is watched from outside, through /proc. A crowd of further
pods may be there all the while, their jobs held in Slurm's queue: what the hub needs to know many.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.base.files import read_json
from slurmlet.base.layout import ClusterFiles
from slurmlet.bench import bench_image
from slurmlet.kube.client import METADATA_LIST, ApiClient, ApiError
from slurmlet.kube.credentials import by_certificate
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage, holds_resources, stage_of
from slurmlet.model.slurm_values import JobSpec
from slurmlet.slurm.commands import CommandSlurm

_PATIENCE_S = 600.0
_LOOK_S = 0.05
_SAMPLE_S = 0.25
_CROWD_LOOK_S = 1.0
# After the last job is queued: until the hub has written what it knows.
_SETTLE_S = 15.0
_MANY = 500
# As many sbatch at once as the hub runs (hub/hub_settings.py): the comparison is about the way, not about the crowd.
_SBATCH_AT_ONCE = 8
# Not kubectl: it holds itself back to five requests a second.
_REQUESTS_AT_ONCE = 16
_PODS = "/api/v1/namespaces/default/pods"
_LABEL = "slurmlet.io/bench"
_PART_LABEL = "slurmlet.io/bench-part"


@dataclass(frozen=True)
class Batch:
    """One batch: seconds from the first request until all were accepted, had started, were gone."""

    count: int
    accepted_s: float
    started_s: float
    gone_s: float

    @property
    def per_s(self) -> float:
        return self.count / self.gone_s

    def as_json(self) -> dict[str, Any]:
        times = {
            name: round(getattr(self, name), 3) for name in ("accepted_s", "started_s", "gone_s", "per_s")
        }
        return {"count": self.count, **times}


@dataclass(frozen=True)
class HubSample:
    at_s: float  # since the beginning of the run
    memory_bytes: int
    cpu_s: float


@dataclass(frozen=True)
class Crowd:
    """Pods whose jobs are held: seconds from the first request until all were accepted, were queued in Slurm."""

    count: int
    accepted_s: float
    queued_s: float
    memory_bytes: int  # of the hub, some seconds later

    def as_json(self) -> dict[str, Any]:
        times = {name: round(getattr(self, name), 3) for name in ("accepted_s", "queued_s")}
        return {"count": self.count, **times, "memory_bytes": self.memory_bytes}


@dataclass(frozen=True)
class Scale:
    sbatch: list[Batch]
    pods: list[Batch]
    hub: list[HubSample] = field(default_factory=list)
    idle_memory_bytes: int = 0
    # With every pod of the largest batch known to the hub.
    full_memory_bytes: int = 0
    crowd: Crowd | None = None

    def as_json(self) -> dict[str, Any]:
        rates = {name: _rate(batches) for name, batches in (("sbatch", self.sbatch), ("pods", self.pods))}
        return {
            "sbatch": {"per_s": round(rates["sbatch"], 2), "batches": [one.as_json() for one in self.sbatch]},
            "pods": {"per_s": round(rates["pods"], 2), "batches": [one.as_json() for one in self.pods]},
            "ratio": round(rates["pods"] / rates["sbatch"], 3),
            "hub": {
                "idle_memory_bytes": self.idle_memory_bytes,
                "full_memory_bytes": self.full_memory_bytes,
                "peak_memory_bytes": max((one.memory_bytes for one in self.hub), default=0),
                "cpu_s": round(self.hub[-1].cpu_s - self.hub[0].cpu_s, 2) if self.hub else 0.0,
                "samples": [[round(one.at_s, 2), one.memory_bytes, round(one.cpu_s, 2)] for one in self.hub],
            },
            "known": self.crowd.as_json() if self.crowd is not None else None,
        }


def _rate(batches: list[Batch]) -> float:
    return sum(one.count for one in batches) / sum(one.gone_s for one in batches)


def hub_usage(pid: int, proc: Path = Path("/proc")) -> tuple[int, float]:
    """(resident bytes, CPU seconds) of a process and nothing of its children. Raises OSError."""
    fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    resident = int((proc / str(pid) / "statm").read_text().split()[1])
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return resident * os.sysconf("SC_PAGE_SIZE"), cpu_s


class HubWatch:
    """Samples the hub in a thread of its own while the context lasts."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._began_s = time.monotonic()
        self.samples: list[HubSample] = []
        self._thread = threading.Thread(target=self._run, name="hub watch", daemon=True)

    def __enter__(self) -> HubWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self.samples.append(HubSample(time.monotonic() - self._began_s, *hub_usage(self._pid)))
            if self._stop.wait(_SAMPLE_S):
                return


class ScaleBench:
    """Needs a running cluster of this user on this host, and an image with a shell."""

    def __init__(self, cluster: str, image: str, runtime_class: str = "") -> None:
        self._files = ClusterFiles.named(cluster)
        config = read_json(self._files.config)
        if not isinstance(config, dict):
            raise UserError(f"cluster {cluster!r} does not exist", hint=f"Run: slurmlet up -c {cluster}")
        self._server = f"https://{config['api_address']}:{config['api_port']}"
        self._slurm = CommandSlurm()
        self._image = image
        self._choice = {"runtimeClassName": runtime_class} if runtime_class else {}
        self._run_id = f"bench-{os.getpid()}"

    def measure(
        self,
        pods: int,
        batch: int,
        on_batch: Callable[[Batch, Batch], None],
        known: int = 0,
        on_crowd: Callable[[Crowd], None] = lambda _: None,
    ) -> Scale:
        pid = self._hub_pid()
        bench_image.have(self._image)
        counts = [min(batch, pods - start) for start in range(0, pods, batch)]
        sbatch: list[Batch] = []
        of_pods: list[Batch] = []
        full_bytes = 0
        with self._workspace() as directory, HubWatch(pid) as watch:
            self._pods(directory, "warm", 1)
            idle_bytes, _ = hub_usage(pid)
            crowd = asyncio.run(self._gather_crowd(directory, known)) if known else None
            if crowd is not None:
                on_crowd(crowd)
            for number, count in enumerate(counts):
                sbatch.append(self._sbatch(directory, f"raw-{number}", count))
                made, memory_bytes = self._pods(directory, f"pods-{number}", count)
                of_pods.append(made)
                full_bytes = max(full_bytes, memory_bytes)
                on_batch(sbatch[-1], made)
        return Scale(sbatch, of_pods, watch.samples, idle_bytes, full_bytes, crowd)

    def _hub_pid(self) -> int:
        told = read_json(self._files.hub)
        pid = int(told["pid"]) if isinstance(told, dict) and told.get("pid") else 0
        if not pid or not Path(f"/proc/{pid}").is_dir():
            raise UserError(
                "the hub is not running on this host",
                hint=f"Run this on {(told or {}).get('host', 'its host')}.",
            )
        return pid

    @contextlib.contextmanager
    def _workspace(self) -> Iterator[Path]:
        # In the home directory: all hosts must see it.
        with tempfile.TemporaryDirectory(prefix=".slurmlet-bench-", dir=Path.home()) as name:
            try:
                yield Path(name)
            finally:
                asyncio.run(self._delete_left())

    async def _delete_left(self) -> None:
        async with self._client() as client:
            left = await self._listed(client, "")
            await _together(_delete(client, name) for name in left)
            await self._until_gone(client, "")

    async def _until_gone(self, client: ApiClient, part: str) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while left := await self._listed(client, part):
            if time.monotonic() > deadline_s:
                raise SlurmletError(
                    "the pods of the measurement are not deleted", hint="Run: slurmlet kubectl get pods"
                )
            await asyncio.sleep(_LOOK_S if len(left) < _MANY else _CROWD_LOOK_S)

    def _client(self) -> ApiClient:
        pki = self._files.pki
        return ApiClient(by_certificate(self._server, pki / "ca.crt", pki / "admin.crt", pki / "admin.key"))

    async def _listed(self, client: ApiClient, part: str) -> list[str]:
        """Names of this run's pods, or of one part of them."""
        chosen = f"{_LABEL}={self._run_id}" + (f",{_PART_LABEL}={part}" if part else "")
        found = await client.get(_PODS, accept=METADATA_LIST, labelSelector=chosen)
        return [item["metadata"]["name"] for item in found.get("items") or ()]

    def _sbatch(self, directory: Path, name: str, count: int) -> Batch:
        marks = _marks(directory, name, count)

        async def submit_all() -> set[JobId]:
            slots = asyncio.Semaphore(_SBATCH_AT_ONCE)

            async def submit(mark: Path) -> JobId:
                script = f"#!/bin/sh\n: > {shlex.quote(str(mark))}\n"
                async with slots:
                    return await self._slurm.submit(
                        JobSpec(name, script, output="/dev/null", tasks=1, memory_mb=32)
                    )

            return set(await asyncio.gather(*map(submit, marks)))

        began_s = time.monotonic()
        jobs = asyncio.run(submit_all())
        accepted_s = time.monotonic() - began_s
        started_s = _wait(lambda: all(mark.exists() for mark in marks), "started") - began_s
        gone_s = _wait(lambda: not self._live(jobs), "ended") - began_s
        return Batch(count, accepted_s, started_s, gone_s)

    def _live(self, jobs: set[JobId]) -> bool:
        listed = asyncio.run(self._slurm.jobs())
        return any(job.job_id in jobs and holds_resources(job.state) for job in listed)

    def _pods(self, directory: Path, name: str, count: int) -> tuple[Batch, int]:
        """The batch, and the hub's memory when all its pods were known and had started."""
        return asyncio.run(self._pods_in_loop(directory, name, _marks(directory, name, count)))

    async def _pods_in_loop(self, directory: Path, part: str, marks: list[Path]) -> tuple[Batch, int]:
        items = [self._manifest(directory, part, mark.name) for mark in marks]
        async with self._client() as client:
            began_s = time.monotonic()
            await _together(client.create(_PODS, item) for item in items)
            accepted_s = time.monotonic() - began_s
            started = asyncio.to_thread(_wait, lambda: all(mark.exists() for mark in marks), "started")
            started_s = await started - began_s
            memory_bytes, _ = hub_usage(self._hub_pid())
            await _together(_delete(client, item["metadata"]["name"]) for item in items)
            await self._until_gone(client, part)
            gone_s = time.monotonic() - began_s
        return Batch(len(marks), accepted_s, started_s, gone_s), memory_bytes

    async def _gather_crowd(self, directory: Path, count: int) -> Crowd:
        items = [self._manifest(directory, "known", mark.name) for mark in _marks(directory, "known", count)]
        for item in items:
            item["metadata"]["annotations"] = {"slurmlet.io/sbatch": "--hold"}
            # As most pods have it; it is a third of such a pod's size.
            item["spec"]["automountServiceAccountToken"] = True
        prefix = f"{self._run_id}-known-"

        def queued() -> bool:
            listed = asyncio.run(self._slurm.jobs())
            waiting = (job for job in listed if stage_of(job.state) is Stage.QUEUED)
            return sum(job.name.startswith(prefix) for job in waiting) >= count

        async with self._client() as client:
            began_s = time.monotonic()
            await _together(client.create(_PODS, item) for item in items)
            accepted_s = time.monotonic() - began_s
        queued_s = await asyncio.to_thread(_wait, queued, "been queued", _CROWD_LOOK_S) - began_s
        await asyncio.sleep(_SETTLE_S)
        memory_bytes, _ = hub_usage(self._hub_pid())
        return Crowd(count, accepted_s, queued_s, memory_bytes)

    def _manifest(self, directory: Path, part: str, mark: str) -> dict[str, Any]:
        container = {
            "name": "main",
            "image": self._image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", ': > "/bench/$MARK"'],
            "env": [{"name": "MARK", "value": mark}],
            "resources": {"requests": {"cpu": "1", "memory": "32Mi"}},
            "volumeMounts": [{"name": "bench", "mountPath": "/bench"}],
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{self._run_id}-{mark}",
                "labels": {_LABEL: self._run_id, _PART_LABEL: part},
            },
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                **self._choice,
                "containers": [container],
                "volumes": [{"name": "bench", "hostPath": {"path": str(directory)}}],
            },
        }


async def _delete(client: ApiClient, name: str) -> None:
    try:
        await client.delete(f"{_PODS}/{name}", {})
    except ApiError as error:
        if error.status != 404:
            raise


async def _together(requests: Iterable[Awaitable[object]]) -> None:
    slots = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def one(request: Awaitable[object]) -> None:
        async with slots:
            await request

    await asyncio.gather(*map(one, requests))


def _marks(directory: Path, name: str, count: int) -> list[Path]:
    return [directory / f"{name}-{number}" for number in range(count)]


def _wait(done: Callable[[], bool], what: str, every_s: float = _LOOK_S) -> float:
    """The moment (monotonic) it was done."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not done():
        if time.monotonic() > deadline_s:
            raise SlurmletError(
                f"not all jobs or pods have {what} within {_PATIENCE_S:g} s",
                hint="Run: squeue; slurmlet kubectl get pods",
            )
        time.sleep(every_s)
    return time.monotonic()
