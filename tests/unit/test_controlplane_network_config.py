from __future__ import annotations

from pathlib import Path

import pytest

from slurmlet.base.errors import SiteError
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import network_config
from tests.unit.test_controlplane_components import CONFIG

FILES = ClusterFiles(Path("/home/user1/.slurmlet/exp"))


def test_names_are_served_on_loopback_to_holders_of_a_certificate_only() -> None:
    text = network_config.corefile(FILES, CONFIG, True)
    assert text.startswith(f"tls://.:{CONFIG.dns_port} {{\n    bind 127.0.0.1\n")
    assert text.count("://") == 1, "one server, no other"
    assert "client_auth require_and_verify" in text
    words = text.split()
    assert not {"health", "ready", "prometheus", "pprof", "log", "debug"} & set(words)


def test_names_of_the_cluster_are_never_cached_and_others_go_where_the_host_asks() -> None:
    text = network_config.corefile(FILES, CONFIG, True)
    assert "disable success cluster.local" in text
    assert "disable denial cluster.local" in text
    assert "forward . /etc/resolv.conf" in text


def test_a_host_without_nameservers_forwards_nothing() -> None:
    text = network_config.corefile(FILES, CONFIG, False)
    assert "forward" not in text
    assert f'file "{FILES.run}/empty.zone" .' in text


def test_odd_paths_stay_one_word() -> None:
    odd = ClusterFiles(Path('/home/a b"c/.slurmlet/exp'))
    assert '"/home/a b\\"c/.slurmlet/exp/pki/coredns.crt"' in network_config.corefile(odd, CONFIG, True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nameserver 192.0.2.1\nsearch a.b\nnameserver 192.0.2.2", ["192.0.2.1", "192.0.2.2"]),
        ("# nameserver 192.0.2.1\nnameserver", []),
        ("", []),
    ],
)
def test_nameservers_of_the_host(text: str, found: list[str]) -> None:
    assert network_config.nameservers(text) == found


def test_only_host_names_that_mean_the_same_elsewhere() -> None:
    hosts = """
127.0.0.1 localhost
127.0.1.1 login   # Debian
192.0.2.5 c1 c1.site.example # a node
::1 ip6-localhost
ff02::1 ip6-allnodes
2001:db8::5 c1
192.0.2.6 {evil} fine_name
not an address
"""
    assert network_config.host_lines(hosts) == [
        "192.0.2.5 c1 c1.site.example",
        "2001:db8::5 c1",
        "192.0.2.6 fine_name",
    ]


def test_the_api_server_goes_through_the_gateways_socket() -> None:
    selection = network_config.egress(FILES)["egressSelections"]
    connection = {
        "proxyProtocol": "HTTPConnect",
        "transport": {"uds": {"udsName": f"{FILES.run}/gateway.sock"}},
    }
    assert selection == [{"name": "cluster", "connection": connection}]


def test_a_path_too_long_for_a_socket_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(SiteError) as error:
        network_config.egress(ClusterFiles(Path("/" + "x" * 100 + "/exp")))
    assert "SLURMLET_HOME" in error.value.hint
