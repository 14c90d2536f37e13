"""From a group and a kind to a path: the version that the server prefers, the resource's name, whether it has namespaces.

Only what was found is remembered: a kind whose definition is made later must be found then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurmlet.kube.client import ApiClient, ApiError


@dataclass(frozen=True)
class Resource:
    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool
    subresources: frozenset[str] = frozenset()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, name: str = "", namespace: str = "", subresource: str = "") -> str:
        """Without a name the collection; without a namespace that of the whole cluster."""
        root = _root(self.group, self.version)
        place = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        parts = [part for part in (self.plural, name, subresource) if part]
        return f"{root}{place}/{'/'.join(parts)}"


class Discovery:
    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._found: dict[tuple[str, str], Resource] = {}

    async def resource(self, kind: str, group: str = "") -> Resource:
        """The preferred version that has the kind. Raises ApiError 404 where none has it."""
        found = self._found.get((group, kind))
        if found is None:
            found = self._found[group, kind] = await self._look(kind, group)
        return found

    async def has(self, kind: str, group: str = "") -> bool:
        try:
            await self.resource(kind, group)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    def forget(self, kind: str, group: str = "") -> None:
        """Its definition changed, or a path of it was not found."""
        self._found.pop((group, kind), None)

    async def _look(self, kind: str, group: str) -> Resource:
        for version in await self._versions(group):
            listed = await self._client.get(_root(group, version))
            resources: list[dict[str, Any]] = listed.get("resources") or []
            for one in resources:
                if one["kind"] == kind and "/" not in one["name"]:
                    prefix = f"{one['name']}/"
                    parts = [known["name"] for known in resources if known["name"].startswith(prefix)]
                    subresources = frozenset(name.removeprefix(prefix) for name in parts)
                    return Resource(group, version, kind, one["name"], one["namespaced"], subresources)
        raise ApiError(404, f"the API server serves no kind {kind} in group {group or 'core'!r}", "NotFound")

    async def _versions(self, group: str) -> list[str]:
        if not group:
            return ["v1"]
        found = await self._client.get(f"/apis/{group}")
        preferred = (found.get("preferredVersion") or {}).get("version")
        others = [one["version"] for one in found.get("versions") or () if one["version"] != preferred]
        return [preferred, *others] if preferred else others


def _root(group: str, version: str) -> str:
    return f"/apis/{group}/{version}" if group else f"/api/{version}"
