"""The operator's webhook server: served by every replica, for the API server calls any of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from slurmlet.kube.webhook import Handler, WebhookServer
from slurmlet.kube.webhook_certificates import MUTATING, VALIDATING
from slurmlet.operators.provisioning.stored_certificates import ServerCertificates

log = logging.getLogger(__name__)
# As the manifests name them.
INJECTION_CONFIGURATION = (MUTATING, "slurmlet-provision-injection")
SCALING_CONFIGURATION = (VALIDATING, "slurmlet-provision-scaling")


class WebhookService:
    """`handlers` by path. `port` is the one that was asked for, and once `ready` is set the one that is served."""

    def __init__(
        self, handlers: Mapping[str, Handler], certificates: ServerCertificates, address: str, port: int
    ) -> None:
        self._server, self._certificates, self._address = WebhookServer(handlers), certificates, address
        self.port, self.ready = port, asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled."""
        await self._certificates.prepare()
        self.port = await self._server.start(self._address, self.port, self._certificates.context)
        log.info("webhooks on %s port %d", self._address, self.port)
        self.ready.set()
        try:
            await self._certificates.follow()
        finally:
            await self._server.stop()
