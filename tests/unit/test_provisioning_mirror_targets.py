"""The Scaling Webhook's ConfigMap: the thesis's one target, ours with many, and every mistake by its field."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlet.operators.provisioning.mirror_targets import (
    Distribution,
    MalformedConfigMap,
    Mirror,
    MirrorTarget,
    mirrors,
)


def config_map(**data: str) -> dict[str, Any]:
    metadata = {"name": "scaling-webhook-configmap", "namespace": "ops"}
    return {"metadata": metadata, "data": {name: textwrap.dedent(text) for name, text in data.items()}}


@pytest.mark.parametrize("namespace", ["machineDeploymentNamespace", "machineDeploymentNameSpace"])
def test_the_thesis_map_has_one_target(namespace: str) -> None:
    found = mirrors(config_map(machineDeploymentName="workers", **{namespace: "metal3"}))
    assert found == [Mirror("ops", "mirror-deployment", (MirrorTarget("metal3", "workers"),))]


def test_several_mirrors_with_several_targets() -> None:
    text = """\
        - deployment: {namespace: keda, name: one}
          targets: [{namespace: metal3, name: a}, {name: b, kind: NodeSet, apiVersion: slinky.slurm.net/v1beta1}]
        - deployment: {name: two}
          distribution: Spread
          targets: [{name: c, max: 3}, {name: d}]
        """
    one, two = mirrors(config_map(mirrors=text))
    assert (one.key, two.key) == ("keda/one", "ops/two")
    assert one.targets[1] == MirrorTarget("ops", "b", "NodeSet", "slinky.slurm.net")
    assert list(one.replicas(4).values()) == [4, 4]
    assert list(two.replicas(4).values()) == [3, 1]


targets = st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=5)


@given(targets, st.integers(0, 50))
def test_what_is_shared_is_never_more_than_was_asked_for(bounds: list[int | None], wanted: int) -> None:
    made = tuple(MirrorTarget("x", str(number), max=most) for number, most in enumerate(bounds))
    given = Mirror("x", "m", made, Distribution.SPREAD).replicas(wanted)
    room = wanted if None in bounds else sum(most or 0 for most in bounds)
    assert sum(given.values()) == min(wanted, room)
    assert all(count >= 0 and (target.max is None or count <= target.max) for target, count in given.items())


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({}, "data.machineDeploymentName is missing"),
        ({"mirrors": "- ["}, "data.mirrors is not YAML"),
        ({"mirrors": "x: y"}, "data.mirrors is not a list"),
        ({"mirrors": "- 1"}, "mirrors[0] is not a map"),
        ({"mirrors": "- {deployment: {name: a}, targets: []}"}, "mirrors[0].targets is not a list"),
        ({"mirrors": "- {deployment: {}, targets: [{name: a}]}"}, "mirrors[0].deployment.name is missing"),
        ({"mirrors": "- {deployment: {name: a}, targets: [{}]}"}, "mirrors[0].targets[0].name is missing"),
        ({"mirrors": "- {deployment: {name: a}, targets: [{name: b, max: -1}]}"}, "targets[0].max is -1"),
        (
            {"mirrors": "- {deployment: {name: a}, targets: [{name: b, mox: 1}]}"},
            "targets[0].mox is not known",
        ),
        (
            {"mirrors": "- {deployment: {name: a}, distribution: x, targets: [{name: b}]}"},
            "distribution is 'x'",
        ),
        (
            {
                "mirrors": "- {deployment: {name: a}, targets: [{name: b}]}\n- {deployment: {name: a}, targets: [{name: b}]}"
            },
            "Deployment ops/a is there twice; mirrors: MachineDeployment ops/b follows two mirrors",
        ),
    ],
)
def test_a_mistake_is_named_by_its_field(data: dict[str, str], named: str) -> None:
    with pytest.raises(MalformedConfigMap) as error:
        mirrors(config_map(**data))
    assert named in error.value.message
