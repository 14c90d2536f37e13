"""What a pod is called: by its kernel, and in its /etc/hosts. The kubelet's rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.base.errors import RefusedPod

CLUSTER_DOMAIN = "cluster.local"
_LONGEST_HOSTNAME = 63
_LONGEST_KERNEL_NAME = 64


@dataclass(frozen=True)
class Names:
    kernel: str  # what `hostname` says
    hosts: tuple[str, ...]  # the names of the pod's own line in /etc/hosts


def names_of(pod: Mapping[str, Any], host: str) -> Names:
    """`host`: the name of the machine, which a pod on the host's network keeps."""
    metadata, spec = pod["metadata"], pod["spec"]
    if spec.get("hostNetwork") and not spec.get("hostnameOverride"):
        return Names(host, (host,))
    if spec.get("hostnameOverride"):
        name = _cut(spec["hostnameOverride"])
        return Names(name, (name,))
    name = _cut(spec.get("hostname") or metadata["name"])
    if not spec.get("subdomain"):
        return Names(name, (name,))
    full = f"{name}.{spec['subdomain']}.{metadata['namespace']}.svc.{CLUSTER_DOMAIN}"
    if not spec.get("setHostnameAsFQDN"):
        return Names(name, (full, name))
    if len(full) > _LONGEST_KERNEL_NAME:
        raise RefusedPod(
            f"spec.setHostnameAsFQDN: FQDN {full} is too long ({_LONGEST_KERNEL_NAME} characters is the max, "
            f"{len(full)} characters requested)",
            hint="Give the pod a shorter spec.hostname or spec.subdomain.",
            reason="FailedCreatePodSandBox",
        )
    return Names(full, (full, name))


def _cut(name: str) -> str:
    return name[:_LONGEST_HOSTNAME].rstrip("-.")
