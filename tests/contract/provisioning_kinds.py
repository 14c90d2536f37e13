"""Kinds that tests of `slurmlet provision` need at the API server: installed once, then found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.operators.provisioning.resource_definitions import DEFINITIONS

Obj = dict[str, Any]


async def install(client: ApiClient, definitions: Sequence[Obj]) -> None:
    """Those that are there stay as they are; all are served when it returns."""
    for definition in definitions:
        try:
            await client.create(DEFINITIONS, definition)
        except ApiError as error:
            if error.status != 409:
                raise
    for definition in definitions:
        spec = definition["spec"]
        for version in spec["versions"]:
            await _served(client, f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}")


async def _served(client: ApiClient, path: str) -> None:
    while True:
        try:
            await client.get(path)
            return
        except ApiError as error:
            # 429: its storage is being made.
            if error.status not in (404, 429):
                raise
            await asyncio.sleep(0.05)
