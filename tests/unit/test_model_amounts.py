"""Quantities, a pod's effective requests, its QoS class: as Kubernetes computes them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from slurmlet.base.errors import UserError
from slurmlet.model import quantities
from slurmlet.model.pod_resources import pod_requests, qos_class

MI = 2**20


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", Fraction(0)), ("1", Fraction(1)), (2, Fraction(2)), ("500m", Fraction(1, 2)), ("1.5", Fraction(3, 2)),
        (".5", Fraction(1, 2)), ("1.", Fraction(1)), ("100n", Fraction(1, 10**7)), ("3u", Fraction(3, 10**6)),
        ("64Mi", Fraction(64 * MI)), ("1.5Gi", Fraction(1536 * MI)), ("1Ki", Fraction(1024)), ("1k", Fraction(1000)),
        ("1G", Fraction(10**9)), ("1E", Fraction(10**18)), ("1Ei", Fraction(2**60)), ("2e3", Fraction(2000)),
        ("2E3", Fraction(2000)), ("1e-3", Fraction(1, 1000)), ("-1", Fraction(-1)), ("+5", Fraction(5)),
        ("0.1", Fraction(1, 10)),
    ],
)  # fmt: skip
def test_a_quantity_is_read_exactly(text: object, value: Fraction) -> None:
    assert quantities.parse(text) == value


@pytest.mark.parametrize(
    "text", ["", "m", "1 Gi", "1gi", "1KI", "1K", "0x10", "1e", "one", "1Gi\n", "1,5", None]
)
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(UserError):
        quantities.parse(text)


@pytest.mark.parametrize(
    ("value", "up"), [(Fraction(1, 1000), 1), (Fraction(2), 2), (Fraction(5, 2), 3), (Fraction(0), 0)]
)
def test_amounts_are_rounded_up(value: Fraction, up: int) -> None:
    assert quantities.ceil(value) == up


def container(
    *, limits: dict[str, str] | None = None, sidecar: bool = False, **requests: str
) -> dict[str, Any]:
    resources = {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
    return {"name": "c", "resources": resources, **({"restartPolicy": "Always"} if sidecar else {})}


@pytest.mark.parametrize(
    ("spec", "cpu_m", "memory_mi"),
    [
        pytest.param({"containers": [container()]}, None, None, id="nothing asked"),
        pytest.param(
            {"containers": [container(cpu="500m", memory="64Mi"), container(cpu="250m")]},
            750, 64, id="containers add up",
        ),
        pytest.param(
            {"containers": [container(cpu="1")], "initContainers": [container(cpu="3"), container(cpu="2", memory="1Gi")]},
            3000, 1024, id="the largest init container counts, each resource for itself",
        ),
        pytest.param(
            {"containers": [container(cpu="2")], "initContainers": [container(cpu="1")]},
            2000, None, id="a small init container costs nothing",
        ),
        pytest.param(
            {"containers": [container(cpu="1")], "initContainers": [container(cpu="500m", sidecar=True)]},
            1500, None, id="a sidecar runs beside the containers",
        ),
        pytest.param(
            {
                "containers": [container(cpu="1")],
                "initContainers": [container(cpu="1", sidecar=True), container(cpu="3"), container(cpu="2", sidecar=True)],
            },
            4000, None, id="an init container runs beside the sidecars before it",
        ),
        pytest.param(
            {"containers": [container(cpu="1")], "initContainers": [container(cpu="3"), container(cpu="1", sidecar=True)]},
            3000, None, id="but not beside those after it",
        ),
        pytest.param(
            {"containers": [container(cpu="1")], "overhead": {"cpu": "250m", "memory": "32Mi"}},
            1250, 32, id="overhead comes on top",
        ),
        pytest.param(
            {"containers": [container(limits={"cpu": "2", "memory": "128Mi"})]}, 2000, 128, id="a limit alone is a request"
        ),
        pytest.param(
            {"containers": [container(cpu="1", limits={"cpu": "4", "memory": "64Mi"})]},
            1000, 64, id="a request wins over its limit",
        ),
        pytest.param(
            {"containers": [container(cpu="1"), container(cpu="1")], "resources": {"requests": {"cpu": "3"}}},
            3000, None, id="requests of the whole pod replace the sum",
        ),
    ],
)  # fmt: skip
def test_what_a_pod_asks_for(spec: dict[str, Any], cpu_m: int | None, memory_mi: int | None) -> None:
    asked = pod_requests(spec)
    assert asked.get("cpu") == (None if cpu_m is None else Fraction(cpu_m, 1000))
    assert asked.get("memory") == (None if memory_mi is None else memory_mi * MI)


FULL = {"cpu": "1", "memory": "1Gi"}


@pytest.mark.parametrize(
    ("spec", "qos"),
    [
        ({"containers": [container()]}, "BestEffort"),
        ({"containers": [container(cpu="0", memory="0")]}, "BestEffort"),
        ({"containers": [container(cpu="1")]}, "Burstable"),
        ({"containers": [container(limits={"cpu": "1"})]}, "Burstable"),
        ({"containers": [container(limits=FULL)]}, "Guaranteed"),
        ({"containers": [container(limits=FULL, cpu="1000m", memory="1024Mi")]}, "Guaranteed"),
        ({"containers": [container(limits=FULL, cpu="500m")]}, "Burstable"),
        ({"containers": [container(limits=FULL), container()]}, "Burstable"),
        ({"containers": [container(limits=FULL)], "initContainers": [container()]}, "Burstable"),
        ({"containers": [container(limits=FULL)], "initContainers": [container(limits=FULL)]}, "Guaranteed"),
        # The kubelet does not count amounts of zero, neither as a request nor as a limit.
        ({"containers": [container(limits={"cpu": "0", "memory": "1Gi"})]}, "Burstable"),
        ({"containers": [container(limits={"cpu": "1"}, cpu="0")]}, "Burstable"),
        ({"containers": [container(**{"nvidia.com/gpu": "1"})]}, "BestEffort"),
    ],
)  # fmt: skip
def test_qos_class_by_the_kubelets_rule(spec: dict[str, Any], qos: str) -> None:
    assert qos_class(spec) == qos
