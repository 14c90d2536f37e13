"""Two clusters on the same hosts, of one user and of two: neither reaches what belongs to the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.testbed_plan import address_of
from tests.e2e.conftest import CLUSTER, eventually
from tests.e2e.network_pods import Net, agent, network_namespace, port, service
from tests.e2e.test_network_strangers import BEHIND, KNOCK

pytestmark = pytest.mark.e2e

HOST, ELSEWHERE = "c2", "c1"
# Nobody else's number: whatever answers on it is the pod of the other cluster.
NUMBER, SERVED = 4747, 4748
# The same ranges, so that addresses mean something in both; ranges of its own, so that they mean nothing in ours.
OTHERS = {
    "user1": (),
    "user2": ("--pod-range", "10.111.0.0/16", "--service-range", "10.112.0.0/16"),
}


class Clusters(NamedTuple):
    ours: Net
    theirs: Net


@pytest.fixture(scope="module", params=OTHERS)
def clusters(request: pytest.FixtureRequest, testbed: Testbed, cluster: str) -> Iterator[Clusters]:
    """Our pods `near` and `far`; their pod `other`, beside `near`, with a Service."""
    user, name = str(request.param), f"{CLUSTER[:20]}-other"
    testbed.run(["slurmlet", "up", "-c", name, *OTHERS[user]], user=user, timeout_s=180)
    try:
        with (
            network_namespace(testbed, cluster) as ours,
            network_namespace(testbed, name, user=user) as theirs,
        ):
            labels = {"app": "other"}
            theirs.apply(
                agent("other", f"tcp:{NUMBER}", f"udp:{NUMBER}", host=HOST, labels=labels),
                agent("friend", "tcp:80", host=ELSEWHERE),
                service("other", labels, port(SERVED, NUMBER, "tcp"), port(SERVED, NUMBER, "udp", "UDP")),
            )
            ours.apply(agent("near", "tcp:80", host=HOST), agent("far", "tcp:80", host=ELSEWHERE))
            theirs.ready("other", "friend")
            theirs.listening("other")
            ours.ready("near", "far")
            eventually(lambda: reached(theirs), 10)
            yield Clusters(ours, theirs)
    finally:
        testbed.run(["slurmlet", "down", "-c", name, "--purge", "--yes"], user=user, timeout_s=120)


def reached(theirs: Net) -> bool:
    """Whether their own pods reach `other`, by its address and by its Service, by TCP and UDP."""
    ways = ((theirs.ip("other"), NUMBER), (theirs.cluster_ip("other"), SERVED))
    said = theirs.ask(
        "friend", *((verb, host, number, None) for host, number in ways for verb in ("who", "udp_who"))
    )
    return all(isinstance(each, dict) and each["name"] == "other" for each in said)


@pytest.mark.parametrize("client", ["near", "far"])
def test_no_address_of_another_cluster_answers(clusters: Clusters, client: str) -> None:
    ours, theirs = clusters
    questions = [
        (verb, host, number, 2)
        for host, number in (
            (theirs.ip("other"), NUMBER),
            (theirs.cluster_ip("other"), SERVED),
            (address_of(HOST), NUMBER),
        )
        for verb in ("who", "udp_who")
    ]
    said = ours.ask(client, *questions)
    # An error's name each: where ranges are the same, the address may be a pod of ours, which has no such port.
    assert all(isinstance(each, str) for each in said), said
    assert ours.ask_one(client, "resolve", theirs.name_of("other")) == "gaierror"
    assert reached(theirs)


@pytest.mark.parametrize("client", ["near", "far"])
def test_the_host_port_behind_their_listener_serves_no_byte(clusters: Clusters, client: str) -> None:
    ours, theirs = clusters
    found = ours.testbed.run(["python3", "-c", BEHIND, f"tcp:{NUMBER}"], host=HOST, user="root").stdout
    (host_port,) = json.loads(found)
    said = ours.run(client, "python3", "-c", KNOCK, address_of(HOST), str(host_port))
    assert json.loads(said.stdout) == [""]
    assert reached(theirs)
