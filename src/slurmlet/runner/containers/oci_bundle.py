"""The OCI runtime configuration of one run of a container. Plan and facts in, a JSON-able value out;
of the host it asks only which capabilities and, for a privileged container, which devices there are.

Resources and cgroups are left out on purpose: Slurm limits the job, and a user has no cgroup to write to.
"""

from __future__ import annotations

from slurmlet.linux import syscalls
from slurmlet.linux.record import Record
from slurmlet.runner.containers import seccomp_profiles
from slurmlet.runner.containers.container_user import User
from slurmlet.runner.host.sandbox import SINGLE, Mapping
from slurmlet.runner.volumes.pod_volumes import Mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

    from slurmlet.protocol.pod_plan import ContainerPlan
    from slurmlet.protocol.pod_report import RunningUser


# containerd's default set.
DEFAULT_CAPS = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
]
# In the kernel's order: an older kernel knows the first so many.
_ALL_CAPS = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
]

_MASKED = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
]
_READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]


class NotHonoured(Exception):
    """The plan asks for what this node cannot give; the message names the field and the remedy."""


class Facts(Record):
    """What the runner found out for this run."""

    root: str
    user: User
    mapping: Mapping
    hostname: str
    mounts: List[Mount]
    # /proc/<pid>/ns/pid of the pod's shared PID namespace, or "" for one of its own.
    pid_namespace: str = ""
    # Where the pod's one /dev/shm and /dev/mqueue lie; with it goes the IPC namespace that the runner is in.
    ipc_dir: str = ""
    # Above that of the runner, so that the kernel does not choose it when memory runs out; None: leave it.
    oom_score_adj: Optional[int] = None
    # Of the pod's own network namespace, or "" for the host's.
    sysfs: str = ""


def pid_namespace(plan: ContainerPlan, shared: str) -> str:
    """The pod's, or that of the container an ephemeral one is to look at; "" for one of its own."""
    if shared or not plan.get("target"):
        return shared
    if not plan.get("target_pid"):
        raise NotHonoured(f"unable to find target container {plan['target']} among those that run")
    return f"/proc/{plan['target_pid']}/ns/pid"


def make(plan: ContainerPlan, facts: Facts) -> Dict[str, Any]:
    isolation: Dict[str, Any] = {"namespaces": _namespaces(facts)}
    if not plan.get("privileged") and not plan.get("unmasked_proc"):
        isolation["maskedPaths"] = _MASKED
        isolation["readonlyPaths"] = _READ_ONLY
    single = facts.mapping.kind == SINGLE
    # As a kubelet has it, a privileged container is never confined. What one uid cannot do is still faked.
    restrict = plan.get("seccomp") == "RuntimeDefault" and not plan.get("privileged")
    rules = seccomp_profiles.profile(fake=single, restrict=restrict, caps=capabilities(plan))
    if rules is not None:
        isolation["seccomp"] = rules
    if single and nested(facts.user):
        isolation["uidMappings"] = [{"containerID": facts.user.uid, "hostID": 0, "size": 1}]
        isolation["gidMappings"] = [{"containerID": facts.user.gid, "hostID": 0, "size": 1}]
    return {
        "ociVersion": "1.0.2",
        "process": process(plan, facts, plan["argv"], bool(plan.get("tty"))),
        "root": {"path": facts.root, "readonly": bool(plan.get("read_only_root"))},
        "hostname": facts.hostname,
        "mounts": [
            *_system_mounts(facts, bool(plan.get("privileged"))),
            *_devices(plan),
            *(_bind(mount) for mount in facts.mounts),
        ],
        "linux": isolation,
    }


def process(plan: ContainerPlan, facts: Facts, argv: List[str], tty: bool) -> Dict[str, Any]:
    """The process part; also what an exec in the container runs."""
    user = facts.user
    identity: Dict[str, Any] = {"uid": user.uid, "gid": user.gid, "umask": 0o022}
    if facts.mapping.kind != SINGLE and user.groups:
        identity["additionalGids"] = list(user.groups)
    caps = capabilities(plan)
    granted = dict.fromkeys(("bounding", "effective", "permitted"), caps)
    score = {} if facts.oom_score_adj is None else {"oomScoreAdj": facts.oom_score_adj}
    return {
        **score,
        "terminal": tty,
        "user": identity,
        "args": argv,
        "env": environment(plan, user, tty),
        "cwd": plan.get("cwd") or "/",
        "capabilities": granted,
        "noNewPrivileges": bool(plan.get("no_new_privs")),
    }


def identity(facts: Facts) -> RunningUser:
    """Who the first process is, as it can see itself: with one uid there are no further groups."""
    user = facts.user
    others = () if facts.mapping.kind == SINGLE else user.groups
    return {"uid": user.uid, "gid": user.gid, "groups": [user.gid, *others]}


def environment(plan: ContainerPlan, user: User, tty: bool) -> List[str]:
    given = dict(plan["env"])
    if tty:
        given.setdefault("TERM", "xterm")
    given.setdefault("HOME", user.home)
    if plan.get("gpus"):
        from slurmlet.runner.containers import devices

        given = {**devices.gpu_variables(), **given}
    return [f"{name}={value}" for name, value in given.items()]


def nested(user: User) -> bool:
    """With one mapped uid, somebody other than root needs a user namespace of their own to be called so."""
    return user.uid != 0 or user.gid != 0


def capabilities(plan: ContainerPlan) -> List[str]:
    add = {_cap(name) for name in plan.get("add_caps") or []}
    drop = {_cap(name) for name in plan.get("drop_caps") or []}
    base = (
        _ALL_CAPS[: syscalls.last_capability() + 1]
        if plan.get("privileged") or "ALL" in add
        else []
        if "ALL" in drop
        else list(DEFAULT_CAPS)
    )
    kept = [name for name in base if name not in drop]
    kept += sorted(name for name in add if name != "ALL" and name not in kept)
    return ["CAP_" + name for name in kept]


def _cap(name: str) -> str:
    upper = name.upper()
    return upper[4:] if upper.startswith("CAP_") else upper


def _namespaces(facts: Facts) -> List[Dict[str, str]]:
    names = [{"type": kind} for kind in ("mount", "uts")]
    if not facts.ipc_dir:
        names.append({"type": "ipc"})
    pid = {"type": "pid"}
    if facts.pid_namespace:
        pid["path"] = facts.pid_namespace
    names.append(pid)
    if facts.mapping.kind == SINGLE and nested(facts.user):
        names.append({"type": "user"})
    return names


def _system_mounts(facts: Facts, privileged: bool) -> List[Dict[str, Any]]:
    pts = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]
    if facts.mapping.gids > 5:
        pts.append("gid=5")
    quiet = ["nosuid", "noexec", "nodev"]
    return [
        _mount("/proc", "proc", "proc", quiet),
        _mount("/dev", "tmpfs", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
        _mount("/dev/pts", "devpts", "devpts", pts),
        *_ipc_mounts(facts.ipc_dir, quiet),
        # Mounted by whoever owns the network namespace; a container's own user namespace could not.
        _mount("/sys", "none", facts.sysfs or "/sys", ["rbind", *([] if privileged else ["ro"]), *quiet]),
    ]


def _devices(plan: ContainerPlan) -> List[Dict[str, Any]]:
    if not plan.get("privileged") and not plan.get("gpus"):
        return []
    from slurmlet.runner.containers import devices

    paths = devices.usable() if plan.get("privileged") else devices.gpus()
    return [_mount(path, "bind", path, ["bind", "rw"]) for path in paths]


def _ipc_mounts(ipc_dir: str, quiet: List[str]) -> List[Dict[str, Any]]:
    if not ipc_dir:
        return [
            _mount("/dev/shm", "tmpfs", "shm", [*quiet, "mode=1777"]),
            _mount("/dev/mqueue", "mqueue", "mqueue", quiet),
        ]
    bound = ["rbind", "rprivate"]
    return [_mount(f"/dev/{name}", "bind", f"{ipc_dir}/{name}", bound) for name in ("shm", "mqueue")]


def _mount(path: str, kind: str, source: str, options: List[str]) -> Dict[str, Any]:
    return {"destination": path, "type": kind, "source": source, "options": options}


def _bind(mount: Mount) -> Dict[str, Any]:
    options = ["rbind", "ro" if mount.read_only else "rw", "rprivate", *mount.options]
    return _mount(mount.path, "bind", mount.source, options)
