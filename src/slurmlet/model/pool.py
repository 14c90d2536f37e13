"""The elastic pool: which allocation nodes to add, to drain, to release. Pure; `hub/allocations/pool_controller` acts on it.

A pool node is one Slurm job with one agent. It is never taken from under a pod: it is cordoned first, what controllers
manage moves to others, the rest finishes; only then does its job end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmlet.model.ids import JobId
from slurmlet.model.pod_job import NODE_PREFIXES, key_in_name
from slurmlet.model.sbatch_options import parse_words
from slurmlet.model.slurm_values import Job, Option

MARK = "slurmlet-pool"
RETIRING_ANNOTATION = "slurmlet.io/retiring"
# A member is replaced when this much of its time is left, or a tenth of it where that is less.
_RENEW_BEFORE_S = 300.0
_RENEW_SHARE = 0.1


@dataclass(frozen=True)
class PoolSpec:
    """The desired pool: pool.json."""

    least: int = 0
    most: int = 0
    options: tuple[Option, ...] = ()  # of the job of each member
    idle_s: float = 120.0
    unwanted: frozenset[str] = frozenset()  # members that were named to go


def spec_of(raw: Mapping[str, Any]) -> PoolSpec:
    return PoolSpec(
        least=int(raw.get("least", 0)),
        most=int(raw.get("most", 0)),
        options=_options(raw.get("options", ())),
        idle_s=float(raw.get("idle_s", PoolSpec.idle_s)),
        unwanted=frozenset(raw.get("unwanted", ())),
    )


def _options(raw: Sequence[Any]) -> tuple[Option, ...]:
    """Pairs of name and value; words of sbatch's where an earlier slurmlet wrote them."""
    if all(isinstance(one, str) for one in raw):
        return tuple(parse_words("the pool's --sbatch", [str(one) for one in raw]))
    return tuple((str(name), None if value is None else str(value)) for name, value in raw)


@dataclass(frozen=True)
class Member:
    name: str
    job_id: JobId
    queued: bool
    ready: bool = False
    pods: int = 0
    idle_s: float = 0.0
    left_s: float | None = None  # of its time limit; None: no limit
    limit_s: float | None = None
    retiring: str = ""  # why, when it is on its way out


@dataclass(frozen=True)
class Plan:
    add: int = 0
    retire: tuple[tuple[str, str], ...] = ()  # (name, why)
    release: tuple[str, ...] = ()  # empty: their jobs may end
    # Members whose pods may be moved: successors are there to take them.
    evict: tuple[str, ...] = ()


def plan(spec: PoolSpec, members: Sequence[Member], waiting_pods: int) -> Plan:
    retire = {one.name: why for one in members if not one.retiring and (why := _reason(spec, one))}
    live = [one for one in members if not one.retiring and one.name not in retire]
    coming = sum(not one.ready for one in live)
    # One more for each pod that waits, less those that are on their way already.
    wanted = max(spec.least, min(spec.most, len(live) + max(0, waiting_pods - coming)))
    retire |= _spare(spec, live, waiting_pods)
    leaving = [one for one in members if one.retiring]
    settled = sum(one.ready for one in live) >= min(wanted, spec.least)
    return Plan(
        add=max(0, wanted - len(live)),
        retire=tuple(retire.items()),
        release=tuple(one.name for one in leaving if one.queued or not one.pods),
        evict=tuple(one.name for one in leaving if one.pods and settled),
    )


def _reason(spec: PoolSpec, member: Member) -> str:
    if member.name in spec.unwanted:
        return "removed"
    if member.left_s is not None and not member.queued and member.left_s < _margin_s(member):
        return "its time limit is near"
    return ""


def _margin_s(member: Member) -> float:
    share_s = _RENEW_SHARE * member.limit_s if member.limit_s is not None else _RENEW_BEFORE_S
    return min(_RENEW_BEFORE_S, share_s)


def _spare(spec: PoolSpec, live: Sequence[Member], waiting_pods: int) -> dict[str, str]:
    """Beyond `most`: all of them, those that matter least first. Beyond `least`: what has been idle for long."""
    ranked = sorted(live, key=lambda one: (not one.queued, one.pods, -one.idle_s))
    found = {one.name: "the pool is larger than wanted" for one in ranked[: max(0, len(live) - spec.most)]}
    room = 0 if waiting_pods else max(0, len(live) - len(found) - spec.least)
    idle = [one for one in ranked if one.name not in found and _is_idle(spec, one)]
    return found | {one.name: "idle" for one in idle[:room]}


def _is_idle(spec: PoolSpec, member: Member) -> bool:
    return member.queued or (not member.pods and member.idle_s >= spec.idle_s)


def comment(cluster_id: str, node: str) -> str:
    return f"{MARK}:{cluster_id}:{node}"


def node_of(cluster_id: str, job: Job) -> str:
    """The node that a job of this cluster's pool or of a gang serves; "" for all others."""
    words = job.comment.split(maxsplit=1)
    parts = words[0].split(":") if words else []
    if len(parts) == 3 and parts[:2] == [MARK, cluster_id]:
        return parts[2]
    key = key_in_name(cluster_id, job.name)
    return key if key.startswith(NODE_PREFIXES) else ""
