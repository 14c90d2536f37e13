from __future__ import annotations

from typing import Any

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model import claims
from slurmlet.model.pod_sources import MissingSource

SHARED, WAIT = claims.storage_classes()


def claim(**changes: Any) -> dict[str, Any]:
    annotations = {"volume.kubernetes.io/storage-provisioner": claims.PROVISIONER}
    metadata = {
        "namespace": "ns",
        "name": "data",
        "uid": "u1",
        "resourceVersion": "7",
        "annotations": annotations,
    }
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    return {
        "metadata": {**metadata, **changes.pop("metadata", {})},
        "spec": {**spec, **changes.pop("spec", {})},
        **changes,
    }


def volume(**changes: Any) -> dict[str, Any]:
    made = claims.persistent_volume(claim(), SHARED, "/v/pvc-u1")
    made["spec"].update(changes.pop("spec", {}))
    made["metadata"].update(changes.pop("metadata", {}))
    return {**made, **changes}


def test_one_class_is_the_default_and_both_grow() -> None:
    assert [one["metadata"]["name"] for one in (SHARED, WAIT)] == ["shared", "shared-wait"]
    assert SHARED["metadata"]["annotations"] == {"storageclass.kubernetes.io/is-default-class": "true"}
    assert WAIT["metadata"]["annotations"] == {}
    assert SHARED["allowVolumeExpansion"]
    assert (SHARED["volumeBindingMode"], WAIT["volumeBindingMode"]) == ("Immediate", "WaitForFirstConsumer")


SELECTED = {
    "volume.kubernetes.io/storage-provisioner": claims.PROVISIONER,
    "volume.kubernetes.io/selected-node": "batch",
}


@pytest.mark.parametrize(
    ("one", "storage_class", "asks"),
    [
        (claim(), SHARED, True),
        (claim(spec={"volumeName": "x"}), SHARED, False),
        (claim(metadata={"deletionTimestamp": "now"}), SHARED, False),
        (claim(metadata={"annotations": {}}), SHARED, False),
        (
            claim(metadata={"annotations": {"volume.kubernetes.io/storage-provisioner": "other"}}),
            SHARED,
            False,
        ),
        (claim(), None, False),
        (claim(), {**SHARED, "provisioner": "other"}, False),
        (claim(), WAIT, False),
        (claim(metadata={"annotations": SELECTED}), WAIT, True),
    ],
)
def test_which_claims_ask_for_a_volume(one: Any, storage_class: Any, asks: bool) -> None:
    assert claims.asks_for_volume(one, storage_class) is asks


def test_the_volume_of_a_claim() -> None:
    made = claims.persistent_volume(claim(), {**SHARED, "reclaimPolicy": "Retain"}, "/v/pvc-u1")
    assert made["metadata"]["name"] == "pvc-u1"
    assert made["metadata"]["finalizers"] == [claims.FINALIZER]
    assert made["spec"]["hostPath"] == {"path": "/v/pvc-u1", "type": "Directory"}
    assert made["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert made["spec"]["claimRef"]["uid"] == "u1"
    assert "nodeAffinity" not in made["spec"]
    assert claims.is_ours(made)


@pytest.mark.parametrize(
    ("spec", "storage_class", "words"),
    [
        ({"volumeMode": "Block"}, SHARED, "spec.volumeMode"),
        ({"selector": {"matchLabels": {}}}, SHARED, "spec.selector"),
        ({"dataSource": {"kind": "PersistentVolumeClaim", "name": "x"}}, SHARED, "spec.dataSource"),
        ({}, {**SHARED, "mountOptions": ["ro"]}, "mountOptions"),
        ({}, {**SHARED, "parameters": {"type": "ssd"}}, "type"),
    ],
)
def test_what_a_directory_cannot_be(spec: Any, storage_class: Any, words: str) -> None:
    if "selector" in spec:
        spec = {"selector": {"matchLabels": {"a": "b"}}}
    with pytest.raises(claims.ClaimRefused, match=words):
        claims.persistent_volume(claim(spec=spec), storage_class, "/v")


def grown(requested: str, told: str, have: str, phase: str = "Bound") -> str | None:
    one = claim(
        spec={"volumeName": "pvc-u1", "resources": {"requests": {"storage": requested}}},
        status={"phase": phase, "capacity": {"storage": told}},
    )
    return claims.growth(one, volume(spec={"capacity": {"storage": have}}))


def test_growing() -> None:
    assert grown("1Gi", "1Gi", "1Gi") is None
    assert grown("1024Mi", "1Gi", "1Gi") is None
    assert grown("2Gi", "1Gi", "1Gi") == "2Gi"
    # A crash came between the two writes.
    assert grown("2Gi", "1Gi", "2Gi") == "2Gi"
    assert grown("1Gi", "2Gi", "2Gi") is None
    assert grown("2Gi", "1Gi", "1Gi", phase="Pending") is None
    other = claim(spec={"volumeName": "pvc-other"}, status={"phase": "Bound"})
    assert claims.growth(other, volume()) is None


def test_grown_keeps_foreign_conditions() -> None:
    one = claim(status={"conditions": [{"type": "Resizing"}, {"type": "ModifyingVolume"}]})
    assert claims.grown_status(one, "2Gi") == {
        "capacity": {"storage": "2Gi"},
        "conditions": [{"type": "ModifyingVolume"}],
    }


@pytest.mark.parametrize(
    ("phase", "unused"),
    [("Pending", False), ("Available", False), ("Bound", False), ("Released", True), ("Failed", True)],
)
def test_only_what_no_claim_holds_may_go(phase: str, unused: bool) -> None:
    assert claims.is_unused(volume(status={"phase": phase})) is unused
    foreign = volume(status={"phase": phase}, metadata={"annotations": {}})
    assert not claims.is_unused(foreign)


POD = {"metadata": {"namespace": "ns", "name": "p", "uid": "pod1"}}
BY_NAME = {"name": "d", "persistentVolumeClaim": {"claimName": "data"}}
BOUND = claim(spec={"volumeName": "pvc-u1"}, status={"phase": "Bound"})


def test_a_bound_claim_is_a_path() -> None:
    found = claims.mounted(POD, BY_NAME, BOUND, volume())
    assert found == claims.Mounted("/v/pvc-u1", "Directory", read_only=False, ours=True)
    asked = {"name": "d", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}}
    assert claims.mounted(POD, asked, BOUND, volume()).read_only
    only_reading = claim(
        spec={"volumeName": "pvc-u1", "accessModes": ["ReadOnlyMany"]}, status={"phase": "Bound"}
    )
    assert claims.mounted(POD, BY_NAME, only_reading, volume()).read_only


@pytest.mark.parametrize(
    ("one", "persistent", "words"),
    [
        (None, None, 'persistentvolumeclaims "data" not found'),
        (claim(status={"phase": "Pending"}), None, "PVC is not bound"),
        (
            {**BOUND, "metadata": {**BOUND["metadata"], "deletionTimestamp": "x"}},
            volume(),
            "PVC is being deleted",
        ),
        (BOUND, None, "failed to fetch PV pvc-u1"),
        (BOUND, volume(spec={"claimRef": {"uid": "u2"}}), "not bound to the claim"),
    ],
)
def test_claims_that_are_not_ready_are_waited_for(one: Any, persistent: Any, words: str) -> None:
    with pytest.raises(MissingSource, match=words) as caught:
        claims.mounted(POD, BY_NAME, one, persistent)
    assert caught.value.volume == "d"
    assert caught.value.event.startswith("error processing PVC ns/data: ")


def test_an_ephemeral_claim_must_be_the_pods_own() -> None:
    inline = {"name": "work", "ephemeral": {"volumeClaimTemplate": {}}}
    assert claims.claim_name(POD, inline) == "p-work"
    with pytest.raises(MissingSource, match="not owner"):
        claims.mounted(POD, inline, BOUND, volume())
    own = {
        **BOUND,
        "metadata": {**BOUND["metadata"], "ownerReferences": [{"uid": "pod1", "controller": True}]},
    }
    assert claims.mounted(POD, inline, own, volume()).path == "/v/pvc-u1"


def test_foreign_kinds_are_refused_by_name() -> None:
    spec = {key: value for key, value in volume()["spec"].items() if key != "hostPath"}
    nfs = {"metadata": {"name": "x"}, "spec": {**spec, "nfs": {"server": "s", "path": "/"}}}
    with pytest.raises(RefusedPod, match=r"spec\.nfs"):
        claims.mounted(POD, BY_NAME, BOUND, nfs)
    local = {"metadata": {"name": "x"}, "spec": {**spec, "local": {"path": "/disk"}}}
    assert claims.mounted(POD, BY_NAME, BOUND, local) == claims.Mounted("/disk", "Directory", False, False)
