"""A pod as a Slurm job: name, comment, size, script. Pure; `hub/pods/job_submission` hands the result to Slurm.

The comment's first word is the key by which a job is found again: `slurmlet:<cluster id>:<pod uid>`. The end of its name
is the same key, for sites whose plugins rewrite comments.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from slurmlet.model import quantities, sbatch_options
from slurmlet.model.ids import PodUid
from slurmlet.model.launch_mode import AUTO, BATCH, LAUNCH_ANNOTATION, launch_of
from slurmlet.model.pod_resources import pod_requests
from slurmlet.model.slurm_values import Job, JobSpec, Option

MARK = "slurmlet"
# What names of nodes begin with that have a job; a UID never does.
NODE_PREFIXES = ("pool-", "gang-")
JOB_ID_ANNOTATION = f"{sbatch_options.PREFIX}job-id"
HOST_ANNOTATION = f"{sbatch_options.PREFIX}host"
# Written by the hub, so not a typing error of the user's.
HUB_ANNOTATIONS = frozenset({JOB_ID_ANNOTATION, HOST_ANNOTATION})
_KNOWN_ANNOTATIONS = HUB_ANNOTATIONS | {LAUNCH_ANNOTATION}
# Options beside which Slurm refuses ours (it says "mutually exclusive").
_RIVALS = {
    "memory_mb": frozenset({"mem-per-cpu", "mem-per-gpu"}),
    "memory_mb_per_cpu": frozenset({"mem", "mem-per-gpu"}),
    "cpus_per_task": frozenset({"cpus-per-gpu", "tres-per-task"}),
}
# An extended resource for each generic resource of the site's; dots stand for colons: gres-gpu.a100 is gpu:a100.
GRES_PREFIX = f"{sbatch_options.PREFIX}gres-"
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


@dataclass(frozen=True)
class JobRequest:
    spec: JobSpec
    notes: tuple[str, ...]  # annotations without effect, for an event
    asked_by: tuple[str, ...] = ()  # annotations that gave options, should Slurm refuse them
    launch: str = AUTO


@dataclass(frozen=True)
class JobPlace:
    """Where the job's files are and what it belongs to."""

    cluster: str
    cluster_id: str
    partition: str
    runner: Path
    pod_dir: Path
    log: Path
    # For pods that do not say.
    launch: str = BATCH


def comment(cluster_id: str, uid: str, label: str = "") -> str:
    return f"{MARK}:{cluster_id}:{uid} {label}".rstrip()


def job_name(label: str, cluster_id: str, key: str) -> str:
    """For people first; its end is the key, for sites whose plugins rewrite comments."""
    return f"{label}.{cluster_id}.{key}"


def key_in_name(cluster_id: str, name: str) -> str:
    """What a job of this cluster is for, by its name: a pod's UID or a node; "" for jobs of others."""
    words = name.rsplit(".", 2)
    return words[2] if len(words) == 3 and words[1] == cluster_id else ""


def uid_of(cluster_id: str, job: Job) -> PodUid | None:
    """The pod a job belongs to, or None for a job that is not a pod's of this cluster."""
    words = job.comment.split(maxsplit=1)
    parts = words[0].split(":") if words else []
    if len(parts) == 3 and parts[:2] == [MARK, cluster_id]:
        return PodUid(parts[2])
    key = key_in_name(cluster_id, job.name)
    return PodUid(key) if key and not key.startswith(NODE_PREFIXES) else None


def job_request(pod: Mapping[str, Any], place: JobPlace) -> JobRequest:
    """The job of a pod. Raises RefusedPod when an annotation asks for what would break the job."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    extra, notes = sbatch_options.from_annotations(annotations)
    notes += [
        f"{key}: no such annotation, ignored"
        for key in sbatch_options.unknown_annotations(annotations, _KNOWN_ANNOTATIONS)
    ]
    name, namespace = metadata["name"], metadata["namespace"]
    label = f"cluster={place.cluster} pod={namespace}/{name}"
    asked = pod_requests(pod["spec"])
    memory_mb = quantities.ceil(asked.get("memory", Fraction(0)) / 2**20)
    spec = JobSpec(
        name=job_name(f"{name}.{namespace}.{place.cluster}", place.cluster_id, metadata["uid"]),
        script=_script(place),
        comment=comment(place.cluster_id, metadata["uid"], label),
        partition=place.partition,
        directory=str(place.pod_dir),
        output=str(place.log),
        nodes=1,
        tasks=1,
        cpus_per_task=max(1, quantities.ceil(asked.get("cpu", Fraction(1)))),
        # 0 would mean all of the node's memory.
        memory_mb=memory_mb or None,
        gres=tuple(sorted(gres_of(asked).items())),
    )
    used = tuple(sbatch_options.used(annotations))
    return JobRequest(with_options(spec, extra), tuple(notes), used, launch_of(annotations, place.launch))


def gres_of(asked: Mapping[str, Fraction]) -> dict[str, int]:
    """Generic resources of Slurm by name: GPUs of either maker, and whatever is asked for by its own name there."""
    found: dict[str, int] = {}
    for resource, amount in asked.items():
        name = "gpu" if resource in _GPU_RESOURCES else gres_name(resource)
        if name and amount > 0:
            found[name] = found.get(name, 0) + quantities.ceil(amount)
    return found


def asks_for_gpus(container: Mapping[str, Any]) -> bool:
    """Whether the container is to see the job's GPUs."""
    asked = gres_of(pod_requests({"containers": [container]}))
    return any(name.partition(":")[0] == "gpu" for name in asked)


def gres_name(resource: str) -> str:
    """`slurmlet.io/gres-<name>` is the generic resource <name>; "" for all others."""
    name = resource.removeprefix(GRES_PREFIX)
    return "" if name == resource else name.replace(".", ":")


def with_options(spec: JobSpec, extra: Sequence[Option]) -> JobSpec:
    """The job with options that a person wrote, less those sizes of ours that Slurm refuses beside one of them."""
    given = {name for name, _ in extra}
    per_task = [value or "" for name, value in extra if name == "tres-per-task"]
    if not any(re.match(r"(.*,)?cpu\b", value) for value in per_task):
        given.discard("tres-per-task")
    refused: dict[str, Any] = {field: None for field, rivals in _RIVALS.items() if given & rivals}
    return replace(spec, options=(*spec.options, *extra), **refused)


def _script(place: JobPlace) -> str:
    """Paths of ours only, quoted; nothing from the manifest."""
    # A site that signs in with a token hands it to the job; the pod has no business with it.
    # Isolated, and without site: the runner needs the standard library only, and starts 3 ms earlier.
    argv = shlex.join(["python3", "-IS", str(place.runner), str(place.pod_dir)])
    return f"#!/bin/sh\nunset SLURM_JWT\nexec {argv}\n"
