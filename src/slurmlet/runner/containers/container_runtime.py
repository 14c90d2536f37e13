"""The seam to whatever runs containers on a node: what a container needs of it, and what it may be unable to do.

A runtime is given a container's plan, whose image lies in the store, and the mounts of this run; how it gets from there to
a process is its own affair. Nobody above this seam knows of bundles, unpacked images or the runtime's commands. All
methods return at once; outcomes come by callback, in the loop. OCI runtimes (crun, runc) are in oci_runtime.py.
"""

from __future__ import annotations

from slurmlet.linux.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, List, Optional, Protocol, Tuple

    from slurmlet.protocol.pod_plan import ContainerPlan, PodPlan
    from slurmlet.protocol.pod_report import RunningUser
    from slurmlet.runner.host.child_processes import OnExit
    from slurmlet.runner.volumes.pod_volumes import Mount

    # (pid, pty master or -1, "") or (0, -1, what went wrong)
    OnStarted = Callable[[int, int, str], None]
    # ("", "") or (what went wrong, the waiting reason)
    OnCreated = Callable[[str, str], None]

    class ContainerRuntime(Protocol):
        # In container ids: crun://…
        name: str
        # What it cannot do here: one of the features below → why, and what to do about it.
        lacks: Dict[str, str]

        def create(self, container_id: str, plan: ContainerPlan, run_dir: str, on_created: OnCreated) -> None:
            """Prepare one run of a container: its image, its root, its user. What the run writes beside its volumes
            lies in `run_dir`/upper."""

        def start(self, container_id: str, mounts: List[Mount], start: Start) -> None:
            """Start the first process of what was created, once."""

        def exec(self, container_id: str, argv: List[str], start: Start) -> None:
            """One more process in a container that runs, with its environment and user."""

        def signal(self, container_id: str, number: int) -> None:
            """To the first process; SIGKILL to every process of the container. Of one that has ended: nothing."""

        def delete(self, container_id: str) -> None:
            """Whether it was started or not; the caller removes `run_dir` afterwards."""

        def user(self, container_id: str) -> RunningUser:
            """Who the first process is, as it sees itself. Of what was created."""


CREATE_ERROR, CONFIG_ERROR = "CreateContainerError", "CreateContainerConfigError"

# What a runtime may lack.
SECCOMP, SELINUX, USERS, CAPABILITIES, PRIVILEGED = (
    "seccomp",
    "selinux",
    "users",
    "capabilities",
    "privileged",
)
EXEC, TERMINAL, SHARED_PIDS, TARGET = "exec", "terminal", "shared-pids", "target"


class Start(Record):
    """How a process is to be started: its descriptors, or a terminal (then stdio is not used)."""

    stdio: Tuple[int, int, int]
    tty: bool
    on_started: OnStarted
    on_exit: OnExit
    # Rows and columns of the terminal, where they are known.
    size: Optional[Tuple[int, int]] = None


def unsupported(pod: PodPlan, plan: ContainerPlan, lacks: Dict[str, str]) -> str:
    """The first field that asks for what the runtime lacks, and what to do about it; "" when it can do everything."""
    if not lacks:
        return ""
    for feature, field in _asked(pod, plan).items():
        if feature in lacks:
            return f"{field}: {lacks[feature]}"
    return ""


def _asked(pod: PodPlan, plan: ContainerPlan) -> Dict[str, str]:
    """Feature → the field of the pod's manifest that asks for it."""
    found = {}
    if plan["seccomp"] == "RuntimeDefault" and not plan["privileged"]:
        found[SECCOMP] = "securityContext.seccompProfile"
    if plan["selinux"]:
        found[SELINUX] = "securityContext.seLinuxOptions"
    if plan["user"]["uid"]:
        found[USERS] = "securityContext.runAsUser"
    if plan["add_caps"]:
        found[CAPABILITIES] = "securityContext.capabilities.add"
    if plan["privileged"]:
        found[PRIVILEGED] = "securityContext.privileged"
    if plan["tty"]:
        found[TERMINAL] = "tty"
    if pod["share_pid"]:
        found[SHARED_PIDS] = "spec.shareProcessNamespace"
    if plan.get("target"):
        found[TARGET] = "targetContainerName"
    hooks = {"lifecycle.postStart": plan["post_start"], "lifecycle.preStop": plan["pre_stop"]}
    probes = {f"{kind}Probe": probe["action"] for kind, probe in plan["probes"].items()}  # type: ignore[index]
    for field, action in {**hooks, **probes}.items():
        if action is not None and action["kind"] == "exec":
            found.setdefault(EXEC, f"{field}.exec")
    return found
