"""The gateway put together. One process, one loop; everything it holds can be had again, so the supervisor just restarts it.

It has no rights at the API server: what it knows of the cluster, the hub tells it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import read_json, write_json
from slurmlet.gateway import dns_tls
from slurmlet.gateway import gateway_settings as settings_module
from slurmlet.gateway.balancer_ports import Balancers
from slurmlet.gateway.destinations import Reach
from slurmlet.gateway.dns_client import CLUSTER_DOMAIN, Resolver
from slurmlet.gateway.dns_server import PORT, DnsServer
from slurmlet.gateway.gateway_settings import HubAccess, Settings
from slurmlet.gateway.http_connect import ConnectServer
from slurmlet.gateway.tcp_accept import Accepting
from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses, overlay_datagrams
from slurmlet.podnet.encryption import tls_contexts
from slurmlet.podnet.encryption.sealer import Sealer
from slurmlet.podnet.netd_setup import FAST
from slurmlet.podnet.overlay_socket import Overlay
from slurmlet.podnet.pod_dial import Dialler
from slurmlet.podnet.ports.host_ports import HostListener, HostPorts, named
from slurmlet.podnet.slow.encrypted_links import Links
from slurmlet.podnet.slow.udp_endpoint import UdpEndpoint
from slurmlet.podnet.tables import Tables
from slurmlet.protocol import wire
from slurmlet.protocol.messages import GatewayToHub, HubToGateway
from slurmlet.runner.link.hub_link import Link

_FILES = 65536
_FIRST_NAME = f"kubernetes.default.svc.{CLUSTER_DOMAIN}"
_FIRST_NAME_AGAIN_S = 0.1
_COUNT_EVERY_S = 30.0
# NodePorts and load balancers are for everybody who reaches this host, as everywhere in Kubernetes.
_EVERYWHERE = "0.0.0.0"


class Gateway:
    def __init__(self, loop: Loop, settings: Settings) -> None:
        self._loop, self._settings = loop, settings
        setup, files = settings.setup, settings.files
        earlier = read_json(files.gateway) or {}
        self._tables = Tables(setup)
        udp = overlay_datagrams.open_socket(setup.host_ip, int(earlier.get("overlay_port", 0)))
        self._links: Links | None = None
        self._overlay = Overlay(loop, setup, self._tables, udp)
        sealer = self._sealer()
        dialler = Dialler(loop, setup, self._tables, self._overlay, sealer)
        context = dns_tls.context(HubAccess(files).hub_ca, *map(str, HubAccess(files).chain))
        self._resolver = Resolver(loop, settings.dns_port, context)
        endpoint = UdpEndpoint(self._overlay, self._tables, setup, setup.ip)
        self._dns = DnsServer(loop, self._resolver, endpoint)
        tcp_port = int(earlier.get("tcp_port", 0))
        self._tcp = Accepting(loop, setup, self._overlay, PORT, tcp_port, self._dns.connection, sealer)
        self._balancers = Balancers(settings, self._tables)
        self._host_ports = HostPorts(
            loop, setup, self._tables, self._overlay, dialler.dial,
            endpoint=endpoint, address=_EVERYWHERE, extra=self._balancers.listeners,
        )  # fmt: skip
        self._overlay.on_announced = self._tcp.announced
        self._overlay.on_ask = self._listens
        self._overlay.on_whois = dialler.recall
        endpoint.on_datagram = self._datagram
        self._host_ports.on_taken = self._ports_taken
        ConnectServer(loop, files.gateway_socket, Reach(setup, self._tables, dialler, self._resolver).reach)
        self._link = Link(loop, HubAccess(files), self._link_up, self._told, lambda: None)

    def start(self) -> None:
        self._link.start()
        self._write(dns=False)
        self._ask_first_name()
        self._loop.later(_COUNT_EVERY_S, self._count)

    # The overlay.

    def _sealer(self) -> Sealer | None:
        setup = self._settings.setup
        if setup.tls is None:
            return None
        made = Sealer(self._loop, tls_contexts.make(setup.tls, str(self._settings.files.run)))
        self._links = Links(self._loop, setup, self._overlay, made)
        return made

    def _listens(self, ip: int, port: int) -> int | None:
        return self._tcp.host_port if (ip, port) == (self._settings.setup.ip, PORT) else None

    def _datagram(self, ip: int, ip_port: int, port: int, payload: bytes) -> None:
        if port == PORT:
            self._dns.datagram(ip, ip_port, payload)
        else:
            self._host_ports.flows.answered(ip, ip_port, port, payload)

    # The hub.

    def _link_up(self, _address: str) -> None:
        self._say(
            {
                "type": "hello",
                "protocol": wire.MAJOR,
                "minor": wire.MINOR,
                "gateway": True,
                "host_ip": self._settings.host_ip,
            }
        )
        self._say(
            {
                "type": "attached",
                "ip": addresses.text(self._settings.setup.ip),
                "overlay_port": self._overlay.port,
                "mode": FAST,
                "why": "",
                "listeners": {str(PORT): self._tcp.host_port},
            }
        )
        if self._host_ports.taken:
            self._ports_taken(self._host_ports.taken)

    def _told(self, frame: wire.Frame) -> None:
        if frame.kind != wire.CONTROL:
            return
        message: HubToGateway = wire.parse(frame.payload)
        if message["type"] == "network":
            self._balancers.apply(message)
            self._tables.apply(message)
        elif message["type"] == "refused":
            print(f"the hub refused the gateway: {message['reason']}", file=sys.stderr, flush=True)

    def _ports_taken(self, taken: dict[HostListener, str]) -> None:
        for why in taken.values():
            print(why, file=sys.stderr, flush=True)
        self._say({"type": "ports-taken", "ports": named(taken)})

    def _count(self) -> None:
        counts = {
            **{f"host_ports_{name}": value for name, value in self._host_ports.counts.items()},
            **{f"dns_{name}": value for name, value in self._resolver.counts.items()},
            "overlay_dropped": self._overlay.dropped,
            **({f"links_{name}": value for name, value in self._links.counts.items()} if self._links else {}),
        }
        self._say({"type": "network-counts", "counts": counts})
        self._loop.later(_COUNT_EVERY_S, self._count)

    def _say(self, message: GatewayToHub) -> None:
        self._link.send(wire.control(message))

    # `slurmlet up` waits for this.

    def _ask_first_name(self) -> None:
        def answered(found: list[int], _told: bool) -> None:
            if found:
                self._write(dns=True)
            else:
                self._loop.later(_FIRST_NAME_AGAIN_S, self._ask_first_name)

        self._resolver.addresses(_FIRST_NAME, answered)

    def _write(self, *, dns: bool) -> None:
        write_json(
            self._settings.files.gateway,
            {
                "pid": os.getpid(),
                "overlay_port": self._overlay.port,
                "tcp_port": self._tcp.host_port,
                "dns": dns,
            },
        )


def run(directory: Path) -> int:
    os.umask(0o077)
    _allow_many_files()
    try:
        settings = settings_module.load(directory)
    except SlurmletError as error:
        print(f"{error.message} {error.hint}", file=sys.stderr)
        return 1
    loop = Loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.on_signal(number, loop.stop)
    Gateway(loop, settings).start()
    loop.run()
    return 0


def _allow_many_files() -> None:
    """Each relayed connection is two, with a pipe for each direction of a busy one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
