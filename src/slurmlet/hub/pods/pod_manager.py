"""All pods the hub looks after: one worker each, found by UID or by name; what belongs to no pod is swept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.base.layout import ClusterFiles
from slurmlet.hub.agents import Agents
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.network.pod_network import Network
from slurmlet.hub.pods.job_file import read_job_file
from slurmlet.hub.pods.job_submission import Submitter
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.pod_worker import PodWorker
from slurmlet.hub.runner_links import GATEWAY, LinkLost, RunnerLink
from slurmlet.model import job_states
from slurmlet.model.ids import JobId, PodUid
from slurmlet.protocol.messages import GatewayToHub, RunnerToHub
from slurmlet.slurm.interface import Slurm

log = logging.getLogger(__name__)
_SWEEP_S = 60.0

Obj = dict[str, Any]


class Pods:
    def __init__(
        self,
        new_worker: Callable[[Obj], PodWorker],
        tasks: asyncio.TaskGroup,
        files: ClusterFiles,
        watch: JobWatch,
        slurm: Slurm,
        submitter: Submitter,
        agents: Agents,
        network: Network | None,
    ) -> None:
        self._new_worker = new_worker
        self._tasks = tasks
        self._files = files
        self._watch = watch
        self._slurm = slurm
        self._submitter = submitter
        self._agents = agents
        self._network = network
        self._workers: dict[PodUid, PodWorker] = {}
        self._by_name: dict[tuple[str, str], PodWorker] = {}
        # Set when the API server and Slurm have both been listed once: only then is an absence a fact.
        self.synced = asyncio.Event()
        self._ready = asyncio.Event()

    def changed(self, pod: Obj, gone: bool) -> None:
        """The reflector's callback."""
        uid = PodUid(pod["metadata"]["uid"])
        if self._network is not None:
            self._network.pod_changed(pod, gone)
        worker = self._workers.get(uid)
        if worker is not None:
            worker.update(pod, gone)
        elif not gone:
            log.info("pod %s: bound to %s", "/".join(_name(pod)), pod["spec"]["nodeName"])
            worker = self._workers[uid] = self._new_worker(pod)
            self._by_name[_name(pod)] = worker
            self._tasks.create_task(self._work(worker), name=f"pod {'/'.join(_name(pod))}")

    async def _work(self, worker: PodWorker) -> None:
        # Before Slurm's first answer a running job could be taken for a missing one, and submitted twice.
        await self._ready.wait()
        await worker.run()
        if self._network is not None:
            self._network.released(worker.state.uid)
        del self._workers[worker.state.uid]
        if self._by_name.get(_name(worker.state.pod)) is worker:
            del self._by_name[_name(worker.state.pod)]

    def slurm_looked(self) -> None:
        self._ready.set()
        for worker in self._workers.values():
            worker.nudge()

    def news_of(self, uid: PodUid) -> None:
        """An agent told something about a pod."""
        worker = self._workers.get(uid)
        if worker is not None:
            worker.news()

    def has_link(self, uid: PodUid) -> bool:
        worker = self._workers.get(uid)
        return worker is not None and worker.state.live_link is not None

    async def disown(self, uid: PodUid, job_id: JobId) -> None:
        """The pod could not begin in this job: it gets another."""
        await self._submitter.disown(uid, job_id)
        worker = self._workers.get(uid)
        if worker is not None:
            worker.disown(job_id)

    def named(self, namespace: str, name: str) -> PodWorker | None:
        return self._by_name.get((namespace, name))

    def states(self) -> list[PodState]:
        return [worker.state for worker in self]

    def __iter__(self) -> Iterator[PodWorker]:
        return iter(list(self._workers.values()))

    # Runners

    async def link_came(self, link: RunnerLink) -> None:
        if link.uid == GATEWAY:
            return
        worker = self._workers.get(link.uid)
        if worker is None:
            log.info("a runner of pod %s dialled in, but the pod is gone", link.uid)
            await link.tell({"type": "stop", "grace_s": 0, "reason": "the pod is gone"})
            return
        worker.attach(link)

    async def link_said(self, link: RunnerLink, message: RunnerToHub | GatewayToHub) -> None:
        worker = self._workers.get(link.uid)
        if message["type"] == "report" or message["type"] == "bye" or message["type"] == "event":
            if worker is not None:
                await worker.heard(link, message)
            elif message["type"] == "bye":
                await link.tell({"type": "ack", "seq": message["seq"]})
        elif message["type"] != "hello" and message["type"] != "answer" and self._network is not None:
            if worker is not None or link.uid == GATEWAY:
                self._network.heard(link, worker.state.pod if worker is not None else None, message)
            if worker is not None:
                worker.placed(self._network.known_address(link.uid))

    def link_refused(self, uid: PodUid, why: str) -> None:
        worker = self._workers.get(uid)
        if worker is not None:
            worker.runner_refused(why)

    def link_ended(self, link: RunnerLink) -> None:
        if self._network is not None:
            self._network.link_ended(link)
        worker = self._workers.get(link.uid)
        if worker is not None:
            worker.detach(link)

    # What belongs to no pod

    async def sweep(self) -> None:
        """Jobs and directories of pods that went while no hub was there to see."""
        await self.synced.wait()
        await self._ready.wait()
        while True:
            # Jobs first: a directory is needed as long as its job may run.
            orphans = await self._sweep_jobs()
            await self._sweep_agents()
            await asyncio.to_thread(self._sweep_directories, orphans)
            await asyncio.sleep(_SWEEP_S)

    async def _sweep_jobs(self) -> set[PodUid]:
        jobs = self._watch.all_jobs()
        orphans = {
            uid for uid, job in jobs.items() if uid not in self._workers and not job_states.is_over(job.state)
        }
        if orphans:
            log.info("cancelling %d Slurm jobs whose pods are gone", len(orphans))
            try:
                await self._slurm.cancel([jobs[uid].job_id for uid in orphans])
            except SlurmletError as error:
                log.warning("they could not be cancelled: %s", error.message)
        return orphans

    async def _sweep_agents(self) -> None:
        for agent in self._agents:
            for uid in agent.running - self._workers.keys():
                log.info("node %s: killing pod %s, whose object is gone", agent.name, uid)
                with contextlib.suppress(LinkLost):
                    await self._agents.kill(agent, uid)

    def _sweep_directories(self, still_running: set[PodUid]) -> None:
        root = self._files.pods
        for directory in list(root.iterdir()) if root.is_dir() else ():
            uid = PodUid(directory.name)
            if uid not in self._workers and uid not in still_running and not self._may_run_on_agent(uid):
                shutil.rmtree(directory, ignore_errors=True)

    def _may_run_on_agent(self, uid: PodUid) -> bool:
        """Its runner needs the directory to dial in, and to be told that the pod is gone."""
        note = read_job_file(self._files.pod(uid))
        agent = self._agents.get(str(note.get("node") or ""))
        return agent is not None and agent.fate is None and (not agent.alive or uid in agent.running)


def _name(pod: Obj) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]
