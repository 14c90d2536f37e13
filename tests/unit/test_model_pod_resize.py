"""Resources in a pod's status, sums of them, and resizes that cannot be."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from slurmlet.model import partition_node, pod_job, pod_resize, quantities
from slurmlet.model.pod_resources import pod_limits, pod_requests, qos_class, storage_limits, written
from slurmlet.model.pod_status import Facts, pod_status
from slurmlet.model.slurm_values import Partition
from tests.unit.reports import pod_report

SMALL = {"requests": {"cpu": "100m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}}


def container(name: str = "c", resources: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "i", "resources": resources or {}, **more}


def pod(*containers: dict[str, Any], status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "p", "namespace": "ns", "uid": "u", "generation": 2}
    return {"metadata": metadata, "spec": {"containers": list(containers), **spec}, "status": status or {}}


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [
        (Fraction(2**20), "Ki", "1Mi"), (Fraction(3 * 2**19), "Ki", "1536Ki"), (Fraction(1000), "Ki", "1k"),
        (Fraction(10**8), "Ki", "100M"), (Fraction(1, 10), "", "100m"), (Fraction(2), "", "2"), (Fraction(1500), "", "1500"),
        (Fraction(1000), "", "1k"), (Fraction(0), "", "0"), (Fraction(3, 2), "", "1500m"),
        (Fraction(2**30), "", "1073741824"),
    ],
)  # fmt: skip
def test_quantities_are_written_as_the_api_server_would(value: Fraction, like: str, text: str) -> None:
    assert quantities.canonical(value, like) == text
    assert quantities.parse(text) == value


def limits(**amounts: str) -> dict[str, Any]:
    return {"limits": {name.replace("_", "-"): value for name, value in amounts.items()}}


def test_limits_of_a_pod() -> None:
    spec = pod(
        container("a", limits(memory="1Gi")),
        container("b", limits(memory="1Gi", cpu="2")),
        initContainers=[
            container("i", limits(memory="3Gi")),
            container("s", limits(cpu="1"), restartPolicy="Always"),
        ],
        overhead={"memory": "1Gi", "ephemeral-storage": "1Gi"},
    )["spec"]
    assert written(pod_limits(spec)) == {"cpu": "3", "memory": "4Gi"}
    spec["resources"] = limits(memory="10Gi")
    assert written(pod_limits(spec)) == {"cpu": "3", "memory": "11Gi"}


def test_only_some_resources_can_be_the_pods_own() -> None:
    spec = pod(container(), resources={"requests": {"cpu": "2", "example.com/x": "5"}})["spec"]
    assert written(pod_requests(spec)) == {"cpu": "2"}


def test_storage_limits() -> None:
    spec = pod(
        container("a", limits(ephemeral_storage="4Mi")),
        container("b"),
        container("z", limits(ephemeral_storage="0")),
    )
    assert storage_limits(spec["spec"]) == {"containers": {"a": (4 << 20, "4Mi")}, "pod": (4 << 20, "4Mi")}
    assert storage_limits(pod(container())["spec"]) == {"containers": {}, "pod": None}


def test_the_pods_own_resources_decide_its_class() -> None:
    whole = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    assert qos_class(pod(container(), resources=whole)["spec"]) == "Guaranteed"
    assert qos_class(pod(container("a", whole), resources=limits(memory="2Gi"))["spec"]) == "Burstable"
    assert qos_class(pod(container("a", whole))["spec"]) == "Guaranteed"


def running(asked: dict[str, Any]) -> dict[str, Any]:
    container = {"state": "running", "started_at": "2026-01-01T00:00:00Z", "ready": True, "started": True}
    report = pod_report({"c": container})
    return pod_status(Facts(pod=asked, now="2026-01-01T00:00:00Z", job_id="7", report=report))


def test_a_status_names_what_the_job_was_given() -> None:
    status = running(pod(container(resources=SMALL)))
    assert status["containerStatuses"][0]["resources"] == SMALL
    assert status["containerStatuses"][0]["allocatedResources"] == SMALL["requests"]
    assert (status["resources"], status["allocatedResources"]) == (SMALL, SMALL["requests"])
    assert (
        "resources"
        not in pod_status(Facts(pod=pod(container(resources=SMALL)), now="x"))["containerStatuses"][0]
    )


def test_a_resize_changes_nothing_and_is_pending_for_good() -> None:
    first = running(pod(container(resources=SMALL)))
    larger = pod(container(resources={**SMALL, "requests": {"cpu": "1", "memory": "32Mi"}}), status=first)
    second = running(larger)
    assert second["containerStatuses"][0]["resources"] == SMALL
    assert "resources" not in second, "what was written stays"
    pending = next(one for one in second["conditions"] if one["type"] == pod_resize.PENDING)
    assert (pending["status"], pending["reason"], pending["observedGeneration"]) == ("True", "Infeasible", 2)
    assert pod_resize.is_new_resize(larger)
    assert not pod_resize.is_new_resize({**larger, "status": second})
    text = pod_resize.resize_event(larger)
    assert json.loads(text.removeprefix("Pod resize Infeasible: "))["error"] == pod_resize.MESSAGE
    # Asked back to what it is, in other words.
    back = pod(container(resources={**SMALL, "requests": {"cpu": "0.1", "memory": "32768Ki"}}), status=second)
    assert {"$patch": "delete", "type": pod_resize.PENDING} in running(back)["conditions"]
    assert not [
        one for one in running(pod(container(resources=SMALL), status=first))["conditions"] if "$patch" in one
    ]


def test_generic_resources_go_both_ways() -> None:
    part = Partition("p", True, True, "infinite", 2, 2, 8, 4, 8000, 4000, 4,
                     gres=frozenset({"gpu:a100:2(S:0-1)", "nic:3", "scratch:fast:no_consume:4G"}))  # fmt: skip
    found = partition_node.extended_resources(part)
    assert found == {
        "nvidia.com/gpu": 4, "amd.com/gpu": 4, "slurmlet.io/gres-gpu": 2, "slurmlet.io/gres-gpu.a100": 2,
        "slurmlet.io/gres-nic": 3, "slurmlet.io/gres-scratch": 4, "slurmlet.io/gres-scratch.fast": 4,
    }  # fmt: skip
    assert [pod_job.gres_name(name) for name in ("slurmlet.io/gres-gpu.a100", "slurmlet.io/gres-nic", "cpu")] == [
        "gpu:a100", "nic", "",
    ]  # fmt: skip
