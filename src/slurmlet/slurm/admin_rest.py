"""An administrator's view of Slurm through slurmrestd. Nodes can be changed from v0.0.39 on (Slurm 23.02)."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from slurmlet.base.errors import SlurmError
from slurmlet.model.slurm_admin_values import QueuedJob, WorkerNode
from slurmlet.slurm import admin_rest_values
from slurmlet.slurm.admin_commands import check_deletable
from slurmlet.slurm.connection import Connection
from slurmlet.slurm.rest_client import RestClient

_UNKNOWN_NODE = 2018
_FIRST_WITH_UPDATES = 39
_BUSY, _NOT_DYNAMIC = "requested nodes are busy", "invalid node state"


class RestAdmin:
    """The token is one of a user who is an operator or administrator in Slurm."""

    def __init__(self, connection: Connection) -> None:
        self._client = RestClient(connection)

    async def close(self) -> None:
        await self._client.close()

    async def queue(self) -> list[QueuedJob]:
        return admin_rest_values.queue(await self._client.ask("GET", "slurm", "jobs/"))

    async def workers(self) -> list[WorkerNode]:
        return admin_rest_values.workers(await self._client.ask("GET", "slurm", "nodes/"))

    async def partition_limits(self) -> dict[str, int]:
        return admin_rest_values.partition_limits(await self._client.ask("GET", "slurm", "partitions/"))

    async def drain(self, name: str, reason: str) -> None:
        await self._update(name, {"state": ["DRAIN"], "reason": reason})

    async def resume(self, name: str) -> None:
        # Not RESUME, which would also declare a node fit that is down. The reason would stay for the next drain.
        await self._update(name, {"state": ["UNDRAIN"], "reason": ""})

    async def delete(self, name: str) -> None:
        # Of all nodes: asked for one that it does not know, slurmrestd 24.11 tells an error without a number.
        found = [one for one in await self.workers() if one.name == name]
        if not found:
            return
        check_deletable(found)
        try:
            await self._client.ask("DELETE", "slurm", _path(name), harmless=(_UNKNOWN_NODE,))
        except SlurmError as error:
            said = error.said.lower()
            if _NOT_DYNAMIC in said:
                raise SlurmError(error.message, said=error.said, reason="SlurmRefused") from error
            if _BUSY in said:
                raise SlurmError(error.message, said=error.said, reason="NodeBusy", transient=True) from error
            raise

    async def set_address(self, name: str, address: str) -> None:
        await self._update(name, {"address": [address]})

    async def power_up(self, name: str) -> None:
        await self._update(name, {"state": ["POWER_UP"]})

    async def power_down(self, name: str) -> None:
        await self._update(name, {"state": ["POWER_DOWN"]})

    async def _update(self, name: str, change: dict[str, Any]) -> None:
        if await self._client.speak() < _FIRST_WITH_UPDATES:
            raise SlurmError(
                "slurmrestd of Slurm 22.05 cannot change nodes",
                hint="Connect through Slurm's commands, or upgrade Slurm.",
            )
        await self._client.ask("POST", "slurm", _path(name), payload=change)


def _path(name: str) -> str:
    return f"node/{quote(name, safe='')}"
