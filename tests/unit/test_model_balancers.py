"""Load balancers: which ports the login host serves, and what a Service's status says of that."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.model import balancers

HERE = "192.0.2.1"


def service(*ports: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "s"}, "spec": {"type": "LoadBalancer", "ports": list(ports), **spec}}


def problems(asked: dict[str, Any], kept: set[Any] = frozenset(), taken: set[Any] = frozenset()) -> list[str]:  # type: ignore[assignment]
    free = {("tcp", 8080), ("udp", 5353), ("tcp", 80)}
    return [one.problem for one in balancers.decide(asked, kept, taken, lambda port: port in free)]


@pytest.mark.parametrize(
    ("port", "kept", "taken", "wanted"),
    [
        ({"port": 8080}, set(), set(), ""),
        ({"port": 5353, "protocol": "UDP"}, set(), set(), ""),
        ({"port": 8080, "protocol": "UDP"}, set(), set(), "PortInUse"),
        ({"port": 80}, set(), set(), "PortNeedsRoot"),
        ({"port": 9090}, set(), set(), "PortInUse"),
        ({"port": 9090}, {("tcp", 9090)}, set(), ""),
        ({"port": 8080}, {("tcp", 8080)}, {("tcp", 8080)}, "PortOfAnotherService"),
        ({"port": 8080, "protocol": "SCTP"}, set(), set(), "ProtocolNotServed"),
    ],
)
def test_which_ports_are_served(port: dict[str, Any], kept: Any, taken: Any, wanted: str) -> None:
    assert problems(service(port), kept, taken) == [wanted]


def test_a_status_is_read_back_as_it_was_written() -> None:
    asked = service({"port": 8080}, {"port": 80, "nodePort": 30080})
    made = balancers.decide(asked, set(), set(), lambda _port: True)
    assert balancers.status(made, HERE) == {
        "ingress": [
            {
                "ip": HERE,
                "ipMode": "Proxy",
                "ports": [
                    {"port": 8080, "protocol": "TCP"},
                    {"port": 80, "protocol": "TCP", "error": "PortNeedsRoot"},
                ],
            }
        ]
    }
    asked["status"] = {"loadBalancer": balancers.status(made, HERE)}
    assert balancers.served(asked, HERE) == {("tcp", 8080)}
    assert balancers.shows(asked, HERE)
    assert balancers.served(asked, "192.0.2.2") == set()
    assert not balancers.shows(asked, "192.0.2.2")


def test_pods_take_the_short_way_only_when_every_port_is_ours() -> None:
    made = balancers.decide(service({"port": 8080}), set(), set(), lambda _port: True)
    assert balancers.status(made, HERE)["ingress"][0]["ipMode"] == "VIP"


def test_people_are_told_where_to_go() -> None:
    asked = service({"port": 8080}, {"port": 80, "nodePort": 30080}, {"port": 81})
    told = [balancers.told(one, HERE) for one in balancers.decide(asked, set(), set(), lambda _port: True)]
    assert [kind for kind, _ in told] == ["Normal", "Normal", "Warning"]
    assert "192.0.2.1:8080" in told[0][1]
    assert "its nodePort, 192.0.2.1:30080" in told[1][1]
    assert "is not served" in told[2][1]


def test_other_balancers_services_are_left_to_them() -> None:
    assert balancers.is_balanced(service())
    assert not balancers.is_balanced(service(loadBalancerClass="example.org/lb"))
    assert not balancers.is_balanced(service(type="NodePort"))
