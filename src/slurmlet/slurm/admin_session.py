"""An administrator's Slurm, reached as a connection says: the one place that chooses between implementations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slurmlet.slurm.administration import SlurmAdmin
from slurmlet.slurm.connection import REST, Connection


@asynccontextmanager
async def opened(connection: Connection) -> AsyncIterator[SlurmAdmin]:
    """For as long as the context lasts."""
    if connection.kind == REST:
        from slurmlet.slurm.admin_rest import RestAdmin

        rest = RestAdmin(connection)
        try:
            yield rest
        finally:
            await rest.close()
    else:
        from slurmlet.slurm.admin_commands import CommandAdmin

        commands = CommandAdmin()
        try:
            yield commands
        finally:
            await commands.close()
