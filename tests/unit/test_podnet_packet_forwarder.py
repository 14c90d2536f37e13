"""The slow path between pods: with real kernels on both sides, and with packets that no honest kernel sends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.podnet import addresses
from slurmlet.podnet.overlay_datagrams import open_socket
from slurmlet.podnet.slow import packets
from slurmlet.podnet.slow.udp_endpoint import UdpEndpoint
from slurmlet.podnet.tables import Peer
from tests.unit.network_making import (
    HOST,
    Cluster,
    Pod,
    datagram,
    making_cluster,
    pods_on_a_host_of_its_own,
    receive,
    receive_from,
    wait,
)

A, B, C = "10.244.0.7", "10.244.0.8", "10.244.0.9"
SERVICE, SECOND = "10.96.0.10", "10.96.0.11"
OTHER_HOST = "192.0.2.7"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with making_cluster() as made:
        yield made


def service(ip: str, *backends: tuple[str, int]) -> dict[str, Any]:
    return {"services": {f"{ip} udp 53": {"to": [[to, port, "node"] for to, port in backends]}}}


class TestBetweenKernels:
    @pytest.fixture
    def pods(self, cluster: Cluster) -> tuple[Pod, Pod]:
        return cluster.add(A, real=True), cluster.add(B, real=True)

    @pytest.mark.parametrize("size", [0, 1, 1472, 9000, 65454, 65507])
    def test_datagrams_arrive_whole_from_the_pods_own_address(
        self, cluster: Cluster, pods: tuple[Pod, Pod], size: int
    ) -> None:
        payload = os.urandom(size)
        client, server = pods[0].udp(), pods[1].udp(9000)
        client.connect((B, 9000))
        client.send(payload)
        received, peer = receive_from(cluster.loop, server)
        assert received == payload
        assert peer == client.getsockname() == (A, peer[1])
        server.sendto(payload[::-1], peer)
        assert receive(cluster.loop, client) == payload[::-1]

    @pytest.mark.parametrize("size", [5, 65507])
    def test_a_service_answers_from_its_own_address(
        self, cluster: Cluster, pods: tuple[Pod, Pod], size: int
    ) -> None:
        cluster.tell(**service(SERVICE, (B, 9000)))
        payload = os.urandom(size)
        client, server = pods[0].udp(), pods[1].udp(9000)
        client.connect((SERVICE, 53))
        client.send(payload)
        received, peer = receive_from(cluster.loop, server)
        assert (received, peer[0]) == (payload, A)
        server.sendto(payload, peer)
        assert receive(cluster.loop, client) == payload

    def test_a_service_with_nobody_behind_it_refuses(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        cluster.tell(**service(SERVICE))
        client = pods[0].udp()
        client.connect((SERVICE, 53))
        client.send(b"anybody?")
        with pytest.raises(ConnectionRefusedError):
            receive(cluster.loop, client)

    @pytest.mark.parametrize("to", [(B, 9999), (SERVICE, 53)])
    def test_a_closed_port_refuses(
        self, cluster: Cluster, pods: tuple[Pod, Pod], to: tuple[str, int]
    ) -> None:
        cluster.tell(**service(SERVICE, (B, 9999)))
        client = pods[0].udp()
        client.connect(to)
        client.send(b"anybody?")
        with pytest.raises(ConnectionRefusedError):
            receive(cluster.loop, client)

    def test_no_such_pod_is_unreachable(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        client = pods[0].udp()
        # Linux tells a program of this only if it asked (IP_RECVERR): hosts come back.
        client.setsockopt(socket.IPPROTO_IP, 11, 1)
        client.connect((C, 53))
        client.send(b"anybody?")
        with pytest.raises(OSError, match="No route to host"):
            receive(cluster.loop, client)

    def test_one_socket_and_two_services_with_one_backend(
        self, cluster: Cluster, pods: tuple[Pod, Pod]
    ) -> None:
        for ip in (SERVICE, SECOND):
            cluster.tell(**service(ip, (B, 9000)))
        client, server = pods[0].udp(), pods[1].udp(9000)
        for to in ((SERVICE, 53), (SECOND, 53), (B, 9000)):
            client.sendto(b"who?", to)
            _, peer = receive_from(cluster.loop, server)
            server.sendto(b"me", peer)
            assert receive_from(cluster.loop, client) == (b"me", to)

    def test_a_service_whose_backend_is_its_client(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        cluster.tell(**service(SERVICE, (A, 9000)))
        client, server = pods[0].udp(), pods[0].udp(9000)
        client.connect((SERVICE, 53))
        client.send(b"who?")
        _, peer = receive_from(cluster.loop, server)
        server.sendto(b"you", peer)
        assert receive(cluster.loop, client) == b"you"
        server.close()
        client.send(b"and now?")
        with pytest.raises(ConnectionRefusedError):
            receive(cluster.loop, client)

    def test_a_client_moves_on_when_its_backend_is_gone(
        self, cluster: Cluster, pods: tuple[Pod, Pod]
    ) -> None:
        third = cluster.add(C, real=True)
        client, first, second = pods[0].udp(), pods[1].udp(9000), third.udp(9000)
        client.connect((SERVICE, 53))
        cluster.tell(**service(SERVICE, (B, 9000)))
        client.send(b"1")
        assert receive(cluster.loop, first) == b"1"
        cluster.tell(**service(SERVICE, (B, 9000), (C, 9000)))
        for _ in range(4):
            client.send(b"2")
            assert receive(cluster.loop, first) == b"2"
        cluster.tell(**service(SERVICE, (C, 9000)))
        client.send(b"3")
        _, peer = receive_from(cluster.loop, second)
        second.sendto(b"4", peer)
        assert receive(cluster.loop, client) == b"4"

    def test_an_endpoint_without_a_kernel_talks_to_pods(
        self, cluster: Cluster, pods: tuple[Pod, Pod]
    ) -> None:
        """As the gateway does, here in B's place."""
        gateway, a, b = pods[1], addresses.number(A), addresses.number(B)
        endpoint = UdpEndpoint(gateway.overlay, gateway.tables, gateway.setup, b)
        heard: list[Any] = []
        endpoint.on_datagram = lambda *what: heard.append(what)
        refused: list[Any] = []
        endpoint.on_refused = lambda *what: refused.append(what)
        server = pods[0].udp(9000)
        assert endpoint.send(777, a, 9000, b"q" * 65507)
        payload, peer = receive_from(cluster.loop, server)
        assert (payload, peer) == (b"q" * 65507, (B, 777))
        server.sendto(b"a" * 65507, peer)
        wait(cluster.loop, lambda: heard)
        assert heard == [(a, 9000, 777, b"a" * 65507)]
        endpoint.send(778, a, 9001, b"anybody?")
        wait(cluster.loop, lambda: refused)
        assert refused == [(a, 9001, 778)]
        assert not endpoint.send(777, addresses.number(C), 9000, b"nowhere")


class TestHosts:
    def test_a_host_hears_and_answers(self) -> None:
        def act(cluster: Cluster) -> None:
            pod = cluster.add(A, real=True)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
                server.bind((OTHER_HOST, 0))
                server.setblocking(False)
                client = pod.udp()
                client.connect(server.getsockname())
                payload = os.urandom(65507)
                client.send(payload)
                received, peer = receive_from(cluster.loop, server)
                assert (received, peer[0]) == (payload, OTHER_HOST)
                server.sendto(payload, peer)
                assert receive(cluster.loop, client) == payload

        pods_on_a_host_of_its_own(act, OTHER_HOST)

    def test_a_host_where_nobody_listens_refuses(self) -> None:
        def act(cluster: Cluster) -> None:
            client = cluster.add(A, real=True).udp()
            client.connect((OTHER_HOST, 9))
            client.send(b"anybody?")
            with pytest.raises(ConnectionRefusedError):
                receive(cluster.loop, client)

        pods_on_a_host_of_its_own(act, OTHER_HOST)

    @pytest.mark.parametrize("ping", [True, False])
    def test_an_echo_is_answered_where_users_may_ping(self, ping: bool) -> None:
        """With the pod's own identifier; elsewhere the pod is told, as by a router, that it may not."""
        host = addresses.number(OTHER_HOST)

        def act(cluster: Cluster) -> None:
            pod = cluster.add(A, real=False)
            pod.send(packets.echo(pod.setup.ip, host, 4711, 1, b"ping"))
            reply = pod.received()
            head = packets.head(reply)
            assert head is not None
            if ping:
                assert (head.source, head.port, reply[20]) == (host, 4711, packets.ECHO_REPLY)
                assert reply[28:] == b"ping"
            else:
                assert (reply[20], reply[21]) == (packets.UNREACHABLE, packets.PROHIBITED)

        pods_on_a_host_of_its_own(act, OTHER_HOST, ping=ping)

    @pytest.mark.parametrize("to", ["127.0.0.1", "127.8.8.8", "0.0.0.0", "224.0.0.251", "255.255.255.255"])
    def test_what_is_only_the_hosts_is_out_of_reach(self, cluster: Cluster, to: str) -> None:
        pod = cluster.add(A, real=False)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as secret:
            secret.bind((to if to.startswith("127.") else "127.0.0.1", 0))
            secret.setblocking(False)
            pod.send(datagram(A, 1000, to, secret.getsockname()[1]))
            cluster.settle()
            with pytest.raises(BlockingIOError):
                secret.recv(10)
        assert pod.count("dropped_not_for_pods") == 1


class TestDistrust:
    @pytest.fixture
    def pods(self, cluster: Cluster) -> tuple[Pod, Pod]:
        return cluster.add(A, real=False), cluster.add(B, real=False)

    def nothing_arrived(self, cluster: Cluster, pod: Pod) -> bool:
        cluster.settle()
        try:
            pod.device.recv(70000)
        except BlockingIOError:
            return True
        return False

    def test_a_pod_speaks_for_itself_only(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        pods[0].send(datagram(C, 1, B, 2))
        pods[0].send(datagram(HOST, 1, B, 2))
        assert self.nothing_arrived(cluster, pods[1])
        assert pods[0].count("dropped_foreign_source") == 2

    def test_a_pod_speaks_from_its_own_host_only(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        pods[1].tables.apply({"pods": {C: ["127.0.0.99", 9, {}]}})
        to = Peer(addresses.number(HOST), pods[1].overlay.port, {})
        for source in (C, "10.244.0.99", "192.0.2.1"):
            pods[0].overlay.send_packet(to, datagram(source, 1, B, 2))
        assert self.nothing_arrived(cluster, pods[1])
        assert pods[1].count("dropped_implausible_source") == 3

    def test_a_known_flow_stays_with_its_host(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        pods[0].send(datagram(A, 1, B, 2))
        pods[1].received()
        stranger = open_socket(addresses.number("127.0.0.2"))
        pods[1].overlay.send_packet(Peer(addresses.number(HOST), pods[1].overlay.port, {}), b"")
        with stranger:
            pods[0].overlay._socket, own = stranger, pods[0].overlay._socket
            pods[0].overlay.send_packet(
                Peer(addresses.number(HOST), pods[1].overlay.port, {}), datagram(A, 1, B, 2)
            )
            pods[0].overlay._socket = own
            assert self.nothing_arrived(cluster, pods[1])
        assert pods[1].count("dropped_implausible_source") == 1

    def test_broken_packets_of_the_pod_and_of_peers_do_no_harm(
        self, cluster: Cluster, pods: tuple[Pod, Pod]
    ) -> None:
        to = Peer(addresses.number(HOST), pods[1].overlay.port, {})
        good = datagram(A, 1, B, 2)
        for broken in (
            b"x",
            b"\x60" + bytes(39),
            b"\x45" + bytes(5),
            good[:21],
            good[:27],
            good[:25] + b"\0\0\0",
        ):
            pods[0].send(broken)
            pods[0].overlay.send_packet(to, broken)
        pods[0].overlay.send_packet(to, b"")
        cluster.settle()
        pods[0].send(good)
        assert pods[1].received() == good

    def test_egress_policy_holds(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        rule = {"peers": [[B + "/32", []]], "ports": [[17, 53, 53]]}
        pods[0].tables.apply({"policy": {"ingress": None, "egress": [rule]}})
        pods[0].send(datagram(A, 1, B, 54))
        assert self.nothing_arrived(cluster, pods[1])
        assert pods[0].count("dropped_egress_policy") == 1
        pods[0].send(datagram(A, 1, B, 53))
        assert pods[1].received() == datagram(A, 1, B, 53)

    def test_ingress_policy_holds_but_answers_pass(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        pods[1].tables.apply({"policy": {"ingress": [], "egress": None}})
        pods[0].send(datagram(A, 1, B, 2))
        assert self.nothing_arrived(cluster, pods[1])
        assert pods[1].count("dropped_ingress_policy") == 1
        pods[1].send(datagram(B, 2, A, 1))
        assert pods[0].received() == datagram(B, 2, A, 1)
        pods[0].send(datagram(A, 1, B, 2))
        assert pods[1].received() == datagram(A, 1, B, 2)

    def test_a_new_policy_ends_what_it_forbids(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        pods[0].send(datagram(A, 1, B, 2))
        pods[1].received()
        pods[1].tables.apply({"policy": {"ingress": [], "egress": None}})
        pods[0].send(datagram(A, 1, B, 2))
        assert self.nothing_arrived(cluster, pods[1])

    def test_an_answer_passes_where_the_pod_may_not_speak_first(
        self, cluster: Cluster, pods: tuple[Pod, Pod]
    ) -> None:
        pods[1].tables.apply({"policy": {"ingress": None, "egress": []}})
        pods[1].send(datagram(B, 2, A, 1))
        assert self.nothing_arrived(cluster, pods[0])
        pods[0].send(datagram(A, 1, B, 2))
        pods[1].received()
        pods[1].send(datagram(B, 2, A, 1))
        assert pods[0].received() == datagram(B, 2, A, 1)

    def test_a_host_speaks_for_itself_and_hears_the_answer(
        self, cluster: Cluster, pods: tuple[Pod, Pod]
    ) -> None:
        """As for its NodePorts, through the netd of any pod there."""
        speaker, a, host = pods[1], addresses.number(A), addresses.number(HOST)
        endpoint = UdpEndpoint(speaker.overlay, speaker.tables, speaker.setup, host)
        heard: list[Any] = []
        endpoint.on_datagram = lambda *what: heard.append(what)
        endpoint.send(777, a, 53, b"who?")
        assert packets.payload(pods[0].received(), 20) == b"who?"
        pods[0].send(datagram(A, 53, HOST, 777, b"me"))
        wait(cluster.loop, lambda: heard)
        assert heard == [(a, 53, 777, b"me")]

    def test_nobody_steers_a_pods_kernel(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        pods[1].send(datagram(B, 1, A, 2))
        pods[0].received()
        quoted = bytes(4) + datagram(B, 1, A, 2)
        for kind, arrives in ((packets.UNREACHABLE, True), (5, False), (4, False)):
            pods[0].send(packets.icmp(pods[0].setup.ip, pods[1].setup.ip, kind, 1, quoted))
            assert self.nothing_arrived(cluster, pods[1]) is not arrives

    def test_errors_about_nothing_are_dropped(self, cluster: Cluster, pods: tuple[Pod, Pod]) -> None:
        told = packets.unreachable(datagram(B, 1, A, 2), packets.PORT)
        assert told is not None
        pods[0].send(told)
        pods[0].overlay.send_packet(Peer(addresses.number(HOST), pods[1].overlay.port, {}), told)
        assert self.nothing_arrived(cluster, pods[1])
        assert pods[0].count("dropped_unrelated_error") == pods[1].count("dropped_unrelated_error") == 1
