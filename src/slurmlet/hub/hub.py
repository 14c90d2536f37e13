"""The hub put together: every root task by name. One of them dying ends the process; the supervisor starts it again."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from pathlib import Path
from typing import Any

from slurmlet import __version__
from slurmlet.base.clock import Clock
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir, read_json
from slurmlet.base.host_addresses import free_port
from slurmlet.base.layout import store_dir
from slurmlet.hub import bootstrap_objects
from slurmlet.hub import hub_settings as settings_module
from slurmlet.hub.agents import Agents
from slurmlet.hub.allocations.allocation_jobs import AllocationJobs
from slurmlet.hub.allocations.gang_controller import GangController
from slurmlet.hub.allocations.offered_objects import offer
from slurmlet.hub.allocations.pool_controller import PoolController
from slurmlet.hub.hub_metrics import CountedSlurm, Counts
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.jobs.submission_gate import SubmissionGate
from slurmlet.hub.kubelet import metrics_api
from slurmlet.hub.kubelet.kubelet_server import KubeletServer
from slurmlet.hub.kubelet.kubelet_stats import StatServer
from slurmlet.hub.kubelet.metrics_api import MetricsServer
from slurmlet.hub.kubelet.pod_usage import Usage
from slurmlet.hub.log_thread import LogThread
from slurmlet.hub.network import dns_rbac
from slurmlet.hub.network.pod_network import Network
from slurmlet.hub.network.service_watch import Services
from slurmlet.hub.nodes.allocation_node_controller import AllocationNodeController
from slurmlet.hub.nodes.partition_node_controller import PartitionNodeController
from slurmlet.hub.pods.container_updates import ContainerUpdates
from slurmlet.hub.pods.image_pulls import Images
from slurmlet.hub.pods.immediate_launch import Launcher, LaunchKeeper
from slurmlet.hub.pods.job_submission import Submitter
from slurmlet.hub.pods.lanes import AgentLane, Lanes, QueueLane
from slurmlet.hub.pods.pod_manager import Pods
from slurmlet.hub.pods.pod_planner import PodPlanner
from slurmlet.hub.pods.pod_start import PodStarter
from slurmlet.hub.pods.pod_termination import PodTermination
from slurmlet.hub.pods.pod_worker import PodWorker
from slurmlet.hub.pods.queued_status import QueuedStatus
from slurmlet.hub.pods.start_backoff import Pacer
from slurmlet.hub.pods.status_writer import StatusWriter
from slurmlet.hub.pods.volume_refresh import VolumeRefresh
from slurmlet.hub.runner_credentials import RunnerAuthority
from slurmlet.hub.runner_links import LinkServer
from slurmlet.hub.runner_server import ANY, serve_runners
from slurmlet.hub.storage.claim_controller import ClaimController
from slurmlet.images.image_store import Store
from slurmlet.kube.client import AT_ONCE, ApiClient, ApiError
from slurmlet.kube.credentials import by_certificate
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.reflector import Reflector
from slurmlet.model.partition_node import HubFacts
from slurmlet.slurm.interface import Slurm
from slurmlet.slurm.session import opened

log = logging.getLogger(__name__)
_API_PATIENCE_S = 0.1
# Only for people to read: a hub does not wait long for it.
_VERSION_S = 3.0
_REGISTER_AGAIN_S = 0.5
_TLS_BUFFER_BYTES = 32 << 10
_FILES = 65536
# Of pods that still run when the cluster they are in ends.
_END_GRACE_S, _END_SLACK_S = 1.0, 1.5
_LOG_S = 1.0


async def serve(directory: Path) -> None:
    """Run until SIGTERM. Raises when a root task dies."""
    settings = settings_module.load(directory)
    private_dir(settings.files.pods)
    counts = Counts()
    # Leases must not wait behind a burst of pods: nodes have a client of their own.
    async with (
        _api(settings, counts, settings.requests_at_once) as client,
        _api(settings, counts) as prompt,
        opened(settings.slurm) as plain,
    ):
        slurm = CountedSlurm(plain, counts)
        version, _ = await asyncio.gather(_slurm_version(slurm), wait_for_api(client))
        await dns_rbac.grant(client)
        async with asyncio.TaskGroup() as tasks:
            hub = _Hub(settings, client, prompt, counts, slurm, version, tasks)
            await hub.prepare()
            await hub.listen()
            for name, work in hub.root_tasks().items():
                tasks.create_task(work, name=name)
            await _stop_signal(settings.ephemeral)
            await hub.finish()
            # Ends the group, and every task in it with it.
            raise _Stopped


class _Stopped(Exception):
    """A clean end was asked for."""


def _api(settings: Settings, counts: Counts, at_once: int = AT_ONCE) -> ApiClient:
    files = (settings.pki(name) for name in ("ca.crt", "hub.crt", "hub.key"))
    return ApiClient(by_certificate(settings.api_url, *files), counts.api_answered, at_once)


async def wait_for_api(client: ApiClient) -> None:
    """Until it answers. Raises ApiError when it does not take our certificate: waiting does not help then."""
    told = ""
    while True:
        try:
            await client.get("/api/v1/nodes", limit="1")
            return
        except ApiError as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                error.hint = "The hub's certificate is not of this cluster's authority. Run: slurmlet up"
                raise
            if error.message != told:
                told = error.message
                log.info("waiting for the API server: %s", told)
            await asyncio.sleep(_API_PATIENCE_S)


class _Hub:
    """The parts, and who knows whom. Listening begins in `listen`, work in `root_tasks`."""

    def __init__(
        self,
        settings: Settings,
        client: ApiClient,
        prompt: ApiClient,
        counts: Counts,
        slurm: Slurm,
        slurm_version: str,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._slurm = slurm
        self._settings, self._client, self._prompt, self._counts = settings, client, prompt, counts
        self._earlier = read_json(settings.files.hub) or {}
        self._ports = {
            "kubelet_port": free_port(ANY, self._earlier.get("kubelet_port")),
            "metrics_port": free_port(settings.api_address, self._earlier.get("metrics_port")),
        }
        facts = _facts(settings, slurm_version, self._ports["kubelet_port"])
        store = Store(store_dir())
        self._events = EventRecorder(client, settings.host)
        self._authority = RunnerAuthority(settings)
        # Slurm and nodes
        self._watch = JobWatch(settings, slurm)
        self._nodes = PartitionNodeController(
            settings, prompt, slurm, self._events, facts, store.list, lambda: self._watch.quiet
        )
        self._agents = Agents()
        self._allocations = AllocationNodeController(
            settings, prompt, slurm, self._agents, self._watch, self._events, facts, store.list
        )
        counts.follow(*self._nodes.controllers, *self._allocations.controllers)
        # Network
        self._services = Services(settings, client)
        self._network = _network(settings, client, self._events, self._services)
        # Pods
        self._launcher = Launcher(settings, slurm, self._watch)
        gate = SubmissionGate(Clock())
        self._submitter = Submitter(settings, slurm, self._watch, self._authority, gate, self._launcher)
        self._queued = QueuedStatus(StatusWriter(client))
        self._pods = Pods(
            self._worker_maker(Images(store, client, self._events, settings.pulls_at_once)),
            tasks,
            settings.files,
            self._watch,
            slurm,
            self._submitter,
            self._agents,
            self._network,
        )
        self._watch.subscribe(self._pods.slurm_looked)
        self._agents.subscribe_pods(self._pods.news_of)
        self._agents.subscribe_nodes(self._watch.expect_node)
        self._watch.subscribe_ended(gate.jobs_ended)
        gate.subscribe(self._pods.news_of)
        self._usage = Usage(self._pods.states)

    def _worker_maker(self, images: Images) -> Callable[[dict[str, Any]], PodWorker]:
        """What every pod's worker is made of."""
        settings, watch, events, clock = self._settings, self._watch, self._events, Clock()
        lanes = Lanes(
            QueueLane(self._submitter, watch, self._nodes, self._slurm),
            AgentLane(settings, self._agents, self._authority, watch),
            self._agents,
        )
        planner = PodPlanner(settings, self._client, images, self._services, self._network)
        status, pacer = StatusWriter(self._client), Pacer()
        starter = PodStarter(lanes, planner, pacer, events)
        termination = PodTermination(settings.files, lanes, watch, status, events, clock)
        updates = ContainerUpdates(planner, events)

        def new_worker(pod: dict[str, Any]) -> PodWorker:
            return PodWorker(
                pod,
                files=settings.files,
                starter=starter,
                termination=termination,
                updates=updates,
                status=status,
                queued=self._queued,
                lanes=lanes,
                watch=watch,
                pacer=pacer,
                events=events,
                network=self._network,
                clock=clock,
            )

        return new_worker

    async def prepare(self) -> None:
        await self._allocations.load()

    async def finish(self) -> None:
        """Asked to end: pods of a cluster that ends with this hub get their grace."""
        if self._settings.ephemeral:
            await self._agents.end_all(_END_GRACE_S, _END_SLACK_S)

    async def listen(self) -> None:
        settings, pods, nodes, usage = self._settings, self._pods, self._nodes, self._usage
        stats = StatServer(pods, nodes, usage, self._watch, self._counts, self._network)
        await KubeletServer(settings, pods, stats, nodes.refresh).start(self._ports["kubelet_port"])
        if self._has_metrics:
            await MetricsServer(settings, pods, nodes, usage).start(self._ports["metrics_port"])

    @property
    def _has_metrics(self) -> bool:
        # A cluster that an older slurmlet brought up gets the keys for it with the next `up`.
        return self._settings.pki("front-proxy-ca.crt").exists()

    def root_tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Everything that goes on for as long as the hub does, by name."""
        settings, client, pods = self._settings, self._client, self._pods
        reflector = Reflector(
            client, "/api/v1/pods", pods.changed, on_synced=self._pods_synced, fieldSelector="spec.nodeName!="
        )
        links = LinkServer(
            settings, pods.link_came, pods.link_said, pods.link_ended, self._agents, pods.link_refused
        )
        claims = ClaimController(settings, client, self._events)
        self._counts.follow(*claims.controllers)
        tasks = {
            "events": self._events.run(),
            "queued status": self._queued.run(),
            "slurm watch": self._watch.run(),
            "nodes": self._nodes.run(),
            "node watch": self._nodes.watch(),
            "allocation nodes": self._allocations.run(),
            "usage": self._usage.run(),
            "services": self._services.run(),
            "pods": reflector.run(),
            "sweep": pods.sweep(),
            "volumes": claims.run(),
            "refresh": VolumeRefresh(client, self._events, pods.states).run(),
            "offers": offer(client, with_gangs=not settings.ephemeral),
            "runners": serve_runners(
                settings, links, pods, self._ports, self._earlier.get("runner_port"), self._home_fails
            ),
        }
        if settings.ephemeral:
            tasks["first things"] = bootstrap_objects.provide(settings, client, self._allocations)
        else:
            tasks |= self._job_tasks()
        if self._has_metrics:
            tasks["metrics API"] = _register_metrics(client, settings, self._ports["metrics_port"])
        if self._network is not None:
            tasks["network"] = self._network.run()
        return tasks

    def _job_tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What a cluster that submits jobs of its own looks after: not one that lives inside a single job."""
        settings, slurm, pods = self._settings, self._slurm, self._pods
        jobs = AllocationJobs(settings, slurm, self._watch, self._authority)
        shared = (settings, self._prompt, jobs, self._watch, self._agents, self._allocations, self._events)
        pool = PoolController(*shared, self._pods.states)
        gangs = GangController(*shared, self._nodes.objects)
        self._counts.follow(*pool.controllers, *gangs.controllers)
        launches = LaunchKeeper(settings, slurm, self._watch, self._launcher, pods.has_link, pods.disown)
        return {"pool": pool.run(), "gangs": gangs.run(), "launches": launches.run()}

    def _home_fails(self, message: str) -> None:
        for node in self._nodes.objects():
            self._events.node_event(node["metadata"]["name"], "Warning", "HomeFails", message)

    def _pods_synced(self) -> None:
        if self._network is not None:
            self._network.pods_synced()
        self._pods.synced.set()


def _network(
    settings: Settings, client: ApiClient, events: EventRecorder, services: Services
) -> Network | None:
    if settings.network is None:
        log.warning("pods share the network of their host until the next `slurmlet up`")
        return None
    return Network(settings, settings.network, client, events, services)


async def _register_metrics(client: ApiClient, settings: Settings, port: int) -> None:
    """Until it is done; then it stays done."""
    while True:
        try:
            await metrics_api.register(client, settings, port)
            return
        except ApiError as error:
            # In a new cluster its namespace takes a moment to appear.
            log.info("the metrics API is not registered yet: %s", error.message)
            await asyncio.sleep(_REGISTER_AGAIN_S)


async def _slurm_version(slurm: Slurm) -> str:
    try:
        async with asyncio.timeout(_VERSION_S):
            return (await slurm.capabilities()).version
    except (SlurmletError, TimeoutError) as error:
        log.warning("Slurm's version is not known: %s", error)
        return "unknown"


def _facts(settings: Settings, version: str, kubelet_port: int) -> HubFacts:
    return HubFacts(
        address=settings.api_address,
        host=settings.host,
        kubelet_port=kubelet_port,
        slurm_version=version,
        kubernetes_version=settings.kubernetes_version,
        version=__version__,
        machine_id=settings.cluster_id,
    )


async def _stop_signal(ephemeral: bool) -> None:
    """In a cluster inside one job, Slurm's SIGTERM is for the workload; who started the cluster says SIGUSR2."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, (lambda: None) if ephemeral else stopped.set)
    if ephemeral:
        loop.add_signal_handler(signal.SIGUSR2, stopped.set)
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
    writer = logging.StreamHandler()
    writer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log_thread = LogThread(writer)
    logging.basicConfig(level=logging.INFO, handlers=[log_thread], format="%(message)s")
    code = 0
    try:
        asyncio.run(serve(directory))
    except* _Stopped:
        pass
    except* SlurmletError as group:
        for error in group.exceptions:
            log.error("the hub ends: %s", error)
        code = 1
    finally:
        log_thread.finish(_LOG_S)
    return code
