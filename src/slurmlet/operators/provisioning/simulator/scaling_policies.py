"""Policies that are compared on the same trace: ours, KEDA on the thesis's queries, Slurm's power saving, and a fixed pool.

Each `act` is called at the policy's interval and changes the simulated cluster. Only ours looks at what nodes do; that is
what is shown.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from slurmlet.operators.provisioning.autoscaler.cluster_snapshot import SetFacts, Snapshot
from slurmlet.operators.provisioning.autoscaler.decision import PolicyState, SetDecision, decide
from slurmlet.operators.provisioning.simulator.simulated_cluster import SimulatedCluster
from slurmlet.operators.provisioning.simulator.simulated_nodes import Power


class Policy(Protocol):
    name: str
    cloud: bool  # Slurm knows machines that are switched off, and starts jobs on them
    shrinks: bool

    def begin(self, cluster: SimulatedCluster) -> None: ...

    def act(self, cluster: SimulatedCluster) -> None: ...


class SlurmletPolicy:
    """The autoscaler itself (autoscaler/decision.py), with the processor time that each decision takes."""

    name = "slurmlet"
    cloud = False
    shrinks = True

    def __init__(self) -> None:
        self.durations_s: list[float] = []
        self.queue_lengths: list[int] = []
        self._state = PolicyState()
        self._version = -1
        self._due_s = 0.0

    def begin(self, cluster: SimulatedCluster) -> None:
        pass

    def act(self, cluster: SimulatedCluster) -> None:
        # Equal facts give equal decisions: nothing needs to be asked again until something changes, or a cool-down ends.
        if cluster.version == self._version and cluster.now_s < self._due_s:
            return
        sets = tuple(
            SetFacts(spec, cluster.replicas[name], cluster.machines(name))
            for name, spec in cluster.sets.items()
        )
        snapshot = Snapshot(sets, cluster.workers(), cluster.queue())
        began_s = time.thread_time()
        made = decide(snapshot, self._state, cluster.now_s)
        self.durations_s.append(time.thread_time() - began_s)
        self.queue_lengths.append(len(cluster.pending))
        self._state = made.state
        self._version = cluster.version
        for one in made.sets:
            self.carry_out(cluster, one)
        self._due_s = min(
            (
                node.last_busy_s + node.spec.scale_in_after_s
                for node in cluster.nodes.values()
                if not node.jobs
                and not node.drained
                and node.last_busy_s + node.spec.scale_in_after_s > cluster.now_s
            ),
            default=math.inf,
        )

    def carry_out(self, cluster: SimulatedCluster, made: SetDecision) -> None:
        for step in self.steps(cluster, made):
            step()

    def steps(self, cluster: SimulatedCluster, made: SetDecision) -> list[Callable[[], None]]:
        """In the order in which they must be taken, each of them whole: an operator may die between any two."""
        found = [partial(cluster.mark, name, marked=False) for name in made.unmark]
        found += [partial(cluster.drain, name, drained=False) for name in made.undrain]
        found += [partial(cluster.drain, name, drained=True) for name in made.drain]
        found += [partial(cluster.mark, name, marked=True) for name in made.mark]
        if made.replicas is not None:
            found.append(partial(cluster.set_replicas, made.name, made.replicas))
        return list(found)


class KedaPolicy:
    """KEDA with a HorizontalPodAutoscaler on a count of jobs (`AverageValue`), as Slinky proposes it and the thesis has it.

    It knows the number of jobs, not what they need, and the number of machines, not which of them are busy.
    It scales the first set only.
    """

    cloud = False
    shrinks = True

    def __init__(self, *, refined: bool, cool_down_s: float = 300.0, threshold: int = 1) -> None:
        self.name = "thesis" if refined else "slinky"
        self._refined = refined
        self._cool_down_s = cool_down_s
        self._threshold = threshold
        self._active_s = -math.inf
        self._wishes: deque[tuple[float, int]] = deque()

    def begin(self, cluster: SimulatedCluster) -> None:
        pass

    def act(self, cluster: SimulatedCluster) -> None:
        (name, spec), *_ = cluster.sets.items()
        metric = len(cluster.pending)
        if self._refined and metric < self._threshold:
            metric = len(cluster.running)
        now_s, replicas = cluster.now_s, cluster.replicas[name]
        if metric > 0:
            self._active_s = now_s
            if not replicas:
                cluster.set_replicas(name, max(1, spec.min))
                return
        elif now_s - self._active_s >= self._cool_down_s and replicas > spec.min:
            self._wishes.clear()
            cluster.set_replicas(name, spec.min)
            return
        if not replicas:
            return
        wish = self._stabilised(now_s, min(spec.max, max(1, spec.min, math.ceil(metric / self._threshold))))
        # The autoscaler's default rate: the double, or four more, every 15 s.
        wish = min(wish, max(replicas * 2, replicas + 4))
        if wish != replicas:
            cluster.set_replicas(name, wish)

    def _stabilised(self, now_s: float, wish: int) -> int:
        """The highest wish of the last five minutes: the HorizontalPodAutoscaler's window before it scales in."""
        self._wishes.append((now_s, wish))
        while self._wishes[0][0] < now_s - 300:
            self._wishes.popleft()
        return max(wish for _, wish in self._wishes)


class PowerSavingPolicy:
    """Slurm's own: it allocates nodes that are off and resumes them, and suspends those that were idle for SuspendTime."""

    name = "power-saving"
    cloud = True
    shrinks = True

    def __init__(self, suspend_time_s: float | None = None) -> None:
        self._suspend_time_s = suspend_time_s

    def begin(self, cluster: SimulatedCluster) -> None:
        for name, spec in cluster.sets.items():
            for _ in range(spec.max):
                cluster.add_node(name, Power.OFF)

    def act(self, cluster: SimulatedCluster) -> None:
        for node in cluster.nodes.values():
            after_s = node.spec.scale_in_after_s if self._suspend_time_s is None else self._suspend_time_s
            if node.power is Power.UP and not node.jobs and cluster.now_s - node.last_busy_s >= after_s:
                cluster.power_down(node)


class FixedPolicy:
    """Every set at its maximum, all the time."""

    name = "fixed"
    cloud = False
    shrinks = False

    def begin(self, cluster: SimulatedCluster) -> None:
        for name, spec in cluster.sets.items():
            for _ in range(spec.max):
                cluster.add_node(name, Power.UP)
            cluster.replicas[name] = spec.max

    def act(self, cluster: SimulatedCluster) -> None:
        pass
