"""The Injection Webhook's climb through real objects: old and new labels, every link broken once, several clusters."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import yaml

from slurmlet.kube.client import ApiClient
from slurmlet.kube.webhook import Review, Verdict
from slurmlet.model.stats_summary import exposition
from slurmlet.operators.provisioning.injection.injection_webhook import InjectionSettings, InjectionWebhook
from slurmlet.operators.provisioning.injection.metadata_chain import MetadataChain
from tests.contract.control_plane import ControlPlane
from tests.contract.provisioning_kinds import METAL3, SLINKY
from tests.contract.provisioning_site import KEY, Site, b64, run, site

Obj = dict[str, Any]
_numbers = itertools.count()


class Told:
    """Stands in for the recorder: what was told, as (kind, reason, message)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def object_event(self, _version: str, _of: str, about: Obj, kind: str, reason: str, text: str) -> None:
        assert about["metadata"]["uid"]
        self.events.append((kind, reason, text))

    def core_event(self, of: str, about: Obj, kind: str, reason: str, text: str) -> None:
        self.object_event("v1", of, about, kind, reason, text)


class Hook:
    def __init__(self, place: Site, **settings: Any) -> None:
        lookup, self.workload = place.lookup()
        self.told, self.place = Told(), place
        self.webhook = InjectionWebhook(
            MetadataChain(place.client),
            lookup,
            self.told,  # type: ignore[arg-type]
            InjectionSettings(**settings),
        )

    async def __aenter__(self) -> Hook:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.workload.close()

    async def ask(self, secret: Obj, *, dry_run: bool = False) -> Verdict:
        review = Review(
            uid="1", operation="CREATE", kind="Secret", namespace=self.place.home, name=secret["metadata"]["name"],
            user="", groups=(), object=secret, old_object={}, dry_run=dry_run, request={},
        )  # fmt: skip
        return await self.webhook.review(review)


def meta_data(verdict: Verdict) -> dict[str, str]:
    assert verdict.allowed, verdict.message
    assert verdict.changed is not None
    found: dict[str, str] = yaml.safe_load(base64.b64decode(verdict.changed["data"]["metaData"]))
    return found


def scene(plane: ControlPlane, scenario: Callable[[Site], Awaitable[None]]) -> None:
    async def go(client: ApiClient) -> None:
        await scenario(await site(client, plane, f"inject-{next(_numbers)}"))

    run(plane, go)


@pytest.mark.parametrize(
    ("app", "key_ref", "version"),
    [("slurm-ctld", "", "v1beta1"), ("slurmctld", "any-name", "v1beta2")],
    ids=["first Slinky", "Slinky today"],
)
def test_a_machine_of_the_thesis_gets_address_and_key(
    api_plane: ControlPlane, app: str, key_ref: str, version: str
) -> None:
    async def scenario(place: Site) -> None:
        await place.kubeconfig()
        await place.controller(app=app, key_ref=key_ref)
        secret = await place.machine("m-0", {"slurm-controller-namespace": place.slurm}, version=version)
        async with Hook(place) as hook:
            verdict = await hook.ask(secret)
            assert meta_data(verdict) == {
                "name": "m-0",
                "local-hostname": "m-0",
                "slurm_controller_address": "192.0.2.7",
                "slurm_conf_server": "192.0.2.7:6817",
                "slurm_key_base64": b64(KEY),
            }
            assert [one[:2] for one in hook.told.events] == [("Normal", "Injected")]
            # Asked again with what it made, it adds nothing.
            assert verdict.changed is not None
            assert await hook.ask(dict(verdict.changed)) == Verdict()
            text = exposition(hook.webhook.families())
            assert 'slurmlet_provision_injection_duration_seconds_count{outcome="injected"} 1' in text
            assert 'slurmlet_provision_injection_duration_seconds_count{outcome="unchanged"} 1' in text

    scene(api_plane, scenario)


def service(name: str, kind: str, selector: Obj) -> Obj:
    port = {"name": "slurmctld", "port": 6817, "targetPort": 6817}
    return {"metadata": {"name": name}, "spec": {"type": kind, "selector": selector, "ports": [port]}}


def test_addresses_of_every_kind_and_two_clusters_at_once(api_plane: ControlPlane) -> None:
    async def scenario(place: Site) -> None:
        await place.kubeconfig()
        await place.controller("one", host="192.0.2.1")
        await place.controller("two", host="192.0.2.2")
        services = f"/api/v1/namespaces/{place.slurm}/services"
        await place.client.create(services, service("a", "NodePort", {"app.kubernetes.io/instance": "one"}))
        made = await place.client.create(
            services, service("b", "NodePort", {"app.kubernetes.io/instance": "two"})
        )
        port = made["spec"]["ports"][0]["nodePort"]
        await place.client.create(
            services, service("c", "LoadBalancer", {"app.kubernetes.io/instance": "two"})
        )
        ingress = {"status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.9"}]}}}
        await place.client.patch(f"{services}/c/status", ingress)
        await place.secret(place.home, "outside", key=b"\0\xff")
        one, two = ({"app.kubernetes.io/instance": name} for name in ("one", "two"))
        spec = {"namespace": place.slurm}
        await place.slurm_cluster("host", {**spec, "labels": one, "address": {"hostIP": {"port": 7000}}})
        await place.slurm_cluster("node", {**spec, "labels": two, "address": {"nodePort": {}}})
        await place.slurm_cluster("balanced", {**spec, "labels": two, "address": {"loadBalancer": {}}})
        await place.slurm_cluster(
            "named",
            {
                "address": {"dnsName": {"name": "slurm.example.org", "port": 6820}},
                "keySecretRef": {"name": "outside", "key": "key"},
                "metaDataNames": {"key": "slurm-key"},
            },
        )
        expected = {
            "host": "192.0.2.1:7000",
            "node": f"192.0.2.2:{port}",
            "balanced": "198.51.100.9:6817",
            "named": "slurm.example.org:6820",
        }
        async with Hook(place) as hook:
            for name, server in expected.items():
                found = meta_data(
                    await hook.ask(await place.machine(f"m-{name}", {"slurmlet.io/slurm-cluster": name}))
                )
                assert (found["slurm_conf_server"], found["slurm_cluster"]) == (server, name)
            assert found["slurm-key"] == b64(b"\0\xff")
            # The thesis's label alone cannot tell them apart, until the controller's name says which.
            both = {"slurm-controller-namespace": place.slurm}
            verdict = await hook.ask(await place.machine("m-both", both))
            assert "SlurmCluster: several" in verdict.message

    scene(api_plane, scenario)


def test_one_of_two_controllers_by_the_label_of_its_name(api_plane: ControlPlane) -> None:
    async def scenario(place: Site) -> None:
        await place.kubeconfig()
        await place.controller("one", host="192.0.2.1")
        await place.controller("two", host="192.0.2.2")
        labels = {"slurm-controller-namespace": place.slurm}
        async with Hook(place) as hook:
            verdict = await hook.ask(await place.machine("m-0", labels))
            assert "one-controller, two-controller" in verdict.message
            labels["slurm-controller-name"] = "two"
            assert (
                meta_data(await hook.ask(await place.machine("m-1", labels)))["slurm_controller_address"]
                == "192.0.2.2"
            )

    scene(api_plane, scenario)


BREAKS: dict[str, Callable[[str, str], str]] = {
    "Metal3Data": lambda home, _: f"/apis/{METAL3}/v1beta2/namespaces/{home}/metal3datas/m-0",
    "Metal3DataTemplate": lambda home, _: (
        f"/apis/{METAL3}/v1beta1/namespaces/{home}/metal3datatemplates/m-0-template"
    ),
    "SlurmCluster": lambda home, _: f"/apis/slurmlet.io/v1alpha1/namespaces/{home}/slurmclusters/hpc",
    "kubeconfig Secret": lambda home, _: f"/api/v1/namespaces/{home}/secrets/alpha-kubeconfig",
    "StatefulSet": lambda _, slurm: f"/apis/apps/v1/namespaces/{slurm}/statefulsets/hpc-controller",
    "controller pod": lambda _, slurm: f"/api/v1/namespaces/{slurm}/pods/hpc-controller-0",
    "Service": lambda _, slurm: f"/api/v1/namespaces/{slurm}/services/hpc",
    "Controller": lambda _, slurm: f"/apis/{SLINKY}/v1beta1/namespaces/{slurm}/controllers/hpc",
    "key Secret": lambda _, slurm: f"/api/v1/namespaces/{slurm}/secrets/hpc-auth-slurm",
}


def test_the_link_that_is_missing_is_named(api_plane: ControlPlane) -> None:
    async def broken(place: Site, link: str) -> None:
        await place.kubeconfig()
        await place.controller()
        selector = {"app.kubernetes.io/instance": "hpc"}
        services = f"/api/v1/namespaces/{place.slurm}/services"
        await place.client.create(services, service("hpc", "NodePort", selector))
        await place.slurm_cluster("hpc", {"namespace": place.slurm, "address": {"nodePort": {}}})
        secret = await place.machine("m-0", {"slurmlet.io/slurm-cluster": "hpc"})
        await place.client.delete(BREAKS[link](place.home, place.slurm), {"gracePeriodSeconds": 0})
        async with Hook(place) as hook:
            verdict = await hook.ask(secret)
            assert not verdict.allowed
            assert f"broken link {link}: " in verdict.message
            ((kind, _, text),) = hook.told.events
            assert (kind, text) == ("Warning", verdict.message)
            assert f'failures_total{{link="{link}"}} 1' in exposition(hook.webhook.families())
        async with Hook(place, fail_open=True) as hook:
            verdict = await hook.ask(secret)
            assert (verdict.allowed, verdict.changed) == (True, None)
            assert f"broken link {link}: " in verdict.warnings[0]

    async def go(client: ApiClient) -> None:
        for link in BREAKS:
            await broken(await site(client, api_plane, f"inject-{next(_numbers)}"), link)

    run(api_plane, go)


def test_a_workload_cluster_that_is_away_and_one_that_comes_back_under_another_kubeconfig(
    api_plane: ControlPlane,
) -> None:
    async def scenario(place: Site) -> None:
        secret = await place.kubeconfig()
        await place.controller()
        machine = await place.machine("m-0", {"slurm-controller-namespace": place.slurm})
        path = f"/api/v1/namespaces/{place.home}/secrets/alpha-kubeconfig"
        right = secret["data"]["value"]
        away = b64(base64.b64decode(right).replace(place.plane.url.encode(), b"https://127.0.0.1:1"))
        async with Hook(place) as hook:
            await place.client.patch(path, {"data": {"value": away}})
            verdict = await hook.ask(machine)
            assert "broken link workload cluster: " in verdict.message
            assert verdict.code == 503
            for bad in (b64("{}"), b64(b"\xff"), b64("- ["), None):
                await place.client.patch(path, {"data": {"value": bad}})
                assert "broken link kubeconfig Secret: " in (await hook.ask(machine)).message
            await place.client.patch(path, {"data": {"value": right}})
            assert meta_data(await hook.ask(machine))["slurm_controller_address"] == "192.0.2.7"

    scene(api_plane, scenario)


def test_what_is_not_for_slurm_passes_as_it_is(api_plane: ControlPlane) -> None:
    async def scenario(place: Site) -> None:
        unlabelled = await place.machine("m-0", {})
        async with Hook(place) as hook:
            assert await hook.ask(unlabelled) == Verdict()
            assert [one[:2] for one in hook.told.events] == [("Normal", "NotForSlurm")]
            owner = unlabelled["metadata"].pop("ownerReferences")
            assert await hook.ask(unlabelled) == Verdict()
            unlabelled["metadata"]["ownerReferences"] = owner
            unlabelled["data"] = {"networkData": ""}
            assert await hook.ask(unlabelled) == Verdict()

    scene(api_plane, scenario)


def test_who_does_not_know_the_metal3data_by_its_uid_gets_no_key(api_plane: ControlPlane) -> None:
    async def scenario(place: Site) -> None:
        await place.kubeconfig()
        await place.controller()
        secret = await place.machine("m-0", {"slurm-controller-namespace": place.slurm})
        secret["metadata"]["ownerReferences"][0]["uid"] = "00000000-0000-0000-0000-000000000000"
        async with Hook(place, fail_open=True) as hook:
            verdict = await hook.ask(secret)
            assert verdict.changed is None
            assert "has another uid" in verdict.warnings[0]

    scene(api_plane, scenario)


def test_a_template_of_another_namespace_gives_no_key(api_plane: ControlPlane) -> None:
    async def scenario(place: Site) -> None:
        await place.kubeconfig()
        await place.controller()
        victim = place.home
        secret = await place.machine("m-0", {"slurm-controller-namespace": place.slurm})
        other = f"{victim}-other"
        await place.namespace(other)
        # Who may make Metal3Data and Secrets in a namespace of their own, and knows the name of a template elsewhere.
        path = f"/apis/{METAL3}/v1beta1/namespaces"
        mine = await place.client.get(f"{path}/{victim}/metal3datas/m-0")
        mine["metadata"] = {"name": "m-0", "namespace": other}
        mine["spec"]["template"] = {"name": "m-0-template", "namespace": victim}
        made = await place.client.create(f"{path}/{other}/metal3datas", mine)
        secret["metadata"]["ownerReferences"][0]["uid"] = made["metadata"]["uid"]
        async with Hook(place) as hook:
            place.home = other
            verdict = await hook.ask(secret)
            place.home = victim
            assert verdict.changed is None
            assert f"Metal3DataTemplate: {victim}/m-0-template is not in namespace {other}" in verdict.message

    scene(api_plane, scenario)


def test_a_dry_run_is_patched_and_told_to_nobody(api_plane: ControlPlane) -> None:
    async def scenario(place: Site) -> None:
        await place.kubeconfig()
        await place.controller()
        secret = await place.machine("m-0", {"slurm-controller-namespace": place.slurm})
        async with Hook(place) as hook:
            assert meta_data(await hook.ask(secret, dry_run=True))["slurm_key_base64"] == b64(KEY)
            assert hook.told.events == []

    scene(api_plane, scenario)
