"""Webhooks, bootstrap provider and DNS records put together, for the operator process to run.

Webhooks are served by every replica. What writes (bootstrap Secrets, targets of mirrors, DNS records, the certificate) is
done by the one that leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Controller, Informer
from slurmlet.kube.discovery import Discovery
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.webhook import Handler
from slurmlet.model.stats_summary import Family
from slurmlet.operators.provisioning.bootstrap.bootstrap_controller import BootstrapController
from slurmlet.operators.provisioning.bootstrap.bootstrap_data import VIRTUAL_KUBELET, WORKER
from slurmlet.operators.provisioning.controller_lookup import ControllerLookup
from slurmlet.operators.provisioning.injection import injection_webhook
from slurmlet.operators.provisioning.injection.metadata_chain import MetadataChain
from slurmlet.operators.provisioning.resource_definitions import BOOTSTRAP_GROUP
from slurmlet.operators.provisioning.scaling_webhook import PATH as SCALING_PATH
from slurmlet.operators.provisioning.scaling_webhook import MirrorController, ScalingWebhook
from slurmlet.operators.provisioning.stored_certificates import (
    MountedCertificates,
    StoredCertificates,
)
from slurmlet.operators.provisioning.webhook_service import (
    INJECTION_CONFIGURATION,
    SCALING_CONFIGURATION,
    WebhookService,
)
from slurmlet.operators.provisioning.workload_clients import WorkloadClients

log = logging.getLogger(__name__)
INJECTION, SCALING, BOOTSTRAP, DNS = PROVIDER_PARTS = ("injection", "scaling", "bootstrap", "dns")
# How often to look whether a kind has been installed meanwhile.
_KIND_POLL_S = 15.0
RunController = Callable[[Controller[str]], Awaitable[None]]


@dataclass(frozen=True)
class WebhookSettings:
    """`port` 0: no webhooks. `names`: those under which the API server calls. `certificates`: cert-manager's directory."""

    namespace: str = "default"  # the operator's own, with its certificate and the Scaling Webhook's ConfigMap
    watched: str = ""  # the only namespace whose machines are bootstrapped; "": all
    # Those whose SlurmClusters may have a controller in another namespace of the management cluster.
    trusted: frozenset[str] = frozenset()
    address: str = "0.0.0.0"
    port: int = 0
    names: tuple[str, ...] = ()
    certificates: Path | None = None
    injection_fail_open: bool = False
    scaling_fail_open: bool = False


class ProviderParts:
    """`parts`: those of PROVIDER_PARTS that are not switched off."""

    def __init__(
        self, client: ApiClient, events: EventRecorder, settings: WebhookSettings, parts: frozenset[str]
    ) -> None:
        self._client, self._events, self._settings, self._parts = client, events, settings, parts
        self._workload = WorkloadClients(client)
        self._lookup = ControllerLookup(client, self._workload, settings.trusted)
        self._injection = injection_webhook.InjectionWebhook(
            MetadataChain(client), self._lookup, events,
            injection_webhook.InjectionSettings(fail_open=settings.injection_fail_open),
        )  # fmt: skip
        self._stored: StoredCertificates | None = None
        self._service = self._made_service() if self._handlers() and settings.port else None

    def families(self) -> list[Family]:
        return self._injection.families() if INJECTION in self._parts else []

    @property
    def is_serving(self) -> bool:
        """Whether webhooks that are to be served are."""
        return self._service is None or self._service.ready.is_set()

    async def serve(self) -> None:
        """For every replica, until it is cancelled."""
        if self._service is not None:
            await self._service.run()

    async def close(self) -> None:
        await self._workload.close()

    def leading(
        self, slurm_clusters: Informer, run: RunController
    ) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """What the replica that leads does besides, by name. `run`: how a controller of the operator is run."""
        found: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        if self._stored is not None and self._service is not None:
            found["webhook certificate"] = self._stored.keep
        if BOOTSTRAP in self._parts:
            found["bootstrap"] = lambda: self._bootstrap(WORKER)
            found["bootstrap of the thesis's kind"] = lambda: self._bootstrap(VIRTUAL_KUBELET)
        if SCALING in self._parts:
            found["mirrors"] = MirrorController(self._client, self._events, self._settings.namespace).run
        if DNS in self._parts:
            found["dns records"] = lambda: self._dns(slurm_clusters, run)
        return found

    def _handlers(self) -> dict[str, Handler]:
        found: dict[str, Handler] = {}
        if INJECTION in self._parts:
            found[injection_webhook.PATH] = self._injection.review
        if SCALING in self._parts:
            fail_open = self._settings.scaling_fail_open
            webhook = ScalingWebhook(self._client, self._settings.namespace, fail_open=fail_open)
            found[SCALING_PATH] = webhook.review
        return found

    def _made_service(self) -> WebhookService:
        settings = self._settings
        mounted = MountedCertificates(settings.certificates) if settings.certificates is not None else None
        configurations = (INJECTION_CONFIGURATION, SCALING_CONFIGURATION)
        self._stored = StoredCertificates(
            self._client, settings.namespace, settings.names, configurations, bundles=mounted is None
        )
        return WebhookService(self._handlers(), self._stored, settings.address, settings.port, mounted)

    async def _bootstrap(self, kind: str) -> None:
        discovery = Discovery(self._client)
        while not await _is_served(discovery, kind):  # noqa: ASYNC110 - a definition may be made at any time
            await asyncio.sleep(_KIND_POLL_S)
        await BootstrapController(
            self._client, self._events, self._lookup, kind, self._settings.watched
        ).run()

    async def _dns(self, slurm_clusters: Informer, run: RunController) -> None:
        try:
            from slurmlet.operators.provisioning.dns_records import DnsController
        except ImportError as error:
            log.warning("no DNS records are kept: %s (pip install 'slurmlet[provision]')", error)
            return
        await run(DnsController(self._client, slurm_clusters, self._lookup, self._events).controller)


async def _is_served(discovery: Discovery, kind: str) -> bool:
    try:
        return await discovery.has(kind, BOOTSTRAP_GROUP)
    except ApiError as error:
        log.warning("kind %s: %s", kind, error.message)
        return False
