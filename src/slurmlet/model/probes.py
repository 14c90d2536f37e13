"""Probes and lifecycle hooks of a container, resolved for its runner: named ports found, defaults filled in.

    Action = {kind: "exec", argv} | {kind: "http", scheme, host, port, path, headers: [[name, value]]}
           | {kind: "tcp", host, port} | {kind: "grpc", port, service} | {kind: "sleep", seconds}
    Probe  = {action, initial_delay_s, period_s, timeout_s, success, failure, grace_s (int|null)}

An empty host means the pod's own address, which only the runner knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.model.container_environment import expand

Obj = Mapping[str, Any]
_KINDS = {"startup": "startupProbe", "liveness": "livenessProbe", "readiness": "readinessProbe"}


def probes(container: Obj) -> dict[str, Any]:
    """{"startup" | "liveness" | "readiness": Probe} for those the container has."""
    return {kind: _probe(container, container[key]) for kind, key in _KINDS.items() if container.get(key)}


def hooks(container: Obj) -> dict[str, Any]:
    """{"post_start", "pre_stop": Action or None}."""
    lifecycle = container.get("lifecycle") or {}
    return {
        "post_start": _hook(container, "postStart", lifecycle.get("postStart")),
        "pre_stop": _hook(container, "preStop", lifecycle.get("preStop")),
    }


def _probe(container: Obj, spec: Obj) -> dict[str, Any]:
    return {
        "action": _action(container, spec, expanded=True),
        "initial_delay_s": int(spec.get("initialDelaySeconds") or 0),
        "period_s": int(spec.get("periodSeconds") or 10),
        "timeout_s": int(spec.get("timeoutSeconds") or 1),
        "success": int(spec.get("successThreshold") or 1),
        "failure": int(spec.get("failureThreshold") or 3),
        "grace_s": spec.get("terminationGracePeriodSeconds"),
    }


def _hook(container: Obj, name: str, spec: Obj | None) -> dict[str, Any] | None:
    if not spec:
        return None
    if "tcpSocket" in spec:
        raise RefusedPod(
            f"container {container['name']}: lifecycle.{name}.tcpSocket is deprecated and no kubelet runs it",
            hint="Use exec or httpGet.",
        )
    return _action(container, spec, expanded=False)


def _action(container: Obj, spec: Obj, *, expanded: bool) -> dict[str, Any]:
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
