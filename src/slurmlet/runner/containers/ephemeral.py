"""Ephemeral containers (`kubectl debug`): started in the pod as it runs, beside what is there. Loaded when one comes."""

from __future__ import annotations

from typing import Any, Dict

from slurmlet.runner.pod.pod_lifecycle import Lifecycle


def start(lifecycle: Lifecycle, plan: Dict[str, Any]) -> None:
    """`target` names the container whose processes it is to see."""
    target = lifecycle.find(str(plan.get("target") or ""))
    if target is not None and target.running:
        plan = {**plan, "target_pid": target.root_pid}
    lifecycle.add_ephemeral(plan)
