"""What the hub pushed, asked as netd asks it: routes, spread, affinity, policy."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from slurmlet.podnet import addresses, connection_policy
from slurmlet.podnet.netd_setup import Setup, from_plan
from slurmlet.podnet.table_log import TableLog
from slurmlet.podnet.tables import DENIED, HOST, POD, REFUSED, TCP, UDP, UNREACHABLE, Route, Tables

OWN, OTHER, THIRD = "10.244.0.7", "10.244.0.8", "10.244.0.9"
DNS = "10.96.0.10"


def setup() -> Setup:
    plan: dict[str, Any] = {
        "ip": OWN,
        "pod_range": "10.244.0.0/16",
        "service_range": "10.96.0.0/16",
        "key": "00" * 32,
        "node": "batch",
        "host_ports": [["tcp", "", 8080, 80]],
    }
    return from_plan(plan, "192.0.2.5")


def target(*to: list[Any], affinity_s: int = 0, local: bool = False) -> dict[str, Any]:
    return {"to": list(to), "affinity_s": affinity_s, "local": local}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def tables(message: dict[str, Any], clock: Clock | None = None) -> Tables:
    made = Tables(setup(), clock or Clock())
    made.apply({"reset": True, "pods": {OTHER: ["192.0.2.6", 4500, {"80": 40123}]}, **message})
    return made


def number(text: str) -> int:
    return addresses.number(text)


@pytest.mark.parametrize(
    ("ip", "port", "expected"),
    [
        (OTHER, 81, Route(POD, number(OTHER), 81)),
        (OWN, 80, Route(POD, number(OWN), 80)),
        (THIRD, 80, Route(UNREACHABLE)),
        ("198.51.100.1", 443, Route(HOST, number("198.51.100.1"), 443)),
        ("10.96.0.1", 443, Route(HOST, number("192.0.2.1"), 6443)),
        (DNS, 53, Route(POD, number(OTHER), 5353)),
        ("10.96.0.99", 80, Route(REFUSED)),
        (DNS, 54, Route(REFUSED)),
        ("203.0.113.9", 80, Route(POD, number(OTHER), 8080)),
    ],
)
def test_an_address_leads_where_the_tables_say(ip: str, port: int, expected: Route) -> None:
    made = tables(
        {
            "services": {
                "10.96.0.1 tcp 443": target(["192.0.2.1", 6443, ""]),
                f"{DNS} tcp 53": target([OTHER, 5353, "batch"]),
                "10.96.0.99 tcp 80": target(),
                "203.0.113.9 tcp 80": target([OTHER, 8080, "batch"]),
            }
        }
    )
    assert made.route(TCP, number(ip), port) == expected


def test_protocols_of_one_port_are_services_apart() -> None:
    made = tables({"services": {f"{DNS} udp 53": target([OTHER, 53, ""])}})
    assert made.route(UDP, number(DNS), 53).kind == POD
    assert made.route(TCP, number(DNS), 53).kind == REFUSED


def test_connections_spread_evenly_over_backends() -> None:
    backends = [[OTHER, port, ""] for port in (1, 2, 3)]
    made = tables({"services": {f"{DNS} tcp 53": target(*backends)}})
    seen = collections.Counter(made.route(TCP, number(DNS), 53).port for _ in range(30))
    assert seen == {1: 10, 2: 10, 3: 10}


def test_a_client_with_affinity_keeps_its_backend_until_it_was_away_too_long() -> None:
    clock = Clock()
    backends = [[OTHER, port, ""] for port in range(1, 60)]
    made = tables({"services": {f"{DNS} tcp 53": target(*backends, affinity_s=10)}}, clock)
    first = made.route(TCP, number(DNS), 53)
    clock.now_s += 9
    assert made.route(TCP, number(DNS), 53) == first
    clock.now_s += 9
    assert made.route(TCP, number(DNS), 53) == first
    # The same Service again, with one backend more: those that are there stay chosen.
    made.apply({"services": {f"{DNS} tcp 53": target([OTHER, 99, ""], *backends, affinity_s=10)}})
    assert made.route(TCP, number(DNS), 53) == first
    # Chosen anew, by chance: the same one every time is out of the question.
    chosen = set()
    for _ in range(20):
        clock.now_s += 11
        chosen.add(made.route(TCP, number(DNS), 53))
    assert len(chosen) > 1


def test_a_backend_that_is_gone_is_left_by_its_client() -> None:
    made = tables({"services": {f"{DNS} tcp 53": target([OTHER, 1, ""], affinity_s=10)}})
    made.route(TCP, number(DNS), 53)
    made.apply({"services": {f"{DNS} tcp 53": target([OTHER, 2, ""], affinity_s=10)}})
    assert made.route(TCP, number(DNS), 53).port == 2


def test_local_traffic_stays_on_the_node() -> None:
    both = [[OTHER, 1, "short"], [OTHER, 2, "batch"]]
    made = tables({"services": {f"{DNS} tcp 53": target(*both, local=True)}})
    assert {made.route(TCP, number(DNS), 53).port for _ in range(4)} == {2}


@pytest.mark.parametrize(("node", "ports"), [("batch", {1, 3}), ("short", {1, 2, 3})])
def test_traffic_keeps_to_what_is_near_to_its_own_node(node: str, ports: set[int]) -> None:
    """This one's name is batch."""
    near = {**target(*([OTHER, port, ""] for port in (1, 2, 3))), "near": {node: [0, 2]}}
    made = tables({"services": {f"{DNS} tcp 53": near}})
    assert {made.route(TCP, number(DNS), 53).port for _ in range(6)} == ports


def test_a_reset_forgets_what_was_there_and_null_one_thing() -> None:
    made = tables({"node_ports": {"tcp 30080": target([OTHER, 80, ""])}})
    assert made.route_node_port(TCP, 30080, number("198.51.100.1")) == Route(POD, number(OTHER), 80)
    made.apply({"pods": {OTHER: None}})
    assert made.route(TCP, number(OTHER), 80).kind == UNREACHABLE
    assert made.route_node_port(TCP, 30080, 1).kind == UNREACHABLE
    made.apply({"reset": True})
    assert made.node_ports == {}
    assert made.route_node_port(TCP, 30080, 1).kind == REFUSED


def test_pods_are_found_by_their_host() -> None:
    made = tables({})
    peer = made.peer(number(OTHER))
    assert peer is not None
    assert list(made.peers_on(number("192.0.2.6"))) == [peer]


RULES = [
    {"peers": [["10.244.0.8/32", []], ["198.51.100.0/24", ["198.51.100.128/25"]]], "ports": [[TCP, 80, 90]]},
    {"peers": None, "ports": [[UDP, 53, 53]]},
]


@pytest.mark.parametrize(
    ("ip", "protocol", "port", "allowed"),
    [
        (OTHER, TCP, 80, True),
        (OTHER, TCP, 90, True),
        (OTHER, TCP, 91, False),
        (OTHER, UDP, 80, False),
        (THIRD, TCP, 80, False),
        (THIRD, UDP, 53, True),
        ("198.51.100.7", TCP, 85, True),
        ("198.51.100.200", TCP, 85, False),
    ],
)
def test_policy_lets_through_what_one_of_its_rules_names(
    ip: str, protocol: int, port: int, allowed: bool
) -> None:
    assert connection_policy.allows(connection_policy.parse(RULES), number(ip), protocol, port) is allowed


def test_no_policy_allows_all_and_an_empty_one_nothing() -> None:
    assert connection_policy.allows(connection_policy.parse(None), 1, TCP, 1)
    assert not connection_policy.allows(connection_policy.parse([]), 1, TCP, 1)


def test_egress_is_judged_by_the_backend_and_never_keeps_a_pod_from_itself() -> None:
    made = tables({"services": {f"{DNS} tcp 53": target([OTHER, 80, ""])}})
    made.apply({"policy": {"ingress": None, "egress": [RULES[0]]}})
    assert made.route(TCP, number(DNS), 53).kind == POD
    assert made.route(TCP, number(OTHER), 79).kind == DENIED
    assert made.route(TCP, number(OWN), 79).kind == POD


def test_ingress_lets_the_nodes_probes_in_whatever_a_policy_says() -> None:
    made = tables({"policy": {"ingress": [], "egress": None}})
    assert made.admits(TCP, number("192.0.2.5"), 80)
    assert not made.admits(TCP, number(OTHER), 80)


def test_a_new_netd_is_told_all_that_the_hub_said_in_pieces() -> None:
    log = TableLog()
    pods = {addresses.text(number("10.244.1.0") + n): ["192.0.2.6", n, {}] for n in range(1, 2501)}
    log.apply(
        {"reset": True, "pods": {OTHER: ["192.0.2.6", 1, {}]}, "policy": {"ingress": [], "egress": None}}
    )
    log.apply({"pods": {**pods, OTHER: None}, "services": {f"{DNS} tcp 53": target()}})
    told = Tables(setup())
    told.apply({"pods": {OTHER: ["192.0.2.6", 9, {}]}})
    messages = list(log.messages())
    for message in messages:
        told.apply(message)
    assert max(len(message.get("pods", {})) for message in messages) <= 1000
    assert told.peer(number(OTHER)) is None
    assert all(told.peer(number(ip)) is not None for ip in pods)
    assert told.is_service(TCP, number(DNS), 53)
    assert told.ingress == []
