"""What a pod on this node needs, put together from its plan: scratch, runtime, volumes, shared namespaces."""

from __future__ import annotations

import os

from slurmlet.linux import syscalls
from slurmlet.linux.event_loop import Loop
from slurmlet.linux.record import Record
from slurmlet.runner.containers.oci_runtime import NoRuntime, OciRuntime, PodNamespaces, find_runtime
from slurmlet.runner.containers.oom import KillCounter
from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.host.sandbox import Mapping
from slurmlet.runner.host.scratch import Scratch, choose_base
from slurmlet.runner.link.reporter import Reporter
from slurmlet.runner.pod.claim import PodDir
from slurmlet.runner.pod.shared_namespaces import Forbidden, share_ipc
from slurmlet.runner.volumes.etc_files import write_etc
from slurmlet.runner.volumes.pod_volumes import Volumes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurmlet.protocol.pod_plan import PodPlan
    from slurmlet.runner.network.network_view import Network


__all__ = ["Around", "Forbidden", "NoRuntime", "make_context", "make_scratch", "mount_private"]

_PRIVATE_OPTIONS = "mode=0700,size=256m"


class Around(Record):
    """What the runner has already."""

    loop: Loop
    children: Children
    reporter: Reporter
    pod: PodDir
    mapping: Mapping


def make_scratch(pod: PodDir) -> Scratch:
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        real_uid = int(file.read().split()[1])
    return Scratch(choose_base(os.environ, os.geteuid(), real_uid), pod.uid)


def mount_private(scratch: Scratch) -> None:
    syscalls.mount(
        "tmpfs", scratch.private, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, _PRIVATE_OPTIONS
    )


def make_context(around: Around, plan: PodPlan, scratch: Scratch, network: Network) -> PodContext:
    """Raises Forbidden for what a pod may not ask for here, NoRuntime and OSError for what the node cannot give."""
    write_etc(scratch, network, plan)
    executable = find_runtime(around.pod.cluster_dir)
    # Before the runtime is looked at: it may hide cgroups.
    oom = KillCounter()
    ipc_dir = share_ipc(plan, scratch)
    pid_namespace = ""
    if plan.get("share_pid"):
        from slurmlet.runner.pod.pause_process import start_pause

        pid_namespace = start_pause(
            around.children, scratch.private_dir("empty"), os.path.join(scratch.private, "pid-namespace")
        )
    shared = PodNamespaces(
        around.mapping, network.hostname(), ipc_dir, pid_namespace, network.sysfs, network.enter
    )
    return PodContext(
        loop=around.loop,
        children=around.children,
        runtime=OciRuntime(around.children, executable, scratch.private_dir("rt"), scratch.images, shared),
        volumes=Volumes(plan, scratch, around.mapping),
        scratch=scratch,
        reporter=around.reporter,
        network=network,
        logs=around.pod.logs,
        plan=plan,
        oom=oom,
    )
