"""A Cluster API infrastructure provider (contracts v1beta1 and v1beta2) whose bare metal is the testbed's machine hosts.

Does what Metal3's does, with its objects: takes a free BareMetalHost that the selector of a Metal3Machine allows, renders
the Metal3DataTemplate into a Metal3Data and its metaData Secret (the moment at which the injection webhook is called),
boots the machine with that and the bootstrap Secret of its Machine, and says when it is provisioned. Everything it knows is
in these objects and in which machines are on: it may be killed at any step.

    python -m slurmlet.testbed.provisioning.infrastructure_provider KUBECONFIG [--boot-seconds S] [--metal3 VERSION]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slurmlet.base.errors import SlurmletError
from slurmlet.kube import finalizers
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Controller, Informer, key_of
from slurmlet.kube.credentials import from_kubeconfig
from slurmlet.kube.work_queue import Backoff
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.provisioning import cloud_init
from slurmlet.testbed.provisioning.machine_hosts import MachineHosts
from slurmlet.testbed.provisioning.metal3_kinds import GROUP, HOST_GROUP, HOST_VERSION

log = logging.getLogger(__name__)
Obj = dict[str, Any]
FINALIZER = f"metal3machine.{GROUP}"
# A test's way to have a machine that is switched on and never comes up.
FAULT = "testbed.slurmlet.io/fault"
NEVER_BOOTS = "never-boots"
_CLUSTER_LABEL = "cluster.x-k8s.io/cluster-name"
_LOOK_AGAIN_S = 1.0
_COMMAND_S = 60.0


class NoHost(SlurmletError):
    reason = "NoAvailableHost"


@dataclass(frozen=True)
class Settings:
    version: str = "v1beta2"
    boot_s: float = 0.0


class InfrastructureProvider:
    """One reconcile for a Metal3Machine, one for a Metal3Cluster."""

    def __init__(self, client: ApiClient, hosts: MachineHosts, settings: Settings) -> None:
        self._client, self._hosts, self._settings = client, hosts, settings
        # Two machines must not be given the same host.
        self._choice = asyncio.Lock()

    async def cluster(self, key: str) -> float | None:
        path = self._path("metal3clusters", key)
        status = {"ready": True, "initialization": {"provisioned": True}}
        await self._client.patch(f"{path}/status", {"status": status})
        return None

    async def machine(self, key: str) -> float | None:
        path = self._path("metal3machines", key)
        try:
            found = await self._client.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        if finalizers.is_deleting(found):
            await self._remove(path, found)
            return None
        machine = await self._owner(found)
        secret = ((machine or {}).get("spec", {}).get("bootstrap") or {}).get("dataSecretName")
        if machine is None or not secret:
            return _LOOK_AGAIN_S
        if (found.get("status") or {}).get("ready"):
            return None
        held = await finalizers.add(self._client, path, FINALIZER)
        if held is None:
            return None
        host = await self._take_host(held)
        await self._provision(path, held, machine, host, secret)
        return None

    async def _provision(self, path: str, found: Obj, machine: Obj, host: Obj, secret: str) -> None:
        namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
        number = _number(host)
        metadata = await self._metadata(found, machine, number)
        boot_data = await self._secret_text(namespace, secret, "value")
        await self._tell_host(host, {"provisioning": {"state": "provisioning"}})
        if host["metadata"].get("annotations", {}).get(FAULT) != NEVER_BOOTS:
            await asyncio.sleep(self._settings.boot_s)
            await asyncio.to_thread(self._boot, number, boot_data, metadata)
        await self._tell_host(host, {"provisioning": {"state": "provisioned"}})
        provider_id = f"metal3://{namespace}/{host['metadata']['name']}/{name}"
        await self._client.patch(path, {"spec": {"providerID": provider_id}})
        status = {
            "ready": True,
            "initialization": {"provisioned": True},
            "addresses": [
                {"type": "InternalIP", "address": self._hosts.address(number)},
                {"type": "Hostname", "address": machine["metadata"]["name"]},
            ],
        }
        await self._client.patch(f"{path}/status", {"status": status})
        log.info("%s/%s is provisioned on machine %d", namespace, name, number)

    def _boot(self, number: int, user_data: str, metadata: Mapping[str, str]) -> None:
        """From the power button to the last command of the user data; whatever was half done before is done anew."""
        boot = cloud_init.read(user_data, metadata)
        self._hosts.power_off(number)
        init = self._hosts.boot(number, boot.hostname)
        cloud_init.act(
            boot,
            init.root,
            lambda argv: self._hosts.run(number, argv, timeout_s=_COMMAND_S),
            self._hosts.log(number),
        )

    async def _remove(self, path: str, found: Obj) -> None:
        for host in await self._bare_metal(found["metadata"]["namespace"]):
            if _consumer(host) == found["metadata"]["name"]:
                await asyncio.to_thread(self._hosts.power_off, _number(host))
                await self._client.patch(_host_path(host), {"spec": {"consumerRef": None, "online": False}})
                await self._tell_host(host, {"provisioning": {"state": "available"}})
        data = self._path("metal3datas", key_of(found))
        try:
            await self._client.delete(data, {})
        except ApiError as error:
            if error.status != 404:
                raise
        await finalizers.remove(self._client, path, FINALIZER)

    async def _take_host(self, found: Obj) -> Obj:
        """The host that is this machine's already, or a free one that its selector allows."""
        name, namespace = found["metadata"]["name"], found["metadata"]["namespace"]
        wanted = (found["spec"].get("hostSelector") or {}).get("matchLabels") or {}
        async with self._choice:
            hosts = await self._bare_metal(namespace)
            for host in hosts:
                if _consumer(host) == name:
                    return host
            for host in hosts:
                labels = host["metadata"].get("labels") or {}
                if _consumer(host) is None and all(labels.get(k) == v for k, v in wanted.items()):
                    reference = {"kind": "Metal3Machine", "name": name, "namespace": namespace}
                    return await self._client.patch(
                        _host_path(host), {"spec": {"consumerRef": reference, "online": True}}
                    )
        raise NoHost(f"no BareMetalHost with labels {wanted} is free", transient=True)

    async def _bare_metal(self, namespace: str) -> list[Obj]:
        listed = await self._client.get(
            f"/apis/{HOST_GROUP}/{HOST_VERSION}/namespaces/{namespace}/baremetalhosts"
        )
        return sorted(listed["items"], key=_number)

    async def _tell_host(self, host: Obj, status: Obj) -> None:
        await self._client.patch(f"{_host_path(host)}/status", {"status": status})

    async def _metadata(self, found: Obj, machine: Obj, number: int) -> dict[str, str]:
        """Rendered, stored in its Secret, and read back: a webhook may have added to it on the way."""
        reference = found["spec"].get("dataTemplate")
        names = {"machine": machine["metadata"]["name"], "metal3machine": found["metadata"]["name"]}
        if not reference:
            return {"name": names["machine"], "local-hostname": names["machine"]}
        namespace = found["metadata"]["namespace"]
        template = await self._client.get(
            self._path("metal3datatemplates", f"{namespace}/{reference['name']}")
        )
        data = await self._data(found, template, number)
        secret = f"{found['metadata']['name']}-metadata"
        rendered = yaml.safe_dump(render_metadata(template["spec"].get("metaData") or {}, names, number))
        await self._create(
            f"/api/v1/namespaces/{namespace}/secrets",
            {
                "metadata": {
                    "name": secret,
                    "labels": {_CLUSTER_LABEL: template["spec"].get("clusterName", "")},
                    "ownerReferences": [self._reference(data, "Metal3Data", controller=True)],
                },
                "type": "infrastructure.cluster.x-k8s.io/secret",
                "data": {"metaData": base64.b64encode(rendered.encode()).decode()},
            },
        )
        return cloud_init.meta_data(await self._secret_text(namespace, secret, "metaData"))

    async def _data(self, found: Obj, template: Obj, number: int) -> Obj:
        namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
        path = self._path("metal3datas", f"{namespace}/{name}")
        await self._create(
            path.rpartition("/")[0],
            {
                "apiVersion": f"{GROUP}/{self._settings.version}",
                "kind": "Metal3Data",
                "metadata": {
                    "name": name,
                    "labels": {_CLUSTER_LABEL: template["spec"].get("clusterName", "")},
                    "ownerReferences": [
                        self._reference(found, "Metal3Machine", controller=True),
                        self._reference(template, "Metal3DataTemplate"),
                    ],
                },
                "spec": {
                    "index": number,
                    "template": {"name": template["metadata"]["name"], "namespace": namespace},
                    "claim": {"name": name, "namespace": namespace},
                    "metaData": {"name": f"{name}-metadata", "namespace": namespace},
                },
            },
        )
        return await self._client.get(path)

    async def _create(self, path: str, obj: Obj) -> None:
        try:
            await self._client.create(path, obj)
        except ApiError as error:
            if error.status != 409 or error.api_reason != "AlreadyExists":
                raise

    async def _secret_text(self, namespace: str, name: str, key: str) -> str:
        secret = await self._client.get(f"/api/v1/namespaces/{namespace}/secrets/{name}")
        return base64.b64decode(secret["data"][key]).decode()

    async def _owner(self, found: Obj) -> Obj | None:
        for owner in found["metadata"].get("ownerReferences") or ():
            if owner["kind"] == "Machine" and owner["apiVersion"].startswith("cluster.x-k8s.io/"):
                path = f"/apis/cluster.x-k8s.io/v1beta2/namespaces/{found['metadata']['namespace']}/machines"
                return await self._client.get(f"{path}/{owner['name']}")
        return None

    def _path(self, plural: str, key: str) -> str:
        namespace, _, name = key.partition("/")
        return f"/apis/{GROUP}/{self._settings.version}/namespaces/{namespace}/{plural}/{name}"

    def _reference(self, obj: Obj, kind: str, *, controller: bool = False) -> Obj:
        made = {"apiVersion": f"{GROUP}/{self._settings.version}", "kind": kind}
        metadata = obj["metadata"]
        return {**made, "name": metadata["name"], "uid": metadata["uid"], "controller": controller}


def render_metadata(template: Mapping[str, Any], names: Mapping[str, str], index: int) -> dict[str, str]:
    """The parts of a Metal3DataTemplate's metaData that need nothing but names and numbers."""
    made = {entry["key"]: str(entry["value"]) for entry in template.get("strings") or ()}
    made |= {entry["key"]: names[entry["object"]] for entry in template.get("objectNames") or ()}
    for entry in template.get("indexes") or ():
        value = index * int(entry.get("step", 1)) + int(entry.get("offset", 0))
        made[entry["key"]] = f"{entry.get('prefix', '')}{value}{entry.get('suffix', '')}"
    return made


def _number(host: Mapping[str, Any]) -> int:
    """A BareMetalHost is the machine host whose number its name ends with."""
    return int(host["metadata"]["name"].rpartition("-")[2])


def _consumer(host: Mapping[str, Any]) -> str | None:
    return (host["spec"].get("consumerRef") or {}).get("name")


def _host_path(host: Mapping[str, Any]) -> str:
    metadata = host["metadata"]
    return f"/apis/{HOST_GROUP}/{HOST_VERSION}/namespaces/{metadata['namespace']}/baremetalhosts/{metadata['name']}"


async def serve(kubeconfig: Path, settings: Settings) -> None:
    async with ApiClient(from_kubeconfig(kubeconfig)) as client:
        provider = InfrastructureProvider(client, MachineHosts(Testbed.running()), settings)
        backoff = Backoff(first_s=0.2, most_s=5.0)
        machines = Controller("metal3machine", provider.machine, workers=4, backoff=backoff)
        clusters = Controller("metal3cluster", provider.cluster, backoff=backoff)
        base = f"/apis/{GROUP}/{settings.version}"
        seen = {
            machines: Informer(client, f"{base}/metal3machines"),
            clusters: Informer(client, f"{base}/metal3clusters"),
        }
        async with asyncio.TaskGroup() as tasks:
            for controller, informer in seen.items():
                informer.feed(controller, key_of)
                tasks.create_task(informer.run(), name=f"watch of {controller.name}")
                tasks.create_task(controller.run(), name=controller.name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve Metal3's kinds with machine hosts of the testbed.")
    parser.add_argument("kubeconfig", type=Path)
    parser.add_argument("--boot-seconds", type=float, default=0.0)
    parser.add_argument("--metal3", default="v1beta2")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(asked.kubeconfig, Settings(asked.metal3, asked.boot_seconds)))


if __name__ == "__main__":
    main()
