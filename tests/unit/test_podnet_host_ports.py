from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.netd_setup import HostPort
from slurmlet.podnet.overlay_socket import Announcement
from slurmlet.podnet.ports import host_ports, socket_owners
from slurmlet.podnet.ports.host_ports import HostPorts
from slurmlet.podnet.slow.udp_endpoint import UdpEndpoint
from tests.unit.overlaying import Place, making_loop, place, turn

NODE = "127.0.0.1"


def free(kind: int = socket.SOCK_STREAM, host: str = NODE) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def loop() -> Iterator[Loop]:
    with making_loop() as made:
        yield made


@pytest.fixture
def node(loop: Loop) -> Place:
    return place(loop, "10.244.0.9", NODE)


@pytest.fixture
def pod(loop: Loop, node: Place) -> Place:
    made = place(loop, "10.244.0.7", "127.0.0.2")
    node.knows(made)
    made.knows(node)
    return made


def serve(where: Place, **more: Any) -> HostPorts:
    return HostPorts(where.loop, where.setup, where.tables, where.overlay, where.dialler.dial, **more)


def node_port(port: int, *to: tuple[str, int], protocol: str = "tcp", **more: Any) -> dict[str, Any]:
    return {"node_ports": {f"{protocol} {port}": {"to": [[ip, at, "batch"] for ip, at in to], **more}}}


def echo(came: list[tuple[socket.socket, Announcement]], loop: Loop) -> None:
    """Answer the one connection that came with who it is from."""
    turn(loop, lambda: came)
    connection, who = came[0]
    connection.send(addresses.text(who.source_ip).encode())
    connection.close()


def ask(port: int, host: str = NODE, source: str = "127.0.0.1") -> tuple[threading.Thread, list[bytes]]:
    said: list[bytes] = []

    def work() -> None:
        with socket.create_connection((host, port), 2, (source, 0)) as made:
            said.append(made.recv(100))

    thread = threading.Thread(target=work)
    thread.start()
    return thread, said


def test_a_node_port_leads_to_the_pod_and_loopback_is_shown_as_the_host(
    loop: Loop, node: Place, pod: Place
) -> None:
    _, came = pod.accept(80)
    ports = serve(node)
    port = free()
    node.tables.apply(node_port(port, ("10.244.0.7", 80)))
    thread, said = ask(port)
    echo(came, loop)
    turn(loop, lambda: said)
    thread.join()
    # Here the node itself is on loopback.
    assert said == [NODE.encode()]
    assert ports.counts["connections"] == 1


def test_a_port_without_a_backend_is_refused_by_the_kernel(loop: Loop, node: Place, pod: Place) -> None:
    serve(node)
    port = free()
    node.tables.apply(node_port(port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((NODE, port), 1)
    node.tables.apply(node_port(port, ("10.244.0.7", 80)))
    socket.create_connection((NODE, port), 1).close()
    node.tables.apply({"node_ports": {f"tcp {port}": None}})
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((NODE, port), 1)


def test_only_backends_of_the_own_node_where_the_policy_is_local(loop: Loop, node: Place, pod: Place) -> None:
    serve(node)
    port = free()
    target = {"to": [["10.244.0.7", 80, "elsewhere"]], "local": True}
    node.tables.apply({"node_ports": {f"tcp {port}": target}})
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((NODE, port), 1)


def test_one_netd_of_a_host_serves_and_the_next_one_takes_over(
    loop: Loop, node: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_ports, "AGAIN_S", 0.05)
    other = place(loop, "10.244.0.10", NODE)
    first, second = serve(node), serve(other)
    port = free()
    for each in (node, other):
        each.knows(place(loop, "10.244.0.7", "127.0.0.2"))
        each.tables.apply(node_port(port, ("10.244.0.7", 80)))
    assert len(first._open) == 1
    assert len(second._open) == 0
    # Held by a process of ours: nothing to complain about.
    assert second.taken == {}
    node.tables.apply({"node_ports": {f"tcp {port}": None}})
    turn(loop, lambda: second._open)


def test_a_port_of_another_user_is_reported_until_it_is_free(
    loop: Loop, node: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_ports, "AGAIN_S", 0.05)
    monkeypatch.setattr(socket_owners.os, "getuid", lambda: 4711)
    ports = serve(node)
    told: list[dict[str, str]] = []
    ports.on_taken = lambda taken: told.append(host_ports.named(taken))
    holder = socket.create_server((NODE, 0))
    port = holder.getsockname()[1]
    node.tables.apply(node_port(port, ("10.244.0.7", 80)))
    assert told == [{f"tcp {port}": f"tcp port {port} of host {NODE} is in use by another program"}]
    loop.run_until(lambda: False, 0.2)
    assert len(told) == 1
    holder.close()
    turn(loop, lambda: told[-1] == {})
    assert len(ports._open) == 1


def test_the_pods_own_host_port(loop: Loop) -> None:
    port = free()
    here = place(loop, "10.244.0.9", NODE, host_ports=[HostPort("tcp", "", port, 80)])
    _, came = here.accept(80)
    serve(here)
    _, said = ask(port)
    echo(came, loop)
    turn(loop, lambda: said)


def udp_server(where: Place, port: int) -> UdpEndpoint:
    endpoint = UdpEndpoint(where.overlay, where.tables, where.setup, where.setup.ip)
    endpoint.on_datagram = lambda ip, ip_port, at, payload: (
        endpoint.send(port, ip, ip_port, payload.upper()) if at == port else None
    )
    return endpoint


def test_udp_goes_to_the_pod_and_back(loop: Loop, node: Place, pod: Place) -> None:
    udp_server(pod, 53)
    # The pod's answers go to whom the question came from: here the node's own address must be known.
    pod.tables.apply({"pods": {NODE: [NODE, node.overlay.port, {}]}})
    serve(node)
    port = free(socket.SOCK_DGRAM)
    node.tables.apply(node_port(port, ("10.244.0.7", 53), protocol="udp"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.setblocking(False)
        client.connect((NODE, port))
        for word in (b"one", b"two", b"x" * 20000):
            client.send(word)
            answers: list[bytes] = []

            def take(answers: list[bytes] = answers) -> bool:
                try:
                    answers.append(client.recv(65535))
                except BlockingIOError:
                    pass
                return bool(answers)

            turn(loop, take)
            assert answers == [word.upper()]


def test_udp_to_a_backend_that_is_a_host(loop: Loop, node: Place) -> None:
    backend = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    backend.bind(("127.0.0.3", 0))
    backend.settimeout(2)
    serve(node)
    port = free(socket.SOCK_DGRAM)
    node.tables.apply(node_port(port, ("127.0.0.3", backend.getsockname()[1]), protocol="udp"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.setblocking(False)
        client.connect((NODE, port))
        client.send(b"question")
        loop.run_until(lambda: False, 0.05)
        payload, where = backend.recvfrom(100)
        backend.sendto(payload + b"!", where)
        loop.run_until(lambda: False, 0.05)
        assert client.recv(100) == b"question!"


def test_whose_a_loopback_connection_is() -> None:
    import os

    with socket.create_server((NODE, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((NODE, port)) as client:
            assert socket_owners.client_uid(NODE, client.getsockname()[1], port) == os.getuid()
            assert socket_owners.owner_of(False, port) == "ours"
        six = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        with six:
            six.connect((f"::ffff:{NODE}", port))
            assert socket_owners.client_uid(NODE, six.getsockname()[1], port) == os.getuid()
        assert socket_owners.client_uid(NODE, 1, port) is None
