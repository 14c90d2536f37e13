"""The operator: one process that runs every part that was not switched off, for as long as it leads.

The parts are made anew each time this process comes to lead: what it knew before may be wrong by then. Metrics and health
are served by every replica, also by those that wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from slurmlet.base.clock import Clock
from slurmlet.base.errors import SlurmletError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Controller, Informer
from slurmlet.kube.credentials import Credentials
from slurmlet.kube.discovery import Discovery
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.leader_lease import LeaderElector
from slurmlet.operators.provisioning.autoscaler_controller import SETS_PATH, AutoscalerController
from slurmlet.operators.provisioning.detach import DetachController
from slurmlet.operators.provisioning.node_records import NodeRecordController
from slurmlet.operators.provisioning.operator_settings import OperatorSettings
from slurmlet.operators.provisioning.power_saving import PowerSavingController
from slurmlet.operators.provisioning.provider_parts import ProviderParts
from slurmlet.operators.provisioning.provisioning_metrics import ProvisioningMetrics
from slurmlet.operators.provisioning.scale_target import MACHINE_GROUP, ScaleTargets
from slurmlet.operators.provisioning.slurm_access import SlurmConnections, SlurmLooks, SlurmSource

log = logging.getLogger(__name__)
# How often to look whether Cluster API has been installed meanwhile.
_KIND_POLL_S = 15.0


@dataclass(frozen=True)
class Shared:
    """What the parts have in common while this process leads."""

    settings: OperatorSettings
    client: ApiClient
    discovery: Discovery
    events: EventRecorder
    metrics: ProvisioningMetrics
    worker_sets: Informer
    slurm_clusters: Informer
    targets: ScaleTargets
    looks: SlurmLooks
    clock: Clock

    async def run(self, controller: Controller[str]) -> None:
        self.metrics.controllers.append(controller)
        try:
            await controller.run()
        finally:
            self.metrics.controllers.remove(controller)


Part = Callable[[Shared], Coroutine[Any, Any, None]]


async def _autoscaler(shared: Shared) -> None:
    made = AutoscalerController(
        shared.client, shared.worker_sets, shared.slurm_clusters, shared.targets, shared.looks, shared.events,
        shared.metrics, shared.clock, shared.settings.interval_s,
    )  # fmt: skip
    await shared.run(made.controller)


async def _detach(shared: Shared) -> None:
    resource = await _kind(shared.discovery, "Machine", MACHINE_GROUP)
    machines = Informer(shared.client, resource.path(namespace=shared.settings.namespace))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(machines.run(), name="machines")
        await machines.synced.wait()
        made = DetachController(
            shared.client, machines, resource.path().rpartition("/")[0], resource.api_version, shared.worker_sets,
            shared.slurm_clusters, shared.looks, shared.events, shared.clock, shared.settings.interval_s,
        )  # fmt: skip
        tasks.create_task(shared.run(made.controller), name="detach")


async def _node_records(shared: Shared) -> None:
    made = NodeRecordController(
        shared.worker_sets, shared.slurm_clusters, shared.targets, shared.looks, shared.events, shared.clock,
        shared.settings.interval_s,
    )  # fmt: skip
    await shared.run(made.controller)


async def _power_saving(shared: Shared) -> None:
    made = PowerSavingController(shared.client, shared.worker_sets, shared.targets, shared.events)
    await shared.run(made.controller)


LEADING: Mapping[str, Part] = {
    "autoscaler": _autoscaler,
    "detach": _detach,
    "node-records": _node_records,
    "power-saving": _power_saving,
}


async def _kind(discovery: Discovery, kind: str, group: str) -> Any:
    """Once its definition is there: Cluster API may be installed after the operator."""
    while True:
        try:
            return await discovery.resource(kind, group)
        except ApiError as error:
            log.info("waiting for kind %s of %s: %s", kind, group, error.message)
            await asyncio.sleep(_KIND_POLL_S)


async def lead(
    settings: OperatorSettings,
    client: ApiClient,
    source: SlurmSource,
    metrics: ProvisioningMetrics,
    provider: ProviderParts | None = None,
) -> None:
    """All parts, until this is cancelled. `provider`: webhooks and what belongs to them, which every replica has."""
    discovery = Discovery(client)
    shared = Shared(
        settings=settings,
        client=client,
        discovery=discovery,
        events=EventRecorder(client, settings.own_name),
        metrics=metrics,
        worker_sets=Informer(client, _path(settings.namespace, "workersets")),
        slurm_clusters=Informer(client, _path(settings.namespace, "slurmclusters")),
        targets=ScaleTargets(client, discovery),
        looks=SlurmLooks(source),
        clock=Clock(),
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(shared.events.run(), name="events")
        tasks.create_task(shared.worker_sets.run(), name="worker sets")
        tasks.create_task(shared.slurm_clusters.run(), name="slurm clusters")
        # Without all of them a Machine would seem to belong to nobody.
        await shared.worker_sets.synced.wait()
        await shared.slurm_clusters.synced.wait()
        for name, part in LEADING.items():
            if name in settings.parts:
                tasks.create_task(part(shared), name=name)
        for name, work in provider.leading(shared.slurm_clusters, shared.run).items() if provider else ():
            tasks.create_task(work(), name=name)


def _path(namespace: str, plural: str) -> str:
    return f"{SETS_PATH}/namespaces/{namespace}/{plural}" if namespace else f"{SETS_PATH}/{plural}"


class MetricsServer:
    """/metrics, /healthz and /readyz; nothing here tells a secret, and nothing can be changed."""

    def __init__(
        self, metrics: ProvisioningMetrics, leading: Callable[[], bool], ready: Callable[[], bool]
    ) -> None:
        self._metrics, self._leading, self._ready = metrics, leading, ready
        self._runner: web.AppRunner | None = None

    async def start(self, address: str, port: int) -> int:
        app = web.Application()
        app.router.add_get("/metrics", self._exposed)
        app.router.add_get("/healthz", self._healthy)
        app.router.add_get("/readyz", self._is_ready)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, address, port).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _exposed(self, _: web.Request) -> web.Response:
        text = self._metrics.exposition(leading=self._leading())
        return web.Response(text=text, content_type="text/plain")

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.json_response({"leading": self._leading()})

    async def _is_ready(self, request: web.Request) -> web.Response:
        """Not before webhooks are served: the API server would be sent here."""
        if not self._ready():
            return web.json_response({"webhooks": "not served yet"}, status=503)
        return await self._healthy(request)


async def serve(settings: OperatorSettings, credentials: Credentials) -> None:
    """Until SIGTERM. Raises when a part dies."""
    metrics = ProvisioningMetrics()
    with tempfile.TemporaryDirectory(prefix="slurmlet-provision-") as directory:
        async with ApiClient(credentials) as client:
            connections = SlurmConnections(client, Path(directory), settings.trusted)
            events = EventRecorder(client, settings.own_name)
            provider = ProviderParts(client, events, settings.webhooks, settings.parts)
            metrics.sources.append(provider.families)
            elector = LeaderElector(
                client, settings.lease_namespace, settings.lease_name, settings.own_name,
                lambda: lead(settings, client, connections, metrics, provider), times=settings.lease_times,
            )  # fmt: skip
            server = MetricsServer(metrics, lambda: elector.leading, lambda: provider.is_serving)
            port = await server.start(settings.metrics_address, settings.metrics_port)
            log.info(
                "metrics on %s port %d; parts: %s",
                settings.metrics_address,
                port,
                ", ".join(sorted(settings.parts)),
            )
            works = {"leader": elector.run(), "events": events.run(), "webhooks": provider.serve()}
            work = asyncio.create_task(_together(works), name="operator")
            try:
                await _until_stopped(work)
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await server.stop()
                await provider.close()
                await connections.close()


async def _together(works: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for name, work in works.items():
            tasks.create_task(work, name=name)


async def _until_stopped(work: asyncio.Task[None]) -> None:
    stopped = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stopped.set)
    waiter = asyncio.create_task(stopped.wait(), name="signals")
    await asyncio.wait([work, waiter], return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if work.done():
        work.result()


def run(settings: OperatorSettings, credentials: Credentials) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    code = 0
    try:
        asyncio.run(serve(settings, credentials))
    except* SlurmletError as group:
        for error in _leaves(group):
            log.error("the operator ends: %s", error)
        code = 1
    return code


def _leaves(group: BaseExceptionGroup[SlurmletError]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
