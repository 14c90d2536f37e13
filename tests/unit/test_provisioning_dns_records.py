"""Signed updates of a zone, against a server that checks every signature and keeps records, as a name server does."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdatatype
import dns.rrset
import dns.tsig
import pytest

from slurmlet.base.errors import UserError
from slurmlet.operators.provisioning.controller_lookup import BrokenLink, Link
from slurmlet.operators.provisioning.controller_spec import DnsSpec
from slurmlet.operators.provisioning.dns_records import (
    DnsController,
    DnsError,
    DnsZone,
    TsigKey,
    tsig_key,
)

Obj = dict[str, Any]
KEY = TsigKey("operator.", b"k" * 32)
NAME = "slurm.example.org."


class NameServer:
    """One zone, one key, over TCP. `records`: by type. `signs`: whether answers carry a signature."""

    def __init__(self) -> None:
        self.records: dict[str, set[str]] = {"A": set(), "AAAA": set()}
        self.updates, self.signs, self.port = 0, True, 0

    async def __aenter__(self) -> NameServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        answer = self._answer(wire)
        writer.write(len(answer).to_bytes(2, "big") + answer)
        await writer.drain()
        writer.close()

    def _answer(self, wire: bytes) -> bytes:
        keyring = {key.name: key for key in [KEY.key()]}
        try:
            asked = dns.message.from_wire(wire, keyring=keyring)
        except (dns.tsig.BadSignature, dns.message.UnknownTSIGKey):
            refused = dns.message.make_response(dns.message.from_wire(wire, keyring=False))
            refused.set_rcode(dns.rcode.NOTAUTH)
            return refused.to_wire()
        answer = dns.message.make_response(asked)
        if not asked.had_tsig:
            answer.set_rcode(dns.rcode.REFUSED)
        elif asked.opcode() == dns.opcode.UPDATE:
            self._update(asked)
        else:
            (question,) = asked.question
            kind = dns.rdatatype.to_text(question.rdtype)
            if self.records[kind]:
                answer.answer.append(dns.rrset.from_text(NAME, 60, "IN", kind, *self.records[kind]))
        if not self.signs:
            answer.keyring = answer.tsig = None
        return answer.to_wire()

    def _update(self, asked: dns.message.Message) -> None:
        self.updates += 1
        assert [str(one.name) for one in asked.question] == ["example.org."]
        for change in asked.sections[2]:
            assert str(change.name) == NAME
            kind = dns.rdatatype.to_text(change.rdtype)
            if change.deleting is not None:
                self.records[kind].clear()
            self.records[kind] |= {str(one.address) for one in change}


def spec(port: int, **changes: Any) -> DnsSpec:
    given = {
        "server": "127.0.0.1", "port": port, "zone": "example.org", "name": "slurm.example.org",
        "ttl_s": 60, "tsig_secret": "tsig", **changes,
    }  # fmt: skip
    return DnsSpec(**given)


def serve(scenario: Callable[[NameServer], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(20), NameServer() as server:
            await scenario(server)

    asyncio.run(go())


def test_the_name_stands_for_the_last_address_alone() -> None:
    async def scenario(server: NameServer) -> None:
        zone = DnsZone(spec(server.port), KEY)
        assert await zone.addresses() == set()
        for address in ("192.0.2.1", "192.0.2.2", "2001:db8::1"):
            await zone.publish(address)
            assert await zone.addresses() == {address}
        assert server.updates == 3

    serve(scenario)


def test_a_wrong_key_an_unsigned_answer_and_a_foreign_name_change_nothing() -> None:
    async def scenario(server: NameServer) -> None:
        with pytest.raises(DnsError):
            await DnsZone(spec(server.port), TsigKey("operator.", b"x" * 32)).publish("192.0.2.1")
        with pytest.raises(UserError, match="is not in zone"):
            await DnsZone(spec(server.port, name="slurm.example.com"), KEY).publish("192.0.2.1")
        assert server.updates == 0
        server.signs = False
        with pytest.raises(DnsError):
            await DnsZone(spec(server.port), KEY).addresses()

    serve(scenario)


def test_a_server_that_is_away_is_worth_another_try() -> None:
    async def scenario(server: NameServer) -> None:
        port = server.port
        server._server.close()
        with pytest.raises(DnsError) as error:
            await DnsZone(spec(port), KEY).addresses()
        assert error.value.transient

    serve(scenario)


def secret(**data: str) -> Obj:
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in data.items()}
    return {"metadata": {"name": "tsig"}, "data": encoded}


def test_keys_are_as_named_conf_has_them() -> None:
    given = secret(keyName="operator.", secret=base64.b64encode(b"k" * 32).decode() + "\n")
    assert tsig_key(given) == KEY
    for bad, named in (
        (secret(secret="eA=="), "keyName"),
        (secret(keyName="x", secret="%"), "base64"),
        (secret(keyName="x", secret="eA==", algorithm="hmac-md5"), "hmac-md5"),
    ):
        with pytest.raises(UserError, match=named):
            tsig_key(bad)


class Clusters:
    """Stands in for an informer of SlurmClusters."""

    def __init__(self, port: int) -> None:
        dns_spec = {
            "server": "127.0.0.1", "port": port, "zone": "example.org", "name": "slurm.example.org",
            "tsigSecretRef": {"name": "tsig"},
        }  # fmt: skip
        self.cluster = {
            "metadata": {"name": "hpc", "namespace": "ops", "uid": "1", "resourceVersion": "1"},
            "spec": {"controller": {"address": {"dnsName": {"name": "slurm.example.org"}}, "dns": dns_spec}},
        }

    def feed(self, *_: Any) -> None: ...

    def get(self, _key: str) -> Obj:
        return self.cluster

    def keep(self, cluster: Obj) -> None:
        self.cluster = cluster

    @property
    def condition(self) -> tuple[str, str, str]:
        (found,) = self.cluster["status"]["conditions"]
        return found["status"], found["reason"], found["message"]


class Lookup:
    def __init__(self) -> None:
        self.host: str | None = "192.0.2.1"

    async def address(self, spec: Any, *_: Any) -> tuple[str, int]:
        # Workers are told the name; what it stands for is the host of the controller's pod.
        assert spec.address_from.value == "hostIP"
        if self.host is None:
            raise BrokenLink(Link.POD, "moving", transient=True)
        return self.host, 6817


class Client:
    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters

    async def patch(self, path: str, change: Obj) -> Obj:
        assert path.endswith("/namespaces/ops/slurmclusters/hpc/status")
        return {**self._clusters.cluster, "status": change["status"]}

    async def get(self, _path: str) -> Obj:
        return secret(keyName="operator.", secret=base64.b64encode(b"k" * 32).decode())


class Events:
    def __init__(self) -> None:
        self.told: list[str] = []

    def object_event(self, _version: str, _kind: str, _obj: Obj, _type: str, _reason: str, text: str) -> None:
        self.told.append(text)


def test_the_record_follows_the_controllers_pod_and_is_left_while_that_is_not_known() -> None:
    async def scenario(server: NameServer) -> None:
        lookup, events, clusters = Lookup(), Events(), Clusters(server.port)
        made = DnsController(Client(clusters), clusters, lookup, events)  # type: ignore[arg-type]
        assert await made.reconcile("ops/hpc") is not None
        await made.reconcile("ops/hpc")
        assert (server.updates, events.told) == (1, ["slurm.example.org is 192.0.2.1"])
        lookup.host = None
        with pytest.raises(BrokenLink):
            await made.reconcile("ops/hpc")
        assert server.records["A"] == {"192.0.2.1"}
        assert clusters.condition == ("False", "ControllerPodBroken", "controller pod: moving")
        lookup.host = "192.0.2.9"
        await made.reconcile("ops/hpc")
        assert server.records["A"] == {"192.0.2.9"}
        assert clusters.condition == ("True", "Published", "slurm.example.org is 192.0.2.9")

    serve(scenario)
