"""NetworkPolicies to rules: upstream's documented cases, asked the way netd asks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from slurmlet.model.network_policy import OPEN, Peer, Pod, View, pod_of, policy_of, resolve, unenforceable
from slurmlet.podnet import addresses, connection_policy

TCP, UDP, ICMP, SCTP = 6, 17, 1, 132
Obj = dict[str, Any]

NAMESPACES = {
    "default": {"kubernetes.io/metadata.name": "default"},
    "mine": {"kubernetes.io/metadata.name": "mine", "team": "a"},
    "theirs": {"kubernetes.io/metadata.name": "theirs", "team": "b"},
    "kube-system": {"kubernetes.io/metadata.name": "kube-system"},
}


def pod(namespace: str, name: str, ip: str, *ports: tuple[str, str, int], **labels: str) -> Obj:
    return {
        "metadata": {"namespace": namespace, "name": name, "labels": labels},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "ports": [{"name": n, "protocol": p, "containerPort": number} for n, p, number in ports],
                }
            ]
        },
        "status": {"podIP": ip, "phase": "Running"},
    }


GATEWAY = Pod(
    "kube-system", "kube-dns", {"k8s-app": "kube-dns"}, "10.244.0.1", (("dns", UDP, 53), ("dns-tcp", TCP, 53))
)
DB = pod("default", "db", "10.244.0.2", ("sql", "TCP", 5432), ("stats", "UDP", 8125), role="db")
FRONT = pod("default", "front", "10.244.0.3", role="frontend")
OTHER = pod("default", "other", "10.244.0.4", role="other", tier="x")
MINE = pod("mine", "m", "10.244.0.5", ("sql", "TCP", 5432), role="client")
THEIRS = pod("theirs", "t", "10.244.0.6", ("sql", "TCP", 3306), role="client")
DONE = {
    **pod("default", "done", "10.244.0.7", role="frontend"),
    "status": {"podIP": "10.244.0.7", "phase": "Succeeded"},
}
HOSTLY = {
    **pod("default", "hostly", "192.0.2.9", role="frontend"),
    "spec": {"hostNetwork": True, "containers": []},
}
PODS = [GATEWAY, *map(pod_of, (DB, FRONT, OTHER, MINE, THEIRS, DONE, HOSTLY))]


def members(peer: Peer) -> Collection[Pod]:
    return [one for one in PODS if peer.selects(one, NAMESPACES[one.namespace])]


VIEW = View("10.244.0.0/16", "10.244.0.1", members, lambda: PODS)


def made(spec: Obj, namespace: str = "default", name: str = "p") -> Obj:
    return {"metadata": {"namespace": namespace, "name": name}, "spec": spec}


def resolved(obj: Obj, *specs: Obj) -> Obj:
    one = pod_of(obj)
    policies = [policy_of(made(spec, one.namespace)) for spec in specs]
    return resolve(one, [each for each in policies if each.selects(one)], VIEW)


def says(rules: Any, ip: str, protocol: int, port: int) -> bool:
    return connection_policy.allows(connection_policy.parse(rules), addresses.number(ip), protocol, port)


ALL = [
    "10.244.0.1",
    "10.244.0.3",
    "10.244.0.4",
    "10.244.0.5",
    "10.244.0.6",
    "10.244.0.7",
    "192.0.2.9",
    "203.0.113.7",
]


def allowed(rules: Any, protocol: int = TCP, port: int = 5432) -> list[str]:
    return [ip for ip in ALL if says(rules, ip, protocol, port)]


def test_no_policy_isolates_nobody() -> None:
    assert resolved(DB) == OPEN == {"ingress": None, "egress": None}


@pytest.mark.parametrize(
    ("types", "spec", "isolated"),
    [
        (None, {}, (True, False)),
        (None, {"ingress": [{}]}, (True, False)),
        (None, {"egress": [{}]}, (True, True)),
        (None, {"egress": []}, (True, False)),
        (["Ingress"], {"egress": [{}]}, (True, False)),
        (["Egress"], {}, (False, True)),
        (["Ingress", "Egress"], {}, (True, True)),
    ],
)
def test_which_directions_a_policy_isolates(types: Any, spec: Obj, isolated: tuple[bool, bool]) -> None:
    given = {"podSelector": {}, **spec, **({"policyTypes": types} if types else {})}
    found = resolved(DB, given)
    assert (found["ingress"] is not None, found["egress"] is not None) == isolated


class TestDefaults:
    """The five default policies of upstream's documentation."""

    def test_deny_all_ingress(self) -> None:
        found = resolved(DB, {"podSelector": {}, "policyTypes": ["Ingress"]})
        assert found == {"ingress": [], "egress": None}
        assert allowed(found["ingress"]) == []

    def test_allow_all_ingress(self) -> None:
        found = resolved(DB, {"podSelector": {}, "ingress": [{}], "policyTypes": ["Ingress"]})
        assert allowed(found["ingress"]) == ALL
        assert says(found["ingress"], "203.0.113.7", ICMP, 0)

    def test_deny_all_egress(self) -> None:
        assert resolved(DB, {"podSelector": {}, "policyTypes": ["Egress"]}) == {"ingress": None, "egress": []}

    def test_allow_all_egress(self) -> None:
        assert allowed(resolved(DB, {"policyTypes": ["Egress"], "egress": [{}]})["egress"]) == ALL

    def test_deny_all(self) -> None:
        assert resolved(DB, {"policyTypes": ["Ingress", "Egress"]}) == {"ingress": [], "egress": []}


def test_upstreams_documented_example() -> None:
    spec = {
        "podSelector": {"matchLabels": {"role": "db"}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {
                "from": [
                    {"ipBlock": {"cidr": "172.17.0.0/16", "except": ["172.17.1.0/24"]}},
                    {"namespaceSelector": {"matchLabels": {"team": "a"}}},
                    {"podSelector": {"matchLabels": {"role": "frontend"}}},
                ],
                "ports": [{"protocol": "TCP", "port": 6379}],
            }
        ],
        "egress": [
            {"to": [{"ipBlock": {"cidr": "10.0.0.0/24"}}], "ports": [{"protocol": "TCP", "port": 5978}]}
        ],
    }
    found = resolved(DB, spec)
    assert allowed(found["ingress"], TCP, 6379) == ["10.244.0.3", "10.244.0.5"]
    assert allowed(found["ingress"], TCP, 6380) == allowed(found["ingress"], UDP, 6379) == []
    assert says(found["ingress"], "172.17.0.9", TCP, 6379)
    assert not says(found["ingress"], "172.17.1.9", TCP, 6379)
    assert says(found["egress"], "10.0.0.9", TCP, 5978)
    assert not says(found["egress"], "10.0.1.9", TCP, 5978)
    assert not says(found["egress"], "10.0.0.9", TCP, 5979)
    assert resolved(FRONT, spec) == OPEN


def expression(key: str, operator: str, *values: str) -> Obj:
    return {
        "matchExpressions": [
            {"key": key, "operator": operator, **({"values": list(values)} if values else {})}
        ]
    }


@pytest.mark.parametrize(
    ("peer", "who"),
    [
        ({"podSelector": {}}, ["10.244.0.3", "10.244.0.4"]),
        ({"podSelector": {"matchLabels": {"role": "frontend"}}}, ["10.244.0.3"]),
        ({"podSelector": expression("role", "In", "frontend", "client")}, ["10.244.0.3"]),
        ({"podSelector": expression("role", "NotIn", "frontend", "db")}, ["10.244.0.4"]),
        ({"podSelector": expression("tier", "Exists")}, ["10.244.0.4"]),
        ({"podSelector": expression("tier", "DoesNotExist")}, ["10.244.0.3"]),
        ({"namespaceSelector": {"matchLabels": {"team": "b"}}}, ["10.244.0.6"]),
        ({"namespaceSelector": expression("team", "Exists")}, ["10.244.0.5", "10.244.0.6"]),
        ({"namespaceSelector": expression("team", "NotIn", "a")}, ["10.244.0.3", "10.244.0.4", "10.244.0.6"]),
        # Both in one entry: the pods of those namespaces that match; in two entries: either.
        ({"namespaceSelector": expression("team", "Exists"), "podSelector": {"matchLabels": {"role": "db"}}}, []),
        ({"namespaceSelector": {}, "podSelector": {"matchLabels": {"role": "client"}}}, ["10.244.0.5", "10.244.0.6"]),
        ({"ipBlock": {"cidr": "10.244.0.4/31"}}, ["10.244.0.4", "10.244.0.5"]),
        ({"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}, ["192.0.2.9", "203.0.113.7"]),
        ({"ipBlock": {"cidr": "010.244.0.003/32"}}, ["10.244.0.3"]),
        ({"ipBlock": {"cidr": "::/0"}}, []),
        ({"somethingNew": {}}, []),
    ],
)  # fmt: skip
def test_who_may_come_in(peer: Obj, who: list[str]) -> None:
    found = resolved(DB, {"podSelector": {}, "ingress": [{"from": [peer]}]})
    assert allowed(found["ingress"]) == who


def test_all_pods_of_all_namespaces_are_one_range_and_not_the_world_behind_the_gateway() -> None:
    spec = {
        "ingress": [{"from": [{"namespaceSelector": {}}]}],
        "egress": [{"to": [{"namespaceSelector": {}}]}],
    }
    found = resolved(DB, spec)
    assert found["ingress"] == [{"peers": [("10.244.0.0/16", ["10.244.0.1/32"])], "ports": None}]
    assert found["egress"] == [{"peers": [("10.244.0.0/16", [])], "ports": None}]


def test_the_usual_rule_for_dns_reaches_the_cluster_s_dns() -> None:
    where = {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
    to = {"namespaceSelector": where, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
    spec = {"policyTypes": ["Egress"], "egress": [{"to": [to], "ports": [{"protocol": "UDP", "port": 53}]}]}
    found = resolved(DB, spec)["egress"]
    assert says(found, "10.244.0.1", UDP, 53)
    assert not says(found, "10.244.0.1", TCP, 53)
    named = {
        "policyTypes": ["Egress"],
        "egress": [{"to": [to], "ports": [{"protocol": "UDP", "port": "dns"}]}],
    }
    assert resolved(DB, named)["egress"] == found
    inward = resolved(DB, {"ingress": [{"from": [to]}]})["ingress"]
    assert not says(inward, "10.244.0.1", UDP, 53)


def test_several_policies_add_up() -> None:
    deny: Obj = {"podSelector": {}}
    one = {"ingress": [{"from": [{"podSelector": {"matchLabels": {"role": "frontend"}}}]}]}
    two = {"ingress": [{"from": [{"podSelector": {"matchLabels": {"role": "other"}}}]}]}
    assert allowed(resolved(DB, deny, one, two)["ingress"]) == ["10.244.0.3", "10.244.0.4"]
    # The same words in two policies are one rule.
    assert len(resolved(DB, deny, one, one)["ingress"]) == 1


class TestPorts:
    def ingress(self, *ports: Obj) -> Any:
        return resolved(DB, {"ingress": [{"ports": list(ports)}]})["ingress"]

    def test_a_protocol_alone_is_all_its_ports(self) -> None:
        rules = self.ingress({"protocol": "UDP"})
        assert says(rules, "192.0.2.1", UDP, 1)
        assert says(rules, "192.0.2.1", UDP, 65535)
        assert not says(rules, "192.0.2.1", TCP, 1)

    def test_tcp_is_meant_where_nothing_is_said(self) -> None:
        assert self.ingress({"port": 80}) == [{"peers": None, "ports": [(TCP, 80, 80)]}]

    def test_a_range(self) -> None:
        rules = self.ingress({"port": 32000, "endPort": 32768})
        assert [says(rules, "192.0.2.1", TCP, port) for port in (31999, 32000, 32768, 32769)] == [
            False, True, True, False,
        ]  # fmt: skip

    def test_any_port_rule_lets_icmp_in_and_a_port_does_not(self) -> None:
        assert says(resolved(DB, {"ingress": [{}]})["ingress"], "192.0.2.1", ICMP, 0)
        assert not says(self.ingress({"port": 80}), "192.0.2.1", ICMP, 0)

    def test_a_name_is_the_pod_s_own(self) -> None:
        assert self.ingress({"port": "sql"}) == [{"peers": None, "ports": [(TCP, 5432, 5432)]}]
        assert self.ingress({"port": "stats", "protocol": "UDP"}) == [
            {"peers": None, "ports": [(UDP, 8125, 8125)]}
        ]

    def test_a_name_of_another_protocol_or_of_nothing_lets_nothing_in(self) -> None:
        assert self.ingress({"port": "stats"}) == []
        assert self.ingress({"port": "nope"}) == []

    def test_names_of_sidecars_count_and_of_other_init_containers_do_not(self) -> None:
        init = [
            {"name": "a", "restartPolicy": "Always", "ports": [{"name": "side", "containerPort": 9}]},
            {"name": "b", "ports": [{"name": "once", "containerPort": 8}]},
        ]
        obj = {**DB, "spec": {**DB["spec"], "initContainers": init}}
        ports = [{"port": "side"}, {"port": "once"}]
        assert resolved(obj, {"ingress": [{"ports": ports}]})["ingress"][0]["ports"] == [(TCP, 9, 9)]

    def test_a_name_in_egress_is_each_destination_s(self) -> None:
        to = [{"namespaceSelector": expression("team", "Exists")}]
        rules = resolved(
            FRONT, {"policyTypes": ["Egress"], "egress": [{"to": to, "ports": [{"port": "sql"}]}]}
        )
        assert rules["egress"] == [
            {"peers": [("10.244.0.6/32", [])], "ports": [(TCP, 3306, 3306)]},
            {"peers": [("10.244.0.5/32", [])], "ports": [(TCP, 5432, 5432)]},
        ]

    def test_a_name_beside_a_number(self) -> None:
        to = [{"podSelector": {"matchLabels": {"role": "db"}}}]
        spec = {"policyTypes": ["Egress"], "egress": [{"to": to, "ports": [{"port": "sql"}, {"port": 22}]}]}
        rules = resolved(FRONT, spec)["egress"]
        assert [says(rules, "10.244.0.2", TCP, port) for port in (22, 5432, 80)] == [True, True, False]

    def test_a_name_to_anybody_is_every_pod_that_has_it(self) -> None:
        rules = resolved(FRONT, {"policyTypes": ["Egress"], "egress": [{"ports": [{"port": "sql"}]}]})[
            "egress"
        ]
        assert says(rules, "10.244.0.2", TCP, 5432)
        assert says(rules, "10.244.0.6", TCP, 3306)
        assert not says(rules, "10.244.0.6", TCP, 5432)
        assert not says(rules, "192.0.2.1", TCP, 5432)

    def test_a_name_to_a_block_is_the_pods_in_it(self) -> None:
        to = [{"ipBlock": {"cidr": "10.244.0.0/29", "except": ["10.244.0.6/32"]}}]
        rules = resolved(
            FRONT, {"policyTypes": ["Egress"], "egress": [{"to": to, "ports": [{"port": "sql"}]}]}
        )
        assert says(rules["egress"], "10.244.0.5", TCP, 5432)
        assert not says(rules["egress"], "10.244.0.6", TCP, 3306)


def test_pods_on_the_hosts_network_are_neither_isolated_nor_selected() -> None:
    assert resolved(HOSTLY, {"podSelector": {}}) == OPEN
    found = resolved(DB, {"ingress": [{"from": [{"podSelector": {"matchLabels": {"role": "frontend"}}}]}]})
    assert allowed(found["ingress"]) == ["10.244.0.3"]


def test_many_addresses_in_turn_are_few_ranges_and_exactly_these() -> None:
    many = [
        Pod("default", f"p{n}", {}, addresses.text(addresses.number("10.244.0.3") + n)) for n in range(5000)
    ]
    del many[1234]
    view = View("10.244.0.0/16", "10.244.0.1", lambda _peer: many, lambda: many)
    policies = [policy_of(made({"ingress": [{"from": [{"podSelector": {}}]}]}))]
    rules = resolve(pod_of(DB), policies, view)["ingress"]
    assert len(rules[0]["peers"]) < 40
    base = addresses.number("10.244.0.0")
    parsed = connection_policy.parse(rules)
    inside = {ip for ip in range(base, base + 6000) if connection_policy.allows(parsed, ip, TCP, 1)}
    assert inside == {addresses.number(one.ip) for one in many}


class TestUnenforceable:
    def test_an_ordinary_policy_is_enforced_in_full(self) -> None:
        rule = {
            "from": [{"podSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}],
            "ports": [{"port": 1}, {}],
        }
        assert unenforceable(made({"ingress": [rule], "egress": [{}]})) == []

    @pytest.mark.parametrize(
        ("rule", "where"),
        [
            (
                {"ports": [{"port": 1}, {"protocol": "QUIC", "port": 7}]},
                "spec.ingress[0].ports[1]: protocol QUIC",
            ),
            (
                {"from": [{"ipBlock": {"cidr": "2001:db8::/64"}}]},
                "spec.ingress[0].from[0].ipBlock: 2001:db8::/64",
            ),
            ({"from": [{"fqdn": "example.org"}]}, "spec.ingress[0].from[0]: a kind of peer"),
        ],
    )
    def test_what_has_no_effect_is_named(self, rule: Obj, where: str) -> None:
        (said,) = unenforceable(made({"ingress": [rule]}))
        assert said.startswith(where)
