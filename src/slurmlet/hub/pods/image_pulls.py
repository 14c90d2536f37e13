"""Every image of a pod into the store before its job is submitted, so that no allocation waits for a pull.

Reasons and event texts are the kubelet's. Pulls of one image for many pods are done once (`_flights`).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.hub.pods.source_fetch import pull_credentials
from slurmlet.images.image_store import Image, Store
from slurmlet.images.references import InvalidImageName
from slurmlet.kube.client import ApiClient
from slurmlet.kube.events import EventRecorder

Obj = Mapping[str, Any]
_FIRST_BACKOFF_S = 10.0
_LONGEST_BACKOFF_S = 300.0
_REMEMBERED = 100


class ImageProblem(SlurmletError):
    """An image that is not to be had now. `waiting` is what the container's status says about it."""

    transient = True

    def __init__(self, reference: str, reason: str, message: str, retry_s: float) -> None:
        super().__init__(message, reason=reason)
        self.waiting = {reference: (reason, message)}
        self.retry_s = retry_s


class Backoff:
    """Per pod: how long to leave a failing image alone."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float, str]] = {}  # reference → (until, delay, message)

    def failed(self, reference: str, message: str) -> float:
        delay_s = min(
            2 * self._until[reference][1] if reference in self._until else _FIRST_BACKOFF_S,
            _LONGEST_BACKOFF_S,
        )
        self._until[reference] = (time.monotonic() + delay_s, delay_s, message)
        return delay_s

    def wait_s(self, reference: str) -> tuple[float, str]:
        """(seconds still to wait, what went wrong)."""
        until, _, message = self._until.get(reference, (0.0, 0.0, ""))
        return max(0.0, until - time.monotonic()), message


def image_volumes(spec: Obj) -> list[dict[str, str]]:
    """Images that are mounted as volumes, in the form of containers without a name: pulled by the same rules."""
    sources = [
        volume["image"] for volume in spec.get("volumes", ()) if (volume.get("image") or {}).get("reference")
    ]
    return [
        {"name": "", "image": one["reference"], "imagePullPolicy": one.get("pullPolicy") or "IfNotPresent"}
        for one in sources
    ]


class Images:
    def __init__(self, store: Store, client: ApiClient, events: EventRecorder, at_once: int) -> None:
        self._store = store
        self._client = client
        self._events = events
        self._slots = asyncio.Semaphore(at_once)
        self._flights: dict[str, asyncio.Task[Image]] = {}
        self._configs: OrderedDict[Image, Obj] = OrderedDict()
        self._values: OrderedDict[Image, Image] = OrderedDict()

    def config(self, image: Image) -> Obj:
        """The image's own "config". A digest's never changes, and a burst of pods has few images: read once."""
        known = self._configs.get(image)
        if known is None:
            known = self._configs[image] = image.config.get("config") or {}
            if len(self._configs) > _REMEMBERED:
                self._configs.popitem(last=False)
        return known

    def _same(self, image: Image) -> Image:
        """One value for all pods of an image: thousands of pods would have thousands of equal ones."""
        known = self._values.setdefault(image, image)
        if len(self._values) > _REMEMBERED:
            self._values.popitem(last=False)
        return known

    async def ensure(self, pod: Obj, backoff: Backoff) -> dict[str, Image]:
        """reference as written → stored image, for all containers. Raises ImageProblem for the first that fails."""
        spec = pod["spec"]
        found: dict[str, Image] = {}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            if container["image"] not in found:
                found[container["image"]] = self._same(await self._one(pod, container, backoff))
        for volume in image_volumes(spec):
            try:
                found[volume["image"]] = self._same(await self._one(pod, volume, backoff))
            except ImageProblem as problem:
                # No container names this image, so every container is told that it waits for it.
                problem.waiting = {"": next(iter(problem.waiting.values()))}
                raise
        return found

    async def stored(self, pod: Obj) -> dict[str, Image]:
        """The images of a pod that was submitted already, from the store alone."""
        spec = pod["spec"]
        every = (*spec.get("initContainers", ()), *spec["containers"], *image_volumes(spec))
        names = {one["image"] for one in every}
        found = {name: await asyncio.to_thread(self._store.lookup, name) for name in names}
        for name, image in found.items():
            if image is None:
                raise ImageProblem(
                    name, "ErrImageNeverPull", f"image {name} was removed from the store", 10.0
                )
        return {name: image for name, image in found.items() if image is not None}

    async def _one(self, pod: Obj, container: Obj, backoff: Backoff) -> Image:
        reference, policy = container["image"], container.get("imagePullPolicy", "IfNotPresent")
        name = container["name"]
        try:
            present = await asyncio.to_thread(self._store.lookup, reference)
        except InvalidImageName as error:
            text = f'Failed to apply default image tag "{reference}": {error.message}'
            self._events.pod_event(pod, "Warning", "InspectFailed", text, name)
            raise ImageProblem(reference, "InvalidImageName", text, _LONGEST_BACKOFF_S) from error
        if present is not None and policy != "Always":
            text = f'Container image "{reference}" already present on machine'
            self._events.pod_event(pod, "Normal", "Pulled", text, name)
            return present
        if policy == "Never":
            text = f'Container image "{reference}" is not present with pull policy of Never'
            self._events.pod_event(pod, "Warning", "ErrImageNeverPull", text, name)
            raise ImageProblem(reference, "ErrImageNeverPull", text, 30.0)
        return await self._pull(pod, name, reference, backoff)

    async def _pull(self, pod: Obj, container: str, reference: str, backoff: Backoff) -> Image:
        wait_s, last_message = backoff.wait_s(reference)
        if wait_s > 0:
            text = f'Back-off pulling image "{reference}"'
            self._events.pod_event(pod, "Normal", "BackOff", text, container)
            raise ImageProblem(reference, "ImagePullBackOff", f"{text}: {last_message}", wait_s)
        self._events.pod_event(pod, "Normal", "Pulling", f'Pulling image "{reference}"', container)
        began_s = time.monotonic()
        try:
            image = await self._fly(pod, reference)
        except SlurmletError as error:
            backoff.failed(reference, error.message)
            text = f'Failed to pull image "{reference}": {error.message}'
            self._events.pod_event(pod, "Warning", "Failed", text, container)
            self._events.pod_event(pod, "Warning", "Failed", "Error: ErrImagePull", container)
            raise ImageProblem(reference, "ErrImagePull", error.message, 1.0) from error
        took_s = time.monotonic() - began_s
        text = (
            f'Successfully pulled image "{reference}" in {took_s:.3f}s. Image size: {image.size_bytes} bytes.'
        )
        self._events.pod_event(pod, "Normal", "Pulled", text, container)
        return image

    async def _fly(self, pod: Obj, reference: str) -> Image:
        auths = await pull_credentials(self._client, pod)
        # Another pod's credentials must not fetch for this one, so only pulls without any are shared.
        key = reference if not auths else f"{reference} {pod['metadata']['uid']}"
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = asyncio.create_task(
                self._transfer(reference, auths), name=f"pull {reference}"
            )
            flight.add_done_callback(lambda _: self._flights.pop(key, None))
        return await asyncio.shield(flight)

    async def _transfer(self, reference: str, auths: dict[str, dict[str, str]]) -> Image:
        async with self._slots:
            return await asyncio.to_thread(self._store.pull, reference, auths=auths or None)
