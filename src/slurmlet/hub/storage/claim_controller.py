"""The built-in provisioner: claims of our storage classes become directories, grow, and go. Rules in `model/claims`.

Level-triggered like the pod workers: each pass looks at all claims and volumes and does what is due, so a crash between
a directory and its object is mended by the next hub. A directory is removed only when its volume is ours by annotation,
by name and by path, and no claim holds it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir
from slurmlet.base.processes import run as run_process
from slurmlet.hub.hub_settings import Settings
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.reflector import Reflector
from slurmlet.model import claims

log = logging.getLogger(__name__)
Obj = dict[str, Any]
Work = Callable[[], Awaitable[None]]

_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_CLAIM, _VOLUME = "PersistentVolumeClaim", "PersistentVolume"
_RETRY_S = 15.0
_API_RETRY_S = 1.0
_REMOVE_TIMEOUT_S = 3600.0
# Several changes in a row make one pass.
_SETTLE_S = 0.02
_CONFLICTS = 10


class Provisioner:
    def __init__(self, settings: Settings, client: ApiClient, events: EventRecorder) -> None:
        self._files = settings.files
        self._client = client
        self._events = events
        self._claims: dict[str, Obj] = {}
        self._volumes: dict[str, Obj] = {}
        self._classes: dict[str, Obj] = {}
        self._wake = asyncio.Event()
        self._busy: set[str] = set()
        # Each holds a thread that the rest of the hub needs too.
        self._removals = asyncio.Semaphore(2)
        # What failed, by UID, and when it may be tried again.
        self._later: dict[str, float] = {}

    async def run(self) -> None:
        await self._make_classes()
        kinds = (
            ("/api/v1/persistentvolumeclaims", self._claims),
            ("/api/v1/persistentvolumes", self._volumes),
            (_CLASSES, self._classes),
        )
        async with asyncio.TaskGroup() as tasks:
            for path, known in kinds:
                reflector = Reflector(self._client, path, partial(self._changed, known))
                tasks.create_task(reflector.run(), name=path.rpartition("/")[2])
            tasks.create_task(self._work(tasks), name="provision")

    def _changed(self, known: dict[str, Obj], obj: Obj, gone: bool) -> None:
        if gone:
            known.pop(_key(obj), None)
            self._later.pop(obj["metadata"]["uid"], None)
        else:
            known[_key(obj)] = obj
        self._wake.set()

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

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._sleep()
            self._wake.clear()
            for claim in list(self._claims.values()):
                self._look_at_claim(claim, tasks)
            for volume in list(self._volumes.values()):
                if claims.is_ours(volume):
                    self._look_at_volume(volume, tasks)

    async def _sleep(self) -> None:
        next_s = min(self._later.values(), default=None)
        try:
            delay_s = None if next_s is None else max(0.0, next_s - time.monotonic())
            async with asyncio.timeout(delay_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        await asyncio.sleep(_SETTLE_S)

    def _look_at_claim(self, claim: Obj, tasks: asyncio.TaskGroup) -> None:
        spec = claim["spec"]
        storage_class = self._classes.get(spec.get("storageClassName") or "")
        if claims.asks_for_volume(claim, storage_class):
            assert storage_class is not None
            if claims.volume_name(claim) not in self._volumes:
                self._do(claim, partial(self._provision, claim, storage_class), tasks)
            return
        volume = self._volumes.get(spec.get("volumeName") or "")
        size = claims.growth(claim, volume) if volume is not None else None
        if volume is not None and size is not None:
            self._do(claim, partial(self._grow, claim, volume, size), tasks)

    def _look_at_volume(self, volume: Obj, tasks: asyncio.TaskGroup) -> None:
        if not claims.is_unused(volume):
            return
        leaving = bool(volume["metadata"].get("deletionTimestamp"))
        if leaving and claims.other_finalizers(volume) is None:
            return  # our part is done; others have a finalizer on it
        if leaving or claims.loses_directory(volume):
            self._do(volume, partial(self._let_go, volume), tasks)

    def _do(self, obj: Obj, work: Work, tasks: asyncio.TaskGroup) -> None:
        """One thing at a time for each object, and not before its retry is due."""
        uid = obj["metadata"]["uid"]
        if uid in self._busy or self._later.get(uid, 0.0) > time.monotonic():
            return
        self._later.pop(uid, None)
        self._busy.add(uid)
        tasks.create_task(self._guarded(obj, work), name=f"volume of {_key(obj)}")

    async def _guarded(self, obj: Obj, work: Work) -> None:
        uid = obj["metadata"]["uid"]
        try:
            await work()
        except (SlurmletError, OSError) as error:
            told = error.message if isinstance(error, SlurmletError) else str(error)
            log.warning("%s: %s", _key(obj), told)
            self._later[uid] = time.monotonic() + _RETRY_S
        finally:
            self._busy.discard(uid)
            self._wake.set()

    # The work

    async def _provision(self, claim: Obj, storage_class: Obj) -> None:
        metadata = claim["metadata"]
        name = f"{metadata['namespace']}/{metadata['name']}"
        text = f'External provisioner is provisioning volume for claim "{name}"'
        self._events.core_event(_CLAIM, claim, "Normal", "Provisioning", text)
        directory = self._directory(claims.volume_name(claim))
        try:
            volume = claims.persistent_volume(claim, storage_class, str(directory))
            await asyncio.to_thread(_make_private, directory)
            made = await self._client.create("/api/v1/persistentvolumes", volume)
            # The next pass must not wait for the watch to know of it.
            self._volumes.setdefault(_key(made), made)
        except ApiError as error:
            if error.status != 409:
                raise
        except (SlurmletError, OSError) as error:
            told = error.message if isinstance(error, SlurmletError) else str(error)
            text = (
                f'failed to provision volume with StorageClass "{storage_class["metadata"]["name"]}": {told}'
            )
            self._events.core_event(_CLAIM, claim, "Warning", "ProvisioningFailed", text)
            raise
        log.info("claim %s: volume %s", name, directory.name)
        text = f"Successfully provisioned volume {directory.name}"
        self._events.core_event(_CLAIM, claim, "Normal", "ProvisioningSucceeded", text)

    async def _grow(self, claim: Obj, volume: Obj, size: str) -> None:
        """A directory has no size of its own: claim and volume agree on the new one."""
        metadata = claim["metadata"]
        text = f"External resizer is resizing volume {volume['metadata']['name']}"
        self._events.core_event(_CLAIM, claim, "Normal", "Resizing", text)
        path = f"/api/v1/persistentvolumes/{volume['metadata']['name']}"
        self._volumes[_key(volume)] = await self._client.patch(
            path, {"spec": {"capacity": {"storage": size}}}
        )
        path = f"/api/v1/namespaces/{metadata['namespace']}/persistentvolumeclaims/{metadata['name']}/status"
        change = {"metadata": {"uid": metadata["uid"]}, "status": claims.grown_status(claim, size)}
        self._claims[_key(claim)] = await self._client.patch(path, change)
        self._events.core_event(_CLAIM, claim, "Normal", "VolumeResizeSuccessful", "Resize volume succeeded")

    async def _let_go(self, volume: Obj) -> None:
        """Directory first, object last: what is left after a crash still names the directory."""
        name = volume["metadata"]["name"]
        path = f"/api/v1/persistentvolumes/{name}"
        if claims.loses_directory(volume):
            try:
                await self._remove(volume)
            except (SlurmletError, OSError) as error:
                self._events.core_event(_VOLUME, volume, "Warning", "VolumeFailedDelete", str(error))
                raise
        try:
            if not volume["metadata"].get("deletionTimestamp"):
                await self._client.delete(path, {"preconditions": {"uid": volume["metadata"]["uid"]}})
            await self._take_finalizer_off(path)
        except ApiError as error:
            if error.status != 404:
                raise
        log.info("volume %s: gone", name)

    async def _take_finalizer_off(self, path: str) -> None:
        """Others take theirs off at the same moment: only a list that nobody changed meanwhile may be replaced."""
        for _ in range(_CONFLICTS):
            now = await self._client.get(path)
            rest = claims.other_finalizers(now)
            if rest is None:
                return
            change = {"finalizers": rest or None, "resourceVersion": now["metadata"]["resourceVersion"]}
            try:
                await self._client.patch(path, {"metadata": change})
                return
            except ApiError as error:
                if error.status != 409:
                    raise
        raise SlurmletError(f"{path}: changed under our hands")

    async def _remove(self, volume: Obj) -> None:
        directory = self._directory(volume["metadata"]["name"])
        if volume["spec"].get("hostPath", {}).get("path") != str(directory):
            raise SlurmletError(f"{directory} is not what the volume names; its directory is left alone")
        if not await asyncio.to_thread(directory.exists):
            return
        # In a process of its own: it may have to become the owner of what containers left (runner/volumes/volume_removal).
        argv = [sys.executable, "-P", "-m", "slurmlet.runner.volumes.volume_removal", str(directory)]
        async with self._removals:
            await asyncio.to_thread(run_process, argv, timeout_s=_REMOVE_TIMEOUT_S)

    def _directory(self, name: str) -> Path:
        return self._files.volumes / name


def _make_private(directory: Path) -> None:
    private_dir(directory.parent)
    private_dir(directory)


def _key(obj: Obj) -> str:
    metadata = obj["metadata"]
    return (
        f"{metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else str(metadata["name"])
    )
