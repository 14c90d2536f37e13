"""The hub put together: every root task by name. One of them dying ends the process; the supervisor starts it again."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from asyncio.sslproto import SSLProtocol
from collections.abc import Mapping
from pathlib import Path

from slurmlet import __version__
from slurmlet.base.addressing import dialled_addresses, free_port
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir, read_json, write_json
from slurmlet.base.layout import store_dir
from slurmlet.hub import settings as settings_module
from slurmlet.hub.counting import CountedScheduler, Counts
from slurmlet.hub.credentials import RunnerAuthority
from slurmlet.hub.imaging import Images
from slurmlet.hub.links import LinkServer
from slurmlet.hub.nodes import NodeKeeper
from slurmlet.hub.pacing import Pacer
from slurmlet.hub.pods import Pods
from slurmlet.hub.polling import SlurmWatch
from slurmlet.hub.provisioning import Provisioner
from slurmlet.hub.refreshing import Refresher
from slurmlet.hub.services import Services
from slurmlet.hub.serving import metricsapi
from slurmlet.hub.serving.kubelet import KubeletServer
from slurmlet.hub.serving.metricsapi import MetricsServer
from slurmlet.hub.serving.stats import StatServer
from slurmlet.hub.settings import SERVER_NAME, Settings
from slurmlet.hub.submitting import Submitter
from slurmlet.hub.tools import Tools
from slurmlet.hub.usage import Usage
from slurmlet.images.store import Store
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.reflecting import Reflector
from slurmlet.model.nodes import HubFacts
from slurmlet.slurm.client import Scheduler, SlurmClient

log = logging.getLogger(__name__)
_API_PATIENCE_S = 0.1
_REGISTER_AGAIN_S = 0.5
_TLS_BUFFER_BYTES = 32 << 10
_FILES = 65536
ANY = "0.0.0.0"  # compute nodes dial the hub; every port of it wants a certificate


async def serve(directory: Path) -> None:
    """Run until SIGTERM. Raises when a root task dies."""
    settings = settings_module.load(directory)
    private_dir(settings.files.pods)
    counts = Counts()
    async with _api(settings, counts) as client:
        await _wait_for_api(client)
        async with asyncio.TaskGroup() as tasks:
            hub = await _spawn(settings, client, counts, tasks)
            await _stop_signal()
            hub.cancel()
            raise _Stopped


class _Stopped(Exception):
    """A clean end was asked for."""


def _api(settings: Settings, counts: Counts) -> ApiClient:
    return ApiClient(
        settings.api_url,
        settings.pki("ca.crt"),
        settings.pki("hub.crt"),
        settings.pki("hub.key"),
        counts.api_answered,
    )


async def _wait_for_api(client: ApiClient) -> None:
    while True:
        try:
            await client.get("/api/v1/nodes", limit="1")
            return
        except ApiError:
            await asyncio.sleep(_API_PATIENCE_S)


async def _spawn(
    settings: Settings, client: ApiClient, counts: Counts, tasks: asyncio.TaskGroup
) -> asyncio.Task[None]:
    slurm = CountedScheduler(SlurmClient(), counts)
    events = EventRecorder(client, settings.host)
    earlier = read_json(settings.files.hub) or {}
    pods: Pods
    watch = SlurmWatch(settings, slurm, lambda: pods.slurm_looked())
    links = LinkServer(
        settings,
        lambda link: pods.link_came(link),
        lambda link, message: pods.link_said(link, message),
        lambda link: pods.link_ended(link),
    )
    submitter = Submitter(settings, slurm, watch, RunnerAuthority(settings))
    kubelet_port = free_port(ANY, earlier.get("kubelet_port"))
    facts = await _facts(settings, slurm, kubelet_port)
    store = Store(store_dir())
    nodes = NodeKeeper(settings, client, slurm, events, facts, store.list)
    images = Images(store, client, events, settings.pulls_at_once)
    services = Services(settings, client)
    tools = Tools(settings, client, events, slurm, watch, images, submitter, nodes, Pacer(), services)
    pods = Pods(tools, tasks)
    watch.busy = pods.busy
    reflector = Reflector(
        client, "/api/v1/pods", pods.changed, on_synced=pods.synced.set, fieldSelector="spec.nodeName!="
    )
    usage = Usage(lambda: [worker.state for worker in pods])
    kubelet = KubeletServer(settings, pods, StatServer(pods, nodes, usage, watch, counts))
    await kubelet.start(kubelet_port)
    metrics_port = free_port(settings.api_address, earlier.get("metrics_port"))
    # A cluster that an older slurmlet brought up gets the keys for it with the next `up`.
    metrics = (
        MetricsServer(settings, pods, nodes, usage) if settings.pki("front-proxy-ca.crt").exists() else None
    )
    if metrics is not None:
        await metrics.start(metrics_port)

    async def all_tasks() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(events.run(), name="events")
            group.create_task(watch.run(), name="slurm watch")
            group.create_task(nodes.run(), name="nodes")
            group.create_task(nodes.watch(), name="node watch")
            group.create_task(usage.run(), name="usage")
            if metrics is not None:
                group.create_task(_register_metrics(client, settings, metrics_port), name="metrics API")
            group.create_task(services.run(), name="services")
            group.create_task(reflector.run(), name="pods")
            group.create_task(pods.sweep(), name="sweep")
            group.create_task(Provisioner(settings, client, events).run(), name="volumes")
            group.create_task(
                Refresher(tools, lambda: (worker.state for worker in pods)).run(), name="refresh"
            )
            ports = {"kubelet_port": kubelet_port, "metrics_port": metrics_port}
            group.create_task(
                _serve_runners(settings, links, pods, ports, earlier.get("runner_port")), name="runners"
            )

    return tasks.create_task(all_tasks(), name="hub")


async def _serve_runners(
    settings: Settings, links: LinkServer, pods: Pods, ports: Mapping[str, int], last_port: int | None
) -> None:
    # A runner that dials in before the pods are known would be sent away as a stranger.
    await pods.synced.wait()
    server = await links.start(free_port(ANY, last_port))
    write_json(
        settings.files.hub,
        {
            "host": settings.host,
            "addresses": list(dict.fromkeys([settings.api_address, *dialled_addresses()])),
            "runner_port": server.sockets[0].getsockname()[1],
            **ports,
            "server_name": SERVER_NAME,
            "pid": os.getpid(),
        },
    )
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        # Not `async with` or serve_forever: from Python 3.12 on both wait until every runner has hung up.
        server.close()


async def _register_metrics(client: ApiClient, settings: Settings, port: int) -> None:
    """Until it is done; then it stays done."""
    while True:
        try:
            await metricsapi.register(client, settings, port)
            return
        except ApiError as error:
            # In a new cluster its namespace takes a moment to appear.
            log.info("the metrics API is not registered yet: %s", error.message)
            await asyncio.sleep(_REGISTER_AGAIN_S)


async def _facts(settings: Settings, slurm: Scheduler, kubelet_port: int) -> HubFacts:
    try:
        version = await asyncio.to_thread(slurm.version)
    except SlurmletError as error:
        log.warning("Slurm's version is not known: %s", error.message)
        version = "unknown"
    return HubFacts(
        address=settings.api_address,
        host=settings.host,
        kubelet_port=kubelet_port,
        slurm_version=version,
        kubernetes_version=settings.kubernetes_version,
        version=__version__,
        machine_id=settings.cluster_id,
    )


async def _stop_signal() -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stopped.set)
    await stopped.wait()


def _allow_many_files() -> None:
    """Each runner is a connection, and strangers may open some too: 1024 files, a common limit, are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _keep_links_small() -> None:
    """asyncio gives every TLS connection a read buffer of 256 KiB: a gigabyte for 4,000 runners that say little.

    Two TLS records are enough. The attribute is not a documented one; a Python without it just uses more memory.
    """
    if hasattr(SSLProtocol, "max_size"):
        SSLProtocol.max_size = _TLS_BUFFER_BYTES


def run(directory: Path) -> int:
    os.umask(0o077)
    _keep_links_small()
    _allow_many_files()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    code = 0
    try:
        asyncio.run(serve(directory))
    except* _Stopped:
        pass
    except* SlurmletError as group:
        for error in group.exceptions:
            log.error("the hub ends: %s", error)
        code = 1
    return code
