"""Addresses that follow from the ranges, and what a plan says about a pod's network."""

from __future__ import annotations

from typing import Any

from slurmlet.model.network_plan import PodNetwork, network_plan

NETWORK = PodNetwork("10.244.0.0/16", "10.96.0.0/16", "ab" * 32)


def test_addresses_that_follow_from_the_ranges() -> None:
    assert (NETWORK.gateway_ip, NETWORK.dns_ip, NETWORK.api_ip) == ("10.244.0.1", "10.96.0.10", "10.96.0.1")
    assert NETWORK.holds("10.244.255.254")
    assert not any(map(NETWORK.holds, ("10.245.0.1", "fd00::1", "", "x")))


def test_the_key_is_not_shown_by_accident() -> None:
    assert "abab" not in repr(NETWORK)


def test_the_part_of_a_plan() -> None:
    ports: list[dict[str, Any]] = [
        {"containerPort": 80, "hostPort": 8080},
        {"containerPort": 53, "hostPort": 53, "protocol": "UDP", "hostIP": "192.0.2.5"},
        {"containerPort": 81},
    ]
    side = {
        "name": "s",
        "restartPolicy": "Always",
        "ports": [{"containerPort": 9, "hostPort": 9, "protocol": "TCP"}],
    }
    spec = {"nodeName": "batch", "containers": [{"name": "c", "ports": ports}], "initContainers": [side]}
    policy = {"ingress": None, "egress": []}
    assert network_plan({"spec": spec}, NETWORK, "10.244.0.7", policy) == {
        "ip": "10.244.0.7", "pod_range": "10.244.0.0/16", "service_range": "10.96.0.0/16", "key": "ab" * 32,
        "node": "batch", "gateway": "10.244.0.1", "policy": policy, "tls": None, "from_host": False,
        "host_ports": [("tcp", "", 8080, 80), ("udp", "192.0.2.5", 53, 53), ("tcp", "", 9, 9)],
    }  # fmt: skip
