"""Ephemeral containers (`kubectl debug`): those that came to a running pod are planned and handed to its runner.

Level-triggered like all of a pod's worker: a container is sent until the runner's report names it.
"""

from __future__ import annotations

import logging
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.hub.pods.image_pulls import ImageProblem
from slurmlet.hub.pods.pod_start import setting_of
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.source_fetch import gather
from slurmlet.hub.pods.tools import Tools
from slurmlet.hub.runner_links import RunnerLink
from slurmlet.model import admission
from slurmlet.model.hostnames import names_of
from slurmlet.model.plan_builder import container_plan
from slurmlet.model.pod_sources import MissingSource

log = logging.getLogger(__name__)
_RETRY_S = 2.0


async def send_ephemeral(tools: Tools, state: PodState, link: RunnerLink) -> float | None:
    """Hand over what is new; seconds until another try is due, None when there is nothing to wait for."""
    known = (state.report or {}).get("ephemeral_containers") or {}
    delays = []
    for number, container in enumerate(state.pod["spec"].get("ephemeralContainers") or ()):
        name = container["name"]
        if name in known or name in link.ephemeral or name in state.refused_ephemeral:
            continue
        delays.append(await _send(tools, state, link, number, container))
    return min((delay for delay in delays if delay is not None), default=None)


async def _send(
    tools: Tools, state: PodState, link: RunnerLink, number: int, container: dict[str, Any]
) -> float | None:
    # The pod as it would be with this container alone: its image and its sources are fetched by the same code.
    alone = {**state.pod, "spec": {**state.pod["spec"], "containers": [container], "initContainers": []}}
    alone["spec"] |= {"volumes": []}
    try:
        admission.check_ephemeral(number, container)
        state.images |= await tools.images.ensure(alone, state.backoff)
        sources = await gather(tools.client, alone, with_tokens=False)
        setting = await setting_of(tools, state, sources)
        plan = container_plan(state.pod, container, setting, names_of(state.pod, setting.place.host))
    except ImageProblem as problem:
        state.waiting = {**state.waiting, **problem.waiting}
        return problem.retry_s
    except MissingSource as missing:
        tools.events.pod_event(state.pod, "Warning", "Failed", f"Error: {missing.message}", container["name"])
        return _RETRY_S
    except RefusedPod as error:
        text = f"{error.message}. {error.hint}".strip()
        tools.events.pod_event(state.pod, "Warning", error.reason, text, container["name"])
        state.refused_ephemeral[container["name"]] = (error.reason, error.message)
        return None
    await link.tell("ephemeral", container={**plan, "target": container.get("targetContainerName") or ""})
    link.ephemeral.add(container["name"])
    log.info("pod %s: its runner has the ephemeral container %s", state.name, container["name"])
    return None
