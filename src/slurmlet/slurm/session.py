"""Slurm, reached as a cluster's settings say (connection.py): the one place that chooses between implementations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slurmlet.slurm.connection import REST, Connection
from slurmlet.slurm.interface import Slurm


@asynccontextmanager
async def opened(connection: Connection) -> AsyncIterator[Slurm]:
    """Slurm over this connection, for as long as the context lasts."""
    if connection.kind == REST:
        # aiohttp takes a tenth of a second to load, which most commands can do without.
        from slurmlet.slurm.rest import RestSlurm

        async with RestSlurm(connection) as slurm:
            yield slurm
    else:
        from slurmlet.slurm.commands import CommandSlurm

        yield CommandSlurm()
