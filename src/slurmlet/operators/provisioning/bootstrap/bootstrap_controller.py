"""The bootstrap provider of Cluster API (contracts v1beta2 and v1beta1): a config of a Machine gets its bootstrap Secret.

The Secret is made once and never changed: a machine may have read it. Its name is the config's, so that both can be moved to
another management cluster. Nothing is made for a config that no Machine owns, or whose cluster is paused.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Mapping
from typing import Any

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.kube import finalizers
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.conditions import Condition, status_patch
from slurmlet.kube.controller import Again, Controller, Informer, key_of, told
from slurmlet.kube.discovery import Discovery
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.work_queue import Backoff
from slurmlet.operators.provisioning.bootstrap.bootstrap_data import (
    VIRTUAL_KUBELET,
    WORKER,
    bootstrap_data,
    secrets_needed,
)
from slurmlet.operators.provisioning.controller_lookup import ControllerFacts, ControllerLookup
from slurmlet.operators.provisioning.controller_spec import MetaDataNames, SecretKey, controller_spec
from slurmlet.operators.provisioning.resource_definitions import BOOTSTRAP_GROUP, VERSION
from slurmlet.operators.provisioning.worker_annotations import SLURM_NODE

log = logging.getLogger(__name__)
Obj = dict[str, Any]
_CLUSTER_GROUP = "cluster.x-k8s.io"
_CLUSTER_NAME, _PAUSED = "cluster.x-k8s.io/cluster-name", "cluster.x-k8s.io/paused"
_SECRET_TYPE = "cluster.x-k8s.io/secret"  # noqa: S105 - a type
_BACKOFF = Backoff(first_s=1.0, most_s=60.0)
# Nobody tells when a Cluster is no longer paused, or a Machine has got the name of its node.
_PAUSED_AGAIN_S, _NAME_AGAIN_S = 30.0, 1.0


class BootstrapController:
    """Of one kind: SlurmWorkerConfig or the thesis's VirtualKubeletConfig. `namespace`: the only one; "": all."""

    def __init__(
        self,
        client: ApiClient,
        events: EventRecorder,
        lookup: ControllerLookup,
        kind: str = WORKER,
        namespace: str = "",
    ) -> None:
        assert kind in (WORKER, VIRTUAL_KUBELET)
        self._client, self._events, self._lookup, self._kind = client, events, lookup, kind
        self._api_version = f"{BOOTSTRAP_GROUP}/{VERSION}"
        self._plural = f"{kind.lower()}s"
        self._discovery = Discovery(client)
        place = f"/namespaces/{namespace}" if namespace else ""
        self._configs = Informer(client, f"/apis/{self._api_version}{place}/{self._plural}")
        self.controller = Controller(
            f"bootstrap {kind}", self.reconcile, workers=4, backoff=_BACKOFF, on_failure=self._failed
        )
        self._configs.feed(self.controller, key_of)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._configs.run(), name=f"{self._plural} informer")
            tasks.create_task(self.controller.run(), name=f"{self._plural} controller")

    async def reconcile(self, key: str) -> Again:
        config = self._configs.get(key)
        if config is None or finalizers.is_deleting(config):
            return None
        machine = await self._machine(config)
        if machine is None:
            await self._write(
                config, Condition("Ready", False, "WaitingForMachine", "no Machine owns it yet")
            )
            return None
        node = (machine["metadata"].get("annotations") or {}).get(SLURM_NODE, "")
        if _slurmd(config).get("cloud") and not node:
            text = f"the Machine has no annotation {SLURM_NODE} yet, which power saving gives it"
            await self._write(config, Condition("Ready", False, "WaitingForNodeName", text))
            return _NAME_AGAIN_S
        cluster_name = machine["spec"]["clusterName"]
        if await self._is_paused(config, cluster_name):
            await self._write(config, Condition("Paused", True, "Paused"))
            return _PAUSED_AGAIN_S
        try:
            if not await self._has_secret(config):
                text = await self._text(_named(config, node), machine["metadata"]["name"], cluster_name)
                await self._create(config, cluster_name, text)
        except SlurmletError as error:
            await self._write(config, Condition("Ready", False, error.reason, told(error)))
            raise
        await self._write(
            config,
            Condition("Ready", True, "DataSecretCreated"),
            Condition("Paused", False, "NotPaused"),
            dataSecretName=config["metadata"]["name"],
            initialization={"dataSecretCreated": True},
            ready=True,
        )
        return None

    def _failed(self, key: str, error: Exception, _failures: int, _delay_s: float) -> None:
        config = self._configs.get(key)
        if config is not None:
            reason = getattr(error, "reason", "BootstrapFailed")
            self._events.object_event(
                self._api_version,
                self._kind,
                config,
                "Warning",
                reason,
                f"bootstrap data not made: {told(error)}",
            )

    # What it stands on

    async def _machine(self, config: Obj) -> Obj | None:
        """The owner that Cluster API sets; None until then, and where it is gone."""
        owners = config["metadata"].get("ownerReferences") or ()
        owner = next(
            (
                one
                for one in owners
                if one["kind"] == "Machine" and one["apiVersion"].partition("/")[0] == _CLUSTER_GROUP
            ),
            None,
        )
        if owner is None:
            return None
        return await self._core("Machine", owner["name"], config["metadata"]["namespace"])

    async def _is_paused(self, config: Obj, cluster_name: str) -> bool:
        if _PAUSED in (config["metadata"].get("annotations") or {}):
            return True
        cluster = await self._core("Cluster", cluster_name, config["metadata"]["namespace"])
        if cluster is None:
            raise UserError(f"cluster {cluster_name} does not exist", reason="ClusterMissing", transient=True)
        return bool((cluster.get("spec") or {}).get("paused"))

    async def _core(self, kind: str, name: str, namespace: str) -> Obj | None:
        resource = await self._discovery.resource(kind, _CLUSTER_GROUP)
        try:
            return await self._client.get(resource.path(name, namespace))
        except ApiError as error:
            if error.status != 404:
                raise
            self._discovery.forget(kind, _CLUSTER_GROUP)
            return None

    # The Secret

    async def _has_secret(self, config: Obj) -> bool:
        metadata = config["metadata"]
        try:
            path = f"/api/v1/namespaces/{metadata['namespace']}/secrets/{metadata['name']}"
            secret = await self._client.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        owners = secret["metadata"].get("ownerReferences") or ()
        # By name and kind: a config that was moved to another management cluster has another uid.
        if not any((one["kind"], one["name"]) == (self._kind, metadata["name"]) for one in owners):
            raise UserError(
                f"Secret {metadata['name']} exists and is not this config's", reason="SecretTaken"
            )
        return True

    async def _text(self, config: Obj, machine: str, cluster_name: str) -> str:
        spec: Mapping[str, Any] = config.get("spec") or {}
        namespace = config["metadata"]["namespace"]
        secrets = {ref: await self._value(namespace, ref) for ref in secrets_needed(self._kind, spec)}
        facts, names = await self._facts(spec, namespace, cluster_name)
        return bootstrap_data(self._kind, spec, machine, secrets, facts, names)

    async def _facts(
        self, spec: Mapping[str, Any], namespace: str, cluster_name: str
    ) -> tuple[ControllerFacts | None, MetaDataNames]:
        name = spec.get("slurmCluster")
        if not name:
            return None, MetaDataNames()
        path = f"/apis/slurmlet.io/{VERSION}/namespaces/{namespace}/slurmclusters/{name}"
        controller = controller_spec(await self._client.get(path))
        return await self._lookup.facts(controller, namespace, cluster_name), controller.names

    async def _value(self, namespace: str, ref: SecretKey) -> bytes:
        try:
            secret = await self._client.get(f"/api/v1/namespaces/{namespace}/secrets/{ref.name}")
            return base64.b64decode((secret.get("data") or {})[ref.key], validate=True)
        except (KeyError, binascii.Error, ValueError) as error:
            raise UserError(
                f"Secret {ref.name} has no key {ref.key!r}", reason="SecretKeyMissing", transient=True
            ) from error

    async def _create(self, config: Obj, cluster_name: str, text: str) -> None:
        metadata = config["metadata"]
        owner = {
            "apiVersion": self._api_version,
            "kind": self._kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
        }
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": _SECRET_TYPE,
            "metadata": {
                "name": metadata["name"],
                "labels": {_CLUSTER_NAME: cluster_name},
                "ownerReferences": [owner],
            },
            "data": {"value": base64.b64encode(text.encode()).decode()},
        }
        await self._client.create(f"/api/v1/namespaces/{metadata['namespace']}/secrets", secret)
        log.info("%s %s: bootstrap Secret made", self._kind, key_of(config))
        self._events.object_event(
            self._api_version, self._kind, config, "Normal", "DataSecretCreated", "bootstrap data made"
        )

    async def _write(self, config: Obj, *conditions: Condition, **fields: Any) -> None:
        generation = int(config["metadata"].get("generation") or 0)
        change = status_patch(config, *conditions, observedGeneration=generation, **fields)
        if change is None:
            return
        metadata = config["metadata"]
        path = f"/apis/{self._api_version}/namespaces/{metadata['namespace']}/{self._plural}/{metadata['name']}/status"
        self._configs.keep(await self._client.patch(path, change))


def _slurmd(config: Obj) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (config.get("spec") or {}).get("slurmd") or {}
    return found


def _named(config: Obj, node: str) -> Obj:
    """With the name that the Machine's annotation gives the worker, which wins."""
    if not node:
        return config
    spec = {**(config.get("spec") or {}), "slurmd": {**_slurmd(config), "nodeName": node}}
    return {**config, "spec": spec}
