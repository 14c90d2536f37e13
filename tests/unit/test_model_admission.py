"""What is refused is refused by the name of its field; what is supported passes."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model import admission


def pod(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {},
        "spec": {"containers": [{"name": "c", "image": "i", **(container or {})}], **spec},
    }


REFUSED = [
    (pod(hostPID=True), "spec.hostPID"),
    (pod(hostIPC=True), "spec.hostIPC"),
    (pod(readinessGates=[{"conditionType": "x"}]), "spec.readinessGates"),
    (pod(hostnameOverride="x"), "spec.hostnameOverride"),
    (pod(setHostnameAsFQDN=True), "spec.setHostnameAsFQDN"),
    (pod(runtimeClassName="gvisor"), "spec.runtimeClassName"),
    (pod(resourceClaims=[{"name": "x"}]), "spec.resourceClaims"),
    (pod(os={"name": "windows"}), "spec.os.name"),
    (pod(securityContext={"sysctls": [{"name": "a", "value": "b"}]}), "spec.securityContext.sysctls"),
    (pod(securityContext={"seLinuxOptions": {"level": "x"}}), "spec.securityContext.seLinuxOptions"),
    (pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "nfs": {}}]), "spec.volumes[1].nfs"),
    (pod(volumes=[{"name": "a", "csi": {}}]), "spec.volumes[0].csi"),
    (
        pod(volumes=[{"name": "a", "projected": {"sources": [{"secret": {}}, {"podCertificate": {}}]}}]),
        "spec.volumes[0].projected.sources[1].podCertificate",
    ),
    (pod(volumes=[{"name": "a", "emptyDir": {"medium": "HugePages-2Mi"}}]), "spec.volumes[0].emptyDir.medium"),
    (pod({"volumeDevices": [{"name": "a"}]}), "spec.containers[0].volumeDevices"),
    (
        pod({"restartPolicyRules": [{"action": "Restart"}, {"action": "RestartAllContainers"}]}),
        "spec.containers[0].restartPolicyRules[1].action",
    ),
    (pod({"securityContext": {"privileged": True}}), "spec.containers[0].securityContext.privileged"),
    (pod({"securityContext": {"seLinuxOptions": {"x": "y"}}}), "spec.containers[0].securityContext.seLinuxOptions"),
    (
        pod({"volumeMounts": [{"name": "a", "mountPropagation": "Bidirectional"}]}),
        "spec.containers[0].volumeMounts[0].mountPropagation",
    ),
    (
        pod(initContainers=[{"name": "i"}, {"name": "j", "securityContext": {"privileged": True}}]),
        "spec.initContainers[1].securityContext.privileged",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_a_field_that_cannot_be_honoured_is_named(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedPod) as refused:
        admission.check(asked)
    assert refused.value.message.startswith(f"{field}: ")
    assert refused.value.hint


SUPPORTED = [
    pod(),
    pod({name: {"exec": {"command": ["true"]}} for name in ("livenessProbe", "readinessProbe", "startupProbe")}),
    pod({"restartPolicyRules": [{"action": "Restart"}]}, activeDeadlineSeconds=5),
    pod(hostPID=False, hostIPC=False, os={"name": "linux"}, hostNetwork=True, subdomain="svc"),
    pod(securityContext={"runAsUser": 1000, "runAsNonRoot": True, "supplementalGroups": [5]}),
    pod(volumes=[{"name": kind, kind: {}} for kind in ("emptyDir", "configMap", "secret", "downwardAPI", "hostPath")]),
    pod(volumes=[{"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}},
        {"configMap": {}}, {"secret": {}}, {"downwardAPI": {}}]}}]),
    pod(volumes=[{"name": "bare"}]),
    pod({"securityContext": {"privileged": False, "capabilities": {"drop": ["ALL"]}},
         "volumeMounts": [{"name": "a", "mountPropagation": "None", "subPath": "x"}]}),
]  # fmt: skip


@pytest.mark.parametrize("asked", SUPPORTED)
def test_what_is_supported_passes(asked: dict[str, Any]) -> None:
    admission.check(asked)
