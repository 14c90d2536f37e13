"""The built-in provisioner: claims of our storage classes become directories, grow, and go. Rules in `model/claims`.

Two controllers, one of claims and one of volumes: each reconcile looks at what is there and does what is due, so a crash
between a directory and its object is mended by the next hub. A directory is removed only when its volume is ours by
annotation, by name and by path, and no claim holds it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir
from slurmlet.base.processes import run as run_process
from slurmlet.hub.hub_settings import Settings
from slurmlet.kube import finalizers
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Again, Controller, Informer, key_of, told
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.work_queue import Backoff
from slurmlet.model import claims

log = logging.getLogger(__name__)
Obj = dict[str, Any]

_CLAIMS, _VOLUMES = "/api/v1/persistentvolumeclaims", "/api/v1/persistentvolumes"
_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_CLAIM, _VOLUME = "PersistentVolumeClaim", "PersistentVolume"
_BACKOFF = Backoff(first_s=2.0, most_s=60.0)
_API_RETRY_S = 1.0
# A directory may hold millions of files. Two at once: each holds a thread that the rest of the hub needs too.
_REMOVE_TIMEOUT_S, _REMOVALS = 3600.0, 2


class ClaimController:
    def __init__(self, settings: Settings, client: ApiClient, events: EventRecorder) -> None:
        self._files, self._client, self._events = settings.files, client, events
        self._claims, self._volumes = Informer(client, _CLAIMS), Informer(client, _VOLUMES)
        self._classes = Informer(client, _CLASSES)
        self._claim = Controller(
            "claim", self.reconcile_claim, workers=4, backoff=_BACKOFF, on_failure=self._claim_failed
        )
        self._volume = Controller(
            "volume",
            self.reconcile_volume,
            workers=_REMOVALS,
            timeout_s=_REMOVE_TIMEOUT_S + 60,
            backoff=_BACKOFF,
            on_failure=self._volume_failed,
        )
        self._claims.feed(self._claim, key_of)
        self._volumes.feed(self._volume, key_of)
        # A claim waits for its volume to be there, to grow or to go.
        self._volumes.feed(self._claim, _claim_of)

    @property
    def controllers(self) -> tuple[Controller[str], ...]:
        return self._claim, self._volume

    async def run(self) -> None:
        await self._make_classes()
        async with asyncio.TaskGroup() as tasks:
            for informer, name in (
                (self._classes, "classes"),
                (self._volumes, "volumes"),
                (self._claims, "claims"),
            ):
                tasks.create_task(informer.run(), name=name)
            # A claim whose class or volume is not known yet would be taken for one that asks for nothing, or anew.
            await self._classes.synced.wait()
            await self._volumes.synced.wait()
            self._classes.on_change(self._look_at_all)
            tasks.create_task(self._claim.run(), name="claim controller")
            tasks.create_task(self._volume.run(), name="volume controller")

    def _look_at_all(self, _class: Obj) -> None:
        for claim in self._claims.objects():
            self._claim.add(key_of(claim))

    async def _make_classes(self) -> None:
        for wanted in claims.storage_classes():
            while not await self._made(wanted):  # noqa: ASYNC110 - nobody tells when the API server is ready
                await asyncio.sleep(_API_RETRY_S)

    async def _made(self, wanted: Obj) -> bool:
        """Whether the class is there, by us or by somebody else; one that is refused for good is only told of."""
        try:
            await self._client.create(_CLASSES, wanted)
        except ApiError as error:
            if error.status != 409:
                log.warning("storage class %s: %s", wanted["metadata"]["name"], error.message)
                return not error.transient
        return True

    async def reconcile_claim(self, key: str) -> Again:
        claim = self._claims.get(key)
        if claim is None:
            return None
        spec = claim["spec"]
        storage_class = self._classes.get(spec.get("storageClassName") or "")
        if claims.asks_for_volume(claim, storage_class):
            assert storage_class is not None
            if self._volumes.get(claims.volume_name(claim)) is None:
                await self._provision(claim, storage_class)
            return None
        volume = self._volumes.get(spec.get("volumeName") or "")
        size = claims.growth(claim, volume) if volume is not None else None
        if volume is not None and size is not None:
            await self._grow(claim, volume, size)
        return None

    async def reconcile_volume(self, key: str) -> Again:
        volume = self._volumes.get(key)
        if volume is None or not claims.is_ours(volume) or not claims.is_unused(volume):
            return None
        leaving = finalizers.is_deleting(volume)
        if leaving and not finalizers.has(volume, claims.FINALIZER):
            return None  # our part is done; others have a finalizer on it
        if leaving or claims.loses_directory(volume):
            await self._let_go(volume)
        return None

    def _claim_failed(self, key: str, error: Exception, _failures: int, _delay_s: float) -> None:
        claim = self._claims.get(key)
        if claim is not None:
            name = claim["spec"].get("storageClassName")
            text = f'failed to provision volume with StorageClass "{name}": {told(error)}'
            self._events.core_event(_CLAIM, claim, "Warning", "ProvisioningFailed", text)

    def _volume_failed(self, key: str, error: Exception, _failures: int, _delay_s: float) -> None:
        volume = self._volumes.get(key)
        if volume is not None:
            self._events.core_event(_VOLUME, volume, "Warning", "VolumeFailedDelete", told(error))

    # The work

    async def _provision(self, claim: Obj, storage_class: Obj) -> None:
        metadata = claim["metadata"]
        name = f"{metadata['namespace']}/{metadata['name']}"
        text = f'External provisioner is provisioning volume for claim "{name}"'
        self._events.core_event(_CLAIM, claim, "Normal", "Provisioning", text)
        directory = self._directory(claims.volume_name(claim))
        volume = claims.persistent_volume(claim, storage_class, str(directory))
        await asyncio.to_thread(_make_private, directory)
        try:
            # The next look must not wait for the watch to know of it.
            self._volumes.keep(await self._client.create(_VOLUMES, volume))
        except ApiError as error:
            if error.status != 409:
                raise
        log.info("claim %s: volume %s", name, directory.name)
        text = f"Successfully provisioned volume {directory.name}"
        self._events.core_event(_CLAIM, claim, "Normal", "ProvisioningSucceeded", text)

    async def _grow(self, claim: Obj, volume: Obj, size: str) -> None:
        """A directory has no size of its own: claim and volume agree on the new one."""
        metadata = claim["metadata"]
        text = f"External resizer is resizing volume {volume['metadata']['name']}"
        self._events.core_event(_CLAIM, claim, "Normal", "Resizing", text)
        path = f"{_VOLUMES}/{volume['metadata']['name']}"
        self._volumes.keep(await self._client.patch(path, {"spec": {"capacity": {"storage": size}}}))
        path = f"/api/v1/namespaces/{metadata['namespace']}/persistentvolumeclaims/{metadata['name']}/status"
        change = {"metadata": {"uid": metadata["uid"]}, "status": claims.grown_status(claim, size)}
        self._claims.keep(await self._client.patch(path, change))
        self._events.core_event(_CLAIM, claim, "Normal", "VolumeResizeSuccessful", "Resize volume succeeded")

    async def _let_go(self, volume: Obj) -> None:
        """Directory first, object last: what is left after a crash still names the directory."""
        name = volume["metadata"]["name"]
        path = f"{_VOLUMES}/{name}"
        if claims.loses_directory(volume):
            await self._remove(volume)
        if not finalizers.is_deleting(volume):
            try:
                await self._client.delete(path, {"preconditions": {"uid": volume["metadata"]["uid"]}})
            except ApiError as error:
                if error.status != 404:
                    raise
        await finalizers.remove(self._client, path, claims.FINALIZER)
        log.info("volume %s: gone", name)

    async def _remove(self, volume: Obj) -> None:
        directory = self._directory(volume["metadata"]["name"])
        if volume["spec"].get("hostPath", {}).get("path") != str(directory):
            raise SlurmletError(f"{directory} is not the directory of the volume and is not removed")
        if not await asyncio.to_thread(directory.exists):
            return
        # In a process of its own: it may have to become the owner of what containers left (runner/volumes/volume_removal).
        argv = [sys.executable, "-P", "-m", "slurmlet.runner.volumes.volume_removal", str(directory)]
        await asyncio.to_thread(run_process, argv, timeout_s=_REMOVE_TIMEOUT_S)

    def _directory(self, name: str) -> Path:
        return self._files.volumes / name


def _make_private(directory: Path) -> None:
    private_dir(directory.parent)
    private_dir(directory)


def _claim_of(volume: Obj) -> str | None:
    """The key of the claim that a volume is for."""
    claim = volume["spec"].get("claimRef") or {}
    return f"{claim['namespace']}/{claim['name']}" if claim.get("name") else None
