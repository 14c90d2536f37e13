"""An administrator's Slurm, reached as a connection says: the one place that chooses between implementations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from slurmlet.slurm.administration import SlurmAdmin
from slurmlet.slurm.connection import REST, Connection


@asynccontextmanager
async def opened(connection: Connection) -> AsyncIterator[SlurmAdmin]:
    """For as long as the context lasts."""
    admin = made(connection)
    try:
        yield admin
    finally:
        await admin.close()


def made(connection: Connection, environment: Mapping[str, str] | None = None) -> SlurmAdmin:
    """`environment`: of Slurm's commands, where not that of this process. Whoever has it closes it."""
    if connection.kind == REST:
        # aiohttp takes a tenth of a second to load.
        from slurmlet.slurm.admin_rest import RestAdmin

        return RestAdmin(connection)
    from slurmlet.slurm.admin_commands import CommandAdmin

    return CommandAdmin(environment)
