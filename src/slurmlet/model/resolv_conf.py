"""A pod's resolv.conf as far as the API decides it: dnsPolicy and dnsConfig, by the kubelet's rules. Pure.

The other part is the compute node's own file, which only the runner sees: `runner/network/resolver_config` puts both
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmlet.protocol.pod_plan import ResolverBase, ResolverPlan

Obj = Mapping[str, Any]
CLUSTER_DOMAIN = "cluster.local"
_CLUSTER_OPTIONS = ["ndots:5"]


def resolv_conf_plan(pod: Obj, dns_ip: str) -> ResolverPlan | None:
    """PodPlan.resolv_conf; None: the host's file as it is."""
    base = _base(pod, dns_ip)
    config = pod["spec"].get("dnsConfig") or {}
    if base is None and not config:
        return None
    return {
        "base": base,
        "nameservers": list(config.get("nameservers") or ()),
        "searches": list(config.get("searches") or ()),
        "options": [
            [one["name"], one.get("value")] for one in config.get("options") or () if one.get("name")
        ],
    }


def _base(pod: Obj, dns_ip: str) -> ResolverBase | None:
    """What dnsConfig is added to; None: what the host's file says."""
    spec = pod["spec"]
    policy = spec.get("dnsPolicy") or "ClusterFirst"
    if policy == "None":
        return {"nameservers": [], "searches": [], "options": [], "host_searches": False}
    if policy == "Default" or (policy == "ClusterFirst" and spec.get("hostNetwork")) or not dns_ip:
        return None
    namespace = pod["metadata"]["namespace"]
    searches = [f"{namespace}.svc.{CLUSTER_DOMAIN}", f"svc.{CLUSTER_DOMAIN}", CLUSTER_DOMAIN]
    return {
        "nameservers": [dns_ip],
        "searches": searches,
        "options": list(_CLUSTER_OPTIONS),
        "host_searches": True,
    }
