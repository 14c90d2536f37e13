"""Ephemeral containers (`kubectl debug`): started in the pod as it runs, beside what is there. Loaded when one comes."""

from __future__ import annotations

from slurmlet.runner.pod.pod_lifecycle import Lifecycle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurmlet.protocol.pod_plan import ContainerPlan


def start(lifecycle: Lifecycle, plan: ContainerPlan) -> None:
    """`target` names the container whose processes it is to see."""
    target = lifecycle.find(str(plan.get("target") or ""))
    if target is not None and target.running:
        plan = {**plan, "target_pid": target.root_pid}
    lifecycle.add_ephemeral(plan)
