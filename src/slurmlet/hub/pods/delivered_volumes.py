"""What a running pod's runner has in its volumes of files, and whether something newer is to be delivered."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmlet.hub.runner_links import RunnerLink
from slurmlet.kube.client import ApiClient
from slurmlet.kube.reflector import Reflector
from slurmlet.model.pod_sources import Needs, Sources, Token, token_lifetime_s, volume_needs
from slurmlet.model.volume_plan import FILE_KINDS, shows_pod
from slurmlet.protocol.pod_plan import FilesVolume, PodPlan

Obj = Mapping[str, Any]
# Trust bundles are few and change rarely: their users simply look again.
_TRUST_LOOK_S = 30.0
# A runner that came to us with its pod has tokens of unknown age. Within this share of their life they are replaced,
# spread out; the last fifth of a life is there to be used for that.
_UNKNOWN_SHARE = 0.15


class Versions:
    """The newest version of every object of one kind, without contents."""

    def __init__(self, client: ApiClient, resource: str) -> None:
        self._known: dict[tuple[str, str], int] = {}
        self.synced = False
        self.reflector = Reflector(
            client, f"/api/v1/{resource}", self.changed, on_synced=self._now_synced, metadata_only=True
        )

    def changed(self, obj: Obj, gone: bool) -> None:
        metadata = obj["metadata"]
        key, version = (metadata["namespace"], metadata["name"]), int(metadata["resourceVersion"])
        if not gone:
            self._known[key] = version
        elif self._known.get(key, 0) <= version:
            self._known.pop(key, None)

    def _now_synced(self) -> None:
        self.synced = True

    def newer(self, namespace: str, name: str, given: str | None) -> bool:
        """Whether a pod that was given version `given` (None: there was none) should be given another."""
        if not self.synced:
            return False
        known = self._known.get((namespace, name))
        if known is None or given is None:
            return (known is None) != (given is None)
        # The pod may have been given a version that this watch has not seen yet.
        return known > int(given)


@dataclass
class Record:
    """What a pod's runner has."""

    link: RunnerLink
    needs: Needs
    objects: frozenset[tuple[str, str]] = field(init=False)
    versions: dict[tuple[str, str], str | None] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    token_due_s: dict[Token, float] = field(default_factory=dict)
    pod_facts: tuple[Any, ...] = ()
    look_s: float = 0.0  # not before this; for retries and for what is only looked at
    unsure: bool = False  # the runner came with its pod: everything is to be delivered again

    def __post_init__(self) -> None:
        self.objects = self.needs.objects


def record_plan(pod: Obj, link: RunnerLink, plan: PodPlan, sources: Sources) -> Record:
    """For a runner that was just given its whole plan."""
    record = Record(link, volume_needs(pod))
    volumes = {name: volume for name, volume in plan["volumes"].items() if volume["kind"] == "files"}
    note(record, pod, volumes, sources, time.monotonic())
    return record


def due(record: Record, pod: Obj, versions: Mapping[str, Versions], now_s: float) -> bool:
    if now_s < record.look_s:
        return False
    namespace = pod["metadata"]["namespace"]
    return (
        record.unsure
        or record.needs.trust_bundles
        or any(due_s <= now_s for due_s in record.token_due_s.values())
        or record.pod_facts != _pod_facts(pod)
        or any(
            versions[kind].newer(namespace, name, record.versions.get((kind, name)))
            for kind, name in record.objects
        )
    )


def unknown_record(pod: Obj, link: RunnerLink, now_s: float) -> Record:
    """For a runner that came with its pod: a new hub, or a connection that broke with a message on its way."""
    wanted = volume_needs(pod)
    unknown = {
        token: now_s + token.expiry_s * random.uniform(0, _UNKNOWN_SHARE)  # noqa: S311 - only to spread the load
        for token in wanted.tokens
    }
    has_files = any(kind in volume for volume in pod["spec"].get("volumes", ()) for kind in FILE_KINDS)
    return Record(link, wanted, token_due_s=unknown, pod_facts=_pod_facts(pod), unsure=has_files)


def note(
    record: Record, pod: Obj, volumes: Mapping[str, FilesVolume], sources: Sources, now_s: float
) -> None:
    record.versions = {key: sources.versions.get(key) for key in record.objects}
    record.digests.update({name: digest(volume) for name, volume in volumes.items()})
    for token in sources.tokens:
        record.token_due_s[token] = now_s + token_lifetime_s(token.expiry_s, random.random())  # noqa: S311
    record.pod_facts = _pod_facts(pod)
    if record.needs.trust_bundles:
        record.look_s = now_s + _TRUST_LOOK_S


def digest(volume: FilesVolume) -> str:
    """Of what the API decides; tokens change on a clock of their own."""
    files = {
        path: file for path, file in volume["files"].items() if not file.get("keep") and not file.get("token")
    }
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def has_new_token(volume: FilesVolume, sources: Sources) -> bool:
    return bool(sources.tokens) and any(
        file.get("token") and not file.get("keep") for file in volume["files"].values()
    )


def _pod_facts(pod: Obj) -> tuple[Any, ...]:
    """What the downward API may show of a pod, as long as it shows anything."""
    if not any(shows_pod(volume) for volume in pod["spec"].get("volumes", ())):
        return ()
    metadata = pod["metadata"]
    return metadata.get("labels"), metadata.get("annotations"), metadata.get("generation")
