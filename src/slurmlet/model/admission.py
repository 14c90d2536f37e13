"""What a pod may not ask for (yet): refused with the field's name, never run with the field dropped in silence.

Runs on what the API server has validated already, so shapes are right; meaning is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slurmlet.base.errors import RefusedPod

_VOLUME_KINDS = {
    "emptyDir", "configMap", "secret", "downwardAPI", "projected", "hostPath", "persistentVolumeClaim", "ephemeral",
    "image",
}  # fmt: skip
_PROJECTED_KINDS = {"configMap", "secret", "downwardAPI", "serviceAccountToken", "clusterTrustBundle"}


def check(pod: Mapping[str, Any]) -> None:
    """Raise RefusedPod for the first thing that cannot be honoured."""
    for field, why in _problems(pod["spec"]):
        raise RefusedPod(
            f"{field}: {why}", hint="Remove the field, or see docs/pods.md for what is supported."
        )


def _problems(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for field in ("hostPID", "hostIPC"):
        if spec.get(field):
            yield f"spec.{field}", "a rootless pod has namespaces of its own"
    for field in ("readinessGates", "hostnameOverride", "setHostnameAsFQDN", "runtimeClassName"):
        if spec.get(field):
            yield f"spec.{field}", "not supported yet"
    if spec.get("resourceClaims"):
        yield "spec.resourceClaims", "dynamic resource allocation is not supported"
    if (spec.get("os") or {}).get("name", "linux") != "linux":
        yield "spec.os.name", "only linux runs here"
    security = spec.get("securityContext") or {}
    for field in ("sysctls", "seLinuxOptions"):
        if security.get(field):
            yield f"spec.securityContext.{field}", "not supported yet"
    yield from _volumes(spec)
    for kind in ("initContainers", "containers"):
        for number, container in enumerate(spec.get(kind, ())):
            yield from _container(f"spec.{kind}[{number}]", container)


def _volumes(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for number, volume in enumerate(spec.get("volumes", ())):
        kind = next((key for key in volume if key != "name"), "emptyDir")
        if kind not in _VOLUME_KINDS:
            yield f"spec.volumes[{number}].{kind}", "this kind of volume is not supported"
        if (volume.get("emptyDir") or {}).get("medium", "").startswith("HugePages"):
            yield f"spec.volumes[{number}].emptyDir.medium", "a user has no huge pages to give"
        for place, source in enumerate((volume.get("projected") or {}).get("sources") or ()):
            for name in source:
                if name not in _PROJECTED_KINDS:
                    yield f"spec.volumes[{number}].projected.sources[{place}].{name}", "not supported yet"


def _container(path: str, container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if container.get("volumeDevices"):
        yield f"{path}.volumeDevices", "a rootless container cannot be given block devices"
    for number, rule in enumerate(container.get("restartPolicyRules") or ()):
        if rule.get("action") != "Restart":
            yield f"{path}.restartPolicyRules[{number}].action", "only Restart is supported"
    security = container.get("securityContext") or {}
    if security.get("privileged"):
        yield f"{path}.securityContext.privileged", "a rootless container cannot be privileged"
    if security.get("seLinuxOptions"):
        yield f"{path}.securityContext.seLinuxOptions", "not supported"
    for number, mount in enumerate(container.get("volumeMounts", ())):
        if mount.get("mountPropagation") not in (None, "None"):
            yield f"{path}.volumeMounts[{number}].mountPropagation", "not supported"
