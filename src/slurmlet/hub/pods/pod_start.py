"""From a bound pod to a submitted job, and from a runner's hello to its plan.

What the pod waits for (an image, a config map) it waits for here, before it holds any resources of Slurm's.
"""

from __future__ import annotations

import logging

from slurmlet.base.errors import RefusedPod, SlurmError
from slurmlet.hub.jobs.submission_gate import SlurmLimited
from slurmlet.hub.network.pod_addresses import NoAddressLeft
from slurmlet.hub.pods.delivered_volumes import record_plan
from slurmlet.hub.pods.image_pulls import ImageProblem
from slurmlet.hub.pods.lanes import Lanes
from slurmlet.hub.pods.pod_planner import PodPlanner
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.start_backoff import Pacer
from slurmlet.hub.runner_links import RunnerLink
from slurmlet.kube.events import EventRecorder
from slurmlet.model import admission
from slurmlet.model.pod_sources import MissingSource

log = logging.getLogger(__name__)
_RETRY_S = 2.0
# How soon to look again for a config map, secret or claim that is not there; doubles up to the second.
_SOON_S, _LATEST_S = 0.5, 8.0
# Most containers begin within that of the plan.
_STARTS_S = 0.2


class PodStarter:
    def __init__(self, lanes: Lanes, planner: PodPlanner, pacer: Pacer, events: EventRecorder) -> None:
        self._lanes = lanes
        self._planner = planner
        self._pacer = pacer
        self._events = events

    async def start(self, state: PodState) -> float | None:
        """Sets `job_id` on success; else what the pod waits for, and returns when to try again (None: never)."""
        if state.refused is not None:
            return None
        if (wait_s := self._pacer.wait_s(state.pod)) > 0:
            text = "Back-off starting the pod: earlier pods of the same owner failed before they started"
            state.waiting = {"": ("CrashLoopBackOff", text)}
            self._events.pod_event(state.pod, "Warning", "BackOff", text)
            return wait_s
        was_told = state.waiting.get("", ("", ""))[0] == "SlurmLimited"
        try:
            admission.check(state.pod)
            order = self._lanes.of(state.node).order(state)
            if order is None:
                return _RETRY_S
            fetched = await self._planner.check(state)
            state.waiting = {}
            if state.deleting or state.gone:
                return 0
            state.job_id = await order.place()
        except SlurmLimited as error:
            return self._wait_in_line(state, error, told=was_told)
        except SlurmError as error:
            return self._wait_for_slurm(state, error)
        except RefusedPod as error:
            if error.reason == MissingSource.reason:
                return self._wait_for_config(state, error)
            self._refuse(state, error)
            return None
        except ImageProblem as problem:
            state.waiting = problem.waiting
            return problem.retry_s
        except MissingSource as missing:
            return self._wait_for_source(state, missing)
        reason, text = order.told(state.job_id)
        log.info("pod %s: %s", state.name, text)
        self._events.pod_event(state.pod, "Normal", reason, text)
        for note in order.notes:
            self._events.pod_event(state.pod, "Warning", "AnnotationWithoutEffect", note)
        await self._planner.prefetch(state, fetched)
        return None

    async def send_plan(self, state: PodState, link: RunnerLink) -> float | None:
        """Give the runner its pod; seconds to wait when something it needs is missing."""
        try:
            plan, sources = await self._planner.plan(state)
        except NoAddressLeft as error:
            self._events.pod_event(state.pod, "Warning", error.reason, f"{error.message}. {error.hint}")
            state.waiting = {"": (error.reason, error.message)}
            return _LATEST_S
        except MissingSource as missing:
            return self._wait_for_source(state, missing)
        except ImageProblem as problem:
            state.waiting = problem.waiting
            return problem.retry_s
        except RefusedPod as error:
            self._refuse(state, error)
            await link.tell({"type": "stop", "grace_s": 0, "reason": error.message})
            return _RETRY_S
        state.waiting = {}
        await link.tell({"type": "pod", "pod": plan})
        link.has_pod = True
        state.delivered = record_plan(state.pod, link, plan, sources)
        state.prepared = None
        state.expect_news(_STARTS_S)
        log.info("pod %s: its runner has the plan", state.name)
        return None

    def _refuse(self, state: PodState, error: RefusedPod) -> None:
        state.refused = (error.reason, error.message)
        text = f"{error.message}. {error.hint}".strip()
        # What a kubelet finds out when it creates the container, it tells in other words.
        is_kubelets = error.reason == "CreateContainerConfigError"
        reason, text = ("Failed", f"Error: {text}") if is_kubelets else (error.reason, text)
        self._events.pod_event(state.pod, "Warning", reason, text)

    def _wait_for_slurm(self, state: PodState, error: SlurmError) -> float:
        """slurmctld is away or says "not now": the pod waits and says so; nothing is lost."""
        self._events.pod_event(state.pod, "Warning", "SubmissionFailed", f"{error.message}; retrying")
        state.waiting = {"": ("SlurmUnavailable", error.message)}
        return _longer(state)

    def _wait_in_line(self, state: PodState, error: SlurmLimited, *, told: bool) -> float:
        """A limit that jobs of the same user will free; the gate tells when it is this pod's turn."""
        if not told:
            text = f"{error.message}; retrying when jobs have ended"
            self._events.pod_event(state.pod, "Warning", "SubmissionLimited", text)
        state.waiting = {"": (error.reason, error.message)}
        return error.retry_s

    def _wait_for_config(self, state: PodState, error: RefusedPod) -> float:
        """As a kubelet does: such a pod is Pending and looked at again, since an annotation it is made of may change."""
        self._events.pod_event(state.pod, "Warning", "Failed", f"Error: {error.message}")
        state.waiting = {"": (error.reason, error.message)}
        return _longer(state)

    def _wait_for_source(self, state: PodState, missing: MissingSource) -> float:
        """As a kubelet does: a volume that lacks something leaves the pod at ContainerCreating, with an event."""
        if missing.volume:
            self._events.pod_event(state.pod, "Warning", "FailedMount", missing.event)
            state.waiting = {}
        else:
            self._events.pod_event(state.pod, "Warning", "Failed", f"Error: {missing.message}")
            state.waiting = {"": (missing.reason, missing.message)}
        return _longer(state)


def _longer(state: PodState) -> float:
    state.missing_s = min(max(_SOON_S, 2 * state.missing_s), _LATEST_S)
    return state.missing_s
