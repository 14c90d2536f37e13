"""What a pod may not ask for (yet): refused with the field's name, never run with the field dropped in silence.

Runs on what the API server has validated already, so shapes are right; meaning is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.model import security_context
from slurmlet.model.runtime_classes import CLASSES
from slurmlet.model.security_context import Problem

_VOLUME_KINDS = {
    "emptyDir", "configMap", "secret", "downwardAPI", "projected", "hostPath", "persistentVolumeClaim", "ephemeral",
    "image",
}  # fmt: skip
_PROJECTED_KINDS = {"configMap", "secret", "downwardAPI", "serviceAccountToken", "clusterTrustBundle"}
_REMEDY = "Remove the field, or see docs/pods.md for what is supported"


def check(pod: Mapping[str, Any]) -> None:
    """Raise RefusedPod for the first thing that cannot be honoured."""
    for problem in _problems(pod["spec"]):
        raise refusal(problem)


def check_ephemeral(number: int, container: Mapping[str, Any]) -> None:
    """The same for a container that came to a running pod."""
    for problem in _container(f"spec.ephemeralContainers[{number}]", container):
        raise refusal(problem)


def refusal(problem: Problem) -> RefusedPod:
    return RefusedPod(f"{problem.field}: {problem.why}", hint=f"{problem.remedy}.", reason=problem.reason)


def _problems(spec: Mapping[str, Any]) -> Iterator[Problem]:
    if spec.get("hostPID"):
        why = "a job has a PID namespace of its own, so that nothing outlives it"
        yield Problem("spec.hostPID", why, "Use shareProcessNamespace to see the processes of the pod")
    if spec.get("runtimeClassName") not in (None, *CLASSES):
        yield Problem(
            "spec.runtimeClassName", "only the RuntimeClasses pool and queue are supported", _REMEDY
        )
    if spec.get("resourceClaims"):
        yield Problem("spec.resourceClaims", "dynamic resource allocation is not supported", _REMEDY)
    if (spec.get("os") or {}).get("name", "linux") != "linux":
        yield Problem("spec.os.name", "only linux is supported", _REMEDY)
    yield from security_context.problems(spec)
    yield from _volumes(spec)
    for kind in ("initContainers", "containers"):
        for number, container in enumerate(spec.get(kind) or ()):
            yield from _container(f"spec.{kind}[{number}]", container)


def _volumes(spec: Mapping[str, Any]) -> Iterator[Problem]:
    for number, volume in enumerate(spec.get("volumes") or ()):
        path = f"spec.volumes[{number}]"
        kind = next((key for key in volume if key != "name"), "emptyDir")
        if kind not in _VOLUME_KINDS:
            yield Problem(f"{path}.{kind}", "this kind of volume is not supported", _REMEDY)
        if (volume.get("emptyDir") or {}).get("medium", "").startswith("HugePages"):
            yield Problem(
                f"{path}.emptyDir.medium",
                "huge pages are not available to an unprivileged user",
                "Use medium Memory",
            )
        for place, source in enumerate((volume.get("projected") or {}).get("sources") or ()):
            for name in source:
                if name not in _PROJECTED_KINDS:
                    yield Problem(f"{path}.projected.sources[{place}].{name}", "not supported yet", _REMEDY)


def _container(path: str, container: Mapping[str, Any]) -> Iterator[Problem]:
    yield from security_context.container_problems(path, container)
    if container.get("volumeDevices"):
        why = "a rootless container cannot be given block devices"
        yield Problem(f"{path}.volumeDevices", why, "Use a volume with volumeMode Filesystem")
    for number, port in enumerate(container.get("ports") or ()):
        if port.get("hostPort") and port.get("protocol") == "SCTP":
            field = f"{path}.ports[{number}].hostPort"
            yield Problem(field, "host ports are supported for TCP and UDP only", "Remove it")
    for number, rule in enumerate(container.get("restartPolicyRules") or ()):
        if rule.get("action") not in ("Restart", "RestartAllContainers"):
            field = f"{path}.restartPolicyRules[{number}].action"
            yield Problem(field, "only Restart and RestartAllContainers are supported", _REMEDY)
    for number, mount in enumerate(container.get("volumeMounts") or ()):
        if mount.get("mountPropagation") not in (None, "None"):
            field = f"{path}.volumeMounts[{number}].mountPropagation"
            yield Problem(field, "mount propagation is not possible for a rootless pod", "Remove it")
