"""Services and their EndpointSlices as entries of the tables: kube-proxy's rules, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.model.service_table import balancer_targets, entries, service_key

HTTP = {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}
TO_A, TO_B, TO_C = ("10.244.0.5", 8080, "n1"), ("10.244.0.6", 8080, "n2"), ("10.244.0.7", 8080, "n1")


def service(*ports: dict[str, Any], labels: Any = None, status: Any = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "web", "namespace": "shop", "labels": labels or {}},
        "spec": {
            "clusterIP": "10.96.1.1",
            "clusterIPs": ["10.96.1.1"],
            "ports": list(ports or [HTTP]),
            **spec,
        },
        "status": status or {},
    }


def endpoint(where: list[Any], **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [where[0]], "nodeName": where[2], "conditions": conditions}


def slice_(*endpoints: dict[str, Any], ports: Any = None, kind: str = "IPv4") -> dict[str, Any]:
    return {
        "metadata": {"name": "web-x", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": kind,
        "endpoints": list(endpoints),
        "ports": ports or [{"name": "http", "port": 8080, "protocol": "TCP"}],
    }


def backends(asked: dict[str, Any], *slices: dict[str, Any], key: str = "10.96.1.1 tcp 80") -> list[Any]:
    to: list[Any] = entries(asked, slices).services[key]["to"]
    return to


READY, NOT_READY = {"ready": True}, {"ready": False, "serving": False}
LEAVING = {"ready": False, "serving": True, "terminating": True}
LEFT = {"ready": False, "serving": False, "terminating": True}


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (READY, READY, [TO_A, TO_B]),
        ({}, {"ready": None}, [TO_A, TO_B]),
        (READY, NOT_READY, [TO_A]),
        (READY, LEAVING, [TO_A]),
        (NOT_READY, LEAVING, [TO_B]),
        (LEFT, LEAVING, [TO_B]),
        ({"ready": False, "terminating": True}, NOT_READY, [TO_A]),
        (NOT_READY, LEFT, []),
    ],
    ids=["both", "unsaid", "one", "no need", "fallback", "fallback only serving", "serving unsaid", "nobody"],
)
def test_who_is_used(a: Any, b: Any, wanted: list[Any]) -> None:
    assert backends(service(), slice_(endpoint(TO_B, **b), endpoint(TO_A, **a))) == wanted


def test_no_slice_at_all_is_an_entry_without_backends() -> None:
    assert entries(service(), []).services == {
        "10.96.1.1 tcp 80": {"to": [], "affinity_s": 0, "local": False}
    }


def test_every_port_and_protocol_by_name() -> None:
    dns = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    there = slice_(endpoint(TO_A), ports=[{**one, "port": 1053} for one in dns])
    found = entries(service(*dns), [there]).services
    assert {key: one["to"] for key, one in found.items()} == {
        "10.96.1.1 udp 53": [("10.244.0.5", 1053, "n1")], "10.96.1.1 tcp 53": [("10.244.0.5", 1053, "n1")],
    }  # fmt: skip


def test_one_port_without_a_name() -> None:
    there = slice_(endpoint(TO_A), ports=[{"name": "", "port": 8080, "protocol": "TCP"}])
    assert backends(service({"port": 80}), there) == [TO_A]


def test_a_named_target_port_may_differ_between_slices() -> None:
    other = slice_(endpoint(TO_B), ports=[{"name": "http", "port": 9090, "protocol": "TCP"}])
    assert backends(service(), slice_(endpoint(TO_A)), other) == [TO_A, ("10.244.0.6", 9090, "n2")]


def test_an_endpoint_in_two_slices_counts_once_and_as_the_living_one() -> None:
    assert backends(service(), slice_(endpoint(TO_A, **READY)), slice_(endpoint(TO_A, **LEAVING))) == [TO_A]
    assert backends(service(), slice_(endpoint(TO_A, **LEAVING)), slice_(endpoint(TO_A, **READY))) == [TO_A]


def test_order_does_not_depend_on_the_order_of_slices() -> None:
    one, two = slice_(endpoint(TO_C), endpoint(TO_A)), slice_(endpoint(TO_B))
    assert backends(service(), one, two) == backends(service(), two, one) == [TO_A, TO_B, TO_C]


def test_other_kinds_of_addresses_are_left_out() -> None:
    assert backends(service(), slice_(endpoint(["fd00::1", 1, "n"]), kind="IPv6")) == []
    both = service(clusterIPs=["10.96.1.1", "fd00::9"])
    assert list(entries(both, []).services) == ["10.96.1.1 tcp 80"]


@pytest.mark.parametrize(
    "asked",
    [
        service(clusterIP="None", clusterIPs=["None"]),
        service(type="ExternalName", externalName="x.example", clusterIP="", clusterIPs=[]),
        service(labels={"service.kubernetes.io/service-proxy-name": "mine"}),
        service(labels={"service.kubernetes.io/headless": ""}),
    ],
    ids=["headless", "external name", "another proxy", "called headless"],
)
def test_services_that_are_not_served(asked: dict[str, Any]) -> None:
    found = entries(asked, [slice_(endpoint(TO_A))])
    assert (found.services, found.node_ports) == ({}, {})


def test_session_affinity() -> None:
    def seconds(**spec: Any) -> Any:
        return entries(service(**spec), []).services["10.96.1.1 tcp 80"]["affinity_s"]

    assert seconds(sessionAffinity="None") == 0
    assert seconds(sessionAffinity="ClientIP") == 10800
    assert seconds(sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 7}}) == 7


def test_internal_traffic_policy_local_holds_for_the_cluster_ip_only() -> None:
    asked = service({**HTTP, "nodePort": 30080}, internalTrafficPolicy="Local", externalIPs=["192.0.2.7"])
    found = entries(asked, [slice_(endpoint(TO_A), endpoint(TO_B))])
    assert found.services["10.96.1.1 tcp 80"]["local"]
    assert not found.services["192.0.2.7 tcp 80"]["local"]
    assert not found.node_ports["tcp 30080"]["local"]


def test_each_node_falls_back_to_its_own_when_only_local_ones_count() -> None:
    asked = service({**HTTP, "nodePort": 30080}, externalTrafficPolicy="Local")
    there = slice_(endpoint(TO_A, **LEAVING), endpoint(TO_B, **READY), endpoint(TO_C, **NOT_READY))
    found = entries(asked, [there])
    assert found.node_ports["tcp 30080"] == {"to": [TO_A, TO_B], "affinity_s": 0, "local": True}
    assert found.services["10.96.1.1 tcp 80"] == {"to": [TO_B], "affinity_s": 0, "local": False}


def test_outside_addresses() -> None:
    ingress = [{"ip": "192.0.2.8"}, {"ip": "192.0.2.9", "ipMode": "Proxy"}, {"hostname": "lb.example"}]
    asked = service(
        externalIPs=["192.0.2.7", "fd00::7"], externalTrafficPolicy="Local", type="LoadBalancer",
        status={"loadBalancer": {"ingress": ingress}},
    )  # fmt: skip
    found = entries(asked, [slice_(endpoint(TO_A))]).services
    assert sorted(found) == ["10.96.1.1 tcp 80", "192.0.2.7 tcp 80", "192.0.2.8 tcp 80"]
    # From inside, any backend will do.
    assert found["192.0.2.8 tcp 80"] == {"to": [TO_A], "affinity_s": 0, "local": False}


def test_what_a_load_balancer_serves() -> None:
    asked = service(type="LoadBalancer", externalTrafficPolicy="Local", sessionAffinity="ClientIP")
    assert balancer_targets(asked, [slice_(endpoint(TO_A), endpoint(TO_B, **NOT_READY))]) == {
        ("tcp", 80): {"to": [TO_A], "affinity_s": 10800, "local": False}
    }


def test_a_slice_tells_whose_it_is() -> None:
    assert service_key(slice_()) == ("shop", "web")
    assert service_key({"metadata": {"name": "x", "namespace": "y"}}) is None


def hinted(where: list[Any], nodes: str = "", zones: str = "", **conditions: bool | None) -> dict[str, Any]:
    hints = {
        key: [{"name": name} for name in names.split()]
        for key, names in (("forNodes", nodes), ("forZones", zones))
        if names
    }
    return {**endpoint(where, **conditions), "hints": hints}


ZONES = {"n1": "east", "n2": "west", "n3": "west", "n4": "north"}


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ({"nodes": "n1"}, {"nodes": "n2"}, {"n1": [0], "n2": [1]}),
        ({"nodes": "n1 n3"}, {"nodes": "n2 n3"}, {"n1": [0], "n2": [1]}),
        ({"nodes": "n1"}, {}, {}),
        ({"zones": "east"}, {"zones": "west"}, {"n1": [0], "n2": [1], "n3": [1]}),
        ({"zones": "east"}, {"zones": "west east"}, {"n2": [1], "n3": [1]}),
        ({"zones": "east"}, {}, {}),
        # A node that is named keeps to its own; the others to their zone.
        (
            {"nodes": "n1", "zones": "east"},
            {"nodes": "n2", "zones": "west"},
            {"n1": [0], "n2": [1], "n3": [1]},
        ),
        ({"nodes": "n1", "zones": "east"}, {"zones": "west"}, {"n1": [0], "n2": [1], "n3": [1]}),
        # Hints of those that are not used count for nothing, and there is no nearness among the last ones.
        ({"nodes": "n1"}, NOT_READY, {}),
        ({"nodes": "n1", **LEAVING}, {"nodes": "n2", **LEAVING}, {}),
    ],
    ids=[
        *(
            "nodes",
            "a node with all",
            "a node hint missing",
            "zones",
            "a zone with all",
            "a zone hint missing",
        ),
        *("both", "zones where node hints are missing", "one not ready", "only terminating"),
    ],
)
def test_who_keeps_to_whom(a: Any, b: Any, wanted: Any) -> None:
    there = slice_(hinted(TO_A, **a), hinted(TO_B, **b))
    found = entries(service({**HTTP, "nodePort": 30080}, externalIPs=["192.0.2.1"]), [there], ZONES)
    for target in (*found.services.values(), *found.node_ports.values()):
        assert target.get("near", {}) == wanted


def test_local_policy_outweighs_nearness() -> None:
    there = slice_(hinted(TO_A, nodes="n2"), hinted(TO_B, nodes="n1"))
    for_inside = entries(service(internalTrafficPolicy="Local"), [there], ZONES).services["10.96.1.1 tcp 80"]
    assert (for_inside["local"], "near" in for_inside) == (True, False)


def test_the_login_host_is_near_to_nobody() -> None:
    there = slice_(hinted(TO_A, nodes="n1"), hinted(TO_B, nodes="n2"))
    assert "near" not in balancer_targets(service(), [there])["tcp", 80]
