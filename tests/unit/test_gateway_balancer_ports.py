from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.layout import ClusterFiles
from slurmlet.gateway.balancer_ports import Balancers
from slurmlet.gateway.gateway_settings import Settings
from slurmlet.podnet import addresses
from slurmlet.podnet.ports.host_ports import HostListener
from slurmlet.podnet.tables import POD, REFUSED, TCP, Route, Tables
from tests.unit.overlaying import setup

HERE, CLIENT = "192.0.2.9", addresses.number("198.51.100.7")
WEB = {"to": [["10.244.0.7", 80, "batch"]]}


@pytest.fixture
def balancers() -> Balancers:
    place = setup("10.244.0.1", HERE)
    return Balancers(Settings(ClusterFiles(Path("/x")), place, (HERE,)), Tables(place))


def told(balancers: Balancers, **message: Any) -> set[HostListener]:
    balancers.apply(message)
    return set(balancers.listeners())


def test_load_balancers_are_open_everywhere_and_the_table_is_always_whole(balancers: Balancers) -> None:
    listener = HostListener(TCP, "0.0.0.0", 8080)
    assert told(balancers, load_balancers={"tcp 8080": WEB, "sctp 9": WEB}) == {listener}
    assert balancers.listeners()[listener].route(CLIENT) == Route(POD, addresses.number("10.244.0.7"), 80)
    assert told(balancers, load_balancers={}) == set()


def test_a_balancer_without_backends_is_closed(balancers: Balancers) -> None:
    assert told(balancers, load_balancers={"tcp 8080": {"to": []}}) == set()


def test_source_ranges_keep_others_out(balancers: Balancers) -> None:
    told(balancers, load_balancers={"tcp 8080": {**WEB, "sources": ["203.0.113.0/24", "198.51.100.0/24"]}})
    route = balancers.listeners()[HostListener(TCP, "0.0.0.0", 8080)].route
    assert route(CLIENT).kind == POD
    assert route(addresses.number("192.0.2.77")).kind == REFUSED


def test_external_addresses_of_this_host_are_served_and_others_are_not(balancers: Balancers) -> None:
    services = {
        f"{HERE} tcp 9090": WEB,
        "192.0.2.10 tcp 9090": WEB,
        "10.96.0.5 tcp 80": WEB,
        f"{HERE} tcp 80": WEB,
    }
    assert told(balancers, services=services) == {HostListener(TCP, HERE, 9090)}
    # The same port as a load balancer's is open already, on all addresses.
    assert told(balancers, load_balancers={"tcp 9090": WEB}) == {HostListener(TCP, "0.0.0.0", 9090)}


def test_a_reset_in_parts_forgets_only_at_its_end(balancers: Balancers) -> None:
    first = {f"{HERE} tcp {port}": WEB for port in (9090, 9091)}
    assert len(told(balancers, services=first)) == 2
    assert len(told(balancers, reset=True, complete=False, services={f"{HERE} tcp 9091": WEB})) == 2
    assert told(balancers, complete=True) == {HostListener(TCP, HERE, 9091)}


def test_who_is_behind_a_door_changes_with_the_table(balancers: Balancers) -> None:
    told(balancers, load_balancers={"tcp 8080": WEB})
    behind = balancers.listeners()[HostListener(TCP, "0.0.0.0", 8080)]
    told(balancers, load_balancers={"tcp 8080": {"to": [["10.244.0.8", 80, "batch"]]}})
    assert behind.route(CLIENT).ip == addresses.number("10.244.0.8")
    assert not behind.holds(addresses.number("10.244.0.7"), 80)
