"""What a pod needs before it may start, and the plan its runner gets: sources fetched, images stored, all resolved.

The only place that plans. Whether a pod could be planned is asked before it holds any resources of Slurm's (`check`);
the plan itself is made when its runner is there (`plan`), from what was fetched in between where that is still fresh.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.network.pod_network import Network
from slurmlet.hub.network.service_watch import Services
from slurmlet.hub.pods.image_pulls import Images
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.source_fetch import Roots, add_tokens, gather
from slurmlet.kube.client import ApiClient
from slurmlet.model.downward_api import Place
from slurmlet.model.hostnames import names_of
from slurmlet.model.network_plan import joins_from_host, uses_host_network
from slurmlet.model.plan_builder import (
    PlannedImage,
    Setting,
    check_containers,
    check_sources,
    container_plan,
    pod_plan,
)
from slurmlet.model.pod_sources import Sources
from slurmlet.protocol.pod_plan import ContainerPlan, PodPlan

Obj = Mapping[str, Any]
# A config map read longer ago than this is read again before the pod starts with it.
_FRESH_S = 10.0


class Fetched(NamedTuple):
    """What a pod draws on, tokens not included."""

    read_s: float
    sources: Sources


class PodPlanner:
    """Every method may raise MissingSource, ImageProblem, RefusedPod and ApiError."""

    def __init__(
        self,
        settings: Settings,
        client: ApiClient,
        images: Images,
        services: Services,
        network: Network | None,
    ) -> None:
        self._settings = settings
        self._client = client
        self._images = images
        self._services = services
        self._network = network
        self._roots = Roots()

    async def check(self, state: PodState) -> Fetched:
        """Fetch what the pod names and pull its images: a pod that waits for these holds nothing of Slurm's."""
        read_s = time.monotonic()
        sources = await gather(self._client, state.pod, with_tokens=False, roots=self._roots)
        check_sources(state.pod, sources)
        state.images = await self._images.ensure(state.pod, state.backoff)
        check_containers(state.pod, await self._setting(state, sources))
        return Fetched(read_s, sources)

    async def prefetch(self, state: PodState, fetched: Fetched) -> None:
        """While Slurm looks for a place: what the plan will need, so that the runner gets it without a wait."""
        if self._client.busy:
            return  # in a burst the job is hardly next, and what is fetched now would be too old by then
        state.prepared = fetched.read_s, await add_tokens(self._client, state.pod, fetched.sources)
        # A pod may be queued for days: what it will then read anew need not fill the hub's memory.
        asyncio.get_running_loop().call_later(_FRESH_S, state.drop_prepared)

    async def plan(self, state: PodState) -> tuple[PodPlan, Sources]:
        """Also gives the pod its address. Raises NoAddressLeft too."""
        sources = await self._sources(state)
        if not state.images:
            state.images = await self._images.stored(state.pod)
        await self._give_address(state)
        return pod_plan(state.pod, await self._setting(state, sources)), sources

    async def container(self, state: PodState, container: Mapping[str, Any]) -> ContainerPlan:
        """The plan of one container that came to a running pod, or changed in it."""
        # The pod as it would be with this container alone: its image and its sources are fetched by the same code.
        alone = {**state.pod["spec"], "containers": [container], "initContainers": [], "volumes": []}
        pod = {**state.pod, "spec": alone}
        state.images |= await self._images.ensure(pod, state.backoff)
        sources = await gather(self._client, pod, with_tokens=False)
        setting = await self._setting(state, sources)
        return container_plan(state.pod, container, setting, names_of(state.pod, setting.place.host))

    async def _sources(self, state: PodState) -> Sources:
        if state.prepared is not None and time.monotonic() - state.prepared[0] < _FRESH_S:
            return state.prepared[1]
        return await gather(self._client, state.pod, with_tokens=True, roots=self._roots)

    async def _give_address(self, state: PodState) -> None:
        """An address of the pod's own, if it is to have one. Raises NoAddressLeft."""
        network = self._network
        if network is None or state.place is None:
            return
        await network.prepare_address()
        # Where encryption was asked for, nobody may connect past it.
        if joins_from_host(state.pod) and network.cluster.tls is None:
            state.place = replace(state.place, overlay_ip=network.address(state.pod))
        if uses_host_network(state.pod):
            return
        state.place = replace(state.place, own_ip=network.address(state.pod))
        # The plan carries the policies that hold for the pod: none may be missed because this hub is new.
        await network.policies.ready.wait()

    async def _setting(self, state: PodState, sources: Sources) -> Setting:
        """What the plan is made from, as far as it is known now."""
        images = {
            name: PlannedImage(image.repo_digest, str(image.directory), self._images.config(image))
            for name, image in state.images.items()
        }
        services = await self._services.variables(
            state.pod["metadata"]["namespace"],
            state.pod["spec"].get("enableServiceLinks") is not False,
            uses_host_network(state.pod),
        )
        policy = self._network.policies.of(state.uid) if self._network is not None else None
        place = state.place or Place()
        return Setting(
            self._settings.cluster, images, sources, place, services, self._settings.network, policy
        )
