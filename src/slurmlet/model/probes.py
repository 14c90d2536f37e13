"""Probes and lifecycle hooks of a container, resolved for its runner: named ports found, defaults filled in.

The shapes are `protocol/pod_plan.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.model.container_environment import expand
from slurmlet.protocol.pod_plan import Action, Probe, Probes

Obj = Mapping[str, Any]


def probes(container: Obj) -> Probes:
    """Those the container has."""
    found: Probes = {}
    if container.get("startupProbe"):
        found["startup"] = _probe(container, container["startupProbe"])
    if container.get("livenessProbe"):
        found["liveness"] = _probe(container, container["livenessProbe"])
    if container.get("readinessProbe"):
        found["readiness"] = _probe(container, container["readinessProbe"])
    return found


def hook(container: Obj, name: str) -> Action | None:
    """`name`: postStart or preStop."""
    spec = (container.get("lifecycle") or {}).get(name)
    if not spec:
        return None
    if "tcpSocket" in spec:
        raise RefusedPod(
            f"container {container['name']}: lifecycle.{name}.tcpSocket is deprecated and not supported",
            hint="Use exec or httpGet.",
        )
    return _action(container, spec, expanded=False)


def _probe(container: Obj, spec: Obj) -> Probe:
    return {
        "action": _action(container, spec, expanded=True),
        "initial_delay_s": int(spec.get("initialDelaySeconds") or 0),
        "period_s": int(spec.get("periodSeconds") or 10),
        "timeout_s": int(spec.get("timeoutSeconds") or 1),
        "success": int(spec.get("successThreshold") or 1),
        "failure": int(spec.get("failureThreshold") or 3),
        "grace_s": spec.get("terminationGracePeriodSeconds"),
    }


def _action(container: Obj, spec: Obj, *, expanded: bool) -> Action:
    if "exec" in spec:
        # The kubelet expands probes' commands from plainly written variables only, and hooks' commands not at all.
        known = {one["name"]: one["value"] for one in container.get("env", ()) if one.get("value")}
        words = spec["exec"].get("command") or ()
        return {"kind": "exec", "argv": [expand(word, known) if expanded else word for word in words]}
    if "httpGet" in spec:
        http = spec["httpGet"]
        return {
            "kind": "http",
            "scheme": str(http.get("scheme") or "HTTP").lower(),
            "host": http.get("host") or "",
            "port": _port(container, http["port"]),
            "path": http.get("path") or "/",
            "headers": [[one["name"], one.get("value", "")] for one in http.get("httpHeaders") or ()],
        }
    if "tcpSocket" in spec:
        tcp = spec["tcpSocket"]
        return {"kind": "tcp", "host": tcp.get("host") or "", "port": _port(container, tcp["port"])}
    if "grpc" in spec:
        return {
            "kind": "grpc",
            "port": int(spec["grpc"]["port"]),
            "service": spec["grpc"].get("service") or "",
        }
    if "sleep" in spec:
        return {"kind": "sleep", "seconds": int(spec["sleep"]["seconds"])}
    raise RefusedPod(f"container {container['name']}: a probe or hook without a known action")


def _port(container: Obj, port: int | str) -> int:
    if isinstance(port, int) or str(port).isdigit():
        return int(port)
    for one in container.get("ports") or ():
        if one.get("name") == port:
            return int(one["containerPort"])
    raise RefusedPod(f"container {container['name']}: no port is named {port!r}")
