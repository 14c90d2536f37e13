"""The manifests as they are installed, at a real API server: it takes them, and the rights they give are enough.

Every part runs as the operator's own service account here. A right that is missing shows as a part that does not get its
work done, which is what it would be on a site.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import yaml

from slurmlet.base.host_addresses import free_port
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.conditions import is_true
from slurmlet.kube.controller import Controller, Informer
from slurmlet.kube.credentials import Credentials
from slurmlet.kube.discovery import Discovery
from slurmlet.kube.events import EventRecorder
from slurmlet.model.stats_summary import exposition
from slurmlet.operators.provisioning.mirror_targets import mirrors
from slurmlet.operators.provisioning.provider_parts import PROVIDER_PARTS, ProviderParts, WebhookSettings
from slurmlet.operators.provisioning.resource_definitions import packaging_dir
from slurmlet.operators.provisioning.stored_certificates import Called
from slurmlet.operators.provisioning.webhook_service import INJECTION_CONFIGURATION, SCALING_CONFIGURATION
from tests.contract.control_plane import ControlPlane
from tests.contract.provisioning_manifests import manifests
from tests.contract.provisioning_site import Site, run
from tests.contract.test_provisioning_admission import created, until_injected
from tests.contract.test_provisioning_bootstrap import Rig as Bootstrap
from tests.contract.test_provisioning_injection import Told
from tests.contract.test_provisioning_scaling import Rig as Scaling
from tests.contract.test_provisioning_scaling import mirror, running

Obj = dict[str, Any]
NAMESPACE = "slurmlet-provision"


async def applied(client: ApiClient, file: str) -> None:
    discovery = Discovery(client)
    for obj in manifests(file):
        group, _, _ = obj["apiVersion"].rpartition("/")
        resource = await discovery.resource(obj["kind"], group)
        path = resource.path(obj["metadata"]["name"], obj["metadata"].get("namespace", ""))
        await client.apply(path, obj, "test", force=True)


async def as_operator(client: ApiClient, plane: ControlPlane) -> ApiClient:
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/slurmlet-provision"
    made = await client.create(f"{accounts}/token", {"spec": {"expirationSeconds": 600}})
    return ApiClient(Credentials(plane.url, ca_file=plane.keys / "ca.crt", token=made["status"]["token"]))


def test_the_rights_of_the_manifests_are_enough_for_every_part(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        await applied(client, "install-with-scaling-webhook.yaml")
        place = Site(client, api_plane, NAMESPACE, "rights-slurm")
        await place.namespace(place.slurm)
        await place.kubeconfig()
        await place.controller()
        try:
            async with await as_operator(client, api_plane) as operator:
                with pytest.raises(ApiError, match="forbidden"):
                    await operator.get(f"/api/v1/namespaces/{place.slurm}/configmaps")
                await _parts(client, operator, place)
        finally:
            for configuration in (INJECTION_CONFIGURATION, SCALING_CONFIGURATION):
                await client.delete(_admission(configuration), {})

    run(api_plane, scenario)


async def _parts(client: ApiClient, operator: ApiClient, place: Site) -> None:
    events, port = EventRecorder(operator, "test"), free_port("127.0.0.1")
    host = f"slurmlet-provision.{NAMESPACE}.svc"
    settings = WebhookSettings(NAMESPACE, address="127.0.0.1", port=port, names=(host, "127.0.0.1"))
    parts = ProviderParts(operator, events, settings, frozenset(PROVIDER_PARTS))
    clusters = Informer(operator, "/apis/slurmlet.io/v1alpha1/slurmclusters")

    async def controller_run(controller: Controller[str]) -> None:
        await controller.run()

    # Called past the Service, which has no network here; the rest is as installed.
    hook = (await client.get(f"{_admission(INJECTION_CONFIGURATION)}"))["webhooks"][0]
    hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}/"}
    await client.patch(_admission(INJECTION_CONFIGURATION), {"webhooks": [hook]})
    leading = parts.leading(clusters, controller_run)
    async with running(events.run(), clusters.run(), parts.serve(), *(part() for part in leading.values())):
        while not parts.is_serving:
            await asyncio.sleep(0.05)
        secret = await place.machine("m-0", {"slurm-controller-namespace": place.slurm})
        await until_injected(place, secret)
        assert "slurm_key_base64" in await created(place, secret)
        bootstrap = Bootstrap(place, Told())
        await bootstrap.cluster()
        await bootstrap.config("w-0", {}, machine="m-0")
        await bootstrap.until("w-0", lambda found: is_true(found, "Ready"))
        scaling = Scaling(place, Told())
        await scaling.deployment("mirror", 3)
        await scaling.machine_deployment("a")
        await scaling.map([mirror("mirror", "a")])
        await scaling.machines_are("a", 3)
        assert 'outcome="injected"' in exposition(parts.families())
        while not {"Injected", "DataSecretCreated", "TargetScaled"} <= await _reasons(client):
            await asyncio.sleep(0.05)
    await parts.close()


def _admission(called: Called) -> str:
    return f"/apis/admissionregistration.k8s.io/v1/{called.kind}/{called.name}"


async def _reasons(client: ApiClient) -> set[str]:
    found = await client.get(f"/api/v1/namespaces/{NAMESPACE}/events")
    return {one["reason"] for one in found["items"]}


def test_the_two_installations_differ_by_the_scaling_webhook_alone() -> None:
    plain, more = ({(one["kind"], one["metadata"]["name"]) for one in manifests(file)} for file in (
        "install.yaml", "install-with-scaling-webhook.yaml",
    ))  # fmt: skip
    assert more - plain == {("ValidatingWebhookConfiguration", "slurmlet-provision-scaling")}


def test_manifests_chart_and_code_agree_on_names_and_paths() -> None:
    names = {one["metadata"]["name"] for one in manifests() if "webhooks" in one}
    assert names == {INJECTION_CONFIGURATION.name, SCALING_CONFIGURATION.name}
    service = next(one for one in manifests() if one["kind"] == "Service")
    for one in manifests():
        for hook in one.get("webhooks", ()):
            called = hook["clientConfig"]["service"]
            assert "path" not in called, "applied again, it would take the token out of the path"
            assert (called["name"], called["namespace"]) == (service["metadata"]["name"], NAMESPACE)


def test_the_dashboard_is_valid_and_every_panel_asks_something() -> None:
    board = json.loads((packaging_dir() / "chart/dashboards/slurmlet-provision.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        for target in panel["targets"]:
            assert re.search(r"slurmlet_provision_\w+", target["expr"])


def test_the_examples_are_taken(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        discovery, taken = Discovery(client), 0
        for file in sorted((packaging_dir() / "examples").glob("*.yaml")):
            for obj in yaml.safe_load_all(file.read_text()):
                group = obj["apiVersion"].rpartition("/")[0]
                if group not in ("slurmlet.io", "bootstrap.cluster.x-k8s.io", "", "apps", "autoscaling"):
                    continue
                resource = await discovery.resource(obj["kind"], group)
                del obj["metadata"]["namespace"]
                path = resource.path(f"example-{taken}", "default")
                obj["metadata"]["name"] = f"example-{taken}"
                made = await client.apply(path, obj, "test")
                # Nothing was dropped as unknown.
                assert within(obj.get("spec"), made.get("spec")), (file.name, obj["kind"])
                taken += 1
                if obj["kind"] == "ConfigMap":
                    assert mirrors({**made, "metadata": {**made["metadata"], "namespace": "x"}})
        assert taken >= 10

    run(api_plane, scenario)


def within(given: Any, stored: Any) -> bool:
    """Whether all that was given is in what is stored; defaults may have been added."""
    if isinstance(given, dict):
        return isinstance(stored, dict) and all(within(given[name], stored.get(name)) for name in given)
    if isinstance(given, list):
        return (
            isinstance(stored, list)
            and len(given) == len(stored)
            and all(within(one, other) for one, other in zip(given, stored, strict=True))
        )
    return bool(given == stored)
