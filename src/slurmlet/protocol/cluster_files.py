"""Files of a cluster that more than one program reads: the hub writes them, runners, agents and the gateway read them.

Types only. Like messages, they may be read by a program of another version: what is not known is ignored.
"""

from __future__ import annotations

from typing import List, TypedDict


class HubFile(TypedDict):
    """hub.json: where the hub listens now. Written by the hub, read by runners, agents, the gateway, `up` and `status`."""

    host: str
    addresses: List[str]
    runner_port: int
    kubelet_port: int
    metrics_port: int
    server_name: str  # in the hub's certificate
    pod_network: bool
    pid: int


# A field of this name cannot be written in a class.
_NotIts = TypedDict("_NotIts", {"not": List[str]}, total=False)


class JobFile(_NotIts, total=False):
    """pods/<uid>/job.json: which job the pod has. Written by one hub, read by the next.

    "not": jobs that it is not to have.
    """

    intent_at: str  # a job is about to be submitted
    submitted_at: str
    job_id: str
    lane: str  # how it was started, where not by sbatch
    allocation: str  # on an allocation node: its job
    node: str
    started_at: str
