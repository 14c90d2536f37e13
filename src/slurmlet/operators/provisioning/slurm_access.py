"""SlurmCluster objects → Slurm as an administrator sees it, and one look at it for all who ask at the same time.

A connection is kept as long as its object (and the Secrets it names) stay as they are. A token goes from the Secret into a
file that only this process reads: the REST client reads it again for each request, so a renewed one is used at once.

Whoever may make SlurmClusters in some namespace is not thereby an administrator of the Slurm that this process can reach by
itself: commands, configuration files and sockets of its host are for namespaces that its own administrator named.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import pwd
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slurmlet.base.errors import SlurmError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import key_of
from slurmlet.model.job_states import Stage
from slurmlet.model.slurm_admin_values import QueuedJob, WorkerNode
from slurmlet.slurm.admin_session import made
from slurmlet.slurm.administration import SlurmAdmin
from slurmlet.slurm.connection import REST, Connection

Obj = Mapping[str, Any]
# Several controllers look at the same moment; what one of them read is good for the others.
_SAME_LOOK_S = 1.0


@dataclass(frozen=True)
class Look:
    """What Slurm said at one moment."""

    jobs: tuple[QueuedJob, ...]
    workers: tuple[WorkerNode, ...]
    at_s: float  # of the monotonic clock
    by_name: Mapping[str, WorkerNode] = field(default_factory=dict)
    partition_limits: Mapping[str, int] = field(default_factory=dict)  # MaxNodes, where there is one

    def jobs_on(self, node: str) -> list[QueuedJob]:
        """Also suspended ones, of which the node's own state tells nothing."""
        return [job for job in self.jobs if node in job.nodes and job.stage is not Stage.ENDED]

    def in_use(self, node: str) -> bool:
        known = self.by_name.get(node)
        return (known is not None and known.busy) or bool(self.jobs_on(node))


class SlurmSource(Protocol):
    """Where a SlurmCluster's Slurm comes from; tests give a fake."""

    async def admin(self, cluster: Obj) -> SlurmAdmin: ...


class SlurmLooks:
    """Shares looks: whoever asks while one is under way, or right after it, gets the same."""

    def __init__(self, source: SlurmSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._last: dict[str, Look] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def admin(self, cluster: Obj) -> SlurmAdmin:
        return await self._source.admin(cluster)

    async def look(self, cluster: Obj, max_age_s: float = _SAME_LOOK_S) -> Look:
        """Raises SlurmError. `max_age_s`: how long before this call it may have begun; 0: it shows all that is so by now."""
        key, asked_s = key_of(cluster), self._clock()
        async with self._turns.setdefault(key, asyncio.Lock()):
            last = self._last.get(key)
            if last is not None and last.at_s >= asked_s - max_age_s:
                return last
            self._last[key] = await self._fresh(await self._source.admin(cluster))
            return self._last[key]

    def forget(self, cluster: Obj) -> None:
        """Something was changed in Slurm: the next look is a new one."""
        self._last.pop(key_of(cluster), None)

    async def _fresh(self, admin: SlurmAdmin) -> Look:
        # From before it was asked: what was said is at least as new.
        at_s = self._clock()
        jobs = await admin.queue()
        workers = await admin.workers()
        limits = await admin.partition_limits()
        return Look(tuple(jobs), tuple(workers), at_s, {one.name: one for one in workers}, limits)


class SlurmConnections:
    """Connections by SlurmCluster. `directory`: for tokens; private to this process.

    `trusted`: namespaces whose SlurmClusters may use what this process itself has: its commands, its host's sockets.
    """

    def __init__(self, client: ApiClient, directory: Path, trusted: Collection[str] = ()) -> None:
        self._client, self._directory, self._trusted = client, directory, frozenset(trusted)
        self._open: dict[str, tuple[str, SlurmAdmin]] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def admin(self, cluster: Obj) -> SlurmAdmin:
        """Raises SlurmError where a Secret that it needs is not there."""
        key = key_of(cluster)
        async with self._turns.setdefault(key, asyncio.Lock()):
            spec = (cluster.get("spec") or {}).get("connection") or {}
            # Secrets are read each time: few clusters, and a token that was replaced must be in use at once.
            connection = await self._connection(key, str(cluster["metadata"].get("namespace", "")), spec)
            mark = json.dumps([spec, connection.as_json()], sort_keys=True)
            known = self._open.get(key)
            if known is not None and known[0] == mark:
                return known[1]
            if known is not None:
                await known[1].close()
            configured = (spec.get("commands") or {}).get("configFile")
            around = {**os.environ, "SLURM_CONF": str(configured)} if configured else None
            self._open[key] = (mark, made(connection, around))
            return self._open[key][1]

    async def close(self) -> None:
        for _, admin in self._open.values():
            await admin.close()
        self._open.clear()

    async def _connection(self, key: str, namespace: str, spec: Obj) -> Connection:
        if "rest" not in spec and namespace not in self._trusted:
            raise SlurmError(
                f"SlurmClusters of namespace {namespace} may be reached by spec.connection.rest only",
                reason="NamespaceNotTrusted",
                hint="An administrator allows commands and socket with --trusted-namespace (chart: trustedNamespaces).",
            )
        if "socket" in spec:
            return Connection(kind=REST, socket=Path(spec["socket"]["path"]), user=_own_name())
        if "rest" not in spec:
            return Connection()
        rest = spec["rest"]
        token = await self._secret(namespace, rest["tokenSecretRef"])
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        token_file = self._write(f"{name}.token", token)
        ca = rest.get("caSecretRef")
        ca_file = None
        if ca is not None:
            content = await self._secret(namespace, ca)
            # The name tells the content, so that another CA makes another connection.
            digest = hashlib.sha256(content).hexdigest()[:16]
            ca_file = self._write(f"{name}-{digest}.crt", content)
        return Connection(
            kind=REST, url=rest["url"], token_file=token_file, ca_file=ca_file,
            user=rest.get("user", "slurm"), insecure=bool(rest.get("insecure")),
        )  # fmt: skip

    async def _secret(self, namespace: str, ref: Obj) -> bytes:
        path = f"/api/v1/namespaces/{namespace}/secrets/{ref['name']}"
        try:
            data = (await self._client.get(path)).get("data") or {}
        except ApiError as error:
            if error.status != 404:
                raise
            data = {}
        if ref["key"] not in data:
            raise SlurmError(
                f"Secret {ref['name']} with key {ref['key']} was not found in namespace {namespace}",
                reason="SecretNotFound", transient=True,
                hint="It holds what the SlurmCluster's spec.connection.rest needs.",
            )  # fmt: skip
        return base64.b64decode(data[ref["key"]])

    def _write(self, name: str, content: bytes) -> Path:
        path = self._directory / name
        if not path.exists() or path.read_bytes() != content:
            fresh = path.with_suffix(".new")
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123
                file.write(content)
            fresh.replace(path)
        return path


def _own_name() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
