"""The stand-ins that tests of several files use, each once. Slurm's is slurmlet.slurm.fake, which ships with the package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmlet.hub.runner_links import LinkLost
from slurmlet.images.image_store import Image
from slurmlet.kube.client import ApiError

Obj = dict[str, Any]


class FakeEvents:
    """Takes events that would go to the API server."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str, str]] = []  # kind, reason, message, container
        self.about: list[tuple[str, str, str]] = []  # of other objects: kind, name, message

    def pod_event(
        self, pod: Mapping[str, Any], kind: str, reason: str, message: str, container: str = ""
    ) -> None:
        self.told.append((kind, reason, message, container))

    def core_event(
        self, object_kind: str, obj: Mapping[str, Any], kind: str, reason: str, message: str
    ) -> None:
        self.object_event("v1", object_kind, obj, kind, reason, message)

    def object_event(
        self, _version: str, object_kind: str, obj: Mapping[str, Any], kind: str, reason: str, message: str
    ) -> None:
        self.told.append((kind, reason, message, ""))
        self.about.append((object_kind, obj["metadata"]["name"], message))

    @property
    def said(self) -> list[tuple[str, str]]:
        """Reasons and messages."""
        return [(reason, message) for _, reason, message, _ in self.told]

    @property
    def reasons(self) -> list[str]:
        return [reason for _, reason, _, _ in self.told]


class FakeLink:
    """A runner's or an agent's connection as the hub sees it; takes what would be sent."""

    def __init__(self, uid: str = "u-1", **hello: Any) -> None:
        self.uid = uid
        self.hello: Obj = hello
        self.has_pod = bool(hello.get("has_pod"))
        self.ephemeral: set[str] = set()
        self.redefined: dict[str, str] = {}
        self.alive = True
        self.told: list[Obj] = []
        self.on_told: Callable[[Obj], None] = lambda _message: None

    async def tell(self, message: Any) -> None:
        if not self.alive:
            raise LinkLost
        self.told.append(message)
        self.on_told(message)

    @property
    def runner(self) -> Any:
        return self.hello

    @property
    def agent(self) -> Any:
        return self.hello

    def end(self) -> None:
        self.alive = False

    def heard(self, type_: str) -> list[Obj]:
        return [message for message in self.told if message["type"] == type_]


class FakePodApi:
    """The API server as a worker sees it: pods with versions, status patches, deletes; all else is not there.

    `changed` hears of every change in the order it happened, as a watch does.
    """

    busy = False

    def __init__(self) -> None:
        self.pods: dict[str, Obj] = {}
        self.patches: list[Obj] = []
        self.changed: Callable[[Obj, bool], None] = lambda _pod, _gone: None
        self.away = False
        self._version = 100

    def put(self, pod: Obj) -> Obj:
        self._version += 1
        pod = {**pod, "metadata": {**pod["metadata"], "resourceVersion": str(self._version)}}
        self.pods[_path(pod)] = pod
        self.changed(pod, False)
        return pod

    def remove(self, path: str) -> None:
        pod = self.pods.pop(path, None)
        if pod is not None:
            self._version += 1
            self.changed(pod, True)

    # What ApiClient has

    async def read(self, path: str) -> Obj:
        raise ApiError(404, f"{path} not found")

    async def get(self, path: str, **_query: str) -> Obj:
        self._check()
        raise ApiError(404, f"{path} not found")

    async def patch_latest(self, path: str, change: Callable[[], Obj | None], _kind: str) -> Obj | None:
        self._check()
        made = change()
        if made is None:
            return None
        pod = self.pods.get(path.removesuffix("/status"))
        if pod is None or pod["metadata"]["uid"] != made["metadata"]["uid"]:
            raise ApiError(404, "not found")
        asked = made["metadata"].get("resourceVersion")
        if asked is not None and asked != pod["metadata"]["resourceVersion"]:
            raise ApiError(409, "the object has been modified")
        self.patches.append(made)
        notes = {**(pod["metadata"].get("annotations") or {}), **(made["metadata"].get("annotations") or {})}
        status = {**(pod.get("status") or {}), **made["status"]}
        return self.put({**pod, "metadata": {**pod["metadata"], "annotations": notes}, "status": status})

    async def delete(self, path: str, options: Mapping[str, Any]) -> Obj:
        self._check()
        pod = self.pods.get(path)
        if pod is None or pod["metadata"]["uid"] != options["preconditions"]["uid"]:
            raise ApiError(404, "not found")
        self.remove(path)
        return pod

    def _check(self) -> None:
        if self.away:
            raise ApiError(0, "the API server does not answer")


class FakeImages:
    """Every image is in the store."""

    def config(self, _image: Image) -> Obj:
        return {"Entrypoint": ["/bin/sh"]}

    async def ensure(self, pod: Mapping[str, Any], _backoff: Any) -> dict[str, Image]:
        return await self.stored(pod)

    async def stored(self, pod: Mapping[str, Any]) -> dict[str, Image]:
        names = [one["image"] for one in pod["spec"]["containers"]]
        return {
            name: Image("sha256:1", name, f"{name}@sha256:1", 1, Path("/store/sha256-1")) for name in names
        }


class FakeServices:
    async def variables(self, *_args: Any) -> dict[str, str]:
        return {}


def _path(pod: Mapping[str, Any]) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


class RunnerStream:
    """The hub's stream to the runner; a test plays the runner."""

    def __init__(self) -> None:
        self._to_hub: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self.sent: list[tuple[int, bytes]] = []
        self.closed = self.lost = False

    async def receive(self) -> tuple[int, bytes] | None:
        return await self._to_hub.get()

    async def send(self, channel: int, data: bytes) -> None:
        if self.lost:
            raise LinkLost
        self.sent.append((channel, data))

    async def close(self) -> None:
        self.closed = True

    def end(self) -> None:
        self._to_hub.put_nowait(None)

    def says(self, channel: int, data: bytes) -> None:
        self._to_hub.put_nowait((channel, data))
