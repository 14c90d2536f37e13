"""Which pods hear of a change, what they are told, and what a policy's owner is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.hub.network.network_policies import NAMESPACES, POLICIES, Policies
from slurmlet.model.ids import PodUid
from slurmlet.model.network_policy import OPEN
from tests.unit.fakes import FakeEvents
from tests.unit.loopback import Api, api_server, make_keys, until, watching

Obj = dict[str, Any]


class Rig:
    def __init__(self) -> None:
        self.events, self.told = FakeEvents(), set[str]()
        self.policies = Policies(
            None,  # type: ignore[arg-type]
            self.events,  # type: ignore[arg-type]
            pod_range="10.244.0.0/16",
            gateway="10.244.0.1",
            on_change=self.told.add,
        )
        self.policies.ready.set()

    def pod(
        self, name: str, ip: str = "", *, gone: bool = False, spec: Obj | None = None, **labels: str
    ) -> None:
        namespace, _, short = name.rpartition("/")
        metadata = {"namespace": namespace or "default", "name": short, "uid": short, "labels": labels}
        status = {"podIP": ip, "phase": "Running"} if ip else {}
        self.policies.pod_changed(
            {"metadata": metadata, "spec": spec or {"containers": []}, "status": status}, gone
        )

    def policy(self, spec: Obj, *, name: str = "p", gone: bool = False) -> None:
        self.policies.policy_changed(
            {"metadata": {"namespace": "default", "name": name, "uid": name}, "spec": spec}, gone
        )

    def namespace(self, name: str, **labels: str) -> None:
        self.policies.namespace_changed({"metadata": {"name": name, "labels": labels}}, False)

    async def heard(self) -> set[str]:
        """Who was told since the last look."""
        await asyncio.sleep(0.08)
        told = set(self.told)
        self.told.clear()
        return told

    def of(self, uid: str) -> Obj:
        return self.policies.of(PodUid(uid))

    def let_in(self, uid: str) -> list[str]:
        return [cidr for rule in self.of(uid)["ingress"] for cidr, _ in rule["peers"]]


def scenario(body: Callable[[Rig], Awaitable[None]]) -> Callable[[], None]:
    def test() -> None:
        async def run() -> None:
            await body(Rig())

        asyncio.run(run())

    test.__name__ = body.__name__
    return test


FROM_WEB = {
    "podSelector": {"matchLabels": {"app": "db"}},
    "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]}],
}


@scenario
async def test_a_peer_s_address_reaches_only_those_whose_policies_mean_it(rig: Rig) -> None:
    rig.pod("db", "10.244.0.2", app="db")
    rig.pod("by", "10.244.0.3", app="other")
    rig.policy(FROM_WEB)
    await rig.heard()
    assert rig.of("db") == {"ingress": [], "egress": None}
    rig.pod("web", app="web")
    assert await rig.heard() == {"web"}
    rig.pod("web", "10.244.0.9", app="web")
    assert await rig.heard() == {"db"}
    assert rig.let_in("db") == ["10.244.0.9/32"]
    assert rig.of("by") is OPEN
    rig.pod("web", "10.244.0.9", gone=True, app="web")
    assert await rig.heard() == {"db"}
    assert rig.of("db")["ingress"] == []


@scenario
async def test_news_that_policies_do_not_look_at_tells_nobody(rig: Rig) -> None:
    rig.policy(FROM_WEB)
    rig.pod("db", "10.244.0.2", app="db")
    rig.pod("web", "10.244.0.9", app="web")
    await rig.heard()
    rig.pod("web", "10.244.0.9", app="web")
    rig.pod("else/web2", "10.244.0.10", app="web")
    assert await rig.heard() == {"web2"}


@scenario
async def test_an_address_counts_as_soon_as_it_is_chosen(rig: Rig) -> None:
    rig.policy(FROM_WEB)
    rig.pod("db", "10.244.0.2", app="db")
    rig.pod("web", app="web")
    await rig.heard()
    rig.policies.placed(PodUid("web"), "10.244.0.9")
    assert await rig.heard() == {"db"}
    assert rig.let_in("db") == ["10.244.0.9/32"]
    # An older version of the object, without an address yet, does not take it away.
    rig.pod("web", app="web")
    assert await rig.heard() == set()
    assert rig.let_in("db") == ["10.244.0.9/32"]


@scenario
async def test_labels_decide_anew(rig: Rig) -> None:
    rig.policy(FROM_WEB)
    rig.pod("db", "10.244.0.2", app="db")
    rig.pod("web", "10.244.0.9", app="web")
    await rig.heard()
    rig.pod("web", "10.244.0.9", app="no")
    assert await rig.heard() == {"db", "web"}
    assert rig.of("db")["ingress"] == []
    rig.pod("db", "10.244.0.2", app="no")
    assert await rig.heard() == {"db"}
    assert rig.of("db") is OPEN


@scenario
async def test_a_policy_that_comes_changes_and_goes(rig: Rig) -> None:
    rig.pod("db", "10.244.0.2", app="db")
    rig.pod("web", "10.244.0.9", app="web")
    await rig.heard()
    rig.policy(FROM_WEB)
    assert await rig.heard() == {"db"}
    rig.policy({"podSelector": {}})
    assert await rig.heard() == {"db", "web"}
    assert rig.of("web") == rig.of("db") == {"ingress": [], "egress": None}
    rig.policy({}, gone=True)
    assert await rig.heard() == {"db", "web"}
    assert rig.of("web") is rig.of("db") is OPEN


@scenario
async def test_labels_of_a_namespace(rig: Rig) -> None:
    rig.policy({"ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]}]})
    rig.namespace("default")
    rig.namespace("far")
    rig.pod("db", "10.244.0.2", app="db")
    rig.pod("far/one", "10.244.0.5")
    await rig.heard()
    rig.namespace("far", unrelated="x")
    assert await rig.heard() == set()
    rig.namespace("far", team="a")
    assert await rig.heard() == {"db"}
    assert rig.let_in("db") == ["10.244.0.5/32"]


@pytest.mark.parametrize("to", [[], [{"namespaceSelector": {}}], [{"ipBlock": {"cidr": "10.244.0.0/16"}}]])
def test_a_port_s_name_in_a_rule_to_anybody(to: list[Obj]) -> None:
    scenario(lambda rig: _named_port(rig, to))()


async def _named_port(rig: Rig, to: list[Obj]) -> None:
    rig.policy({"policyTypes": ["Egress"], "egress": [{"to": to, "ports": [{"port": "sql"}]}]})
    rig.pod("web", "10.244.0.9", app="web")
    await rig.heard()
    ports = [{"name": "sql", "containerPort": 5432}]
    rig.pod("far/db", "10.244.0.2", spec={"containers": [{"name": "a", "ports": ports}]})
    assert await rig.heard() == {"db", "web"}
    assert rig.of("web")["egress"] == [{"peers": [("10.244.0.2/32", [])], "ports": [(6, 5432, 5432)]}]


@scenario
async def test_pods_under_the_same_policies_share_one_answer(rig: Rig) -> None:
    rig.policy(FROM_WEB)
    for number in range(3):
        rig.pod(f"db{number}", f"10.244.0.{number + 2}", app="db")
    assert rig.of("db0") is rig.of("db1") is rig.of("db2")


@scenario
async def test_a_burst_is_told_once(rig: Rig) -> None:
    counted: list[str] = []
    rig.policies.on_change = counted.append
    rig.policy({"ingress": [{"from": [{"podSelector": {}}]}]})
    for number in range(50):
        rig.pod(f"p{number}", f"10.244.1.{number}")
    await rig.heard()
    assert sorted(counted) == sorted(f"p{number}" for number in range(50))


@scenario
async def test_what_is_not_enforced_is_said(rig: Rig) -> None:
    rig.pod("hostly", "192.0.2.1", spec={"hostNetwork": True, "containers": []}, app="db")
    rig.policy(
        {
            "podSelector": {"matchLabels": {"app": "db"}},
            "ingress": [{"from": [{"ipBlock": {"cidr": "::/0"}}]}],
        }
    )
    rig.pod("hostly2", spec={"hostNetwork": True, "containers": []}, app="db")
    rig.pod("hostly2", "192.0.2.1", spec={"hostNetwork": True, "containers": []}, app="db")
    kinds = [(kind, name) for kind, name, _ in rig.events.about]
    assert kinds == [("NetworkPolicy", "p"), ("Pod", "hostly"), ("Pod", "hostly2")]
    assert "::/0" in rig.events.about[0][2]
    assert "host's network" in rig.events.about[1][2]
    assert rig.of("hostly") is OPEN


@scenario
async def test_a_host_without_network_namespaces_is_named_to_the_isolated(rig: Rig) -> None:
    for name in ("db", "by"):
        rig.pod(name, "10.244.0.2", app=name)
        rig.policies.attached(PodUid(name), "no-netns")
    rig.pod("fast", "10.244.0.3", app="db")
    rig.policies.attached(PodUid("fast"), "fast")
    rig.policy(FROM_WEB)
    rig.policies.attached(PodUid("db"), "no-netns")
    assert [(name, "beyond TCP" in text) for _, name, text in rig.events.about] == [("db", True)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def test_nobody_is_told_before_all_is_listed_and_then_everybody(keys: Path) -> None:
    def listing(*items: Obj) -> Obj:
        return {"metadata": {"resourceVersion": "5"}, "items": list(items)}

    async def run() -> None:
        async with api_server(keys) as api:
            told: list[str] = []
            policies = Policies(
                api.client,
                FakeEvents(),  # type: ignore[arg-type]
                pod_range="10.244.0.0/16",
                gateway="10.244.0.1",
                on_change=told.append,
            )
            _serve(api, listing)
            policies.pod_changed(
                {
                    "metadata": {"namespace": "default", "name": "a", "uid": "a"},
                    "spec": {},
                    "status": {"podIP": "10.244.0.2"},
                },
                False,
            )
            await asyncio.sleep(0.08)
            assert told == []
            task = asyncio.create_task(policies.run())
            try:
                await until(lambda: told == ["a"])
                assert policies.ready.is_set()
                assert policies.of(PodUid("a"))["ingress"] == []
            finally:
                task.cancel()

    asyncio.run(run())


def _serve(api: Api, listing: Callable[..., Obj]) -> None:
    policy = {
        "metadata": {"namespace": "default", "name": "p", "uid": "p", "resourceVersion": "3"},
        "spec": {"podSelector": {}},
    }
    api.on("GET", POLICIES, listing(policy), watching(then="hang"))
    api.on("GET", NAMESPACES, listing(), watching(then="hang"))
