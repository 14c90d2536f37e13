"""A whole site in memory for the hub's pod workers: Slurm, API server and runners are fakes that live on when a hub dies.

Time is virtual. The hub's own parts are the real ones, put together as in hub/hub.py; a hub can be killed at any moment
and another one started on the same files.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.clock import rfc3339
from slurmlet.base.files import write_json
from slurmlet.hub.agents import Agents
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.jobs.submission_gate import SubmissionGate
from slurmlet.hub.pods.container_updates import ContainerUpdates
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
from slurmlet.hub.runner_links import NODE_PREFIX
from slurmlet.model import pod_job
from slurmlet.model.allocation_node import AllocationFacts
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.slurm_values import Job, JobSpec, Partition
from slurmlet.protocol import checks
from slurmlet.slurm.fake import FakeSlurm
from tests.unit.fakes import FakeEvents, FakeImages, FakeLink, FakePodApi, FakeServices
from tests.unit.hub_making import CLUSTER_ID, make_settings
from tests.unit.reports import pod_report
from tests.unit.virtual_time import EPOCH_S, LoopClock, VirtualLoop

NODE, POOL_NODE = "batch", "pool-1"
Obj = dict[str, Any]


class Crash(BaseException):
    """The hub's process ends here."""


class Slurm(FakeSlurm):
    """Can lose the answer to sbatch, or the hub with it."""

    def __init__(self) -> None:
        super().__init__()
        self.after_submit = lambda: None

    async def submit(self, spec: JobSpec) -> JobId:
        job_id = await super().submit(spec)
        self.after_submit()
        return job_id


class Authority:
    """Makes the pod's directory, without the cost of keys."""

    def equip(self, pod: Any, uid: str, prefix: str = "") -> None:
        pod.root.mkdir(parents=True, exist_ok=True)


class Nodes:
    def __init__(self, slurm: FakeSlurm) -> None:
        self._slurm = slurm

    def partition_of(self, node: str) -> Partition | None:
        return next((one for one in self._slurm.listed_partitions if one.name == node), None)


class Runner:
    """What a job, or an agent's fork, does for its pod. Dies with its job; its claim and its report stay."""

    def __init__(self, site: Site, uid: str, job_id: JobId) -> None:
        self.site, self.uid, self.job_id = site, uid, job_id
        self.files = site.settings.files.pod(uid)
        self.link: FakeLink | None = None
        self.has_pod = self.done = self.stopping = False
        self.report: Obj | None = None
        self._seq = 0

    def dial(self) -> None:
        hub = self.site.hub
        if self.link is not None or hub is None or self.done:
            return
        self.link = FakeLink(
            self.uid,
            job_id=self.job_id,
            host="c1",
            host_ip="10.0.0.1",
            has_pod=self.has_pod,
            report=self.report,
        )
        self.link.on_told = self._told
        self.site.do(hub.pods.link_came(self.link))  # type: ignore[arg-type]

    def hang_up(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.end()
            if self.site.hub is not None:
                self.site.hub.pods.link_ended(link)  # type: ignore[arg-type]

    def _told(self, message: Obj) -> None:
        if message["type"] == "pod":
            self.has_pod = True
        elif message["type"] == "stop":
            self.stopping = True

    def say(self, phase: str, state: str, exit_code: int | None = None, problem: Obj | None = None) -> None:
        """A report: first on disk, as the runner does, then to whoever listens."""
        began, ended = "2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z"
        one = {
            "image": "busybox", "state": state, "reason": "Completed" if exit_code == 0 else "Error" if exit_code else "",
            "started_at": began if state != "waiting" else None, "finished_at": ended if state == "terminated" else None,
            "exit_code": exit_code, "container_id": "crun://1", "started": state == "running", "ready": state == "running",
        }  # fmt: skip
        self.report = dict(pod_report({"c": one}, phase=phase, exit_code=exit_code, problem=problem))
        checks.pod_report(self.report)
        write_json(self.files.report, self.report)
        self._seq += 1
        if self.link is not None and self.site.hub is not None:
            kind = "bye" if phase == "Done" else "report"
            message = {"type": kind, "seq": self._seq, "report": self.report}
            self.site.do(self.site.hub.pods.link_said(self.link, message))  # type: ignore[arg-type]

    def end(self, exit_code: int = 0, problem: Obj | None = None) -> None:
        """The pod has ended; the job ends by itself, as a runner's does."""
        self.say("Done", "terminated", exit_code, problem)
        self.done = True
        self.hang_up()
        self.site.runner_left(self, exit_code)


class Hub:
    """One process's worth of hub."""

    def __init__(self, site: Site, tasks: asyncio.TaskGroup) -> None:
        settings, slurm, client, events = site.settings, site.slurm, site.api, site.events
        clock = LoopClock(site.loop)
        self.watch = JobWatch(settings, slurm, clock)
        self.agents = Agents()
        gate = SubmissionGate(clock)
        authority: Any = Authority()
        self.submitter = Submitter(settings, slurm, self.watch, authority, gate)
        nodes: Any = Nodes(slurm)
        lanes = Lanes(
            QueueLane(self.submitter, self.watch, nodes, slurm),
            AgentLane(settings, self.agents, authority, self.watch),
            self.agents,
        )
        api: Any = client
        recorder: Any = events
        planner = PodPlanner(settings, api, FakeImages(), FakeServices(), None)  # type: ignore[arg-type]
        status, pacer = StatusWriter(api), Pacer()
        starter = PodStarter(lanes, planner, pacer, recorder)
        termination = PodTermination(settings.files, lanes, self.watch, status, recorder, clock)
        updates = ContainerUpdates(planner, recorder)
        self.queued = QueuedStatus(StatusWriter(api))

        def new_worker(pod: Obj) -> PodWorker:
            return PodWorker(
                pod, files=settings.files, starter=starter, termination=termination, updates=updates, status=status,
                queued=self.queued, lanes=lanes, watch=self.watch, pacer=pacer, events=recorder, network=None, clock=clock,
            )  # fmt: skip

        self.pods = Pods(
            new_worker, tasks, settings.files, self.watch, slurm, self.submitter, self.agents, None
        )
        self.watch.subscribe(self.pods.slurm_looked)
        self.watch.subscribe_ended(gate.jobs_ended)
        gate.subscribe(self.pods.news_of)
        self.agents.subscribe_pods(self.pods.news_of)
        self.agents.subscribe_nodes(self.watch.expect_node)


class Site:
    def __init__(self, root: Path) -> None:
        self.loop = VirtualLoop()
        # Also for what asks no clock of the hub's: how busy the machine is must not decide what is due.
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(time, "monotonic", self.loop.time)
        self.slurm = Slurm()
        self.api = FakePodApi()
        self.events = FakeEvents()
        self.settings: Settings = make_settings(root, busy_poll_s=0.3, queued_poll_s=2.0, calm_poll_s=15.0)
        self.settings.files.pods.mkdir(parents=True, exist_ok=True)
        self.hub: Hub | None = None
        self.runners: dict[str, Runner] = {}  # by UID: those that hold the claim and live
        self.agent: FakeLink | None = None  # of POOL_NODE
        self.agent_ended: dict[str, int] = {}
        self._main: asyncio.Task[None] | None = None
        self._made = 0

    # Time

    def do(self, work: Any) -> None:
        """Have it done by the loop, whether or not it runs now."""
        if self.loop.is_running():
            self.loop.create_task(work)
        else:
            self.loop.run_until_complete(work)

    def settle(self, seconds: float = 0.0) -> None:
        """Let time pass, for Slurm too."""
        self.loop.run_until_complete(self._pass(seconds))
        self.slurm.advance(seconds)
        if self._main is not None and self._main.done():
            main, self._main, self.hub = self._main, None, None
            self.api.changed = lambda _pod, _gone: None
            self._forget_links()
            if (error := None if main.cancelled() else main.exception()) is not None and not _crashed(error):
                raise error

    async def _pass(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        # A hub that dies takes a few turns for it.
        for _ in range(20):
            await asyncio.sleep(0)

    # The hub

    def start_hub(self) -> None:
        assert self.hub is None
        self._main = self.loop.create_task(self._run_hub())
        self.settle(0)

    async def _run_hub(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            hub = self.hub = Hub(self, tasks)
            self.api.changed = hub.pods.changed
            for pod in list(self.api.pods.values()):
                hub.pods.changed(pod, False)
            if self.agent is not None:
                hub.agents.expect(POOL_NODE, JobId("7"))
            hub.pods.synced.set()
            tasks.create_task(hub.watch.run())
            tasks.create_task(hub.queued.run())
            tasks.create_task(hub.pods.sweep())

    def kill_hub(self) -> None:
        """At once: nothing of it runs another step but what cancellation cannot stop."""
        main, self._main, self.hub = self._main, None, None
        self.api.changed = lambda _pod, _gone: None
        self._forget_links()
        if main is not None:
            main.cancel()
            self.loop.run_until_complete(asyncio.wait([main]))
            if not main.cancelled() and main.exception() is not None and not _crashed(main.exception()):
                raise main.exception()  # type: ignore[misc]

    def _forget_links(self) -> None:
        for runner in self.runners.values():
            if runner.link is not None:
                runner.link.end()
                runner.link = None
        if self.agent is not None:
            self.agent.end()

    def close(self) -> None:
        self.kill_hub()
        self.loop.close()
        self._patch.undo()

    # Pods

    def create(self, node: str = NODE, **more: Any) -> str:
        self._made += 1
        uid = f"uid-{self._made}"
        spec = {
            "nodeName": node, "restartPolicy": "Never", "terminationGracePeriodSeconds": 5,
            "containers": [{"name": "c", "image": "busybox", "command": ["true"]}], **more,
        }  # fmt: skip
        metadata = {"name": f"p{self._made}", "namespace": "ns", "uid": uid, "creationTimestamp": rfc3339()}
        self.api.put({"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})
        return uid

    def pod(self, uid: str) -> Obj | None:
        return next((pod for pod in self.api.pods.values() if pod["metadata"]["uid"] == uid), None)

    def phase(self, uid: str) -> str:
        pod = self.pod(uid)
        return str(pod["status"].get("phase")) if pod is not None else "gone"

    def delete(self, uid: str, grace_s: int = 5) -> None:
        pod = self.pod(uid)
        if pod is None:
            return
        if grace_s == 0:
            self.api.remove(f"/api/v1/namespaces/ns/pods/{pod['metadata']['name']}")
            return
        from datetime import UTC, datetime

        due = datetime.fromtimestamp(EPOCH_S + self.loop.time() + grace_s, UTC)
        more = {"deletionTimestamp": rfc3339(due), "deletionGracePeriodSeconds": grace_s}
        self.api.put({**pod, "metadata": {**pod["metadata"], **more}})

    # Jobs and their runners

    def jobs(self, uid: str) -> list[Job]:
        return [job for job in self.slurm.queue if pod_job.uid_of(CLUSTER_ID, job) == uid]

    def live(self, uid: str) -> list[Job]:
        return [job for job in self.jobs(uid) if job.state in ("PENDING", "RUNNING")]

    def start_job(self, uid: str) -> Runner | None:
        """Slurm starts the pod's job, and its runner claims the pod, or leaves because another has."""
        pending = [job for job in self.jobs(uid) if job.state == "PENDING"]
        if not pending:
            return None
        job_id = pending[0].job_id
        self.slurm.start(job_id)
        return self._begin(uid, job_id)

    def _begin(self, uid: str, job_id: JobId) -> Runner | None:
        files = self.settings.files.pod(uid)
        try:
            with files.claim.open("x") as claim:
                claim.write(json.dumps({"job_id": job_id}))
        except FileExistsError:
            if job_id != "7":
                self.slurm.finish(job_id)
            return None
        except FileNotFoundError:
            # Its directory is gone: so is the pod.
            if job_id != "7":
                self.slurm.finish(job_id, "FAILED", 1)
            return None
        runner = self.runners[uid] = Runner(self, uid, job_id)
        runner.dial()
        return runner

    def runner_left(self, runner: Runner, exit_code: int) -> None:
        self.runners.pop(runner.uid, None)
        if runner.job_id == "7":
            self.pod_of_agent_ended(runner.uid, exit_code)
        elif any(job.job_id == runner.job_id and job.state == "RUNNING" for job in self.slurm.queue):
            self.slurm.finish(runner.job_id, "COMPLETED" if not exit_code else "FAILED", exit_code)

    def reap(self) -> None:
        """Runners whose jobs are over are dead, whatever they were doing."""
        running = {job.job_id for job in self.slurm.queue if job.state == "RUNNING"}
        for runner in list(self.runners.values()):
            if runner.job_id not in running and runner.job_id != "7":
                runner.hang_up()
                self.runners.pop(runner.uid, None)

    # An allocation node

    def start_agent(self) -> None:
        """It dials in, or dials in again, and tells what it runs."""
        mine = [uid for uid, runner in self.runners.items() if runner.job_id == "7"]
        self.agent = FakeLink(
            f"{NODE_PREFIX}{POOL_NODE}", job_id="7", host="c2", pods=mine, ended=dict(self.agent_ended)
        )
        self.agent.on_told = self._agent_told
        if self.hub is not None:
            self.do(self.hub.agents.link_came(self.agent))  # type: ignore[arg-type]
            agent = self.hub.agents.get(POOL_NODE)
            assert agent is not None
            agent.facts = AllocationFacts(POOL_NODE, "c2", "10.0.0.2", "batch", "7", 4, 8000, 0)

    def agent_hangs_up(self) -> None:
        if self.agent is not None and self.agent.alive:
            self.agent.end()
            self.do(self._agent_left(self.agent))

    async def _agent_left(self, link: FakeLink) -> None:
        if self.hub is not None:
            self.hub.agents.link_ended(link)  # type: ignore[arg-type]

    def _agent_told(self, message: Obj) -> None:
        uid = message.get("uid", "")
        if message["type"] == "start-pod" and uid not in self.runners and uid not in self.agent_ended:
            self._begin(uid, JobId("7"))
        elif message["type"] == "kill-pod" and uid in self.runners:
            runner = self.runners.pop(uid)
            runner.done = True
            runner.hang_up()
            self.pod_of_agent_ended(uid, 137)

    def pod_of_agent_ended(self, uid: str, exit_code: int) -> None:
        self.agent_ended[uid] = exit_code
        if self.agent is not None and self.agent.alive and self.hub is not None:
            message = {"type": "pod-ended", "uid": PodUid(uid), "exit_code": exit_code}
            self.do(self.hub.agents.link_said(self.agent, message))  # type: ignore[arg-type]


def _crashed(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_crashed(one) for one in error.exceptions)
    return isinstance(error, Crash)
