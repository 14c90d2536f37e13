"""A name for each Slurm controller: its address is kept in a DNS zone by updates signed with TSIG (RFC 2136, RFC 8945).

Workers of many clusters find their controller by a name that stays when the controller's pod moves. One record set of one
name is written, never another; an unsigned answer is not believed. MD5 and SHA-1 are refused, as is a zone that takes
updates from anybody.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import dns.asyncquery
import dns.exception
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.tsig
import dns.update

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.conditions import Condition, status_patch
from slurmlet.kube.controller import Again, Controller, Informer, key_of, told
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.work_queue import Backoff
from slurmlet.operators.provisioning.controller_lookup import Chain, ControllerLookup
from slurmlet.operators.provisioning.controller_spec import (
    ControllerSpec,
    DnsSpec,
    controller_spec,
)
from slurmlet.operators.provisioning.resource_definitions import GROUP, VERSION

log = logging.getLogger(__name__)
Obj = dict[str, Any]
_ALGORITHMS = {
    "hmac-sha224": dns.tsig.HMAC_SHA224,
    "hmac-sha256": dns.tsig.HMAC_SHA256,
    "hmac-sha384": dns.tsig.HMAC_SHA384,
    "hmac-sha512": dns.tsig.HMAC_SHA512,
}
_TIMEOUT_S = 10.0
_BACKOFF = Backoff(first_s=2.0, most_s=120.0)
# Nobody tells when the controller's pod moved to another host.
_AGAIN_S = 30.0


class DnsError(SlurmletError):
    reason = "DnsUpdateFailed"
    transient = True


@dataclass(frozen=True)
class TsigKey:
    name: str
    secret: bytes
    algorithm: str = "hmac-sha256"

    def key(self) -> dns.tsig.Key:
        return dns.tsig.Key(dns.name.from_text(self.name), self.secret, _ALGORITHMS[self.algorithm])


def tsig_key(secret: Mapping[str, Any]) -> TsigKey:
    """Of a Secret with keyName, secret (base64, as named.conf has it) and algorithm. Raises UserError."""
    name = secret["metadata"]["name"]
    try:
        fields = {
            field: base64.b64decode(value).decode().strip()
            for field, value in (secret.get("data") or {}).items()
        }
        made = TsigKey(
            fields["keyName"],
            base64.b64decode(fields["secret"], validate=True),
            (fields.get("algorithm") or "hmac-sha256").rstrip(".").lower(),
        )
    except KeyError as error:
        raise UserError(f"Secret {name} has no {error.args[0]}, expected keyName and secret") from error
    except (binascii.Error, ValueError) as error:
        raise UserError(f"Secret {name}: secret is not base64, expected it as in named.conf") from error
    if made.algorithm not in _ALGORITHMS:
        raise UserError(
            f"Secret {name}: algorithm {made.algorithm}, expected one of {', '.join(_ALGORITHMS)}",
            hint="Make a key with: tsig-keygen -a hmac-sha256",
        )
    return made


class DnsZone:
    """One server and one key. Asks over TCP: an answer that was cut short, or forged, is no answer."""

    def __init__(self, spec: DnsSpec, key: TsigKey) -> None:
        self._spec, self._key = spec, key

    async def addresses(self) -> set[str]:
        """What the zone says now."""
        name = dns.name.from_text(self._spec.name)
        found: set[str] = set()
        for kind in ("A", "AAAA"):
            question = dns.message.make_query(name, kind)
            question.use_tsig(self._key.key())
            answer = await self._ask(question)
            if answer.rcode() not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
                raise DnsError(f"{self._spec.server} says {dns.rcode.to_text(answer.rcode())} for {name}")
            sets = [one for one in answer.answer if one.rdtype == dns.rdatatype.from_text(kind)]
            found |= {str(record.address) for one in sets for record in one}
        return found

    async def publish(self, address: str) -> None:
        """This address and no other, under the name."""
        name = dns.name.from_text(self._spec.name)
        zone = dns.name.from_text(self._spec.zone)
        if not name.is_subdomain(zone):
            raise UserError(f"dns.name {self._spec.name} is not in zone {self._spec.zone}")
        kind, other = ("A", "AAAA") if ipaddress.ip_address(address).version == 4 else ("AAAA", "A")
        update = dns.update.UpdateMessage(zone)
        update.use_tsig(self._key.key())
        update.replace(name, self._spec.ttl_s, kind, address)
        update.delete(name, other)
        answer = await self._ask(update)
        if answer.rcode() != dns.rcode.NOERROR:
            raise DnsError(
                f"{self._spec.server} refused the update of {self._spec.name}: {dns.rcode.to_text(answer.rcode())}",
                hint="Look at update-policy of the zone, and at the key.",
            )

    async def _ask(self, message: dns.message.Message) -> dns.message.Message:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                where = await _resolved(self._spec.server)
                answer = await dns.asyncquery.tcp(message, where, _TIMEOUT_S, self._spec.port)
        except (dns.exception.DNSException, OSError, EOFError, TimeoutError) as error:
            raise DnsError(
                f"{self._spec.server} port {self._spec.port}: {str(error) or type(error).__name__}"
            ) from error
        if not answer.had_tsig:
            raise DnsError(f"{self._spec.server} did not sign its answer")
        return answer


async def _resolved(server: str) -> str:
    found = await asyncio.get_running_loop().getaddrinfo(server, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


class DnsController:
    """Every SlurmCluster with spec.controller.dns."""

    def __init__(
        self, client: ApiClient, slurm_clusters: Informer, lookup: ControllerLookup, events: EventRecorder
    ) -> None:
        self._client, self._clusters, self._lookup, self._events = client, slurm_clusters, lookup, events
        self.controller = Controller(
            "dns", self.reconcile, workers=2, backoff=_BACKOFF, on_failure=self._failed
        )
        slurm_clusters.feed(self.controller, key_of)

    async def run(self) -> None:
        await self.controller.run()

    async def reconcile(self, key: str) -> Again:
        cluster = self._clusters.get(key)
        spec = controller_spec(cluster) if cluster is not None else ControllerSpec()
        if cluster is None or spec.dns is None:
            return None
        try:
            said = await self._published(cluster, spec, spec.dns)
        except SlurmletError as error:
            await self._write(cluster, Condition("DnsPublished", False, error.reason, told(error)))
            raise
        await self._write(cluster, Condition("DnsPublished", True, "Published", said))
        return _AGAIN_S

    async def _published(self, cluster: Obj, spec: ControllerSpec, wanted: DnsSpec) -> str:
        namespace = cluster["metadata"]["namespace"]
        address = await self._address(spec, namespace)
        said = f"{wanted.name} is {address}"
        zone = DnsZone(wanted, await self._key(namespace, wanted.tsig_secret))
        if await zone.addresses() != {address}:
            await zone.publish(address)
            log.info("%s: %s", key_of(cluster), said)
            self._tell(cluster, "Normal", "DnsUpdated", said)
        return said

    async def _write(self, cluster: Obj, condition: Condition) -> None:
        change = status_patch(cluster, condition)
        if change is not None:
            metadata = cluster["metadata"]
            root = f"/apis/{GROUP}/{VERSION}/namespaces/{metadata['namespace']}/slurmclusters"
            self._clusters.keep(await self._client.patch(f"{root}/{metadata['name']}/status", change))

    async def _address(self, spec: ControllerSpec, namespace: str) -> str:
        """Workers may be told the name; the name itself stands for the pod's host, or the load balancer."""
        assert spec.dns is not None
        chain = Chain()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found = replace(spec, address_from=spec.dns.address_from)
                address, _ = await self._lookup.address(found, namespace, spec.cluster, chain)
                return str(ipaddress.ip_address(await _resolved(address)))
        except (SlurmletError, TimeoutError) as error:
            raise chain.broken(error) from error

    async def _key(self, namespace: str, name: str) -> TsigKey:
        try:
            return tsig_key(await self._client.get(f"/api/v1/namespaces/{namespace}/secrets/{name}"))
        except ApiError as error:
            raise UserError(f"TSIG Secret {name}: {error.message}", transient=error.transient) from error

    def _failed(self, key: str, error: Exception, _failures: int, _delay_s: float) -> None:
        cluster = self._clusters.get(key)
        if cluster is not None:
            self._tell(cluster, "Warning", getattr(error, "reason", DnsError.reason), told(error))

    def _tell(self, cluster: Obj, kind: str, reason: str, text: str) -> None:
        self._events.object_event(f"{GROUP}/{VERSION}", "SlurmCluster", cluster, kind, reason, text)
