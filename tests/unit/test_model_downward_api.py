"""The downward API as the kubelet prints it."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model.downward_api import Place, field_value, resource_value

PLACE = Place(host_ip="10.0.0.5", host="c1", node_cpus=16, node_memory_bytes=6000 << 20)
POD: dict[str, Any] = {
    "metadata": {
        "name": "p", "namespace": "ns", "uid": "u-1",
        "labels": {"b": "2", "a": "1"},
        "annotations": {"note": 'say "hi"\n\ttab\x01\\ ü\u200b', "a.b/c": "x"},
    },
    "spec": {
        "nodeName": "batch", "serviceAccountName": "robot",
        "initContainers": [{"name": "first", "resources": {"limits": {"cpu": "250m"}}}],
        "containers": [
            {"name": "c", "resources": {"requests": {"cpu": "1500m", "memory": "1Mi"}, "limits": {"memory": "3000k"}}},
            {"name": "bare"},
            {"name": "zero", "resources": {"limits": {"cpu": "0"}}},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "p"), ("metadata.namespace", "ns"), ("metadata.uid", "u-1"), ("spec.nodeName", "batch"),
        ("spec.serviceAccountName", "robot"), ("status.hostIP", "10.0.0.5"), ("status.hostIPs", "10.0.0.5"),
        ("status.podIP", "10.0.0.5"), ("status.podIPs", "10.0.0.5"), ("metadata.labels['a']", "1"),
        ("metadata.annotations['a.b/c']", "x"), ("metadata.labels['none']", ""),
        ("metadata.labels", 'a="1"\nb="2"'),
        # strconv.Quote: what does not print is escaped, letters of any language are not
        ("metadata.annotations", 'a.b/c="x"\nnote="say \\"hi\\"\\n\\ttab\\x01\\\\ ü\\u200b"'),
    ],
)  # fmt: skip
def test_fields(path: str, value: str) -> None:
    assert field_value(POD, path, PLACE) == value


def test_labels_of_a_pod_without_any() -> None:
    bare = {"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {}}
    assert field_value(bare, "metadata.labels", PLACE) == ""
    assert field_value(bare, "metadata.annotations['x']", PLACE) == ""
    assert field_value(bare, "spec.nodeName", PLACE) == ""


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(RefusedPod, match="spec.secretThing".replace(".", r"\.")):
        field_value(POD, "spec.secretThing", PLACE)


@pytest.mark.parametrize(
    ("container", "reference", "value"),
    [
        ("c", {"resource": "requests.cpu"}, "2"),
        ("c", {"resource": "requests.cpu", "divisor": "1m"}, "1500"),
        ("c", {"resource": "requests.cpu", "divisor": "0"}, "2"),
        ("c", {"resource": "requests.memory"}, str(1 << 20)),
        ("c", {"resource": "limits.memory", "divisor": "1Mi"}, "3"),
        ("c", {"resource": "limits.cpu"}, "16"),
        ("bare", {"resource": "limits.cpu"}, "16"),
        ("bare", {"resource": "limits.memory", "divisor": "1Mi"}, "6000"),
        ("bare", {"resource": "requests.cpu"}, "0"),
        ("zero", {"resource": "limits.cpu"}, "16"),
        ("bare", {"resource": "requests.cpu", "containerName": "c"}, "2"),
        ("bare", {"resource": "limits.cpu", "containerName": "first", "divisor": "1m"}, "250"),
        ("bare", {"resource": "requests.cpu", "containerName": "first", "divisor": "1m"}, "250"),
    ],
)
def test_resources_are_divided_and_rounded_up(container: str, reference: dict[str, Any], value: str) -> None:
    own = next(one for one in POD["spec"]["containers"] if one["name"] == container)
    assert resource_value(POD, reference, own, PLACE) == value


def test_a_resource_of_no_container_is_refused() -> None:
    with pytest.raises(RefusedPod, match="no container"):
        resource_value(POD, {"resource": "limits.cpu", "containerName": "none"}, None, PLACE)
