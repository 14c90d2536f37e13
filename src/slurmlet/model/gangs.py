"""Gangs: pods that start together or not at all, in one Slurm allocation that is theirs alone. Pure.

The API server itself holds a gang's pods back (`policies`: a scheduling gate for every pod that is annotated), so none of
them can be placed before `hub/allocations/gang_controller` has an allocation for all. The allocation is sized in
equal slots, one per pod, each as large as the largest: whatever order the scheduler places them in, every pod finds room.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.model import quantities, sbatch_options
from slurmlet.model.partition_node import DEFAULT_LABEL, KIND_LABEL, PARTITION_LABEL
from slurmlet.model.pod_job import gres_of, with_options
from slurmlet.model.pod_resources import pod_requests
from slurmlet.model.slurm_values import JobSpec

Obj = dict[str, Any]
# Annotation of pods and Jobs; label of the pods; gate of the pods; label and taint of the nodes.
GANG = "slurmlet.io/gang"
SIZE_ANNOTATION = "slurmlet.io/gang-size"
_NODE = re.compile(r"(gang-[0-9a-f]{10}-[0-9a-f]{6})-\d+")
_ALLOCATION = re.compile(r"gang-([0-9a-f]{10})-[0-9a-f]{6}")
_OVER = ("Succeeded", "Failed")


# Names: allocation `gang-<key of the gang>-<random>`, its nodes that and a number.


def allocation_of(node: str) -> str:
    """The gang's allocation that a Node belongs to, "" for all other nodes."""
    found = _NODE.fullmatch(node)
    return found.group(1) if found else ""


def key_of_allocation(name: str) -> str:
    """The gang that an allocation is for; "" where the name is not that of one."""
    found = _ALLOCATION.fullmatch(name)
    return found.group(1) if found else ""


def key_of(pod: Mapping[str, Any]) -> str:
    """The same for all pods of a gang. Without a size of its own a gang is the pods of one Job."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    owner = "" if SIZE_ANNOTATION in annotations else str(_controller(pod).get("uid", ""))
    said = "\0".join((metadata["namespace"], annotations.get(GANG, ""), owner))
    return hashlib.sha256(said.encode()).hexdigest()[:10]


def name_of(pod: Mapping[str, Any]) -> str:
    """For people: what is written, or the Job's name where it only says that it is one."""
    name = (pod["metadata"].get("annotations") or {}).get(GANG, "")
    return name if name not in ("", "true") else str(_controller(pod).get("name") or name or "gang")


def _controller(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((one for one in owners if one.get("controller")), {})


def job_of(pod: Mapping[str, Any]) -> str:
    """The Job whose parallelism is the gang's size; "" where there is none to ask."""
    owner = _controller(pod)
    if SIZE_ANNOTATION in (pod["metadata"].get("annotations") or {}) or owner.get("kind") != "Job":
        return ""
    return str(owner["name"])


def size_of(pod: Mapping[str, Any], job: Mapping[str, Any] | None) -> int:
    """How many pods make the gang complete; 0 when nobody says."""
    said = (pod["metadata"].get("annotations") or {}).get(SIZE_ANNOTATION, "")
    if said.isdecimal():
        return int(said)
    if job is None:
        return 0
    spec, status = job["spec"], job.get("status") or {}
    parallel = int(spec.get("parallelism", 1))
    if spec.get("completions") is None:
        return parallel
    return min(parallel, int(spec["completions"]) - int(status.get("succeeded") or 0))


def is_over(pod: Mapping[str, Any]) -> bool:
    """Whether it no longer needs its place: ended, or deleted before it had one."""
    ended = (pod.get("status") or {}).get("phase") in _OVER
    return ended or (is_leaving(pod) and not pod["spec"].get("nodeName"))


def is_leaving(pod: Mapping[str, Any]) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_held(pod: Mapping[str, Any]) -> bool:
    return any(gate["name"] == GANG for gate in pod["spec"].get("schedulingGates") or ())


def is_held_by_us_alone(pod: Mapping[str, Any]) -> bool:
    return [gate["name"] for gate in pod["spec"].get("schedulingGates") or ()] == [GANG]


def release_patch(pod: Mapping[str, Any], allocation: str) -> Obj:
    """Lets the scheduler have the pod, for nodes of this allocation only."""
    tolerations = [*(pod["spec"].get("tolerations") or ()), {**taint(allocation), "operator": "Equal"}]
    return {
        # Whoever changed the pod in this moment may have put another gate on it.
        "metadata": {"resourceVersion": pod["metadata"]["resourceVersion"]},
        "spec": {"schedulingGates": [], "nodeSelector": {GANG: allocation}, "tolerations": tolerations},
    }


def taint(allocation: str) -> dict[str, str]:
    return {"key": GANG, "value": allocation, "effect": "NoSchedule"}


# The Slurm job.


def sized(spec: JobSpec, pods: Sequence[Mapping[str, Any]]) -> JobSpec:
    """The job with a slot per pod. Raises RefusedPod when an annotation asks for what would break it."""
    asked: dict[str, Fraction] = {}
    for pod in pods:
        for resource, amount in pod_requests(pod["spec"]).items():
            asked[resource] = max(asked.get(resource, Fraction(0)), amount)
    cpus = max(1, quantities.ceil(asked.get("cpu", Fraction(1))))
    memory_mb = quantities.ceil(asked.get("memory", Fraction(0)) / 2**20)
    # Not memory of the host: how many slots a host has is for Slurm to say.
    per_cpu_mb = -(-memory_mb // cpus) or None
    spec = replace(spec, tasks=len(pods), cpus_per_task=cpus, memory_mb_per_cpu=per_cpu_mb)
    if gres := gres_of(asked):
        # Per host too, and there is no such option per task that all versions know: one pod on each.
        spec = replace(spec, nodes=len(pods), tasks_per_node=1, gres=tuple(sorted(gres.items())))
    for pod in pods:
        if (pod["spec"].get("nodeSelector") or {}).get(KIND_LABEL) == "partition":
            raise RefusedPod(
                "a gang has an allocation of its own, but its pods select partition nodes",
                hint="Remove runtimeClassName queue and the node selector, or the annotation of the gang.",
            )
    extra, _ = sbatch_options.from_annotations(pods[0]["metadata"].get("annotations") or {})
    if any(name == "ntasks" for name, _ in extra):
        raise RefusedPod(
            "--ntasks of a gang is the number of its pods", hint="Remove --ntasks from the annotation."
        )
    return with_options(spec, extra)


def script(runner: str, directory: str) -> str:
    """An agent on each host, whose node directory is `directory` and the host's number. Paths of ours only."""
    start = 'unset SLURM_JWT; exec python3 -IS "$0" agent "$1-$SLURM_NODEID"'
    argv = shlex.join(["sh", "-c", start, runner, directory])
    return (
        "#!/bin/sh\n"
        # Of the job as a whole; they would contradict what the step asks for.
        "unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK"
        " SLURM_MEM_PER_CPU SLURM_TRES_PER_TASK\n"
        "export SLURM_CPU_BIND=none\n"
        'exec srun --kill-on-bad-exit=1 --overlap --mem=0 --nodes="$SLURM_JOB_NUM_NODES"'
        ' --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --input=none ' + argv + "\n"
    )


def partition_for(pod: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]]) -> str:
    """What the pod's node selector names, else the one that pods go to by default. `nodes`: those of partitions."""
    wanted = (pod["spec"].get("nodeSelector") or {}).get(PARTITION_LABEL)
    names: dict[bool, list[str]] = {True: [], False: []}
    for node in nodes:
        name = str(node["metadata"]["annotations"][PARTITION_LABEL])
        if wanted is not None and node["metadata"]["labels"].get(PARTITION_LABEL) == wanted:
            return name
        names[node["metadata"]["labels"].get(DEFAULT_LABEL) == "true"].append(name)
    return next(iter([*names[True], *sorted(names[False])]), "")


# What holds the pods back.


def policies() -> list[tuple[str, Obj]]:
    """(name, spec) of admission policies that the API server evaluates by itself: no webhook, no port."""
    annotated = f"has(object.metadata.annotations) && '{GANG}' in object.metadata.annotations"
    name, size = (f"object.metadata.annotations['{key}']" for key in (GANG, SIZE_ANNOTATION))
    hold = (
        f"Object{{metadata: Object.metadata{{labels: {{'{GANG}': {name}}}}}, "
        f"spec: Object.spec{{schedulingGates: [Object.spec.schedulingGates{{name: '{GANG}'}}]}}}}"
    )
    template = (
        "Object{spec: Object.spec{template: Object.spec.template{metadata: Object.spec.template.metadata{"
    )
    hand_on = (
        f"{template}annotations: '{SIZE_ANNOTATION}' in object.metadata.annotations "
        f"? {{'{GANG}': {name}, '{SIZE_ANNOTATION}': {size}}} : {{'{GANG}': {name}}}}}}}}}}}"
    )
    return [
        ("slurmlet-gang-pods", _policy("", "pods", annotated, hold)),
        ("slurmlet-gang-jobs", _policy("batch", "jobs", annotated, hand_on)),
    ]


def _policy(group: str, resource: str, condition: str, expression: str) -> Obj:
    rule = {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [resource]}
    return {
        "matchConstraints": {"resourceRules": [rule]},
        "matchConditions": [{"name": "annotated", "expression": condition}],
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}],
    }
