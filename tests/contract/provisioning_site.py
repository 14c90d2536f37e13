"""One namespace with all that the Injection Webhook climbs through, at a real API server that is both clusters at once."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slurmlet.kube.client import ApiClient
from slurmlet.operators.provisioning.controller_lookup import ControllerLookup
from slurmlet.operators.provisioning.resource_definitions import custom_resource_definitions
from slurmlet.operators.provisioning.workload_clients import WorkloadClients
from tests.contract.control_plane import ControlPlane, all_closed
from tests.contract.provisioning_kinds import METAL3, SLINKY, foreign_kinds, install

Obj = dict[str, Any]
KEY = bytes(range(256)) * 4


def run(plane: ControlPlane, scenario: Callable[[ApiClient], Awaitable[None]]) -> None:
    async def go() -> None:
        async with all_closed(), asyncio.timeout(150), plane.client() as client:
            await install(client, [*custom_resource_definitions(), *foreign_kinds()])
            await scenario(client)

    asyncio.run(go())


def b64(data: bytes | str) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def kubeconfig(plane: ControlPlane) -> str:
    """Of an administrator, with everything inline, as Cluster API keeps it."""
    keys = {name: b64((plane.keys / name).read_bytes()) for name in ("ca.crt", "admin.crt", "admin.key")}
    return json.dumps(
        {
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            "clusters": [
                {"name": "x", "cluster": {"server": plane.url, "certificate-authority-data": keys["ca.crt"]}}
            ],
            "users": [
                {
                    "name": "x",
                    "user": {
                        "client-certificate-data": keys["admin.crt"],
                        "client-key-data": keys["admin.key"],
                    },
                }
            ],
        }
    )


@dataclass
class Site:
    """`home`: namespace of machines and SlurmClusters. Slurm's own: `slurm`. Made by `site`."""

    client: ApiClient
    plane: ControlPlane
    home: str
    slurm: str

    async def namespace(self, name: str) -> None:
        await self.client.create("/api/v1/namespaces", {"metadata": {"name": name}})
        # Pods are admitted only once the namespace has its account, which a controller manager would make.
        await self.client.create(
            f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "default"}}
        )

    async def kubeconfig(self, cluster: str = "alpha") -> Obj:
        return await self.secret(self.home, f"{cluster}-kubeconfig", value=kubeconfig(self.plane))

    async def secret(self, namespace: str, name: str, **data: str | bytes) -> Obj:
        body = {"metadata": {"name": name}, "data": {key: b64(value) for key, value in data.items()}}
        return await self.client.create(f"/api/v1/namespaces/{namespace}/secrets", body)

    async def controller(
        self, name: str = "hpc", *, app: str = "slurmctld", key_ref: str = "", host: str = "192.0.2.7"
    ) -> None:
        """What Slinky makes of a Controller: a StatefulSet with its labels, a pod, a Secret with the key."""
        spec: Obj = {"slurmKeyRef": {"name": key_ref, "key": "the.key"}} if key_ref else {}
        path = f"/apis/{SLINKY}/v1beta1/namespaces/{self.slurm}/controllers"
        made = await self.client.create(
            path,
            {
                "apiVersion": f"{SLINKY}/v1beta1",
                "kind": "Controller",
                "metadata": {"name": name},
                "spec": spec,
            },
        )
        owner = {
            "apiVersion": f"{SLINKY}/v1beta1",
            "kind": "Controller",
            "name": name,
            "uid": made["metadata"]["uid"],
            "controller": True,
        }
        selector = {"app.kubernetes.io/name": app, "app.kubernetes.io/instance": name}
        labels = {**selector, "app.kubernetes.io/component": "controller"}
        containers = [{"name": "slurmctld", "image": "slurmctld"}]
        stateful = {
            "metadata": {"name": f"{name}-controller", "labels": labels, "ownerReferences": [owner]},
            "spec": {
                "serviceName": "x",
                "selector": {"matchLabels": selector},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": containers}},
            },
        }
        await self.client.create(f"/apis/apps/v1/namespaces/{self.slurm}/statefulsets", stateful)
        pods = f"/api/v1/namespaces/{self.slurm}/pods"
        pod = f"{name}-controller-0"
        await self.client.create(
            pods, {"metadata": {"name": pod, "labels": labels}, "spec": {"containers": containers}}
        )
        await self.client.patch(f"{pods}/{pod}/status", {"status": {"hostIP": host, "phase": "Running"}})
        await self.secret(
            self.slurm, key_ref or f"{name}-auth-slurm", **{"the.key" if key_ref else "slurm.key": KEY}
        )

    async def machine(self, name: str, labels: Obj, *, version: str = "v1beta1", template: str = "") -> Obj:
        """The Secret that Metal3 would make next, with its Metal3Data and template there."""
        root = f"/apis/{METAL3}/{version}/namespaces/{self.home}"
        template = template or f"{name}-template"
        await self.client.create(
            f"{root}/metal3datatemplates",
            {
                "apiVersion": f"{METAL3}/{version}",
                "kind": "Metal3DataTemplate",
                "metadata": {"name": template, "labels": labels},
                "spec": {"clusterName": "alpha"},
            },
        )
        data = await self.client.create(
            f"{root}/metal3datas",
            {
                "apiVersion": f"{METAL3}/{version}",
                "kind": "Metal3Data",
                "metadata": {"name": name},
                "spec": {"template": {"name": template}},
            },
        )
        owner = {
            "apiVersion": f"{METAL3}/{version}",
            "kind": "Metal3Data",
            "name": name,
            "uid": data["metadata"]["uid"],
            "controller": True,
        }
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": f"{name}-metadata",
                "labels": {"cluster.x-k8s.io/cluster-name": "alpha"},
                "ownerReferences": [owner],
            },
            "data": {"metaData": b64("name: m-0\nlocal-hostname: m-0\n")},
        }

    async def slurm_cluster(self, name: str, controller: Obj) -> None:
        body = {
            "apiVersion": "slurmlet.io/v1alpha1",
            "kind": "SlurmCluster",
            "metadata": {"name": name},
            "spec": {"connection": {"commands": {}}, "controller": controller},
        }
        await self.client.create(f"/apis/slurmlet.io/v1alpha1/namespaces/{self.home}/slurmclusters", body)

    def lookup(self) -> tuple[ControllerLookup, WorkloadClients]:
        workload = WorkloadClients(self.client)
        return ControllerLookup(self.client, workload), workload


async def site(client: ApiClient, plane: ControlPlane, name: str) -> Site:
    made = Site(client, plane, f"{name}-machines", f"{name}-slurm")
    await made.namespace(made.home)
    await made.namespace(made.slurm)
    return made
