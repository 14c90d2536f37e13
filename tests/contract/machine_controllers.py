"""A stand-in for Cluster API on a real API server: MachineDeployments with /scale, and Machines that come and go with it.

It keeps the contract that the operator relies on: Machines marked `cluster.x-k8s.io/delete-machine` go first, a Machine that
is deleted stays while a pre-terminate hook is on it (no Node stands for it, so pre-drain hooks do not hold it), and
`status.selector` names a deployment's Machines. `boot` is what a host would do: its slurmd registers with Slurm.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from slurmlet.kube.client import ApiClient, ApiError

Obj = dict[str, Any]
GROUP, VERSION = "cluster.x-k8s.io", "v1beta2"
FINALIZER = "machine.cluster.x-k8s.io"
HOOK = "pre-terminate.delete.hook.machine.cluster.x-k8s.io"


class MachineControllers:
    """One deployment's worth of Cluster API. `removed` lists Machines in the order in which their hosts were taken away."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        name: str,
        boot: Callable[[str], None],
        shut: Callable[[str], None],
    ) -> None:
        self._client, self._name, self._boot, self._shut = client, name, boot, shut
        root = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}"
        self.machines_path, self._deployments = f"{root}/machines", f"{root}/machinedeployments"
        self._numbers = itertools.count(1)
        self.booting = True
        self.removed: list[str] = []
        self.replica_changes: list[int] = []

    async def make(self, replicas: int = 0) -> None:
        spec = {"replicas": replicas, "clusterName": "test"}
        obj = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "MachineDeployment",
            "metadata": {"name": self._name},
            "spec": spec,
        }
        await self._client.create(self._deployments, obj)

    async def machines(self) -> list[Obj]:
        listed = await self._client.get(
            self.machines_path, labelSelector=f"{GROUP}/deployment-name={self._name}"
        )
        found: list[Obj] = listed["items"]
        return sorted(found, key=lambda one: one["metadata"]["name"])

    async def run(self) -> None:
        while True:
            try:
                await self.step()
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
            await asyncio.sleep(0.03)

    async def step(self) -> None:
        deployment = await self._client.get(f"{self._deployments}/{self._name}")
        wanted = deployment["spec"].get("replicas", 0)
        if self.replica_changes[-1:] != [wanted]:
            self.replica_changes.append(wanted)
        machines = await self.machines()
        for machine in [one for one in machines if one["metadata"].get("deletionTimestamp")]:
            await self._end(machine)
        alive = [one for one in machines if not one["metadata"].get("deletionTimestamp")]
        alive.sort(key=_turn)
        for machine in alive[: max(0, len(alive) - wanted)]:
            await self._client.delete(f"{self.machines_path}/{machine['metadata']['name']}", {})
        for _ in range(wanted - len(alive)):
            await self._new()
        status = {"replicas": len(machines), "selector": f"{GROUP}/deployment-name={self._name}"}
        if (deployment.get("status") or {}) != status:
            await self._client.patch(f"{self._deployments}/{self._name}/status", {"status": status})

    async def _new(self) -> None:
        name = f"{self._name}-{next(self._numbers)}"
        labels = {f"{GROUP}/deployment-name": self._name}
        metadata = {"name": name, "labels": labels, "finalizers": [FINALIZER]}
        spec = {
            "clusterName": "test",
            "infrastructureRef": {"kind": "Metal3Machine", "name": f"infra-{name}"},
        }
        obj = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Machine", "metadata": metadata, "spec": spec}
        await self._client.create(self.machines_path, obj)
        if self.booting:
            self._boot(name)

    async def _end(self, machine: Obj) -> None:
        metadata = machine["metadata"]
        if any(name.startswith(HOOK) for name in metadata.get("annotations") or {}):
            return
        if metadata["name"] not in self.removed:
            self.removed.append(metadata["name"])
            self._shut(metadata["name"])
        await self._client.patch(
            f"{self.machines_path}/{metadata['name']}", {"metadata": {"finalizers": None}}
        )


def _turn(machine: Obj) -> tuple[bool, str]:
    marked = "cluster.x-k8s.io/delete-machine" in (machine["metadata"].get("annotations") or {})
    return not marked, machine["metadata"]["name"]
