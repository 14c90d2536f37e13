"""The hub's side of the pod network: addresses, tables and who is told what, over a scripted API server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.hub.network import dns_service, pod_network
from slurmlet.hub.network.network_counters import NetworkCounts
from slurmlet.hub.network.pod_addresses import Addresses, NoAddressLeft
from slurmlet.hub.network.pod_network import Network
from slurmlet.hub.network.service_watch import Services
from slurmlet.hub.network.table_board import PODS, SERVICES, Board
from slurmlet.hub.network.table_push import Follower, Pusher, interval_s
from slurmlet.hub.runner_links import GATEWAY, LinkLost
from slurmlet.model.ids import PodUid
from slurmlet.model.network_plan import PodNetwork
from slurmlet.podnet import addresses as numbers
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.tables import HOST, POD, REFUSED, UNREACHABLE, Tables
from slurmlet.protocol import checks, wire
from tests.unit.fakes import FakeEvents
from tests.unit.hub_making import make_settings
from tests.unit.loopback import Api, api_server, make_keys, until, watching

ONE, TWO, THREE = PodUid("u-1"), PodUid("u-2"), PodUid("u-3")
CLUSTER = PodNetwork("10.244.0.0/16", "10.96.0.0/16", "ab" * 32)
OPEN = {"ingress": None, "egress": None}


class FakeLink:
    """A runner at the other end that keeps tables as a netd does. `gate` unset: it does not read."""

    def __init__(self, uid: PodUid = ONE, **hello: Any) -> None:
        self.uid, self.alive = uid, True
        self.hello = {"host_ip": "192.0.2.5", "has_pod": False, **hello}
        self.messages: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        setup = Setup(0, numbers.network("10.244.0.0/16"), numbers.network("10.96.0.0/16"), b"", "n1", 0, [])
        self.tables = Tables(setup)

    async def send(self, frame: bytes) -> None:
        await self.gate.wait()
        if not self.alive:
            raise LinkLost
        message = json.loads(frame[wire.HEADER_BYTES :])
        self.messages.append(message)
        self.tables.apply(message)

    def route(self, ip: str, port: int, protocol: int = 6) -> str:
        return self.tables.route(protocol, numbers.number(ip), port).kind


# Addresses


def test_addresses_go_round_and_are_not_given_again_soon(tmp_path: Path) -> None:
    made = Addresses("10.1.0.0/29", tmp_path / "mark")
    given = []
    for number in range(7):
        uid = PodUid(f"u-{number}")
        given.append(made.give(uid))
        made.release(uid)
    assert given == ["10.1.0.2", "10.1.0.3", "10.1.0.4", "10.1.0.5", "10.1.0.6", "10.1.0.2", "10.1.0.3"]


def test_addresses_are_marked_beside_the_loop_before_they_are_needed(tmp_path: Path) -> None:
    made = Addresses("10.1.0.0/16", tmp_path / "mark")
    assert made.nearly_used
    made.mark_ahead()
    (tmp_path / "mark").unlink()
    given = [made.give(PodUid(f"a-{number}")) for number in range(100)]
    assert not (tmp_path / "mark").exists(), "nothing is written by whoever needs an address"
    assert len(set(given)) == 100


def test_a_pod_keeps_its_address_and_nobody_else_gets_it(tmp_path: Path) -> None:
    made = Addresses("10.1.0.0/29", tmp_path / "mark")
    first = made.give(ONE)
    assert made.give(ONE) == made.of(ONE) == first
    others = {made.give(PodUid(f"o-{number}")) for number in range(4)}
    assert len(others | {first}) == 5
    with pytest.raises(NoAddressLeft, match="all 5 addresses"):
        made.give(TWO)
    assert made.release(ONE) == first
    assert made.give(TWO) == first
    assert made.release(THREE) == ""


def test_what_pods_have_already_is_theirs(tmp_path: Path) -> None:
    made = Addresses("10.1.0.0/28", tmp_path / "mark")
    assert made.reserve(ONE, "10.1.0.2")
    assert made.reserve(ONE, "10.1.0.2")
    assert not made.reserve(TWO, "10.1.0.2")
    assert not made.reserve(TWO, "10.9.0.2")
    assert made.give(TWO) == "10.1.0.3"
    assert made.give(ONE) == "10.1.0.2"


def test_a_new_hub_begins_behind_all_that_the_last_one_may_have_given(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    first = Addresses("10.1.0.0/24", mark)
    given = {first.give(PodUid(f"a-{number}")) for number in range(40)}
    # It knows of nobody, as if the last hub had died before it could write a status.
    second = Addresses("10.1.0.0/24", mark)
    assert not given & {second.give(PodUid(f"b-{number}")) for number in range(100)}
    assert mark.stat().st_mode & 0o777 == 0o600


def test_a_mark_of_another_range_or_none_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "mark").write_text('{"range": "10.9.0.0/16", "next": 300}')
    assert Addresses("10.1.0.0/16", tmp_path / "mark").give(ONE) == "10.1.0.2"
    (tmp_path / "mark").write_text("rubbish")
    assert Addresses("10.1.0.0/16", tmp_path / "mark").give(ONE) == "10.1.0.2"


# The board and who follows it


def pushing(scenario: Callable[[Board, Pusher, Callable[..., FakeLink]], Awaitable[None]]) -> None:
    async def run() -> None:
        board = Board()
        pusher = Pusher(board)
        tasks, links = [], []

        def follow(**hello: Any) -> FakeLink:
            link = FakeLink(**hello)
            links.append(link)
            follower = Follower(link, lambda: {"policy": OPEN}, asyncio.sleep(0))  # type: ignore[arg-type]
            tasks.append(asyncio.create_task(pusher.follow(follower)))
            return link

        await asyncio.wait_for(scenario(board, pusher, follow), 5)
        for link in links:
            link.alive = False
            link.gate.set()
            pusher.own_changed(link)  # type: ignore[arg-type]
        await asyncio.gather(*tasks)
        assert len(pusher) == 0

    asyncio.run(run())


def test_who_comes_is_told_everything_then_changes() -> None:
    async def scenario(board: Board, _pusher: Pusher, follow: Callable[..., FakeLink]) -> None:
        board.put(PODS, "10.244.0.7", ["192.0.2.6", 4500, {"80": 40123}])
        link = follow()
        await until(lambda: link.route("10.244.0.7", 80) == POD)
        assert [message.get("policy") for message in link.messages[:1]] == [OPEN]
        assert link.messages[1]["reset"] is True
        board.put(
            SERVICES, "10.96.1.1 tcp 80", {"to": [["10.244.0.7", 80, "n1"]], "affinity_s": 0, "local": False}
        )
        await until(lambda: link.route("10.96.1.1", 80) == POD)
        board.put(PODS, "10.244.0.7", None)
        await until(lambda: link.route("10.244.0.7", 80) == UNREACHABLE)
        assert sum(message["reset"] for message in link.messages) == 1

    pushing(scenario)


def test_changes_at_once_become_one_message_and_what_did_not_change_none() -> None:
    async def scenario(board: Board, _pusher: Pusher, follow: Callable[..., FakeLink]) -> None:
        link = follow()
        await until(lambda: len(link.messages) == 3)
        for number in range(100):
            board.put(PODS, f"10.244.1.{number}", ["192.0.2.6", 4500 + number, {}])
            board.put(PODS, f"10.244.1.{number}", ["192.0.2.6", 4500 + number, {"80": 1}])
        await until(lambda: len(link.messages) == 4)
        board.put(PODS, "10.244.1.1", ["192.0.2.6", 4501, {"80": 1}])
        await asyncio.sleep(0.05)
        assert len(link.messages) == 4
        assert len(link.messages[3]["pods"]) == 100

    pushing(scenario)


def test_large_tables_go_in_pieces_and_old_entries_stay_until_the_last() -> None:
    async def scenario(board: Board, _pusher: Pusher, follow: Callable[..., FakeLink]) -> None:
        for number in range(2500):
            board.put(PODS, f"10.244.{number // 250}.{number % 250}", ["192.0.2.6", 1, {}])
        board.tell()
        link = follow()
        link.tables.apply(
            {"pods": {"10.244.9.250": ["192.0.2.6", 1, {}], "10.244.0.1": ["192.0.2.7", 9, {}]}}
        )
        await until(lambda: len(link.messages) == 5)
        pieces = link.messages[1:]
        assert [len(piece.get("pods", ())) for piece in pieces] == [1000, 1000, 500, 0]
        assert [(piece["reset"], piece["complete"]) for piece in pieces] == [
            (True, False),
            (False, False),
            (False, False),
            (False, True),
        ]
        # Told by an earlier hub, and by this one no more.
        assert link.route("10.244.9.250", 80) == UNREACHABLE
        assert link.route("10.244.0.1", 80) == POD

        half = Tables(link.tables._setup)
        half.apply({"pods": {"10.244.9.250": ["192.0.2.6", 1, {}]}})
        half.apply(pieces[0])
        assert half.route(6, numbers.number("10.244.9.250"), 80).kind == POD

    pushing(scenario)


def test_what_was_learned_a_moment_ago_is_never_forgotten_for_a_moment() -> None:
    """As after the death of a hub: its tables were made for a first pod before the others had dialled in again."""
    here = ["192.0.2.6", 4500, {"80": 40123}]

    async def scenario(board: Board, _pusher: Pusher, follow: Callable[..., FakeLink]) -> None:
        first = follow()
        await until(lambda: len(first.messages) == 3)
        board.put(PODS, "10.244.0.7", here)
        await until(lambda: first.route("10.244.0.7", 80) == POD)
        # One is in the log behind those tables, one not even there yet.
        board.put(PODS, "10.244.0.8", here)
        second = follow(uid=TWO)
        await until(lambda: any(message.get("complete") for message in second.messages))
        told_before = Tables(second.tables._setup)
        told_before.apply({"pods": {"10.244.0.7": here, "10.244.0.8": here, "10.244.0.9": here}})
        for message in second.messages:
            told_before.apply(message)
            for ip in ("10.244.0.7", "10.244.0.8"):
                assert told_before.route(6, numbers.number(ip), 80).kind == POD
        assert told_before.route(6, numbers.number("10.244.0.9"), 80).kind == UNREACHABLE

    pushing(scenario)


def test_a_follower_that_does_not_read_costs_nothing_and_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmlet.hub.network.table_board._MAX_LOG_BYTES", 5000)
    monkeypatch.setattr("slurmlet.hub.network.table_push._BASE_S", 0.0)
    monkeypatch.setattr("slurmlet.hub.network.table_push._SETTLE_S", 0.0)

    async def scenario(board: Board, _pusher: Pusher, follow: Callable[..., FakeLink]) -> None:
        slow, quick = follow(), follow(uid=TWO)
        await until(lambda: len(slow.messages) == len(quick.messages) == 3)
        slow.gate.clear()
        for number in range(200):
            board.put(PODS, "10.244.0.9", ["192.0.2.6", 1000 + number, {}])
            board.put(PODS, f"10.244.2.{number}", ["192.0.2.6", 1, {}])
            await asyncio.sleep(0.002)
        await until(lambda: quick.route("10.244.2.199", 1) == POD)
        assert board._log_bytes <= 5000
        assert sum(message["reset"] for message in quick.messages) == 1
        slow.gate.set()
        await until(lambda: slow.route("10.244.2.199", 1) == POD)
        assert sum(message["reset"] for message in slow.messages) == 2
        assert len(slow.messages) < 60
        peer = slow.tables.peer(numbers.number("10.244.0.9"))
        assert peer is not None
        assert peer.overlay_port == 1199

    pushing(scenario)


def test_frames_are_made_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = wire.control

    def counted(message: Any) -> bytes:
        made.append("policy" if "policy" in message else "tables")
        return real(message)

    monkeypatch.setattr("slurmlet.hub.network.table_board.wire.control", counted)

    async def scenario(board: Board, _pusher: Pusher, follow: Callable[..., FakeLink]) -> None:
        links = [follow(uid=PodUid(f"u-{number}")) for number in range(50)]
        await until(lambda: all(len(link.messages) == 3 for link in links))
        board.put(PODS, "10.244.0.9", ["192.0.2.6", 1, {}])
        await until(lambda: all(link.route("10.244.0.9", 1) == POD for link in links))
        assert made.count("tables") == 2

    pushing(scenario)


def test_intervals_grow_with_followers_within_half_a_second() -> None:
    assert interval_s(1) < 0.1
    assert interval_s(100) < 0.1
    assert interval_s(100_000) <= 0.4


# All of it


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("cluster") / "pki")


PATHS = {
    "nodes": "/api/v1/nodes",
    "services": "/api/v1/services",
    "slices": "/apis/discovery.k8s.io/v1/endpointslices",
    "policies": "/apis/networking.k8s.io/v1/networkpolicies",
    "namespaces": "/api/v1/namespaces",
}


def networked(
    keys: Path,
    tmp_path: Path,
    scenario: Callable[[Network, Api, FakeEvents], Awaitable[None]],
    pods: tuple[dict[str, Any], ...] = (),
    **objects: list[dict[str, Any]],
) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            for name, path in PATHS.items():
                listed = {"metadata": {"resourceVersion": "5"}, "items": objects.get(name, [])}
                api.on("GET", path, listed, watching(then="hang"))
            (tmp_path / "run").mkdir()
            settings = make_settings(tmp_path, network=CLUSTER, api_address="192.0.2.1")
            events = FakeEvents()
            services = Services(settings, api.client)
            network = Network(settings, CLUSTER, api.client, events, services)  # type: ignore[arg-type]
            tasks = [asyncio.create_task(network.run()), asyncio.create_task(services.run())]
            await asyncio.sleep(0)
            for pod in pods:
                network.pod_changed(pod, False)
            network.pods_synced()
            try:
                await asyncio.wait_for(scenario(network, api, events), 5)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def pod(uid: PodUid, ip: str = "", phase: str = "Running", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": uid, "namespace": "shop", "uid": uid, "labels": {}},
        "spec": {"nodeName": "n1", "containers": [{"name": "c"}], **spec},
        "status": {"phase": phase, **({"podIP": ip} if ip else {})},
    }


def attached(ip: str, port: int = 4500, **listeners: int) -> dict[str, Any]:
    ports = {name.removeprefix("p"): at for name, at in listeners.items()}
    return {"type": "attached", "ip": ip, "overlay_port": port, "mode": "fast", "why": "", "listeners": ports}


def come(network: Network, link: FakeLink, of: dict[str, Any] | None, message: dict[str, Any]) -> None:
    network.heard(link, of, message)  # type: ignore[arg-type]


def test_a_runner_that_attached_is_told_and_told_of(keys: Path, tmp_path: Path) -> None:
    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        one, two = FakeLink(ONE), FakeLink(TWO, host_ip="192.0.2.6")
        ips = [network.address(pod(uid)) for uid in (ONE, TWO)]
        come(network, one, pod(ONE), attached(ips[0]))
        await until(lambda: one.route(ips[0], 80) == POD)
        come(network, two, pod(TWO), attached(ips[1], 4501, p80=40001))
        await until(lambda: one.tables.peer(numbers.number(ips[1])) is not None)
        peer = one.tables.peer(numbers.number(ips[1]))
        assert peer == (numbers.number("192.0.2.6"), 4501, {80: 40001})
        come(network, two, pod(TWO), {"type": "listeners", "listeners": {"81": 40002}})
        await until(lambda: one.tables.peer(numbers.number(ips[1])) == (peer[0], 4501, {81: 40002}))
        network.released(TWO)
        await until(lambda: one.route(ips[1], 81) == UNREACHABLE)
        assert network.address(pod(THREE)) not in ips

    networked(keys, tmp_path, scenario)


def test_a_lost_connection_does_not_make_a_pod_unreachable(keys: Path, tmp_path: Path) -> None:
    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        one, two = FakeLink(ONE), FakeLink(TWO)
        for link, uid in ((one, ONE), (two, TWO)):
            come(network, link, pod(uid), attached(network.address(pod(uid))))
        await until(lambda: one.route("10.244.0.3", 1) == POD)
        two.alive = False
        network.link_ended(two)  # type: ignore[arg-type]
        await until(lambda: len(network.pusher) == 1)
        assert one.route("10.244.0.3", 1) == POD

    networked(keys, tmp_path, scenario)


@pytest.mark.parametrize("ip", ["10.244.0.1", "10.244.0.3", "192.0.2.9", "10.96.0.1"])
def test_a_runner_that_claims_what_is_not_its_own_is_cut_off(keys: Path, tmp_path: Path, ip: str) -> None:
    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        with pytest.raises(wire.ProtocolError):
            come(network, FakeLink(ONE), pod(ONE), attached(ip))
        assert network.board.get(PODS, ip) is None

    networked(keys, tmp_path, scenario, pods=(pod(TWO, "10.244.0.3"),))


@pytest.mark.parametrize(
    "broken", [{"ip": "x"}, {"ip": None}, {"overlay_port": "x"}, {"listeners": {"x": 1}}, {"listeners": None}]
)
def test_a_runner_that_talks_nonsense_is_cut_off(keys: Path, tmp_path: Path, broken: dict[str, Any]) -> None:
    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        # What the link server takes for a broken peer.
        with pytest.raises((wire.ProtocolError, ValueError, LookupError, TypeError, AttributeError)):
            message: Any = checks.from_runner({**attached("10.244.0.2"), **broken})
            come(network, FakeLink(ONE), pod(ONE), message)

    networked(keys, tmp_path, scenario)


def test_a_new_hub_tells_old_runners_nothing_until_the_others_are_back(keys: Path, tmp_path: Path) -> None:
    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        old, new, other = FakeLink(ONE, has_pod=True), FakeLink(THREE), FakeLink(TWO, has_pod=True)
        come(network, old, pod(ONE), attached("10.244.0.9"))
        come(network, new, pod(THREE), attached(network.address(pod(THREE))))
        await until(lambda: new.route("10.244.0.9", 1) == POD)
        assert old.messages == []
        come(network, other, pod(TWO), attached("10.244.0.10"))
        await until(lambda: new.route("10.244.0.10", 1) == POD)
        # Without the gateway there would be no DNS.
        assert old.messages == []
        come(network, FakeLink(GATEWAY), None, attached("10.244.0.1"))
        await until(lambda: old.route("10.244.0.10", 1) == old.route("10.244.0.1", 1) == POD)

    known = (pod(ONE, "10.244.0.9"), pod(TWO, "10.244.0.10"), pod(PodUid("u-4"), "10.244.0.11", "Succeeded"))
    networked(keys, tmp_path, scenario, pods=known)


def test_the_address_of_a_pod_that_has_ended_may_be_anothers(keys: Path, tmp_path: Path) -> None:
    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        assert network.known_address(TWO) == "10.244.0.9"
        come(network, FakeLink(TWO), pod(TWO), attached("10.244.0.9"))
        network.released(TWO)
        network.pod_changed(pod(TWO, "10.244.0.9", "Failed"), False)
        assert network.known_address(TWO) == ""

    ended = pod(ONE, "10.244.0.9", "Succeeded")
    networked(keys, tmp_path, scenario, pods=(ended, pod(TWO, "10.244.0.9")))


def test_it_does_not_wait_for_ever(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_network, "_SETTLE_S", 0.1)

    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        old = FakeLink(ONE, has_pod=True)
        come(network, old, pod(ONE), attached("10.244.0.9"))
        await until(lambda: old.messages)

    networked(keys, tmp_path, scenario, pods=(pod(ONE, "10.244.0.9"), pod(TWO, "10.244.0.10")))


def service(name: str, ip: str, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "shop", "uid": f"s-{name}", "resourceVersion": "1"}
    ports = [{"name": "http", "port": 8080, "protocol": "TCP", "nodePort": 30080}]
    status = more.pop("status", {})
    return {"metadata": metadata, "spec": {"clusterIP": ip, "ports": ports, **more}, "status": status}


def slice_of(name: str, *ips: str) -> dict[str, Any]:
    labels = {"kubernetes.io/service-name": name}
    metadata = {
        "name": f"{name}-x",
        "namespace": "shop",
        "uid": f"e-{name}",
        "resourceVersion": "1",
        "labels": labels,
    }
    endpoints = [{"addresses": [ip], "nodeName": "n1", "conditions": {"ready": True}} for ip in ips]
    ports = [{"name": "http", "port": 80, "protocol": "TCP"}]
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": endpoints, "ports": ports}


def test_services_are_told_and_their_changes(keys: Path, tmp_path: Path) -> None:
    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        link = FakeLink(ONE)
        come(network, link, pod(ONE), attached(network.address(pod(ONE))))
        await until(lambda: link.route("10.96.1.1", 8080) == HOST)
        network.translator.slice_changed(slice_of("web"), False)
        await until(lambda: link.route("10.96.1.1", 8080) == REFUSED)
        network.translator.slice_changed(slice_of("web", "192.0.2.8"), False)
        await until(lambda: link.route("10.96.1.1", 8080) == HOST)
        network.translator.slice_changed(slice_of("web", "192.0.2.8"), True)
        await until(lambda: link.route("10.96.1.1", 8080) == REFUSED)
        assert (6, 30080) in link.tables.node_ports
        network.translator.service_changed(service("web", "10.96.1.1"), True)
        await until(lambda: (6, 30080) not in link.tables.node_ports)
        assert network.board.size(SERVICES) == 0

    networked(
        keys,
        tmp_path,
        scenario,
        services=[service("web", "10.96.1.1")],
        slices=[slice_of("web", "192.0.2.7")],
    )


def test_a_zone_keeps_its_traffic_and_a_changed_label_moves_it(keys: Path, tmp_path: Path) -> None:
    def node(zone: str) -> dict[str, Any]:
        labels = {"topology.kubernetes.io/zone": zone} if zone else {}
        return {"metadata": {"name": "n1", "uid": "n", "resourceVersion": "1", "labels": labels}}

    there = slice_of("web", "192.0.2.7", "192.0.2.8")
    for endpoint, zone in zip(there["endpoints"], ("east", "west"), strict=True):
        endpoint["hints"] = {"forZones": [{"name": zone}]}

    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        link = FakeLink(ONE)
        come(network, link, pod(ONE), attached(network.address(pod(ONE))))

        def used() -> set[str]:
            ip = numbers.number("10.96.1.1")
            return {numbers.text(link.tables.route(6, ip, 8080).ip) for _ in range(4)}

        await until(lambda: used() == {"192.0.2.7"})
        for zone, wanted in (("west", {"192.0.2.8"}), ("north", {"192.0.2.7", "192.0.2.8"})):
            network.translator.node_changed(node(zone), False)
            await until(lambda wanted=wanted: used() == wanted)  # type: ignore[misc]
        network.translator.node_changed(node("east"), False)
        await until(lambda: used() == {"192.0.2.7"})
        network.translator.node_changed(node("east"), True)
        await until(lambda: used() == {"192.0.2.7", "192.0.2.8"})

    web = [service("web", "10.96.1.1")]
    networked(keys, tmp_path, scenario, services=web, slices=[there], nodes=[node("east")])


def test_two_services_that_claim_one_address_do_not_take_it_from_each_other_when_they_go(
    keys: Path, tmp_path: Path
) -> None:
    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        link = FakeLink(ONE)
        come(network, link, pod(ONE), attached(network.address(pod(ONE))))
        await until(lambda: link.route("192.0.2.99", 8080) == REFUSED)
        first, second = (
            service(name, ip, externalIPs=["192.0.2.99"])
            for name, ip in (("a", "10.96.1.1"), ("b", "10.96.1.2"))
        )
        network.translator.service_changed(second, False)
        await until(lambda: link.route("10.96.1.2", 8080) == REFUSED)
        network.translator.service_changed(first, True)
        await until(lambda: "10.96.1.1 tcp 8080" not in network.board._tables[SERVICES])
        assert network.board.get(SERVICES, "192.0.2.99 tcp 8080") is not None

    networked(keys, tmp_path, scenario, services=[service("a", "10.96.1.1", externalIPs=["192.0.2.99"])])


def test_a_policy_comes_first_and_again_when_it_changes(keys: Path, tmp_path: Path) -> None:
    deny = {
        "metadata": {"name": "deny", "namespace": "shop", "uid": "p", "resourceVersion": "1"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    }

    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        await network.policies.ready.wait()
        network.pod_changed(pod(ONE), False)
        link = FakeLink(ONE)
        come(network, link, pod(ONE), attached(network.address(pod(ONE))))
        await until(lambda: len(link.messages) >= 2)
        assert link.messages[0]["policy"]["ingress"] == []
        network.policies.policy_changed(deny, True)
        await until(lambda: link.messages[-1].get("policy") == OPEN)

    networked(keys, tmp_path, scenario, policies=[deny])


def test_the_gateway_gets_tables_and_load_balancers_but_no_policy(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/api/v1/namespaces/shop/services/web/status"
    held = service("web", "10.96.1.1", type="LoadBalancer", loadBalancerSourceRanges=[" 192.0.2.0/24"])

    async def scenario(network: Network, api: Api, events: FakeEvents) -> None:
        api.on("PATCH", path, held)
        monkeypatch.setattr(network._balancer, "_is_free", lambda _port: True)
        gateway = FakeLink(GATEWAY, host_ip="192.0.2.1")
        with pytest.raises(wire.ProtocolError):
            come(network, gateway, None, attached("10.244.0.2"))
        come(network, gateway, None, attached("10.244.0.1", p53=40053))
        target = {
            "to": [["192.0.2.7", 80, "n1"]],
            "affinity_s": 0,
            "local": False,
            "sources": ["192.0.2.0/24"],
        }
        await until(lambda: any(m.get("load_balancers") == {"tcp 8080": target} for m in gateway.messages))
        assert not any("policy" in message for message in gateway.messages)
        peer = gateway.tables.peer(numbers.number("10.244.0.1"))
        assert peer is not None
        assert peer.listeners == {53: 40053}
        await until(lambda: events.said)
        ingress = {"ip": "192.0.2.1", "ipMode": "VIP", "ports": [{"port": 8080, "protocol": "TCP"}]}
        assert api.seen("PATCH", path)[0][1] == {"status": {"loadBalancer": {"ingress": [ingress]}}}
        assert events.said == [("LoadBalancer", "port 8080/TCP is served at 192.0.2.1:8080")]
        network.translator.slice_changed(slice_of("web", "192.0.2.8"), False)
        await until(lambda: balanced(gateway)["tcp 8080"]["to"] == [["192.0.2.8", 80, "n1"]])
        network._services._changed(held, True)
        await until(lambda: balanced(gateway) == {})

    networked(keys, tmp_path, scenario, services=[held], slices=[slice_of("web", "192.0.2.7")])


def balanced(gateway: FakeLink) -> dict[str, Any]:
    """The table of load balancers as it was told last."""
    told: list[dict[str, Any]] = [m["load_balancers"] for m in gateway.messages if "load_balancers" in m]
    return told[-1]


def test_a_service_that_is_no_load_balancer_any_more_loses_its_address(keys: Path, tmp_path: Path) -> None:
    path = "/api/v1/namespaces/shop/services/web/status"
    shown = {"loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ports": [{"port": 8080, "protocol": "TCP"}]}]}}

    async def scenario(_network: Network, api: Api, _events: FakeEvents) -> None:
        api.on("PATCH", path, {})
        await until(lambda: api.seen("PATCH", path))
        assert api.seen("PATCH", path)[0][1] == {"status": {"loadBalancer": {"ingress": None}}}

    networked(
        keys, tmp_path, scenario, services=[service("web", "10.96.1.1", type="ClusterIP", status=shown)]
    )


def test_the_service_of_the_clusters_dns_is_made(keys: Path, tmp_path: Path) -> None:
    services, slices = "/api/v1/namespaces/kube-system/services", dns_service._SLICES
    assert slices == "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices"

    async def scenario(_network: Network, api: Api, _events: FakeEvents) -> None:
        api.on("POST", services, 404, {})
        api.on("POST", slices, 409)
        api.on("PATCH", f"{slices}/kube-dns-gateway", {})
        await until(lambda: api.seen("PATCH", f"{slices}/kube-dns-gateway"))
        made = api.seen("POST", services)[-1][1]
        assert made["spec"]["clusterIP"] == "10.96.0.10"
        assert "selector" not in made["spec"]
        assert api.seen("POST", slices)[0][1]["endpoints"][0]["addresses"] == ["10.244.0.1"]

    networked(keys, tmp_path, scenario)


def test_a_port_that_somebody_else_holds_is_told_where_it_was_asked_for(keys: Path, tmp_path: Path) -> None:
    async def scenario(network: Network, _api: Api, events: FakeEvents) -> None:
        await network._services.synced.wait()
        come(network, FakeLink(ONE), pod(ONE), {"type": "ports-taken", "ports": {"tcp 30080": "node port"}})
        come(network, FakeLink(ONE), pod(ONE), {"type": "ports-taken", "ports": {"udp 30080": "host port"}})
        assert events.said == [("PortTaken", "node port"), ("PortTaken", "host port")]

    networked(keys, tmp_path, scenario, services=[service("web", "10.96.1.1")])


def test_a_network_that_is_not_the_best_is_told_of(keys: Path, tmp_path: Path) -> None:
    async def scenario(network: Network, _api: Api, events: FakeEvents) -> None:
        ip = network.address(pod(ONE))
        come(network, FakeLink(ONE), pod(ONE), {**attached(ip), "mode": "packets", "why": "no seccomp"})
        assert [reason for reason, _ in events.said] == ["NetworkMode"]
        assert "no seccomp" in events.said[0][1]

    networked(keys, tmp_path, scenario)


def test_packets_are_the_best_where_they_are_encrypted(keys: Path, tmp_path: Path) -> None:
    async def scenario(network: Network, _api: Api, events: FakeEvents) -> None:
        network.cluster = dataclasses.replace(CLUSTER, tls={"ca": "", "cert": "", "key": ""})
        ip = network.address(pod(ONE))
        come(network, FakeLink(ONE), pod(ONE), {**attached(ip), "mode": "packets", "why": "asked for"})
        assert events.said == []

    networked(keys, tmp_path, scenario)


def test_counts_are_sums_that_never_fall() -> None:
    counts = NetworkCounts()

    def shown() -> dict[str, Any]:
        return {family.name: family.samples[0][2] for family in counts.families()}

    counts.take(ONE, {"slow-path": 5})
    counts.take(TWO, {"slow-path": 7})
    assert shown() == {"slurmlet_network_slow_path_total": 12}
    counts.take(ONE, {"slow-path": 1})
    assert shown() == {"slurmlet_network_slow_path_total": 13}
    counts.ended(ONE)
    assert shown() == {"slurmlet_network_slow_path_total": 13}


def test_variables_name_an_api_server_that_the_pod_can_reach(keys: Path, tmp_path: Path) -> None:
    async def scenario(network: Network, _api: Api, _events: FakeEvents) -> None:
        own = await network._services.variables("shop", links=False, host_network=False)
        hosts = await network._services.variables("shop", links=True, host_network=True)
        assert (own["KUBERNETES_SERVICE_HOST"], own["KUBERNETES_SERVICE_PORT"]) == ("10.96.0.1", "443")
        assert (hosts["KUBERNETES_SERVICE_HOST"], hosts["KUBERNETES_SERVICE_PORT"]) == ("192.0.2.1", "1")
        assert (hosts["WEB_SERVICE_HOST"], "WEB_SERVICE_HOST" in own) == ("10.96.1.1", False)

    networked(keys, tmp_path, scenario, services=[service("web", "10.96.1.1")])
