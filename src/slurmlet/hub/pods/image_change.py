"""Another `image` in the spec of a pod that runs: the container starts again with it, as a kubelet has it.

Level-triggered: the runner's report names the image each container was made from; where the spec says another, the
container is planned anew and handed over. Unlike a kubelet's, the old one runs on until the new image is in the store.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.hub.pods.image_pulls import ImageProblem
from slurmlet.hub.pods.pod_start import setting_of
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.source_fetch import gather
from slurmlet.hub.pods.tools import Tools
from slurmlet.hub.runner_links import RunnerLink
from slurmlet.model.hostnames import names_of
from slurmlet.model.plan_builder import container_plan
from slurmlet.model.pod_sources import MissingSource

log = logging.getLogger(__name__)
_RETRY_S = 2.0
_KINDS = {"initContainers": "init_containers", "containers": "containers"}
Obj = Mapping[str, Any]


def changed_containers(pod: Obj, report: Obj | None, sent: Mapping[str, str]) -> list[Obj]:
    """Containers whose image is another than what the runner has, less those it was told about already."""
    found = []
    for field, key in _KINDS.items():
        reports = (report or {}).get(key) or {}
        for container in pod["spec"].get(field) or ():
            name, image = container["name"], container["image"]
            # A runner of an older slurmlet does not say.
            has = (reports.get(name) or {}).get("image") or image
            if has != image and sent.get(name) != image:
                found.append(container)
    return found


async def send_changed(tools: Tools, state: PodState, link: RunnerLink) -> float | None:
    """Hand over what is new; seconds until another try is due, None when there is nothing to wait for."""
    delays = [
        await _send(tools, state, link, container)
        for container in changed_containers(state.pod, state.report, link.redefined)
    ]
    return min((delay_s for delay_s in delays if delay_s is not None), default=None)


async def _send(tools: Tools, state: PodState, link: RunnerLink, container: Obj) -> float | None:
    # The pod as it would be with this container alone: its image and its sources are fetched by the same code.
    alone = {**state.pod, "spec": {**state.pod["spec"], "containers": [container], "initContainers": []}}
    alone["spec"]["volumes"] = []
    try:
        state.images |= await tools.images.ensure(alone, state.backoff)
        sources = await gather(tools.client, alone, with_tokens=False)
        setting = await setting_of(tools, state, sources)
        plan = container_plan(state.pod, container, setting, names_of(state.pod, setting.place.host))
    except ImageProblem as problem:
        return problem.retry_s
    except MissingSource as missing:
        tools.events.pod_event(state.pod, "Warning", "Failed", f"Error: {missing.message}", container["name"])
        return _RETRY_S
    except RefusedPod as error:
        link.redefined[container["name"]] = container["image"]
        text = f"{error.message}. {error.hint}".strip()
        tools.events.pod_event(state.pod, "Warning", "Failed", f"Error: {text}", container["name"])
        return None
    link.redefined[container["name"]] = container["image"]
    await link.tell("container", container=plan)
    log.info("pod %s: container %s is to run %s", state.name, container["name"], container["image"])
    return None
