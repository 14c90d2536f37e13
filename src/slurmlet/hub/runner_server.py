"""Where runners and agents dial in, and hub.json, by which they find it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmlet.base.files import write_json
from slurmlet.base.host_addresses import dialled_addresses, free_port
from slurmlet.hub.hub_settings import SERVER_NAME, Settings
from slurmlet.hub.pods.pod_manager import Pods
from slurmlet.hub.runner_links import LinkServer
from slurmlet.kube.work_queue import Backoff

log = logging.getLogger(__name__)
ANY = "0.0.0.0"  # compute nodes dial the hub; every port of it wants a certificate
_HOME_BACKOFF = Backoff(first_s=1.0, most_s=30.0)


async def serve_runners(
    settings: Settings,
    links: LinkServer,
    pods: Pods,
    ports: Mapping[str, int],
    last_port: int | None,
    tell: Callable[[str], None],
) -> None:
    # A runner that dials in before the pods are known would be sent away as a stranger.
    await pods.synced.wait()
    server = await links.start(free_port(ANY, last_port))
    record = {
        "host": settings.host,
        "addresses": list(dict.fromkeys([settings.api_address, *dialled_addresses()])),
        "runner_port": server.sockets[0].getsockname()[1],
        **ports,
        "server_name": SERVER_NAME,
        "pod_network": settings.network is not None,
        "pid": os.getpid(),
    }
    try:
        await write_record(settings.files.hub, record, tell)
        await asyncio.get_running_loop().create_future()
    finally:
        # Not `async with` or serve_forever: from Python 3.12 on both wait until every runner has hung up.
        server.close()


async def write_record(path: Path, record: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """hub.json, by which runners find the hub. A home that is full or away is waited for: what serves here serves on."""
    failures = 0
    while True:
        try:
            await asyncio.to_thread(write_json, path, dict(record))
            return
        except OSError as error:
            failures += 1
            delay_s = _HOME_BACKOFF.delay_s(failures)
            log.warning("%s cannot be written: %s; again in %.1f s", path, error, delay_s)
            tell(
                f"{path} cannot be written: {error}. New pods cannot reach the hub; free space in the home directory"
            )
            await asyncio.sleep(delay_s)
