"""What the operator tells Prometheus: sizes of each WorkerSet, acts, whether Slurm answers, how its controllers do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from slurmlet.kube.controller import Controller
from slurmlet.model.stats_summary import Family, exposition
from slurmlet.operators.provisioning.autoscaler.decision import Decision, SetDecision

_GAUGES: tuple[tuple[str, str, Callable[[SetDecision], int]], ...] = (
    ("desired", "Workers that the last decision called for", lambda one: one.desired),
    ("busy", "Workers with a job", lambda one: one.busy),
    ("idle", "Workers without a job", lambda one: one.idle),
    ("draining", "Workers that were drained to be retired", lambda one: one.draining),
    ("registering", "Machines that have not registered with Slurm yet", lambda one: one.starting),
    ("unavailable", "Workers that are down, or drained by a person", lambda one: one.unavailable),
    ("failed", "Machines that did not register in time", lambda one: one.failed),
    ("waiting_jobs", "Jobs that wait for workers of this set", lambda one: one.waiting_jobs),
)


class ProvisioningMetrics:
    def __init__(self) -> None:
        self._sets: dict[str, dict[str, SetDecision]] = {}  # by SlurmCluster, then by WorkerSet
        self._ignored: dict[str, int] = {}
        self._unplaced: dict[str, int] = {}
        self._reachable: dict[str, bool] = {}
        self._acts: Counter[tuple[str, str]] = Counter()
        self._decided_at_s: dict[str, float] = {}
        self.controllers: list[Controller[str]] = []
        self.sources: list[Callable[[], Sequence[Family]]] = []  # what other parts tell, such as webhooks

    def reachable(self, cluster: str, answers: bool) -> None:
        self._reachable[cluster] = answers

    def acted(self, worker_set: str, act: str) -> None:
        self._acts[worker_set, act] += 1

    def decided(self, cluster: str, decision: Decision) -> None:
        self._sets[cluster] = {one.name: one for one in decision.sets}
        self._ignored[cluster] = sum(one.count for one in decision.ignored)
        self._unplaced[cluster] = sum(one.count for one in decision.unplaced)
        self._decided_at_s[cluster] = time.time()

    def exposition(self, *, leading: bool) -> str:
        leads = Family("slurmlet_provision_leading", "gauge", "Whether this replica is the one that acts")
        leads.add(float(leading))
        more = [family for source in self.sources for family in source()]
        return exposition([leads, *self._of_sets(), *self._of_clusters(), *self._of_controllers(), *more])

    def _of_sets(self) -> list[Family]:
        families = [
            (Family(f"slurmlet_provision_{name}", "gauge", text), read) for name, text, read in _GAUGES
        ]
        for cluster, sets in self._sets.items():
            namespace, _, name = cluster.partition("/")
            for one in sets.values():
                labels = {"namespace": namespace, "slurm_cluster": name, "worker_set": one.name}
                for family, read in families:
                    family.add(read(one), labels)
        acts = Family("slurmlet_provision_acts_total", "counter", "Changes that were made, by kind")
        for (key, act), count in self._acts.items():
            namespace, _, name = key.partition("/")
            acts.add(count, {"namespace": namespace, "worker_set": name, "act": act})
        return [*(family for family, _ in families), acts]

    def _of_clusters(self) -> list[Family]:
        up = Family("slurmlet_provision_slurm_reachable", "gauge", "Whether Slurm answered the last time")
        ignored = Family(
            "slurmlet_provision_ignored_jobs", "gauge", "Waiting jobs that are no reason for workers"
        )
        unplaced = Family(
            "slurmlet_provision_unplaced_jobs", "gauge", "Waiting jobs that get no worker for now"
        )
        last = Family("slurmlet_provision_last_decision_seconds", "gauge", "Unix time of the last decision")
        for family, values in (
            (up, {key: float(value) for key, value in self._reachable.items()}),
            (ignored, self._ignored),
            (unplaced, self._unplaced),
            (last, self._decided_at_s),
        ):
            for key, value in values.items():
                namespace, _, name = key.partition("/")
                family.add(value, {"namespace": namespace, "slurm_cluster": name})
        return [up, ignored, unplaced, last]

    def _of_controllers(self) -> list[Family]:
        done = Family("slurmlet_provision_reconciles_total", "counter", "Reconciles, by controller")
        failed = Family("slurmlet_provision_reconcile_failures_total", "counter", "Failed reconciles")
        failing = Family("slurmlet_provision_failing_objects", "gauge", "Objects whose last reconcile failed")
        for controller in self.controllers:
            labels = {"controller": controller.name}
            done.add(controller.tally.reconciled, labels)
            failed.add(controller.tally.failed, labels)
            failing.add(len(controller.tally.failing), labels)
        return [done, failed, failing]
