"""The ranges of pods and Services: defaults move out of the way, choices are checked, what was chosen stays."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from slurmlet.base.errors import SiteError, UserError
from slurmlet.base.host_addresses import routed_networks
from slurmlet.controlplane.address_ranges import POD_RANGE, SERVICE_RANGE, Ranges, Wanted, choose

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0102000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000F40A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
ib0\t00006064\t00000000\t0001\t0\t0\t0\t0000E0FF\t0\t0\t0
"""
FIB_TRIE = """Local:
     |-- 10.96.3.4
        /32 host LOCAL
     |-- 127.0.0.1
        /32 host LOCAL
"""


def taken(*texts: str) -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(text) for text in texts]


def test_routes_and_addresses_of_the_host_are_known_but_not_the_default_route(tmp_path: Path) -> None:
    (tmp_path / "route").write_text(ROUTES)
    (tmp_path / "fib_trie").write_text(FIB_TRIE)
    wanted = ["10.96.3.4/32", "127.0.0.1/32", "10.244.0.0/16", "100.96.0.0/11"]
    assert [str(one) for one in routed_networks(tmp_path)] == wanted


def test_a_free_host_gets_the_usual_ranges() -> None:
    assert choose(taken("192.0.2.0/24"), Wanted()) == Ranges(POD_RANGE, SERVICE_RANGE)


def test_defaults_move_out_of_the_way() -> None:
    assert choose(taken("10.244.7.0/24", "10.96.1.1/32"), Wanted()) == Ranges("10.245.0.0/16", "10.97.0.0/16")


def test_a_site_that_uses_all_of_net_10_gets_ranges_elsewhere_that_do_not_overlap() -> None:
    chosen = choose(taken("10.0.0.0/8"), Wanted())
    pods, services = ipaddress.IPv4Network(chosen.pods), ipaddress.IPv4Network(chosen.services)
    assert not pods.overlaps(services)
    assert not any(one.overlaps(ipaddress.IPv4Network("10.0.0.0/8")) for one in (pods, services))


def test_a_host_with_a_way_to_everything_is_told_the_option() -> None:
    with pytest.raises(SiteError) as caught:
        choose(taken("0.0.0.0/1", "128.0.0.0/1"), Wanted())
    assert "--service-range" in caught.value.hint


def test_a_choice_is_taken() -> None:
    wanted = Wanted("172.20.0.0/14", "172.16.0.0/20")
    assert choose(taken("10.0.0.0/8"), wanted) == Ranges("172.20.0.0/14", "172.16.0.0/20")


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Wanted(pods="10.244.0.0/16"), r"--pod-range 10.244.0.0/16 overlaps 10.244.0.0/24"),
        (Wanted(services="10.244.0.0/20"), r"--service-range 10.244.0.0/20 overlaps 10.244.0.0/24"),
        (
            Wanted(pods="10.96.0.0/12"),
            r"--pod-range 10.96.0.0/12 overlaps the range of Services, 10.96.0.0/16",
        ),
        (Wanted(pods="10.1.0.0/25"), r"--pod-range 10.1.0.0/25 must have a prefix length between /8 and /24"),
        (
            Wanted(services="11.0.0.0/8"),
            r"--service-range 11.0.0.0/8 must have a prefix length between /12 and /24",
        ),
        (Wanted(pods="10.1.1.0/16"), r"--pod-range 10.1.1.0/16: .*host bits"),
        (Wanted(pods="fd00::/64"), r"--pod-range fd00::/64: "),
        (Wanted(pods="many"), r"--pod-range many: "),
    ],
)
def test_a_choice_that_cannot_be_is_refused_by_its_name(wanted: Wanted, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        choose(taken("10.244.0.0/24"), wanted)
    assert caught.value.hint


def test_what_was_chosen_stays_whatever_the_host_has_now() -> None:
    kept = Ranges("10.244.0.0/16", "10.96.0.0/16")
    assert choose(taken("10.0.0.0/8"), Wanted(), kept) == kept
    assert choose(taken("10.0.0.0/8"), Wanted("10.244.0.0/16", "10.96.0.0/16"), kept) == kept


def test_an_older_cluster_gets_a_pod_range_beside_its_services() -> None:
    kept = Ranges("", "10.244.0.0/16")
    assert choose((), Wanted(), kept) == Ranges("10.245.0.0/16", "10.244.0.0/16")
    assert choose((), Wanted(pods="10.9.0.0/16"), kept).pods == "10.9.0.0/16"


@pytest.mark.parametrize("wanted", [Wanted(pods="10.9.0.0/16"), Wanted(services="10.9.0.0/16")])
def test_another_range_for_a_cluster_that_has_one_is_refused(wanted: Wanted) -> None:
    with pytest.raises(UserError, match=r"the range of this cluster is 10\.(244|96)\.0\.0/16"):
        choose((), wanted, Ranges("10.244.0.0/16", "10.96.0.0/16"))
