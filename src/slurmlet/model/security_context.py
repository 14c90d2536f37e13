"""securityContext: what of it a rootless pod honours, what it is mapped to, what is refused (docs/security-context.md).

The container's context goes over the pod's, field by field. What only the image or the node can tell (who "User" is,
which uids exist) is left to the plan's reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from slurmlet.base.errors import RefusedPod
from slurmlet.protocol.pod_plan import ContainerSecurity, PlannedUser

Obj = Mapping[str, Any]

# The kubelet's safe list, as far as a pod has the namespace to itself: its IPC namespace it has, a network not yet.
_OWN_SYSCTLS = frozenset({"kernel.shm_rmid_forced"})
_SEE = "see docs/security-context.md"


class Problem(NamedTuple):
    """Something a pod asks for and cannot have."""

    field: str
    why: str
    remedy: str
    reason: str = "PodRefused"


def problems(spec: Obj) -> Iterator[Problem]:
    """Of the pod's own context."""
    pod = spec.get("securityContext") or {}
    yield from _sysctls(spec, pod)
    yield from _shared("spec.securityContext", pod)


def container_problems(path: str, container: Obj) -> Iterator[Problem]:
    own = container.get("securityContext") or {}
    path = f"{path}.securityContext"
    yield from _shared(path, own)


def _shared(path: str, context: Obj) -> Iterator[Problem]:
    """Fields that pods and containers both have."""
    if context.get("windowsOptions"):
        yield Problem(f"{path}.windowsOptions", "only linux is supported", "Remove it")
    for field in ("seccompProfile", "appArmorProfile"):
        if (context.get(field) or {}).get("type") == "Localhost":
            why = "compute nodes have no Localhost profiles"
            yield Problem(f"{path}.{field}.type", why, f"Use RuntimeDefault or Unconfined; {_SEE}")


def _sysctls(spec: Obj, context: Obj) -> Iterator[Problem]:
    for number, sysctl in enumerate(context.get("sysctls") or ()):
        name = str(sysctl["name"]).replace("/", ".")
        field = f"spec.securityContext.sysctls[{number}]"
        forbidden, remedy = f'forbidden sysctl: "{name}"', f"Remove it; {_SEE}"
        if name.startswith("net."):
            why = f"{forbidden} belongs to the network, which the pod shares with its host"
            yield Problem(field, why, remedy, "SysctlForbidden")
        elif name not in _OWN_SYSCTLS:
            yield Problem(field, f"{forbidden} not allowlisted", remedy, "SysctlForbidden")
        elif spec.get("hostIPC"):
            yield Problem(field, f"{forbidden} not allowed with host ipc enabled", remedy, "SysctlForbidden")


def container_security(pod: Obj, container: Obj, image_user: str) -> ContainerSecurity:
    """The security part of a ContainerPlan. Raises RefusedPod where the kubelet would not start the container."""
    merged = {**(pod["spec"].get("securityContext") or {}), **(container.get("securityContext") or {})}
    capabilities = merged.get("capabilities") or {}
    if merged.get("runAsNonRoot"):
        _check_not_root(pod, container, merged.get("runAsUser"), image_user)
    user: PlannedUser = {
        "uid": merged.get("runAsUser"),
        "gid": merged.get("runAsGroup"),
        # The group that owns the pod's volumes is one of every container's.
        "groups": [
            *(merged.get("supplementalGroups") or ()),
            *([merged["fsGroup"]] if merged.get("fsGroup") is not None else ()),
        ],
        "name": image_user,
    }
    if merged.get("supplementalGroupsPolicy") == "Strict":
        # Only the groups named here, none from the image's /etc/group.
        user["strict"] = True
    return {
        "user": user,
        "read_only_root": bool(merged.get("readOnlyRootFilesystem")),
        "add_caps": list(capabilities.get("add") or ()),
        "drop_caps": list(capabilities.get("drop") or ()),
        "no_new_privs": merged.get("allowPrivilegeEscalation") is False,
        "privileged": bool(merged.get("privileged")),
        "seccomp": (merged.get("seccompProfile") or {}).get("type") or "Unconfined",
        "unmasked_proc": merged.get("procMount") == "Unmasked",
        # Without SELinux on the host nobody reads labels, as with a kubelet; with it the runner does not start this.
        "selinux": bool(merged.get("seLinuxOptions")),
    }


def _check_not_root(pod: Obj, container: Obj, uid: int | None, image_user: str) -> None:
    """The kubelet's rule and words: what cannot be shown to be another than root is not started."""
    metadata = pod["metadata"]
    where = f'(pod: "{metadata["name"]}_{metadata["namespace"]}({metadata["uid"]})", container: {container["name"]})'
    name = image_user.partition(":")[0]
    told = ""
    if uid is not None:
        told = "container's runAsUser breaks non-root policy" if uid == 0 else ""
    elif name and not name.isdigit():
        told = f"container has runAsNonRoot and image has non-numeric user ({name}), cannot verify user is non-root"
    elif int(name or 0) == 0:
        told = "container has runAsNonRoot and image will run as root"
    if told:
        raise RefusedPod(
            f"{told} {where}",
            reason="CreateContainerConfigError",
            hint="Set securityContext.runAsUser to a uid other than 0.",
        )
