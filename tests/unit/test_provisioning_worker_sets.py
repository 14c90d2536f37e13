"""A WorkerSet's spec: what is sound becomes a value, whatever is not is named, every field of it at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlet.operators.provisioning.autoscaler.worker_sets import (
    DrainPolicy,
    InvalidWorkerSet,
    NodeNameFrom,
    Shape,
    parse_worker_set,
)


def manifest(**changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "slurmCluster": "one",
        "scaleTargetRef": {
            "apiVersion": "cluster.x-k8s.io/v1beta2",
            "kind": "MachineDeployment",
            "name": "md",
        },
        "partitions": ["batch"],
        "shape": {"cpus": 16, "memoryMB": 64000, "gres": {"gpu:a100": 4, "shard": 0}},
        "max": 8,
    }
    spec.update(changes)
    return {"metadata": {"name": "gpu"}, "spec": {key: one for key, one in spec.items() if one is not ...}}


def problems(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(InvalidWorkerSet) as caught:
        parse_worker_set(manifest(**changes))
    assert caught.value.reason == "Invalid"
    return caught.value.problems


def test_a_short_spec_gets_the_defaults_of_the_crd() -> None:
    made = parse_worker_set(manifest())
    assert (made.min, made.max, made.scale_in_after_s, made.startup_deadline_s) == (0, 8, 300, 1800)
    assert made.shape == Shape(16, 64000, (("gpu:a100", 4),))
    assert (made.scale_out_step, made.scale_in_step, made.paused) == (None, None, False)
    assert (made.drain_policy, made.node_name_from) == (DrainPolicy.WAIT, NodeNameFrom.MACHINE)


def test_a_long_spec_is_taken_whole() -> None:
    made = parse_worker_set(
        manifest(
            features=["ib", "rack1"], topologyDomain="rack1", min=2, scaleInAfterSeconds=60, scaleOutStep=3, scaleInStep=1,
            startupDeadlineSeconds=900, nodeNamePrefix="w-", nodeNameFrom="InfrastructureMachine", paused=True,
            drain={"deadlineSeconds": 10, "policy": "Never"},
        )
    )  # fmt: skip
    assert (made.features, made.topology_domain, made.min) == ({"ib", "rack1"}, "rack1", 2)
    assert (made.scale_in_after_s, made.scale_out_step, made.scale_in_step) == (60, 3, 1)
    assert (made.drain_deadline_s, made.drain_policy, made.paused) == (10, DrainPolicy.NEVER, True)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("slurmCluster", ..., "spec.slurmCluster: is missing"),
        ("slurmCluster", "", "spec.slurmCluster: is ''"),
        ("scaleTargetRef", ..., "spec.scaleTargetRef: is missing, expected an object"),
        ("scaleTargetRef", "md", "spec.scaleTargetRef: is 'md', expected an object"),
        ("scaleTargetRef", {"apiVersion": "v1", "kind": "X"}, "spec.scaleTargetRef.name: is missing"),
        ("scaleTargetRef", {"apiVersion": "X Y", "kind": "X", "name": "x"}, "spec.scaleTargetRef.apiVersion: is 'X Y'"),
        ("partitions", [], "spec.partitions: is [], expected a list of at least 1 names"),
        ("partitions", ["a", 3], "spec.partitions[1]: is 3, expected a name"),
        ("features", ["a&b"], "spec.features[0]: is 'a&b', expected a name"),
        ("shape", ..., "spec.shape: is missing, expected an object"),
        ("shape", {"cpus": 0, "memoryMB": 1}, "spec.shape.cpus: is 0, expected a number of at least 1"),
        ("shape", {"cpus": 1}, "spec.shape.memoryMB: is missing"),
        ("shape", {"cpus": 1, "memoryMB": 1, "gres": {"gpu": -1}}, "spec.shape.gres.gpu: is -1"),
        ("max", ..., "spec.max: is missing"),
        ("max", "8", "spec.max: is '8', expected a number from 0 to 65533"),
        ("max", True, "spec.max: is True"),
        ("min", -1, "spec.min: is -1"),
        ("min", 9, "spec.min: is 9, expected at most spec.max, which is 8"),
        ("scaleInAfterSeconds", -5, "spec.scaleInAfterSeconds: is -5"),
        ("scaleOutStep", 0, "spec.scaleOutStep: is 0"),
        ("scaleInStep", "1", "spec.scaleInStep: is '1'"),
        ("startupDeadlineSeconds", 0, "spec.startupDeadlineSeconds: is 0"),
        ("topologyDomain", 7, "spec.topologyDomain: is 7"),
        ("nodeNameFrom", "Host", "spec.nodeNameFrom: is 'Host', expected Machine or InfrastructureMachine"),
        ("drain", {"policy": "Kill"}, "spec.drain.policy: is 'Kill', expected Wait or Never"),
        ("drain", {"deadlineSeconds": -1}, "spec.drain.deadlineSeconds: is -1"),
        ("paused", "yes", "spec.paused: is 'yes', expected true or false"),
        ("scaleDownAfter", 5, "spec.scaleDownAfter: is not a field of a WorkerSet"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_as_it_must_be_is_named(field: str, value: object, said: str) -> None:
    assert [one for one in problems(**{field: value}) if one.startswith(said)], problems(**{field: value})


def test_all_problems_are_told_at_once() -> None:
    found = problems(min="a", max=-1, shape={"cpus": 0, "memoryMB": 0})
    assert len(found) == 4


def test_an_object_without_a_spec_is_refused() -> None:
    with pytest.raises(InvalidWorkerSet, match="spec: is missing"):
        parse_worker_set({"metadata": {"name": "x"}})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(sorted({*manifest()["spec"], "min", "drain", "features", "paused"})), VALUES
    )
)
def test_any_values_are_taken_or_refused_with_the_field_named(changes: dict[str, Any]) -> None:
    try:
        made = parse_worker_set(manifest(**changes))
    except InvalidWorkerSet as error:
        named = error.problems
    else:
        named = ()
        assert made.min <= made.max
    assert all(one.startswith("spec.") for one in named)
