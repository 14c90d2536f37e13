"""One worker per pod: brings it from bound to gone.

Level-triggered: `_step` looks at all that is known now (the object, Slurm's word, the runner's report) and does the next
thing. Whatever wakes it, in whatever order, after whatever crash, the same facts lead to the same act. Nothing is kept
here that a new hub could not learn again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from slurmlet.base.clock import Clock, rfc3339
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import read_json
from slurmlet.base.layout import ClusterFiles
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.network.pod_network import Network
from slurmlet.hub.pods.container_updates import ContainerUpdates
from slurmlet.hub.pods.lanes import Lanes
from slurmlet.hub.pods.pod_start import PodStarter
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.pod_termination import PodTermination
from slurmlet.hub.pods.queued_status import QueuedStatus
from slurmlet.hub.pods.start_backoff import Pacer
from slurmlet.hub.pods.status_writer import StatusWriter
from slurmlet.hub.runner_links import LinkLost, RunnerLink
from slurmlet.kube.client import ApiError
from slurmlet.kube.events import EventRecorder
from slurmlet.model import job_states
from slurmlet.model.downward_api import Place
from slurmlet.model.ids import JobId
from slurmlet.model.network_plan import uses_host_network
from slurmlet.model.pod_resize import is_new_resize, resize_event
from slurmlet.model.pod_status import seconds_until_queued
from slurmlet.model.slurm_values import Job
from slurmlet.protocol import checks
from slurmlet.protocol.messages import PodNews
from slurmlet.protocol.pod_report import PodReport
from slurmlet.protocol.wire import ProtocolError

log = logging.getLogger(__name__)
Obj = dict[str, Any]

_RETRY_S = 2.0
_SOON_S = 0.3
_FAULT_RETRY_S = 30.0
# How long a signalled pod may wait for Slurm to say why: longer than KillWait (30 s), for so long may a job be COMPLETING.
_VERDICT_S = 45.0


class PodWorker:
    def __init__(
        self,
        pod: Obj,
        *,
        files: ClusterFiles,
        starter: PodStarter,
        termination: PodTermination,
        updates: ContainerUpdates,
        status: StatusWriter,
        queued: QueuedStatus,
        lanes: Lanes,
        watch: JobWatch,
        pacer: Pacer,
        events: EventRecorder,
        network: Network | None,
        clock: Clock,
    ) -> None:
        self.state = PodState(pod, clock)
        self._files = files
        self._starter = starter
        self._termination = termination
        self._updates = updates
        self._status = status
        self._queued = queued
        self._lanes = lanes
        self._watch = watch
        self._pacer = pacer
        self._events = events
        self._network = network
        self._clock = clock
        self._wake = asyncio.Event()
        self._linked: asyncio.Event | None = None  # while somebody waits for a link
        self._finished = False
        self._verdict_asked_s: float | None = None
        self._pending_told = ""
        self._refused_told = ""
        self._seen_job: Job | None = None  # at the last look that counts

    # What wakes the worker

    def update(self, pod: Obj, gone: bool) -> None:
        """A newer version of the object, or its end."""
        if gone:
            self.state.gone = True
        else:
            self.state.take_newer(pod)
        self._wake.set()

    def attach(self, link: RunnerLink) -> None:
        """The pod's runner dialled in, for the first time or again."""
        state, hello = self.state, link.runner
        if state.link is not None:
            state.link.end()
        state.link = link
        size = self._lanes.of(state.node).size(state.node)
        state.place = Place(
            host_ip=hello["host_ip"],
            host=hello["host"],
            node_cpus=size.cpus,
            node_memory_bytes=size.memory_bytes,
            own_ip=self._own_ip(link),
        )
        if hello["report"] is not None:
            state.report = hello["report"]
        self._adopt_job_of(link)
        state.stop_sent_grace_s = None
        log.info("pod %s: runner of job %s dialled in from %s", state.name, state.job_id, state.place.host)
        if self._linked is not None:
            self._linked.set()
        self._wake.set()

    def _adopt_job_of(self, link: RunnerLink) -> None:
        """Should the pod ever have two jobs, its runner's holds the claim. Slurm must know the job as the pod's."""
        state, told = self.state, JobId(link.runner["job_id"])
        if told and told != state.job_id and self._watch.owns(state.uid, told):
            state.job_id, state.fate = told, None

    def _own_ip(self, link: RunnerLink) -> str | None:
        state, network = self.state, self._network
        if network is None or uses_host_network(state.pod):
            return ""
        # One that runs since before there was a pod network keeps the address that its status shows.
        shown = (state.pod.get("status") or {}).get("podIP") if link.has_pod else None
        return network.known_address(state.uid) or shown

    def placed(self, ip: str) -> None:
        """The runner told the address it has: news to a hub that was started anew."""
        if uses_host_network(self.state.pod):
            return
        if self.state.place is not None and self.state.place.own_ip != ip:
            self.state.place = replace(self.state.place, own_ip=ip)
            self._wake.set()

    async def heard(self, link: RunnerLink, message: PodNews) -> None:
        """A control message of the runner."""
        if message["type"] == "event":
            told = (message["kind"], message["reason"], message["message"], message["container"])
            self._events.pod_event(self.state.pod, *told)
            return
        self.state.report = message["report"]
        if self.state.ran:
            self._pacer.started(self.state.pod)
        # The runner put it on disk before it sent it, so it is written down already.
        await link.tell({"type": "ack", "seq": message["seq"]})
        self._wake.set()

    def runner_refused(self, why: str) -> None:
        """The pod's runner speaks a protocol that this hub does not: the pod runs on, out of our reach."""
        if why != self._refused_told:
            self._refused_told = why
            text = f"the pod's runner was refused: {why}. The pod runs on without logs, exec and status; delete it to end it"
            self._events.pod_event(self.state.pod, "Warning", "RunnerRefused", text)

    def detach(self, link: RunnerLink) -> None:
        if self.state.link is link:
            self.state.link = None
            self._wake.set()

    def nudge(self) -> None:
        """Slurm was looked at. A job that is over outweighs a link that still seems to live."""
        state, watch = self.state, self._watch
        job = watch.job(state.uid)
        if job is not None and not job_states.is_over(job.state):
            # Thousands may wait in the queue: only those it has news for are worth a turn.
            untold = job_states.fate_of(job).pending_reason not in ("", self._pending_told)
            news = job != self._seen_job or untold or state.deleting or state.gone
            self._seen_job = job if watch.looked_since(state.mark) else None
        else:
            news = state.needs_slurm or state.gone or (job is not None and not state.job_over)
        if news:
            self._wake.set()

    def disown(self, job_id: JobId) -> None:
        """The pod could not begin in this job: it is to have another."""
        if self.state.job_id == job_id:
            self.state.job_id, self.state.fate = None, None
        self._wake.set()

    def news(self) -> None:
        """The agent of the pod's node told something about it."""
        self._wake.set()

    async def linked(self, timeout_s: float) -> RunnerLink | None:
        """The runner's link, waiting a moment for one that is about to dial in."""
        if self.state.live_link is None:
            self._linked = self._linked or asyncio.Event()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._linked.wait()
            except TimeoutError:
                return None
            self._linked = None
        return self.state.live_link

    # The work

    async def run(self) -> None:
        while not self._finished:
            self._wake.clear()
            delay_s = await self._try_step()
            if not self._finished:
                self._lanes.of(self.state.node).expect(self.state)
                await self._sleep(delay_s)

    async def _try_step(self) -> float | None:
        try:
            return await self._step()
        except ApiError as error:
            log.warning("pod %s: %s", self.state.name, error.message)
            # Not found: the object went; the reflector will say so.
            return None if error.status == 404 else _RETRY_S
        except LinkLost:
            return _SOON_S
        except SlurmletError as error:
            log.warning("pod %s: %s", self.state.name, error.message)
            return _RETRY_S
        except Exception:
            # One pod nobody thought of (or a runner that talks nonsense) must not take all others down with the hub.
            log.exception("pod %s: a fault of the hub's own", self.state.name)
            return _FAULT_RETRY_S

    async def _sleep(self, delay_s: float | None) -> None:
        deadline_s = None if self.state.terminal else self.state.deadline_s
        if deadline_s is not None and deadline_s > 0:
            delay_s = deadline_s if delay_s is None else min(delay_s, deadline_s)
        try:
            async with asyncio.timeout(delay_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _step(self) -> float | None:
        """Do the next thing; seconds until another look is due, None to wait for news."""
        state = self.state
        await self._learn()
        if state.gone:
            delay_s = await self._termination.clean_up(state)
            self._finished = delay_s is None
            return delay_s
        if state.deleting:
            return await self._termination.delete(state)
        if state.terminal:
            if self._network is not None and (state.job_id is None or state.job_over):
                self._network.released(state.uid)
            return await self._termination.linger(state)
        if state.deadline_s is not None and state.deadline_s <= 0:
            return await self._termination.expire(state)
        if state.job_id is None:
            delay_s = await self._starter.start(state)
            if state.job_id is None:
                await self._status.write(state)
                return delay_s
        if state.link is not None and not state.link.has_pod:
            delay_s = await self._starter.send_plan(state, state.link)
            if delay_s is not None:
                await self._status.write(state)
                return delay_s
        return await self._tell_state()

    async def _learn(self) -> None:
        """Bring together what Slurm and the pod's directory know."""
        state, lane = self.state, self._lanes.of(self.state.node)
        if state.link is not None:
            self._adopt_job_of(state.link)  # the look before its hello may not have had it
        if state.job_id is None:
            state.job_id = await lane.known(state.uid)
            if state.job_id is not None:
                # Its submission went through, whatever was heard of it.
                state.waiting = {}
        if state.job_id is None or not lane.settled(state):
            return
        if not state.job_over:
            state.fate = await lane.fate(state) or state.fate
        if not state.runner_done and (state.job_over or state.report is None):
            path = self._files.pod(state.uid).report
            found = _checked(await asyncio.to_thread(read_json, path), state.name)
            # The runner writes it once for each phase: of a pod that goes on, the object knows more than the file,
            # and a hub that was started anew would take its containers back to where they began.
            if found is not None and (state.job_over or found["phase"] == "Done"):
                state.report = found
        self._tell_pending()

    async def _tell_state(self) -> float | None:
        """Write what is; a pod whose job was signalled waits for Slurm to say why."""
        state = self.state
        if state.runner_done and state.signalled and not state.job_over:
            now_s = self._clock.monotonic_s()
            if self._verdict_asked_s is None:
                self._verdict_asked_s = now_s
            if now_s - self._verdict_asked_s < _VERDICT_S:
                return _SOON_S
        if state.never_started:
            self._pacer.never_started(state.pod)
        if state.job_id is not None and is_new_resize(state.pod):
            text = resize_event(state.pod)
            self._events.pod_event(state.pod, "Warning", "ResizeInfeasible", text)
        delay_s = None
        if state.live_link is not None and not state.runner_done:
            delay_s = await self._updates.send(state, state.live_link)
        if state.news_in_s:
            return min(state.news_in_s, delay_s or state.news_in_s)
        if state.only_waits:
            if not state.began_before:
                self._queued.add(state)
        else:
            await self._status.write(state)
        if delay_s is None and state.queued:
            delay_s = seconds_until_queued(state.pod, rfc3339())
        return delay_s

    def _tell_pending(self) -> None:
        state = self.state
        reason = state.fate.pending_reason if state.fate is not None and state.queued else ""
        if reason and reason != self._pending_told:
            self._pending_told = reason
            text = f"Slurm job {state.job_id} is pending: {reason}"
            self._events.pod_event(state.pod, "Normal", "Queued", text)


def _checked(found: Any, name: str) -> PodReport | None:
    """report.json, unless there is none, or one that says nothing."""
    if not found:
        return None
    try:
        return checks.pod_report(found)
    except ProtocolError as error:
        log.warning("pod %s: its report.json is of no use: %s", name, error)
        return None
