"""Many machines at once: one lookup for all who ask, and never an answer that is older than its question."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from slurmlet.operators.provisioning.controller_lookup import BrokenLink, Chain, ControllerLookup, Link
from slurmlet.operators.provisioning.controller_spec import AddressFrom, ControllerSpec, SecretKey
from slurmlet.operators.provisioning.workload_clients import WorkloadClients

SPEC = ControllerSpec(address_from=AddressFrom.DNS_NAME, dns_name="slurm", key=SecretKey("s", "k"))


class Client:
    """One Secret, whose reading waits for `go`."""

    def __init__(self) -> None:
        self.reads, self.key, self.go = 0, b"old", asyncio.Event()

    async def get(self, _path: str) -> dict[str, Any]:
        self.reads += 1
        key = self.key
        await self.go.wait()
        return {"data": {"k": base64.b64encode(key).decode()}}


def lookup(client: Client) -> ControllerLookup:
    return ControllerLookup(client, WorkloadClients(client))  # type: ignore[arg-type]


def test_who_asks_while_a_lookup_is_under_way_gets_the_next_one() -> None:
    async def scenario() -> None:
        client = Client()
        made = lookup(client)
        first = asyncio.create_task(made.facts(SPEC, "x", ""))
        while not client.reads:
            await asyncio.sleep(0)
        client.key = b"new"
        others = [asyncio.create_task(made.facts(SPEC, "x", "")) for _ in range(20)]
        await asyncio.sleep(0)
        client.go.set()
        assert (await first).key == b"old"
        assert {(await one).key for one in others} == {b"new"}
        assert client.reads == 2
        client.key = b"newer"
        assert (await made.facts(SPEC, "x", "")).key == b"newer"
        assert not made._turns

    asyncio.run(scenario())


def test_a_link_that_hangs_is_named_and_the_next_who_ask_are_not_held_by_who_gave_up() -> None:
    async def scenario() -> None:
        client = Client()
        made = lookup(client)
        with pytest.raises(BrokenLink) as error:
            await made.facts(SPEC, "x", "", timeout_s=0.01)
        assert (error.value.link, error.value.transient) == (Link.KEY, True)
        waiting = asyncio.create_task(made.facts(SPEC, "x", ""))
        client.go.set()
        assert (await waiting).key == b"old"

    asyncio.run(scenario())


def test_a_controller_of_another_namespace_of_the_management_cluster_is_for_trusted_namespaces() -> None:
    spec = ControllerSpec(slurm_cluster="hpc", in_management_cluster=True, namespace="slurm")

    class Empty:
        asked: ClassVar[list[str]] = []

        async def get(self, path: str, **_: str) -> dict[str, Any]:
            self.asked.append(path)
            return {"items": []}

    async def scenario() -> None:
        client: Any = Empty()
        made = ControllerLookup(client, WorkloadClients(client), ["trusted"])
        with pytest.raises(
            BrokenLink, match="of namespace tenant may not have a controller of namespace slurm"
        ):
            await made.facts(spec, "tenant", "")
        with pytest.raises(BrokenLink, match="may not have"):
            await made.address(spec, "tenant", "", Chain())
        assert client.asked == []
        for namespace in ("trusted", "slurm"):
            with pytest.raises(BrokenLink) as broken:
                await made.facts(spec, namespace, "")
            assert broken.value.link is Link.STATEFUL_SET

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["x'; touch /tmp/x; '", "a b", "$(id)", ""])
def test_what_is_no_address_reaches_no_script(name: str) -> None:
    async def scenario() -> None:
        client = Client()
        client.go.set()
        with pytest.raises(BrokenLink, match="neither an address nor a name"):
            await lookup(client).facts(replace(SPEC, dns_name=name), "x", "")

    asyncio.run(scenario())
