"""What comes to the spec of a pod that runs: ephemeral containers (`kubectl debug`), and another `image`.

Level-triggered like all of a pod's worker: the runner's report names the containers it has and the image each was made
from; what the spec has beyond that is planned and handed over. Unlike a kubelet's, a container whose image changes runs
on until the new image is in the store.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.hub.pods.image_pulls import ImageProblem
from slurmlet.hub.pods.pod_planner import PodPlanner
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.runner_links import RunnerLink
from slurmlet.kube.events import EventRecorder
from slurmlet.model import admission
from slurmlet.model.container_reports import containers_of
from slurmlet.model.pod_sources import MissingSource
from slurmlet.protocol.pod_report import PodReport

log = logging.getLogger(__name__)
_RETRY_S = 2.0
Obj = Mapping[str, Any]


def changed_containers(pod: Obj, report: PodReport | None, sent: Mapping[str, str]) -> list[Obj]:
    """Containers whose image is another than what the runner has, less those it was told about already."""
    reports = containers_of(report)
    found = []
    for container in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]):
        name, image = container["name"], container["image"]
        has = reports[name]["image"] if name in reports else image
        if has != image and sent.get(name) != image:
            found.append(container)
    return found


class ContainerUpdates:
    def __init__(self, planner: PodPlanner, events: EventRecorder) -> None:
        self._planner = planner
        self._events = events

    async def send(self, state: PodState, link: RunnerLink) -> float | None:
        """Hand over what is new; seconds until another try is due, None when there is nothing to wait for."""
        known = state.report.get("ephemeral_containers", {}) if state.report is not None else {}
        delays = []
        for number, container in enumerate(state.pod["spec"].get("ephemeralContainers") or ()):
            name = container["name"]
            if name not in known and name not in link.ephemeral and name not in state.refused_ephemeral:
                delays.append(await self._send_ephemeral(state, link, number, container))
        changed = changed_containers(state.pod, state.report, link.redefined)
        delays += [await self._send_changed(state, link, container) for container in changed]
        return min((delay_s for delay_s in delays if delay_s is not None), default=None)

    async def _send_ephemeral(
        self, state: PodState, link: RunnerLink, number: int, container: Obj
    ) -> float | None:
        name = container["name"]
        try:
            admission.check_ephemeral(number, container)
            plan = await self._planner.container(state, container)
        except ImageProblem as problem:
            state.waiting = {**state.waiting, **problem.waiting}
            return problem.retry_s
        except MissingSource as missing:
            self._events.pod_event(state.pod, "Warning", "Failed", f"Error: {missing.message}", name)
            return _RETRY_S
        except RefusedPod as error:
            self._events.pod_event(state.pod, "Warning", error.reason, _full(error), name)
            state.refused_ephemeral[name] = (error.reason, error.message)
            return None
        plan["target"] = container.get("targetContainerName") or ""
        await link.tell({"type": "ephemeral", "container": plan})
        link.ephemeral.add(name)
        log.info("pod %s: its runner has the ephemeral container %s", state.name, name)
        return None

    async def _send_changed(self, state: PodState, link: RunnerLink, container: Obj) -> float | None:
        name, image = container["name"], container["image"]
        try:
            plan = await self._planner.container(state, container)
        except ImageProblem as problem:
            return problem.retry_s
        except MissingSource as missing:
            self._events.pod_event(state.pod, "Warning", "Failed", f"Error: {missing.message}", name)
            return _RETRY_S
        except RefusedPod as error:
            link.redefined[name] = image
            self._events.pod_event(state.pod, "Warning", "Failed", f"Error: {_full(error)}", name)
            return None
        link.redefined[name] = image
        await link.tell({"type": "container", "container": plan})
        log.info("pod %s: container %s is to run %s", state.name, name, image)
        return None


def _full(error: RefusedPod) -> str:
    return f"{error.message}. {error.hint}".strip()
