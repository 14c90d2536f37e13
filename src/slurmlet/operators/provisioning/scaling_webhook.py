"""The Scaling Webhook of the thesis, and what makes it safe: a mirror Deployment's replicas are those of its targets.

The webhook only looks: a request that could not be carried out (a ConfigMap that cannot be read, a target that is not there)
is refused where somebody sees it, and a dry run changes nothing because no request does. The number is carried over by a
controller that follows the Deployment itself, so that a missed call, a direct edit of spec.replicas, or a target that
somebody else scaled is put right. Deployments that the ConfigMap does not name are never touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.kube import finalizers
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Again, Controller, Informer, key_of, told
from slurmlet.kube.discovery import Discovery
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.webhook import Review, Verdict, denied
from slurmlet.kube.work_queue import Backoff
from slurmlet.operators.provisioning.mirror_targets import CONFIG_MAP, Mirror, MirrorTarget, mirrors
from slurmlet.operators.provisioning.resource_definitions import GROUP, VERSION

log = logging.getLogger(__name__)
Obj = dict[str, Any]
PATH = "/validate-scale"
# On the ConfigMap, which has no conditions: "Ready", or what is wrong with it.
STATUS = "slurmlet.io/scaling-status"
_DEPLOYMENTS = "/apis/apps/v1/deployments"
_BACKOFF = Backoff(first_s=1.0, most_s=60.0)
# Nobody tells when a target was scaled by somebody else.
_AGAIN_S = 30.0


class MirrorTargets:
    """Targets as they are at the API server."""

    def __init__(self, client: ApiClient) -> None:
        self._client, self._discovery = client, Discovery(client)

    async def scales(self, mirror: Mirror) -> dict[MirrorTarget, Obj]:
        """The /scale of every target. Raises UserError where one is not there, cannot be scaled, or is another's."""
        found: dict[MirrorTarget, Obj] = {}
        for target in mirror.targets:
            try:
                found[target] = await self._client.get(await self.path(target))
            except ApiError as error:
                if error.status != 404:
                    raise
                self._discovery.forget(target.kind, target.group)
                raise UserError(
                    f"mirror {mirror.key}: target {target} is not there, or has no /scale",
                    reason="UnknownTarget",
                ) from error
            await self._check_free(mirror, target)
        return found

    async def path(self, target: MirrorTarget) -> str:
        resource = await self._discovery.resource(target.kind, target.group)
        return resource.path(target.name, target.namespace, "scale")

    async def _check_free(self, mirror: Mirror, target: MirrorTarget) -> None:
        """Two who scale one thing undo each other for ever."""
        try:
            listed = await self._client.read(
                f"/apis/{GROUP}/{VERSION}/namespaces/{target.namespace}/workersets"
            )
        except ApiError as error:
            if error.status != 404:
                raise
            return
        for one in listed.get("items") or ():
            ref = one["spec"]["scaleTargetRef"]
            if (ref["kind"], ref["name"]) == (target.kind, target.name) and not one["spec"].get("paused"):
                raise UserError(
                    f"mirror {mirror.key}: target {target} is scaled by WorkerSet {one['metadata']['name']}",
                    reason="TargetTaken",
                    hint="Pause the WorkerSet (spec.paused), or take the target out of the ConfigMap.",
                )


class ScalingWebhook:
    """`review` is a handler for kube/webhook's server, under PATH: UPDATE of deployments/scale."""

    def __init__(self, client: ApiClient, namespace: str, *, fail_open: bool = False) -> None:
        self._client, self._targets, self._fail_open = client, MirrorTargets(client), fail_open
        self._path = f"/api/v1/namespaces/{namespace}/configmaps/{CONFIG_MAP}"

    async def review(self, review: Review) -> Verdict:
        if review.operation != "UPDATE" or review.kind != "Scale" or not _of_deployments(review):
            return Verdict()
        try:
            return await self._verdict(f"{review.namespace}/{review.name}")
        except SlurmletError as error:
            text = f"slurmlet cannot scale the targets of {review.name}: {told(error)}"
            if self._fail_open:
                return Verdict(warnings=(text[:256],))
            return denied(text, code=503 if error.transient else 422)

    async def _verdict(self, key: str) -> Verdict:
        try:
            config_map = await self._client.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            return Verdict()
        mirror = next((one for one in mirrors(config_map) if one.key == key), None)
        if mirror is not None:
            await self._targets.scales(mirror)
        return Verdict()


class MirrorController:
    """Every mirror's targets have its number of replicas."""

    def __init__(self, client: ApiClient, events: EventRecorder, namespace: str) -> None:
        self._client, self._events, self._targets = client, events, MirrorTargets(client)
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        self._config_path = f"{path}/{CONFIG_MAP}"
        self._config = Informer(client, path, fieldSelector=f"metadata.name={CONFIG_MAP}")
        self._deployments = Informer(client, _DEPLOYMENTS)
        self._mirrors: dict[str, Mirror] = {}
        self.controller = Controller(
            "mirror", self.reconcile, workers=2, backoff=_BACKOFF, on_failure=self._failed
        )
        # "" is the ConfigMap's own key: no Deployment has it.
        self._config.feed(self.controller, lambda _: "")
        self._deployments.feed(self.controller, key_of)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._config.run(), name="scaling ConfigMap")
            tasks.create_task(self._deployments.run(), name="deployments")
            await self._config.synced.wait()
            await self._deployments.synced.wait()
            tasks.create_task(self.controller.run(), name="mirror controller")

    async def reconcile(self, key: str) -> Again:
        if not key:
            await self._read()
            return None
        mirror, deployment = self._mirrors.get(key), self._deployments.get(key)
        if mirror is None or deployment is None or finalizers.is_deleting(deployment):
            return None
        wanted = deployment["spec"].get("replicas", 1)
        scales = await self._targets.scales(mirror)
        for target, replicas in mirror.replicas(wanted).items():
            await self._scale(deployment, target, scales[target], replicas)
        return _AGAIN_S

    async def _read(self) -> None:
        """A map that is gone or cannot be read has no mirrors: nothing is scaled by it until it is right."""
        config_map = next(iter(self._config.objects()), None)
        self._mirrors, status = {}, "Ready"
        if config_map is None:
            return
        try:
            self._mirrors = {one.key: one for one in mirrors(config_map)}
        except SlurmletError as error:
            status = told(error)
            self._events.core_event("ConfigMap", config_map, "Warning", error.reason, status)
        if (config_map["metadata"].get("annotations") or {}).get(STATUS) != status:
            await self._client.patch(self._config_path, {"metadata": {"annotations": {STATUS: status}}})
        for key in self._mirrors:
            self.controller.add(key)

    async def _scale(self, deployment: Obj, target: MirrorTarget, scale: Obj, replicas: int) -> None:
        now = (scale.get("spec") or {}).get("replicas", 0)
        if now == replicas:
            return
        # With the version that was read: who scaled it meanwhile is looked at first.
        metadata = {"resourceVersion": scale["metadata"]["resourceVersion"]}
        await self._client.patch(
            await self._targets.path(target), {"metadata": metadata, "spec": {"replicas": replicas}}
        )
        log.info("mirror %s: %s from %d to %d", key_of(deployment), target, now, replicas)
        text = f"{target} scaled from {now} to {replicas}"
        self._events.object_event("apps/v1", "Deployment", deployment, "Normal", "TargetScaled", text)

    def _failed(self, key: str, error: Exception, _failures: int, _delay_s: float) -> None:
        deployment = self._deployments.get(key)
        if deployment is not None:
            reason = getattr(error, "reason", "ScalingFailed")
            self._events.object_event("apps/v1", "Deployment", deployment, "Warning", reason, told(error))


def _of_deployments(review: Review) -> bool:
    resource: Mapping[str, Any] = review.request.get("resource") or {}
    return (resource.get("group"), resource.get("resource")) == ("apps", "deployments")
