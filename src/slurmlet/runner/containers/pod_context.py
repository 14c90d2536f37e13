"""What the containers of a running pod share."""

from __future__ import annotations

from slurmlet.linux.event_loop import Loop
from slurmlet.linux.record import Record
from slurmlet.runner.containers.oom import KillCounter
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.host.scratch import Scratch
from slurmlet.runner.link.reporter import Reporter
from slurmlet.runner.volumes.pod_volumes import Volumes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurmlet.protocol.pod_plan import PodPlan
    from slurmlet.runner.containers.container_runtime import ContainerRuntime
    from slurmlet.runner.network.network_view import Network


class PodContext(Record):
    loop: Loop
    children: Children
    runtime: ContainerRuntime
    volumes: Volumes
    scratch: Scratch
    reporter: Reporter
    network: Network
    # Where containers' logs go, a directory for each.
    logs: str
    plan: PodPlan
    oom: KillCounter

    @property
    def full_name(self) -> str:
        """The kubelet's way to name a pod in messages."""
        return f"{self.plan['name']}_{self.plan['namespace']}({self.plan['uid']})"
