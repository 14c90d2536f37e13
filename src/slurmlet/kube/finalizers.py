"""Finalizers: set before anything outside is made, taken off when it is gone. Other people's are never touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slurmlet.kube.client import ApiClient, ApiError

Obj = dict[str, Any]
_CONFLICTS = 10


def is_deleting(obj: Mapping[str, Any]) -> bool:
    return bool(obj["metadata"].get("deletionTimestamp"))


def has(obj: Mapping[str, Any], name: str) -> bool:
    return name in (obj["metadata"].get("finalizers") or ())


async def add(client: ApiClient, path: str, name: str) -> Obj | None:
    """The object with the finalizer; None where it is gone or going: then nothing may be made for it."""
    return await _change(
        client, path, lambda obj: None if is_deleting(obj) else [*_of(obj), name], name, True
    )


async def remove(client: ApiClient, path: str, name: str) -> None:
    """Safe to repeat; an object that is gone has none."""
    await _change(client, path, lambda obj: [one for one in _of(obj) if one != name], name, False)


async def _change(
    client: ApiClient, path: str, change: Callable[[Obj], list[str] | None], name: str, wanted: bool
) -> Obj | None:
    """Others change the list at the same moment: only one that nobody changed meanwhile may be replaced."""
    for _ in range(_CONFLICTS):
        try:
            now = await client.get(path)
            if has(now, name) == wanted:
                return now
            finalizers = change(now)
            if finalizers is None:
                return None
            metadata = {
                "finalizers": finalizers or None,
                "resourceVersion": now["metadata"]["resourceVersion"],
            }
            return await client.patch(path, {"metadata": metadata})
        except ApiError as error:
            if error.status == 404:
                return None
            if error.status != 409:
                raise
    raise ApiError(409, f"{path} changed {_CONFLICTS} times while its finalizers were written", "Conflict")


def _of(obj: Mapping[str, Any]) -> list[str]:
    return list(obj["metadata"].get("finalizers") or ())
