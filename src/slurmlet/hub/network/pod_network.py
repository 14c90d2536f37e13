"""The hub's side of the pod network put together: who has which address, where pods are, and who is told.

Nothing of it is kept that a new hub could not learn again: addresses from the pods' status, places from the runners.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Iterable
from typing import Any

from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.network.dns_service import DnsKeeper
from slurmlet.hub.network.load_balancers import Balancer
from slurmlet.hub.network.network_counters import NetworkCounts
from slurmlet.hub.network.network_policies import Policies
from slurmlet.hub.network.pod_addresses import Addresses
from slurmlet.hub.network.service_entries import Translator
from slurmlet.hub.network.service_watch import Services
from slurmlet.hub.network.table_board import PODS, Board
from slurmlet.hub.network.table_push import Follower, Own, Pusher
from slurmlet.hub.runner_links import GATEWAY, RunnerLink
from slurmlet.kube.client import ApiClient
from slurmlet.kube.events import EventRecorder
from slurmlet.model.ids import PodUid
from slurmlet.model.network_plan import PodNetwork, uses_host_network
from slurmlet.model.pod_status import is_terminal
from slurmlet.model.service_table import asks_for
from slurmlet.model.stats_summary import Family
from slurmlet.protocol import wire
from slurmlet.protocol.network_tables import Attached, Listeners, NetworkMessage, NetworkUpdate

log = logging.getLogger(__name__)
Obj = dict[str, Any]
# How long a new hub waits for runners of pods it knows of before it tells the others, who know where they are, that they
# are nowhere. A runner dials again within 6.5 s.
_SETTLE_S = 8.0
_FAST, _PACKETS, _HOST = "fast", "packets", "host"


class Network:
    """Only for a cluster that has a pod network: `Settings.network`."""

    def __init__(
        self,
        settings: Settings,
        cluster: PodNetwork,
        client: ApiClient,
        events: EventRecorder,
        services: Services,
    ) -> None:
        self.cluster = cluster
        self._events = events
        self._addresses = Addresses(cluster.pod_range, settings.files.run / "addresses.json")
        self.board = Board()
        self.pusher = Pusher(self.board)
        self.translator = Translator(client, self.board)
        self.policies = Policies(
            client,
            events,
            pod_range=cluster.pod_range,
            gateway=cluster.gateway_ip,
            on_change=self._policy_changed,
        )
        self._balancer = Balancer(
            client, events, self.translator, settings.api_address, self._gateway_changed
        )
        self._dns = DnsKeeper(client, cluster, self.translator)
        services.followers += [
            self.translator.service_changed,
            self._balancer.service_changed,
            self._dns.service_changed,
        ]
        self._services = services
        self._links: dict[PodUid, RunnerLink] = {}
        # By address, what runners said of ports.
        self._listening: dict[str, dict[str, int]] = {}
        self.gateway: RunnerLink | None = None
        # Pods that may have a runner which has yet to say where they are; and the gateway, without which there is no DNS.
        self._expected: set[PodUid] = {GATEWAY}
        self._settled = asyncio.Event()
        self._pods_synced = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._counts = NetworkCounts()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self.translator.run(), name="endpoint slices")
            self._tasks.create_task(self.policies.run(), name="network policies")
            self._tasks.create_task(self._dns.run(self._services.synced), name="cluster DNS")
            self._tasks.create_task(self._balancer.run(self._services.synced), name="load balancers")
            self._tasks.create_task(self._settle(), name="network settles")

    async def _settle(self) -> None:
        await self._pods_synced.wait()
        if self._expected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await self._settled.wait()
        self._settled.set()

    # Pods, as the API server has them.

    def pod_changed(self, pod: Obj, gone: bool) -> None:
        self.policies.pod_changed(pod, gone)
        if gone or uses_host_network(pod):
            return
        uid, status = PodUid(pod["metadata"]["uid"]), pod.get("status") or {}
        ip = status.get("podIP") or ""
        # One that has ended shows an address which may be another's by now.
        if not ip or is_terminal(status) or self._addresses.of(uid) or not self.cluster.holds(ip):
            return
        if self._addresses.reserve(uid, ip) and not self._pods_synced.is_set():
            self._expected.add(uid)

    def pods_synced(self) -> None:
        self._pods_synced.set()

    async def prepare_address(self) -> None:
        """Before `address`: does its writing beside the event loop, which a stalled file system would stop."""
        if self._addresses.nearly_used:
            await asyncio.to_thread(self._addresses.mark_ahead)

    def address(self, pod: Obj) -> str:
        """The pod's own address, now if it has none yet. Raises NoAddressLeft."""
        uid = PodUid(pod["metadata"]["uid"])
        ip = self._addresses.give(uid)
        self.policies.placed(uid, ip)
        return ip

    def known_address(self, uid: PodUid) -> str:
        """ "" while it has none, and for pods of the host's network."""
        return self._addresses.of(uid)

    def released(self, uid: PodUid) -> None:
        """The pod's job is over: nobody has its address any more."""
        ip = self._addresses.release(uid)
        if ip:
            self.board.put(PODS, ip, None)
            self._listening.pop(ip, None)
        self._links.pop(uid, None)
        self._arrived(uid)
        self._counts.ended(uid)

    # Runners and the gateway.

    def heard(self, link: RunnerLink, pod: Obj | None, message: NetworkMessage) -> None:
        """`pod` is None for the gateway."""
        if message["type"] == "attached":
            self._attached(link, pod, message)
        elif message["type"] == "listeners":
            ip = self._addresses.of(link.uid) if pod is not None else self.cluster.gateway_ip
            self._listening[ip] = _listeners(message)
            self._show(link.uid, ip)
        elif message["type"] == "network-counts":
            self._counts.take(link.uid, message["counts"])
        else:
            for port, why in message["ports"].items():
                self._tell_taken(pod, port, why)

    def _attached(self, link: RunnerLink, pod: Obj | None, message: Attached) -> None:
        ip = str(ipaddress.IPv4Address(message["ip"]))
        host_ip = str(ipaddress.IPv4Address(link.hello["host_ip"]))
        if pod is None:
            if ip != self.cluster.gateway_ip:
                raise wire.ProtocolError("the gateway has another address than its own")
            self.gateway = link
        elif ip == self.cluster.gateway_ip or not self._addresses.reserve(link.uid, ip):
            raise wire.ProtocolError(f"pod {link.uid} has no right to address {ip}")
        else:
            self._links[link.uid] = link
            self.policies.placed(link.uid, ip)
            self.policies.attached(link.uid, message["mode"])
            self._tell_mode(pod, message)
        self._listening[ip] = _listeners(message)
        self._show(link.uid, ip, host_ip, message["overlay_port"])
        self._arrived(link.uid)
        self._begin_telling(link, pod)

    def _tell_taken(self, pod: Obj | None, port: str, why: str) -> None:
        """A port of a host that somebody else holds: told where it was asked for, a Service or the pod itself."""
        protocol, _, number = port.partition(" ")
        asking = [one for one in self.translator.services.values() if asks_for(one, protocol, int(number))]
        for service in asking:
            self._events.core_event("Service", service, "Warning", "PortTaken", why)
        if pod is not None and not asking:
            self._events.pod_event(pod, "Warning", "PortTaken", why)

    def _tell_mode(self, pod: Obj, message: Attached) -> None:
        mode, why = message["mode"], message["why"]
        # Packets are how encryption is done; a pod is on its host's network because it asked for that.
        if mode != (_FAST if self.cluster.tls is None else _PACKETS) and (mode != _HOST or why):
            text = f"the pod's network runs in mode {mode!r} on its host: {why or 'the host lacks support'}"
            self._events.pod_event(pod, "Warning", "NetworkMode", text)

    def _begin_telling(self, link: RunnerLink, pod: Obj | None) -> None:
        if self.pusher.follows(link):
            return
        assert self._tasks is not None

        def policy() -> NetworkUpdate:
            return {"policy": self.policies.of(link.uid)}

        own: Own = self._balancer.fields if pod is None else policy
        # Whoever has tables already keeps them until these are whole.
        has_tables = pod is None or bool(link.hello.get("has_pod"))
        follower = Follower(link, own, self._may_begin(has_tables))
        self._tasks.create_task(self.pusher.follow(follower), name=f"network of {link.uid}")

    async def _may_begin(self, has_tables: bool) -> None:
        await self._services.synced.wait()
        await self.translator.synced.wait()
        await self.policies.ready.wait()
        if has_tables:
            await self._settled.wait()

    def link_ended(self, link: RunnerLink) -> None:
        """The pod may live on: where it is stays known until its job is over."""
        if self._links.get(link.uid) is link:
            del self._links[link.uid]
        if self.gateway is link:
            self.gateway = None
        self.pusher.own_changed(link)

    def _gateway_changed(self) -> None:
        self.pusher.own_changed(self.gateway)

    def _show(self, uid: PodUid, ip: str, *place: str | int) -> None:
        """A pod's entry. An isolated pod's listeners are not in it: its own netd is asked, and may say no."""
        where = self.board.get(PODS, ip)
        if place or where is not None:
            hidden = self.policies.of(uid)["ingress"] is not None
            self.board.put(PODS, ip, [*(place or where[:2]), {} if hidden else self._listening.get(ip, {})])

    def _policy_changed(self, uid: PodUid) -> None:
        ip = self._addresses.of(uid)
        if ip:
            self._show(uid, ip)
        self.pusher.own_changed(self._links.get(uid))

    def _arrived(self, uid: PodUid) -> None:
        self._expected.discard(uid)
        if not self._expected and self._pods_synced.is_set():
            self._settled.set()

    def families(self) -> Iterable[Family]:
        """For `/metrics`."""
        yield from self._counts.families()
        entries = Family(
            "slurmlet_network_entries", "gauge", "Entries of the tables that pods' networks are told"
        )
        for table in ("pods", "services", "node_ports"):
            entries.add(self.board.size(table), {"table": table})
        followers = Family(
            "slurmlet_network_followers", "gauge", "Pods' networks and gateways that are told of changes"
        )
        followers.add(len(self.pusher))
        yield from (entries, followers)


def _listeners(message: Attached | Listeners) -> dict[str, int]:
    return {str(int(port)): host_port for port, host_port in message["listeners"].items()}
