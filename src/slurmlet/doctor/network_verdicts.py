"""From facts of a compute node to the network that pods get there. Pure; the choice is the runner's own (podnet)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slurmlet.doctor.findings import ASK, NODE, Line
from slurmlet.podnet.netd_setup import FAST, NO_NETNS, PACKETS

Facts = Mapping[str, Any]
NONE = "none"

# what the pods get, what is lost beside the best
_MODES: dict[str, tuple[str, str]] = {
    FAST: ("TCP by sockets of the host, at its own speed; UDP and ICMP by TUN", "-"),
    NO_NETNS: (
        "TCP, Services and DNS by sockets of the host alone",
        "pods share the host's UDP ports and ICMP; NetworkPolicy holds for TCP only; ip addr shows the host",
    ),
    PACKETS: (
        "TUN for everything, TCP too",
        "TCP is many times slower than the host's, and costs CPU time of the pod's job",
    ),
    NONE: ("nothing", "pods run only with hostNetwork: true"),
}


def mode_of(node: Facts) -> str:
    spaces = not (_problem(node, "network_namespace") or _problem(node, "tun"))
    answers = not (_answers_problem(node) or _problem(node, "pidfd_getfd"))
    if spaces:
        return FAST if answers else PACKETS
    return NO_NETNS if answers else NONE


def network_lines(node: Facts) -> Iterator[Line]:
    yield _namespaces(node)
    yield _line(
        node, "tun", "TUN", "eth0 of each pod: UDP, ICMP", "no own network for pods beyond TCP",
        f"{ASK} to load the module tun and to open /dev/net/tun to users (mode 0666, as distributions do).",
    )  # fmt: skip
    yield _judged(
        _answers_problem(node), "seccomp notification", "TCP at the host's own speed", "TCP as slow as packets through TUN",
        "Needs Linux 5.14 or newer with seccomp filters, and jobs without another seccomp listener.",
    )  # fmt: skip
    yield _line(
        node, "pidfd_getfd", "pidfd_getfd", "TCP at the host's own speed", "TCP as slow as packets through TUN",
        f"Needs Linux 5.6 or newer; {ASK.lower()} for sysctl kernel.yama.ptrace_scope below 3.",
    )  # fmt: skip
    yield _line(
        node, "own_ports", "low ports and ping", "any port, and ping, without capabilities in a pod",
        "UDP servers below port 1024 and ping need root in their container",
        "Needs a /proc/sys that jobs may write in a network namespace of their own.",
    )  # fmt: skip
    yield _line(
        node, "host_ping", "ping of hosts", "ping sockets of the host", "pods ping each other, but no other host",
        f"{ASK} for sysctl net.ipv4.ping_group_range=\"0 2147483647\" on compute nodes.",
    )  # fmt: skip
    yield _mode(node)


def _namespaces(node: Facts) -> Line:
    limit = node.get("max_net_namespaces")
    now = f" (it is {limit})" if limit is not None else ""
    return _line(
        node, "network_namespace", "network namespaces", "one for each pod", "no own network for pods beyond TCP",
        f"{ASK} for sysctl user.max_net_namespaces > 0{now} on compute nodes.",
    )  # fmt: skip


def _mode(node: Facts) -> Line:
    mode = mode_of(node)
    uses, lost = _MODES[mode]
    return Line(
        NODE, "pod network", "ok" if mode == FAST else "missing" if mode == NONE else "degraded", mode, uses, lost,
        "" if mode == FAST else "See the lines above that are not ok.",
    )  # fmt: skip


def _problem(node: Facts, key: str) -> str:
    return str(node.get(key, "not tried"))


def _answers_problem(node: Facts) -> str:
    problem = _problem(node, "seccomp")
    if not problem and "user_notif" not in (node.get("seccomp_actions") or ["user_notif"]):
        return "the kernel has no user_notif"
    return problem


def _line(node: Facts, key: str, what: str, uses: str, without: str, remedy: str) -> Line:
    return _judged(_problem(node, key), what, uses, without, remedy)


def _judged(problem: str, what: str, uses: str, without: str, remedy: str) -> Line:
    if problem:
        return Line(NODE, what, "degraded", problem, "-", without, remedy)
    return Line(NODE, what, "ok", "yes", uses, without)
