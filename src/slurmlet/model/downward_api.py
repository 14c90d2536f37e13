"""The downward API: fields and resources of the pod as text, as the kubelet formats them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.model import quantities

_SUBSCRIPT = re.compile(r"metadata\.(annotations|labels)\['(.*)'\]")
_DEFAULT_DIVISOR = "0"
_GO_ESCAPES = {
    "\a": r"\a", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v", "\\": r"\\", '"': r"\"",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where the pod runs: what the runner told in its hello."""

    host_ip: str = ""
    host: str = ""
    node_cpus: int = 1
    node_memory_bytes: int = 0
    # "": the pod has the network of its host; None: an address of its own, not known yet.
    own_ip: str | None = ""
    # By which others know a pod of its host's network that takes part in the pod network; nobody is shown it.
    overlay_ip: str = ""

    @property
    def pod_ip(self) -> str:
        return "" if self.own_ip is None else self.own_ip or self.host_ip


def field_value(pod: Mapping[str, Any], path: str, place: Place) -> str:
    metadata, spec = pod["metadata"], pod["spec"]
    subscript = _SUBSCRIPT.fullmatch(path)
    if subscript:
        return str((metadata.get(subscript.group(1)) or {}).get(subscript.group(2), ""))
    simple = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.hostIP": place.host_ip,
        "status.hostIPs": place.host_ip,
        "status.podIP": place.pod_ip,
        "status.podIPs": place.pod_ip,
    }
    if path in simple:
        return str(simple[path])
    if path in ("metadata.labels", "metadata.annotations"):
        values = metadata.get(path.split(".")[1]) or {}
        return "\n".join(f"{key}={_go_quoted(values[key])}" for key in sorted(values))
    raise RefusedPod(f"fieldPath {path!r} is not supported")


def _go_quoted(text: str) -> str:
    """Go's strconv.Quote, in which the kubelet writes label and annotation files."""

    def quoted(char: str) -> str:
        if char in _GO_ESCAPES:
            return _GO_ESCAPES[char]
        if char.isprintable():
            return char
        code = ord(char)
        return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return f'"{"".join(map(quoted, text))}"'


def resource_value(
    pod: Mapping[str, Any], reference: Mapping[str, Any], container: Mapping[str, Any] | None, place: Place
) -> str:
    """limits.cpu and friends, divided and rounded up; a limit that is not set is what the node has."""
    name = reference.get("containerName")
    if name:
        spec = pod["spec"]
        every = (*spec.get("initContainers", ()), *spec.get("containers", ()))
        container = next((one for one in every if one["name"] == name), None)
    if container is None:
        raise RefusedPod(f"resourceFieldRef: no container {name!r}")
    kind, _, resource = reference["resource"].partition(".")
    value = _resource(container, kind, resource, place)
    divisor = quantities.parse(reference.get("divisor") or _DEFAULT_DIVISOR) or Fraction(1)
    return str(quantities.ceil(value / divisor))


def _resource(container: Mapping[str, Any], kind: str, resource: str, place: Place) -> Fraction:
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    if kind == "requests":
        return quantities.parse(requests.get(resource) or limits.get(resource) or 0)
    limit = quantities.parse(limits.get(resource) or 0)
    if limit:
        return limit
    if resource == "cpu":
        return Fraction(place.node_cpus)
    return Fraction(place.node_memory_bytes) if resource == "memory" else Fraction(0)
