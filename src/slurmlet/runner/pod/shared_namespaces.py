"""What the containers of a pod share besides volumes: one IPC namespace, one /dev/shm, the pod's sysctls.

The namespace is the runner's own, entered before the first container. A container that asks for a user namespace could
not mount a message queue file system of a namespace it does not own, so both are mounted here and bound there.
"""

from __future__ import annotations

import os

from slurmlet.linux import syscalls
from slurmlet.runner.host.scratch import Scratch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurmlet.protocol.pod_plan import PodPlan


_QUIET = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC


class Forbidden(OSError):
    """A sysctl that this node does not let a user set, even in a namespace of their own."""


def share_ipc(plan: PodPlan, scratch: Scratch) -> str:
    """The directory that holds shm and mqueue for all containers."""
    directory = scratch.private_dir("ipc")
    targets = {name: os.path.join(directory, name) for name in ("shm", "mqueue")}
    for target in targets.values():
        os.mkdir(target)
    if plan.get("host_ipc"):
        for name, target in targets.items():
            if os.path.isdir(f"/dev/{name}"):
                syscalls.bind(f"/dev/{name}", target)
        return directory
    syscalls.unshare(syscalls.CLONE_NEWIPC)
    syscalls.mount("shm", targets["shm"], "tmpfs", _QUIET, "mode=1777")
    syscalls.mount("mqueue", targets["mqueue"], "mqueue", _QUIET)
    for name, value in plan.get("sysctls") or []:
        _set(str(name), str(value))
    return directory


def _set(name: str, value: str) -> None:
    path = "/proc/sys/" + name.replace(".", "/")
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(value)
    except OSError as error:
        raise Forbidden(
            f"spec.securityContext.sysctls: this node does not let a user set {name} ({error.strerror}); remove it"
        ) from error
