"""What the operator process is told when it starts. Everything about a cluster or a set of workers is in their objects."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field

from slurmlet.base.errors import UserError
from slurmlet.kube.leader_lease import LeaseTimes
from slurmlet.operators.provisioning.provider_parts import PROVIDER_PARTS, WebhookSettings

# Each can be left out.
LEADING_PARTS = ("autoscaler", "detach", "node-records", "power-saving")
PARTS = (*LEADING_PARTS, *PROVIDER_PARTS)


@dataclass(frozen=True)
class OperatorSettings:
    namespace: str = ""  # whose WorkerSets and SlurmClusters are looked after; "": all
    parts: frozenset[str] = frozenset(PARTS)
    # Namespaces whose SlurmClusters may use the Slurm of the operator's own host: its commands and sockets.
    trusted: frozenset[str] = frozenset()
    # How often the queue is looked at, in seconds: each look asks slurmctld for all jobs and all nodes.
    interval_s: float = 15.0
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 9810  # 0: any
    lease_namespace: str = "default"
    lease_name: str = "slurmlet-provision"
    identity: str = ""
    lease_times: LeaseTimes = field(default_factory=LeaseTimes)
    webhooks: WebhookSettings = field(default_factory=WebhookSettings)

    @property
    def own_name(self) -> str:
        return self.identity or f"{socket.gethostname()}-{os.getpid()}"


def chosen_parts(without: Iterable[str], known: Iterable[str] = PARTS) -> frozenset[str]:
    """Raises UserError for a part that there is not."""
    names, off = frozenset(known), frozenset(without)
    if unknown := sorted(off - names):
        raise UserError(
            f"--without {', '.join(unknown)}: there is no such part",
            hint=f"Parts: {', '.join(sorted(names))}.",
        )
    return names - off
