"""Persistent volumes: our storage classes, what a claim becomes, when it goes, how it grows. Pure.

Upstream's controllers bind claims to volumes; slurmlet plays the external provisioner and resizer, for which these are
the rules. A volume of ours is a directory below the cluster's `volumes/`, written into the PersistentVolume as a
hostPath, because the shared file system shows the same path on every host. Nothing here may guess: a claim that asks
for what a directory cannot give is told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.model import quantities
from slurmlet.model.pod_sources import MissingSource

Obj = Mapping[str, Any]

PROVISIONER = "slurmlet.io/shared"
# Keeps the object until the directory is gone (or, with Retain, is known to stay).
FINALIZER = "slurmlet.io/directory"
_PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
# The PV controller asks the provisioner it names; the second is what it wrote before 1.23.
_ASKS = ("volume.kubernetes.io/storage-provisioner", "volume.beta.kubernetes.io/storage-provisioner")
_SELECTED_NODE = "volume.kubernetes.io/selected-node"
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_PROTECTION = "kubernetes.io/pvc-protection"


class ClaimRefused(RefusedPod):
    """A claim asks for what a directory cannot be."""

    reason = "ProvisioningFailed"


def storage_classes() -> list[dict[str, Any]]:
    """What every cluster has from the start."""
    return [
        _storage_class("shared", "Immediate", {_DEFAULT_CLASS: "true"}),
        _storage_class("shared-wait", "WaitForFirstConsumer", {}),
    ]


def _storage_class(name: str, binding: str, annotations: Obj) -> dict[str, Any]:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": dict(annotations)},
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": binding,
        "allowVolumeExpansion": True,
    }


# Provisioning


def asks_for_volume(claim: Obj, storage_class: Obj | None) -> bool:
    """Whether the PV controller waits for us to make this claim's volume."""
    metadata, spec = claim["metadata"], claim["spec"]
    if spec.get("volumeName") or metadata.get("deletionTimestamp"):
        return False
    annotations = metadata.get("annotations") or {}
    if PROVISIONER not in (annotations.get(name) for name in _ASKS):
        return False
    if storage_class is None or storage_class["provisioner"] != PROVISIONER:
        return False
    waits = storage_class.get("volumeBindingMode") == "WaitForFirstConsumer"
    return not waits or bool(annotations.get(_SELECTED_NODE))


def volume_name(claim: Obj) -> str:
    """The same after a crash, so that a second attempt finds what the first one made."""
    return f"pvc-{claim['metadata']['uid']}"


def persistent_volume(claim: Obj, storage_class: Obj, directory: str) -> dict[str, Any]:
    """The volume for a claim. Raises ClaimRefused for what a directory cannot give."""
    for problem in _problems(claim["spec"], storage_class):
        raise ClaimRefused(problem)
    metadata, spec = claim["metadata"], claim["spec"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": volume_name(claim),
            "annotations": {_PROVISIONED_BY: PROVISIONER},
            "finalizers": [FINALIZER],
        },
        "spec": {
            "capacity": {"storage": _requested(claim)},
            "accessModes": list(spec.get("accessModes") or ["ReadWriteOnce"]),
            "persistentVolumeReclaimPolicy": storage_class.get("reclaimPolicy") or "Delete",
            "storageClassName": storage_class["metadata"]["name"],
            "volumeMode": "Filesystem",
            # "Directory", not "DirectoryOrCreate": a lost directory must not come back empty and in silence.
            "hostPath": {"path": directory, "type": "Directory"},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
        },
    }


def _problems(spec: Obj, storage_class: Obj) -> list[str]:
    found = []
    if spec.get("volumeMode") == "Block":
        found.append("spec.volumeMode Block: a volume of this class is a directory")
    if spec.get("selector"):
        found.append(
            "spec.selector: volumes of this class are provisioned for the claim and cannot be selected"
        )
    if spec.get("dataSource") or spec.get("dataSourceRef"):
        found.append("spec.dataSource: volumes of this class start empty")
    if storage_class.get("mountOptions"):
        found.append("the storage class has mountOptions: a directory is not mounted")
    if storage_class.get("parameters"):
        names = ", ".join(sorted(storage_class["parameters"]))
        found.append(f"the storage class has unsupported parameters: {names}")
    return found


def _requested(claim: Obj) -> str:
    return str(((claim["spec"].get("resources") or {}).get("requests") or {}).get("storage") or "0")


# Growing


def growth(claim: Obj, volume: Obj) -> str | None:
    """The size that claim and volume should have, when they do not have it yet."""
    if claim["spec"].get("volumeName") != volume["metadata"]["name"] or not is_ours(volume):
        return None
    if (claim.get("status") or {}).get("phase") != "Bound" or claim["metadata"].get("deletionTimestamp"):
        return None
    wanted = _requested(claim)
    told = ((claim.get("status") or {}).get("capacity") or {}).get("storage") or "0"
    have = min(quantities.parse(told), quantities.parse(volume["spec"]["capacity"]["storage"]))
    return wanted if quantities.parse(wanted) > have else None


def grown_status(claim: Obj, size: str) -> dict[str, Any]:
    """The part of the claim's status that says the growing is over."""
    kept = [
        one
        for one in (claim.get("status") or {}).get("conditions") or ()
        if one["type"] not in ("Resizing", "FileSystemResizePending")
    ]
    return {"capacity": {"storage": size}, "conditions": kept}


# Going


def is_ours(volume: Obj) -> bool:
    return bool((volume["metadata"].get("annotations") or {}).get(_PROVISIONED_BY) == PROVISIONER)


def is_unused(volume: Obj) -> bool:
    """Whether no claim holds the volume any more: only then may anything of it go."""
    phase = (volume.get("status") or {}).get("phase")
    return is_ours(volume) and phase in ("Released", "Failed")


def loses_directory(volume: Obj) -> bool:
    return bool(volume["spec"].get("persistentVolumeReclaimPolicy") == "Delete")


# Using


@dataclass(frozen=True)
class Mounted:
    """What a claim means to the runner."""

    path: str
    type: str
    read_only: bool
    ours: bool


def claim_name(pod: Obj, volume: Obj) -> str:
    """The claim behind a volume of a pod; "" for other kinds."""
    if "ephemeral" in volume:
        return f"{pod['metadata']['name']}-{volume['name']}"
    return str((volume.get("persistentVolumeClaim") or {}).get("claimName") or "")


def mounted(pod: Obj, volume: Obj, claim: Obj | None, persistent: Obj | None) -> Mounted:
    """Raises MissingSource while the claim is not ready (in the kubelet's words), RefusedPod for foreign kinds."""
    problem = _not_ready(pod, volume, claim, persistent)
    if problem:
        name = f"{pod['metadata']['namespace']}/{claim_name(pod, volume)}"
        text = f"error processing PVC {name}: {problem}"
        raise MissingSource(text, volume=str(volume["name"]), event=text)
    assert claim is not None
    assert persistent is not None
    path, kind = _directory(persistent)
    modes = claim["spec"].get("accessModes") or []
    asked = bool((volume.get("persistentVolumeClaim") or {}).get("readOnly"))
    return Mounted(path, kind, asked or modes == ["ReadOnlyMany"], is_ours(persistent))


def _not_ready(pod: Obj, volume: Obj, claim: Obj | None, persistent: Obj | None) -> str:
    if claim is None:
        name = claim_name(pod, volume)
        return f'failed to fetch PVC from API server: persistentvolumeclaims "{name}" not found'
    metadata = claim["metadata"]
    owners = [one.get("uid") for one in metadata.get("ownerReferences") or () if one.get("controller")]
    if "ephemeral" in volume and pod["metadata"]["uid"] not in owners:
        return "PVC was not created for pod (pod is not owner)"
    if metadata.get("deletionTimestamp") and _PROTECTION not in (metadata.get("finalizers") or ()):
        return "PVC is being deleted"
    if (claim.get("status") or {}).get("phase") != "Bound" or not claim["spec"].get("volumeName"):
        return "PVC is not bound"
    if persistent is None:
        return f"failed to fetch PV {claim['spec']['volumeName']} from API server: not found"
    if (persistent["spec"].get("claimRef") or {}).get("uid") != metadata["uid"]:
        return f"found PV object {claim['spec']['volumeName']} but it is not bound to the claim"
    return ""


def _directory(persistent: Obj) -> tuple[str, str]:
    """(path, hostPath type)."""
    spec, name = persistent["spec"], persistent["metadata"]["name"]
    if spec.get("volumeMode") == "Block":
        raise RefusedPod(
            f"PersistentVolume {name}: spec.volumeMode Block: block devices are not available to an unprivileged user"
        )
    if "hostPath" in spec:
        return str(spec["hostPath"]["path"]), str(spec["hostPath"].get("type") or "")
    if "local" in spec:
        return str(spec["local"]["path"]), "Directory"
    common = {
        "accessModes",
        "capacity",
        "claimRef",
        "mountOptions",
        "nodeAffinity",
        "storageClassName",
        "volumeMode",
    }
    kinds = [
        key
        for key in spec
        if key not in {*common, "persistentVolumeReclaimPolicy", "volumeAttributesClassName"}
    ]
    raise RefusedPod(
        f"PersistentVolume {name}: spec.{(kinds or ['?'])[0]}: only hostPath and local can be used without root"
    )
