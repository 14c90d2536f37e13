"""What came of a simulation, for people and programs: a table, JSON, and two pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurmlet.base.bar_chart import bars
from slurmlet.base.step_chart import Panel, step_chart
from slurmlet.operators.provisioning.simulator.simulation import Outcome

HEAD = [
    "POLICY", "FINISHED", "MEAN WAIT [s]", "P90", "NODE-HOURS", "IN USE [%]", "REQUEUES", "LOST NODE-HOURS", "BOOTS",
    "END [h]",
]  # fmt: skip


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    return [
        [
            one.policy,
            f"{one.finished}/{one.jobs}",
            f"{one.mean_wait_s:.0f}",
            f"{one.wait_s(0.9):.0f}",
            f"{one.node_hours:.1f}",
            f"{100 * one.busy_node_hours / one.node_hours if one.node_hours else 0:.0f}",
            str(one.requeues),
            f"{one.lost_node_hours:.1f}",
            str(one.scale_outs),
            f"{one.ended_s / 3600:.1f}",
        ]
        for one in outcomes
    ]


def as_json(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {
        "policy": outcome.policy,
        "jobs": outcome.jobs,
        "finished": outcome.finished,
        "impossible": outcome.impossible,
        "unfinished": outcome.unfinished,
        "mean_wait_s": round(outcome.mean_wait_s, 1),
        "p90_wait_s": round(outcome.wait_s(0.9), 1),
        "node_hours": round(outcome.node_hours, 2),
        "busy_node_hours": round(outcome.busy_node_hours, 2),
        "lost_node_hours": round(outcome.lost_node_hours, 2),
        "requeues": outcome.requeues,
        "boots": outcome.scale_outs,
        "ended_s": round(outcome.ended_s, 1),
    }
    if outcome.decisions_s:
        found["decisions"] = decision_times(outcome)
    return found


def decision_times(outcome: Outcome) -> dict[str, float]:
    """Of processor time, in milliseconds."""
    ordered = sorted(outcome.decisions_s)
    return {
        "count": len(ordered),
        "mean_ms": round(1000 * sum(ordered) / len(ordered), 3),
        "p99_ms": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 3),
        "most_ms": round(1000 * ordered[-1], 3),
        "longest_queue": max(outcome.queue_lengths),
    }


def bar_picture(outcomes: Sequence[Outcome], title: str) -> str:
    return bars(
        title,
        {
            "mean wait [s]": [(one.policy, one.mean_wait_s) for one in outcomes],
            "node-hours": [(one.policy, one.node_hours) for one in outcomes],
            "requeues": [(one.policy, float(one.requeues)) for one in outcomes],
            "jobs not finished": [(one.policy, float(one.unfinished)) for one in outcomes],
        },
    )


def timeline_picture(outcomes: Sequence[Outcome], title: str) -> str:
    """Up to when the last policy that finished was done: one that never gets there goes on the same way."""
    ends = [one.ended_s for one in outcomes if not one.unfinished] or [one.ended_s for one in outcomes]
    last_s = max(ends, default=0.0) * 1.15
    machines = [
        (one.policy, [(sample.at_s, float(sample.nodes)) for sample in one.samples]) for one in outcomes
    ]
    waiting = [
        (one.policy, [(sample.at_s, float(sample.pending)) for sample in one.samples]) for one in outcomes
    ]
    return step_chart(title, [Panel("machines", machines), Panel("waiting jobs", waiting)], last_s)
