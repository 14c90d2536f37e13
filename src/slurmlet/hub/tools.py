"""What all pod workers share, in one bundle."""

from __future__ import annotations

from dataclasses import dataclass

from slurmlet.hub.allocations.lanes import Lanes
from slurmlet.hub.gathering import Roots
from slurmlet.hub.imaging import Images
from slurmlet.hub.network.networking import Network
from slurmlet.hub.nodes import NodeKeeper
from slurmlet.hub.noting import Notes
from slurmlet.hub.pacing import Pacer
from slurmlet.hub.polling import SlurmWatch
from slurmlet.hub.services import Services
from slurmlet.hub.settings import Settings
from slurmlet.hub.submitting import Submitter
from slurmlet.kube.client import ApiClient
from slurmlet.kube.events import EventRecorder
from slurmlet.slurm.client import Scheduler


@dataclass(frozen=True)
class Tools:
    settings: Settings
    client: ApiClient
    events: EventRecorder
    slurm: Scheduler
    watch: SlurmWatch
    images: Images
    submitter: Submitter
    nodes: NodeKeeper
    pacer: Pacer
    notes: Notes
    services: Services
    lanes: Lanes
    roots: Roots
    # None in a cluster whose pods share the network of their host.
    network: Network | None
