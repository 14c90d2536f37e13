"""What all pod workers share, in one bundle."""

from __future__ import annotations

from dataclasses import dataclass

from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import SlurmWatch
from slurmlet.hub.network.pod_network import Network
from slurmlet.hub.network.service_watch import Services
from slurmlet.hub.nodes.partition_node_controller import NodeKeeper
from slurmlet.hub.pods.image_pulls import Images
from slurmlet.hub.pods.job_submission import Submitter
from slurmlet.hub.pods.lanes import Lanes
from slurmlet.hub.pods.queued_status import Notes
from slurmlet.hub.pods.source_fetch import Roots
from slurmlet.hub.pods.start_backoff import Pacer
from slurmlet.kube.client import ApiClient
from slurmlet.kube.events import EventRecorder
from slurmlet.slurm.interface import Slurm


@dataclass(frozen=True)
class Tools:
    settings: Settings
    client: ApiClient
    events: EventRecorder
    slurm: Slurm
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
