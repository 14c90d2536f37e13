"""A pod's resolv.conf: the plan's part and the host's, put together as a kubelet does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurmlet.model.resolv_conf import resolv_conf_plan
from slurmlet.runner.network import resolver_config

HOST = """# made by somebody
domain ignored.example
search site.example lab.site.example. .
nameserver 192.0.2.53
nameserver 192.0.2.54
options timeout:1 rotate
options timeout:2
"""
CLUSTER = "search shop.svc.cluster.local svc.cluster.local cluster.local site.example lab.site.example\n"


def made(host: str = HOST, **spec: Any) -> str:
    pod = {"metadata": {"name": "p", "namespace": "shop"}, "spec": spec}
    plan = resolv_conf_plan(pod, "10.96.0.10")
    assert plan is not None
    return resolver_config.merged(json.loads(json.dumps(plan)), host)


@pytest.mark.parametrize("policy", [{}, {"dnsPolicy": "ClusterFirst"}])
def test_cluster_first(policy: dict[str, Any]) -> None:
    assert made(**policy) == CLUSTER + "nameserver 10.96.0.10\noptions ndots:5\n"


def test_cluster_first_with_host_net() -> None:
    text = made(dnsPolicy="ClusterFirstWithHostNet", hostNetwork=True)
    assert text == CLUSTER + "nameserver 10.96.0.10\noptions ndots:5\n"


@pytest.mark.parametrize(
    "spec", [{"dnsPolicy": "Default"}, {"dnsPolicy": "ClusterFirst", "hostNetwork": True}]
)
def test_the_hosts_own_file(spec: dict[str, Any]) -> None:
    assert resolv_conf_plan({"metadata": {"namespace": "x"}, "spec": spec}, "10.96.0.10") is None


def test_none_holds_only_what_the_pod_says() -> None:
    config = {
        "nameservers": ["192.0.2.1"],
        "searches": ["my.example"],
        "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}],
    }
    text = made(dnsPolicy="None", dnsConfig=config)
    assert text == "search my.example\nnameserver 192.0.2.1\noptions ndots:2 edns0\n"


def test_config_is_added_behind_the_policys_own_and_its_options_win() -> None:
    config = {
        "nameservers": ["192.0.2.1", "10.96.0.10"],
        "searches": ["my.example", "svc.cluster.local"],
        "options": [{"name": "ndots", "value": "2"}, {"name": "use-vc"}],
    }
    assert made(dnsConfig=config) == (
        CLUSTER.replace("\n", " my.example\n")
        + "nameserver 10.96.0.10\nnameserver 192.0.2.1\noptions ndots:2 use-vc\n"
    )


def test_config_on_top_of_the_hosts() -> None:
    text = made(dnsPolicy="Default", dnsConfig={"options": [{"name": "timeout", "value": "9"}]})
    assert text == (
        "search site.example lab.site.example\nnameserver 192.0.2.53\nnameserver 192.0.2.54\n"
        "options timeout:9 rotate\n"
    )


def test_no_more_servers_than_resolvers_take() -> None:
    servers = [f"192.0.2.{number}" for number in range(1, 6)]
    text = made(dnsPolicy="None", dnsConfig={"nameservers": servers})
    assert text.count("nameserver") == 3
    assert "192.0.2.4" not in text


def test_no_more_searches_than_resolvers_take() -> None:
    many = [f"d{number}.example" for number in range(40)]
    assert len(made(dnsPolicy="None", dnsConfig={"searches": many}).split()) == 1 + 32
    wide = ["a" * 250 + f"{number}" for number in range(9)]
    line = made(dnsPolicy="None", dnsConfig={"searches": [*wide, "b" * 254]})
    assert len(line.removeprefix("search ").strip()) <= 2048
    assert "b" * 254 not in line


def test_a_host_without_a_file_is_fine() -> None:
    assert made(host="") == (
        "search shop.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n"
    )


def test_servers_on_the_hosts_loopback_are_replaced_by_those_behind_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    stub, behind = tmp_path / "stub", tmp_path / "behind"
    stub.write_text("nameserver 127.0.0.53\n")
    monkeypatch.setattr(resolver_config, "_FILE", str(stub))
    monkeypatch.setattr(resolver_config, "_BEHIND_STUB", str(behind))
    assert resolver_config.resolv_conf(None) == "nameserver 127.0.0.53\n"
    behind.write_text("nameserver 192.0.2.53\n")
    assert resolver_config.resolv_conf(None) == "nameserver 192.0.2.53\n"
    stub.write_text("nameserver 127.0.0.53\nnameserver 192.0.2.9\n")
    assert "192.0.2.9" in resolver_config.resolv_conf(None)
