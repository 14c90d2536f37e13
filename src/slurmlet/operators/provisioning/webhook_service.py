"""The operator's webhook server: served by every replica, for the API server calls any of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from slurmlet.kube.webhook import Handler, WebhookServer
from slurmlet.kube.webhook_certificates import MUTATING, VALIDATING
from slurmlet.operators.provisioning.injection.injection_webhook import PATH as INJECTION_PATH
from slurmlet.operators.provisioning.scaling_webhook import PATH as SCALING_PATH
from slurmlet.operators.provisioning.stored_certificates import (
    Called,
    MountedCertificates,
    StoredCertificates,
)

log = logging.getLogger(__name__)
# As the manifests name them.
INJECTION_CONFIGURATION = Called(MUTATING, "slurmlet-provision-injection", INJECTION_PATH)
SCALING_CONFIGURATION = Called(VALIDATING, "slurmlet-provision-scaling", SCALING_PATH)


class WebhookService:
    """`handlers` by path, to which one of `stored`'s tokens is added. `mounted`: the certificate that is shown instead.

    `port` is the one that was asked for, and once `ready` is set the one that is served.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        stored: StoredCertificates,
        address: str,
        port: int,
        mounted: MountedCertificates | None = None,
    ) -> None:
        self._server = WebhookServer(handlers, tokens=lambda: stored.tokens)
        self._stored, self._shown, self._address = stored, mounted or stored, address
        self.port, self.ready = port, asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled."""
        await self._shown.prepare()
        await self._stored.prepare()
        self.port = await self._server.start(self._address, self.port, self._shown.context)
        log.info("webhooks on %s port %d", self._address, self.port)
        self.ready.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._stored.follow(), name="webhook secret")
                if self._shown is not self._stored:
                    tasks.create_task(self._shown.follow(), name="mounted certificates")
        finally:
            await self._server.stop()
