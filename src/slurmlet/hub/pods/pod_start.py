"""From a bound pod to a submitted job, and from a runner's hello to its plan.

What the pod waits for (an image, a config map) it waits for here, before it holds any resources of Slurm's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from slurmlet.base.errors import RefusedPod, SlurmError
from slurmlet.hub.network.pod_addresses import NoAddressLeft
from slurmlet.hub.pods.image_pulls import ImageProblem
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.source_fetch import add_tokens, gather
from slurmlet.hub.pods.tools import Tools
from slurmlet.hub.pods.volume_refresh import record_plan
from slurmlet.hub.runner_links import RunnerLink
from slurmlet.model import admission
from slurmlet.model.downward_api import Place
from slurmlet.model.network_plan import joins_from_host, uses_host_network
from slurmlet.model.plan_builder import PlannedImage, Setting, check_containers, check_sources, pod_plan
from slurmlet.model.pod_sources import MissingSource, Sources

log = logging.getLogger(__name__)
_RETRY_S = 2.0
# How soon to look again for a config map, secret or claim that is not there; doubles up to the second.
_SOON_S, _LATEST_S = 0.5, 8.0
# A config map read longer ago than this is read again before the pod starts with it.
_FRESH_S = 10.0
# Most containers begin within that of the plan.
_STARTS_S = 0.2


async def start(tools: Tools, state: PodState) -> float | None:
    """Sets `job_id` on success; else what the pod waits for, and returns when to try again (None: never)."""
    lane = tools.lanes.of(state.node)
    if state.refused is not None:
        return None
    if (wait_s := tools.pacer.wait_s(state.pod)) > 0:
        text = "back-off: earlier pods of the same owner ended before they could start"
        state.waiting = {"": ("CrashLoopBackOff", text)}
        tools.events.pod_event(state.pod, "Warning", "BackOff", text)
        return wait_s
    try:
        admission.check(state.pod)
        order = lane.order(state)
        if order is None:
            return _RETRY_S
        # A pod that waits for a config map or secret waits before it has a job, not inside one.
        read_s = time.monotonic()
        sources = await gather(tools.client, state.pod, with_tokens=False, roots=tools.roots)
        check_sources(state.pod, sources)
        state.images = await tools.images.ensure(state.pod, state.backoff)
        check_containers(state.pod, await setting_of(tools, state, sources))
        state.waiting = {}
        if state.deleting or state.gone:
            return 0
        state.job_id = await order.place()
    except SlurmError as error:
        return _wait_for_slurm(tools, state, error)
    except RefusedPod as error:
        if error.reason == MissingSource.reason:
            return _wait_for_config(tools, state, error)
        _refuse(tools, state, error)
        return None
    except ImageProblem as problem:
        state.waiting = problem.waiting
        return problem.retry_s
    except MissingSource as missing:
        return _wait_for_source(tools, state, missing)
    reason, text = order.told(state.job_id)
    log.info("pod %s: %s", state.name, text)
    tools.events.pod_event(state.pod, "Normal", reason, text)
    for note in order.notes:
        tools.events.pod_event(state.pod, "Warning", "AnnotationWithoutEffect", note)
    if tools.client.busy:
        return None  # in a burst the job is hardly next, and what is fetched now would be too old by then
    # While Slurm looks for a place: what the plan will need, so that the runner gets it without a wait.
    state.prepared = read_s, await add_tokens(tools.client, state.pod, sources)
    # A pod may be queued for days: what it will then read anew need not fill the hub's memory.
    asyncio.get_running_loop().call_later(_FRESH_S, state.drop_prepared)
    return None


async def send_plan(tools: Tools, state: PodState, link: RunnerLink) -> float | None:
    """Give the runner its pod; seconds to wait when something it needs is missing."""
    try:
        sources = await _sources(tools, state)
        if not state.images:
            state.images = await tools.images.stored(state.pod)
        await _place(tools, state)
        plan = pod_plan(state.pod, await setting_of(tools, state, sources))
    except NoAddressLeft as error:
        tools.events.pod_event(state.pod, "Warning", error.reason, f"{error.message}. {error.hint}")
        state.waiting = {"": (error.reason, error.message)}
        return _LATEST_S
    except MissingSource as missing:
        return _wait_for_source(tools, state, missing)
    except ImageProblem as problem:
        state.waiting = problem.waiting
        return problem.retry_s
    except RefusedPod as error:
        _refuse(tools, state, error)
        await link.tell("stop", grace_s=0, reason=error.message)
        return _RETRY_S
    state.waiting = {}
    await link.tell("pod", pod=plan)
    link.has_pod = True
    state.delivered = record_plan(state, link, plan, sources)
    state.prepared = None
    state.expect_news(_STARTS_S)
    log.info("pod %s: its runner has the plan", state.name)
    tools.pacer.started(state.pod)
    return None


async def setting_of(tools: Tools, state: PodState, sources: Sources) -> Setting:
    """What the plan is made from, as far as it is known now."""
    settings = tools.settings
    images = {
        name: PlannedImage(image.repo_digest, str(image.directory), tools.images.config(image))
        for name, image in state.images.items()
    }
    links = state.pod["spec"].get("enableServiceLinks") is not False
    services = await tools.services.variables(
        state.pod["metadata"]["namespace"], links, uses_host_network(state.pod)
    )
    policy = tools.network.policies.of(state.uid) if tools.network is not None else None
    return Setting(
        settings.cluster, images, sources, state.place or Place(), services, settings.network, policy
    )


async def _place(tools: Tools, state: PodState) -> None:
    """Give the pod an address of its own, if it is to have one. Raises NoAddressLeft."""
    if tools.network is None or state.place is None:
        return
    # Where encryption was asked for, nobody may connect past it.
    if joins_from_host(state.pod) and tools.network.cluster.tls is None:
        state.place = replace(state.place, overlay_ip=tools.network.address(state.pod))
    if uses_host_network(state.pod):
        return
    state.place = replace(state.place, own_ip=tools.network.address(state.pod))
    # The plan carries the policies that hold for the pod: none may be missed because this hub is new.
    await tools.network.policies.ready.wait()


async def _sources(tools: Tools, state: PodState) -> Sources:
    if state.prepared is not None and time.monotonic() - state.prepared[0] < _FRESH_S:
        return state.prepared[1]
    return await gather(tools.client, state.pod, with_tokens=True, roots=tools.roots)


def _refuse(tools: Tools, state: PodState, error: RefusedPod) -> None:
    state.refused = (error.reason, error.message)
    text = f"{error.message}. {error.hint}".strip()
    # What a kubelet finds out when it creates the container, it tells in other words.
    is_kubelets = error.reason == "CreateContainerConfigError"
    reason, text = ("Failed", f"Error: {text}") if is_kubelets else (error.reason, text)
    tools.events.pod_event(state.pod, "Warning", reason, text)


def _wait_for_slurm(tools: Tools, state: PodState, error: SlurmError) -> float:
    """slurmctld is away or says "not now": the pod waits and says so; nothing is lost."""
    tools.events.pod_event(state.pod, "Warning", "SubmissionFailed", f"{error.message}; trying again")
    state.waiting = {"": ("SlurmUnavailable", error.message)}
    state.missing_s = min(max(_SOON_S, 2 * state.missing_s), _LATEST_S)
    return state.missing_s


def _wait_for_config(tools: Tools, state: PodState, error: RefusedPod) -> float:
    """As a kubelet does: such a pod is Pending and looked at again, since an annotation it is made of may change."""
    tools.events.pod_event(state.pod, "Warning", "Failed", f"Error: {error.message}")
    state.waiting = {"": (error.reason, error.message)}
    state.missing_s = min(max(_SOON_S, 2 * state.missing_s), _LATEST_S)
    return state.missing_s


def _wait_for_source(tools: Tools, state: PodState, missing: MissingSource) -> float:
    """As a kubelet does: a volume that lacks something leaves the pod at ContainerCreating, with an event."""
    if missing.volume:
        tools.events.pod_event(state.pod, "Warning", "FailedMount", missing.event)
        state.waiting = {}
    else:
        tools.events.pod_event(state.pod, "Warning", "Failed", f"Error: {missing.message}")
        state.waiting = {"": (missing.reason, missing.message)}
    state.missing_s = min(max(_SOON_S, 2 * state.missing_s), _LATEST_S)
    return state.missing_s
