"""Whole reports of runners out of the fields that a test is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmlet.protocol.pod_report import ContainerReport, PodReport

_CONTAINER = {
    "image": "", "state": "waiting", "reason": "", "message": "", "started_at": None, "finished_at": None,
    "exit_code": None, "signal": None, "container_id": "", "restart_count": 0, "started": False, "ready": False,
}  # fmt: skip
_RUN = ("reason", "message", "started_at", "finished_at", "exit_code", "signal", "container_id")


def container_report(**fields: Any) -> ContainerReport:
    last = fields.pop("last", None)
    whole: Any = {**_CONTAINER, "last": last and {**{key: _CONTAINER[key] for key in _RUN}, **last}, **fields}
    return whole  # type: ignore[no-any-return]


def pod_report(
    containers: Mapping[str, Any] | None = None,
    init_containers: Mapping[str, Any] | None = None,
    **fields: Any,
) -> PodReport:
    ephemeral = fields.pop("ephemeral_containers", {})
    whole: Any = {
        "phase": "Running", "started_at": "2026-01-01T00:00:00Z", "exit_code": None, "problem": None,
        "containers": {name: container_report(**one) for name, one in (containers or {}).items()},
        "init_containers": {name: container_report(**one) for name, one in (init_containers or {}).items()},
        "ephemeral_containers": {name: container_report(**one) for name, one in ephemeral.items()},
        **fields,
    }  # fmt: skip
    return whole  # type: ignore[no-any-return]
