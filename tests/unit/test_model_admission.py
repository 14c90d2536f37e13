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
    (pod(runtimeClassName="gvisor"), "spec.runtimeClassName"),
    (pod(resourceClaims=[{"name": "x"}]), "spec.resourceClaims"),
    (pod(os={"name": "windows"}), "spec.os.name"),
    (pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}), "spec.securityContext.sysctls[0]"),
    (pod(securityContext={"sysctls": [{"name": "net.core.somaxconn", "value": "1"}]}), "spec.securityContext.sysctls[0]"),
    (
        pod(hostIPC=True, securityContext={"sysctls": [{"name": "kernel/shm_rmid_forced", "value": "1"}]}),
        "spec.securityContext.sysctls[0]",
    ),
    (pod(securityContext={"seccompProfile": {"type": "Localhost"}}), "spec.securityContext.seccompProfile.type"),
    (pod(securityContext={"windowsOptions": {"runAsUserName": "x"}}), "spec.securityContext.windowsOptions"),
    (
        pod({"securityContext": {"appArmorProfile": {"type": "Localhost"}}}),
        "spec.containers[0].securityContext.appArmorProfile.type",
    ),
    (pod({"ports": [{"containerPort": 80, "hostPort": 80, "protocol": "SCTP"}]}), "spec.containers[0].ports[0].hostPort"),
    (pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "nfs": {}}]), "spec.volumes[1].nfs"),
    (pod(volumes=[{"name": "a", "csi": {}}]), "spec.volumes[0].csi"),
    (
        pod(volumes=[{"name": "a", "projected": {"sources": [{"secret": {}}, {"podCertificate": {}}]}}]),
        "spec.volumes[0].projected.sources[1].podCertificate",
    ),
    (pod(volumes=[{"name": "a", "emptyDir": {"medium": "HugePages-2Mi"}}]), "spec.volumes[0].emptyDir.medium"),
    (pod({"volumeDevices": [{"name": "a"}]}), "spec.containers[0].volumeDevices"),
    (
        pod({"restartPolicyRules": [{"action": "Restart"}, {"action": "Explode"}]}),
        "spec.containers[0].restartPolicyRules[1].action",
    ),
    (
        pod({"volumeMounts": [{"name": "a", "mountPropagation": "Bidirectional"}]}),
        "spec.containers[0].volumeMounts[0].mountPropagation",
    ),
    (
        pod(initContainers=[{"name": "i"}, {"name": "j", "securityContext": {"windowsOptions": {"hostProcess": True}}}]),
        "spec.initContainers[1].securityContext.windowsOptions",
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
    pod(readinessGates=[{"conditionType": "x"}], hostnameOverride="x", setHostnameAsFQDN=True, hostIPC=True),
    pod({"restartPolicyRules": [{"action": "RestartAllContainers"}]}),
    pod({"ports": [{"containerPort": 80, "hostPort": 8080}, {"containerPort": 81}]}, hostUsers=False),
    pod({"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, "procMount": "Unmasked"}},
        securityContext={"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}],
                         "appArmorProfile": {"type": "RuntimeDefault"}, "supplementalGroupsPolicy": "Strict"}),
    pod(hostPID=False, hostIPC=False, os={"name": "linux"}, hostNetwork=True, subdomain="svc"),
    pod(securityContext={"runAsUser": 1000, "runAsNonRoot": True, "supplementalGroups": [5]}),
    pod(volumes=[{"name": kind, kind: {}} for kind in ("emptyDir", "configMap", "secret", "downwardAPI", "hostPath")]),
    pod(volumes=[{"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}},
        {"configMap": {}}, {"secret": {}}, {"downwardAPI": {}}]}}]),
    pod(volumes=[{"name": "bare"}]),
    pod({"securityContext": {"privileged": True}}),
    pod({"securityContext": {"privileged": False, "capabilities": {"drop": ["ALL"]}},
         "volumeMounts": [{"name": "a", "mountPropagation": "None", "subPath": "x"}]}),
]  # fmt: skip


@pytest.mark.parametrize("asked", SUPPORTED)
def test_what_is_supported_passes(asked: dict[str, Any]) -> None:
    admission.check(asked)
