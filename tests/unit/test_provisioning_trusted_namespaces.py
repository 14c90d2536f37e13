"""Whose SlurmClusters may use the Slurm that the operator's own host can reach: nobody's whom no administrator named."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.errors import SlurmError
from slurmlet.operators.provisioning.slurm_access import SlurmConnections


class Client:
    """Every Secret is there; remembers which were read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    async def get(self, path: str) -> dict[str, Any]:
        self.read.append(path)
        return {"data": {"token": base64.b64encode(b"t").decode()}}


def cluster(namespace: str, connection: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"namespace": namespace, "name": "hpc"}, "spec": {"connection": connection}}


OWN_WAYS = [
    {"commands": {}},
    {"commands": {"configFile": "/home/user1/slurm.conf"}},
    {"socket": {"path": "/run/slurmrestd.sock"}},
    {},
]


@pytest.mark.parametrize("connection", OWN_WAYS, ids=["commands", "configuration", "socket", "nothing"])
def test_a_namespace_that_nobody_trusts_does_not_reach_the_operators_own_slurm(
    tmp_path: Path, connection: dict[str, Any]
) -> None:
    async def scenario() -> None:
        connections = SlurmConnections(Client(), tmp_path, ["operator"])  # type: ignore[arg-type]
        with pytest.raises(
            SlurmError, match=r"namespace tenant may be reached by spec\.connection\.rest only"
        ):
            await connections.admin(cluster("tenant", connection))
        await connections.admin(cluster("operator", connection))
        await connections.close()

    asyncio.run(scenario())


def test_a_token_is_read_from_the_clusters_own_namespace(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = Client()
        connections = SlurmConnections(client, tmp_path)  # type: ignore[arg-type]
        rest = {"url": "https://slurm.example.org", "tokenSecretRef": {"name": "s", "key": "token"}}
        await connections.admin(cluster("tenant", {"rest": rest}))
        assert client.read == ["/api/v1/namespaces/tenant/secrets/s"]
        await connections.close()

    asyncio.run(scenario())
