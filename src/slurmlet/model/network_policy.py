"""NetworkPolicies resolved to what one pod's netd can ask of every connection: address ranges and port numbers. Pure.

What upstream leaves to the network is decided as most networks do: pods on the host's network are no pods here, neither
isolated nor selected as peers (an ipBlock can name their host); an ipBlock may also cover pods; the backend behind a
Service is what a rule is asked about. What cannot be enforced is named by `unenforceable`, never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slurmlet.model.label_selectors import Labels, Selector, compiled
from slurmlet.podnet import addresses
from slurmlet.protocol.pod_plan import Policy as PodPolicy
from slurmlet.protocol.pod_plan import PolicyRule

Obj = Mapping[str, Any]
Ranges = list[tuple[str, list[str]]]
Limits = list[tuple[int, int, int]]

_PROTOCOLS = {"TCP": 6, "UDP": 17, "SCTP": 132}
_LAST_PORT = 65535
_OVER = ("Succeeded", "Failed")
OPEN: PodPolicy = {"ingress": None, "egress": None}


@dataclass(frozen=True, slots=True)
class Pod:
    """The part of a pod that policies look at."""

    namespace: str
    name: str
    labels: Labels
    # "" while it has none, and for a pod that is over: its address may be another's soon.
    ip: str
    ports: tuple[tuple[str, int, int], ...] = ()  # (name, protocol number, port) of those that have a name
    host_network: bool = False


@dataclass(frozen=True, eq=False)
class Peer:
    """One entry of `from` or `to`. Compared by identity: it is the key under which its members are remembered."""

    # Where its pods are: one namespace, or those with such labels; neither: it selects no pods.
    namespace: str = ""
    namespaces: Selector | None = None
    pods: Selector | None = None
    everybody: bool = False  # all pods of all namespaces
    block: tuple[str, tuple[str, ...]] | None = None

    def selects(self, pod: Pod, namespace_labels: Labels) -> bool:
        if pod.host_network or self.pods is None:
            return False
        if self.namespaces is None:
            return pod.namespace == self.namespace and self.pods(pod.labels)
        return self.namespaces(namespace_labels) and self.pods(pod.labels)


@dataclass(frozen=True)
class Port:
    protocol: int
    name: str  # "": first to last
    first: int = 0
    last: int = _LAST_PORT


@dataclass(frozen=True, eq=False)
class Rule:
    peers: tuple[Peer, ...] | None  # None: anybody
    ports: tuple[Port, ...] | None  # None: any


@dataclass(frozen=True, eq=False)
class Policy:
    namespace: str
    name: str
    chosen: Selector
    ingress: tuple[Rule, ...] | None  # None: does not speak of this direction
    egress: tuple[Rule, ...] | None

    def selects(self, pod: Pod) -> bool:
        return pod.namespace == self.namespace and not pod.host_network and self.chosen(pod.labels)

    @cached_property
    def peers(self) -> tuple[Peer, ...]:
        rules = (*(self.ingress or ()), *(self.egress or ()))
        return tuple(peer for rule in rules for peer in rule.peers or ())

    @cached_property
    def names_own_ports(self) -> bool:
        """Whether two pods it selects may get different rules from it."""
        return any(port.name for rule in self.ingress or () for port in rule.ports or ())

    @cached_property
    def names_others_ports(self) -> bool:
        """Whether a rule to anybody looks at what every pod calls its ports."""
        return any(
            rule.peers is None or any(peer.block or peer.everybody for peer in rule.peers)
            for rule in self.egress or ()
            if any(port.name for port in rule.ports or ())
        )


@dataclass(frozen=True)
class View:
    """The cluster as rules are resolved against it."""

    pod_range: str
    # Whom the cluster's DNS answers through. As a source it stands for the world outside, which no selector means.
    gateway: str
    members: Callable[[Peer], Collection[Pod]]
    all_pods: Callable[[], Iterable[Pod]]


# From objects.


def pod_of(obj: Obj, ip: str = "") -> Pod:
    """`ip`: the pod's address where the object does not show it yet."""
    spec, status, metadata = obj["spec"], obj.get("status") or {}, obj["metadata"]
    host_network = bool(spec.get("hostNetwork"))
    address = "" if host_network or status.get("phase") in _OVER else status.get("podIP") or ip
    return Pod(
        metadata["namespace"],
        metadata["name"],
        metadata.get("labels") or {},
        address,
        tuple(_named_ports(spec)),
        host_network,
    )


def _named_ports(spec: Obj) -> Iterator[tuple[str, int, int]]:
    sidecars = (one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always")
    for container in (*(spec.get("containers") or ()), *sidecars):
        for port in container.get("ports") or ():
            if port.get("name"):
                yield (
                    port["name"],
                    _PROTOCOLS.get(port.get("protocol") or "TCP", 0),
                    int(port["containerPort"]),
                )


def policy_of(obj: Obj) -> Policy:
    metadata, spec = obj["metadata"], obj.get("spec") or {}
    kinds = spec.get("policyTypes") or (["Ingress", "Egress"] if spec.get("egress") else ["Ingress"])
    namespace = metadata["namespace"]

    def rules(kind: str, key: str, side: str) -> tuple[Rule, ...] | None:
        if kind not in kinds:
            return None
        return tuple(_rule(raw, side, namespace) for raw in spec.get(key) or ())

    return Policy(
        namespace,
        metadata["name"],
        compiled(spec.get("podSelector") or {}),
        rules("Ingress", "ingress", "from"),
        rules("Egress", "egress", "to"),
    )


def _rule(raw: Obj, side: str, namespace: str) -> Rule:
    peers, ports = raw.get(side), raw.get("ports")
    return Rule(
        tuple(_peer(each, namespace) for each in peers) if peers else None,
        tuple(map(_port, ports)) if ports else None,
    )


def _peer(raw: Obj, namespace: str) -> Peer:
    block, pods, namespaces = (raw.get(key) for key in ("ipBlock", "podSelector", "namespaceSelector"))
    if block is not None:
        cidr = _four(block["cidr"])
        return Peer(
            block=(cidr, tuple(filter(None, map(_four, block.get("except") or ())))) if cidr else None
        )
    if pods is None and namespaces is None:
        return Peer()  # of a kind that is not known here: it matches nobody
    chosen = compiled(pods or {})
    if namespaces is None:
        return Peer(namespace=namespace, pods=chosen)
    return Peer(
        namespaces=compiled(namespaces), pods=chosen, everybody=not _holds(namespaces) and not _holds(pods)
    )


def _holds(selector: Obj | None) -> bool:
    return bool(selector and (selector.get("matchLabels") or selector.get("matchExpressions")))


def _four(cidr: str) -> str:
    """An IPv4 range as its bare decimal form, "" for an IPv6 one. Old objects may hold leading zeros."""
    if ":" in cidr:
        return ""
    address, _, length = cidr.partition("/")
    return ".".join(str(int(part)) for part in address.split(".")) + f"/{int(length or 32)}"


def _port(raw: Obj) -> Port:
    protocol, port = _PROTOCOLS.get(raw.get("protocol") or "TCP", 0), raw.get("port")
    if port is None:
        return Port(protocol, "")
    if isinstance(port, str):
        return Port(protocol, port)
    return Port(protocol, "", port, raw.get("endPort") or port)


# To rules.


def resolve(pod: Pod, policies: Sequence[Policy], view: View) -> PodPolicy:
    """Of the policies that select the pod: what may come and go. None in a direction: it is not isolated there."""
    if not policies:
        return OPEN
    inward = [rule for policy in policies for rule in policy.ingress or ()]
    outward = [rule for policy in policies for rule in policy.egress or ()]
    found: PodPolicy = {"ingress": None, "egress": None}
    if any(policy.ingress is not None for policy in policies):
        found["ingress"] = _distinct(_ingress(rule, pod, view) for rule in inward)
    if any(policy.egress is not None for policy in policies):
        found["egress"] = _distinct(made for rule in outward for made in _egress(rule, view))
    return found


def _distinct(rules: Iterable[PolicyRule | None]) -> list[PolicyRule]:
    found: list[PolicyRule] = []
    for rule in rules:
        if rule is not None and rule not in found:
            found.append(rule)
    return found


def _ingress(rule: Rule, pod: Pod, view: View) -> PolicyRule | None:
    ports = None if rule.ports is None else list(_own_limits(rule.ports, pod))
    return _made(None if rule.peers is None else _ranges(rule.peers, view, inward=True), ports)


def _own_limits(ports: Iterable[Port], pod: Pod) -> Iterator[tuple[int, int, int]]:
    for port in ports:
        if not port.name:
            yield port.protocol, port.first, port.last
        for name, protocol, number in pod.ports:
            if (name, protocol) == (port.name, port.protocol):
                yield protocol, number, number


def _egress(rule: Rule, view: View) -> Iterator[PolicyRule | None]:
    peers = None if rule.peers is None else _ranges(rule.peers, view, inward=False)
    if rule.ports is None:
        yield _made(peers, None)
        return
    yield _made(peers, [(port.protocol, port.first, port.last) for port in rule.ports if not port.name])
    # A name means at each pod what that pod calls so: a rule for each number it stands for.
    wanted = {(port.name, port.protocol) for port in rule.ports if port.name}
    behind: dict[tuple[int, int], set[int]] = {}
    for pod in _reached(rule, view) if wanted else ():
        for name, protocol, number in pod.ports:
            if (name, protocol) in wanted and pod.ip:
                behind.setdefault((protocol, number), set()).add(addresses.number(pod.ip))
    for (protocol, number), ips in sorted(behind.items()):
        yield _made(_collapsed(ips), [(protocol, number, number)])


def _reached(rule: Rule, view: View) -> Iterator[Pod]:
    if rule.peers is None:
        yield from view.all_pods()
        return
    for peer in rule.peers:
        if peer.block is None:
            yield from view.members(peer)
        else:
            yield from (pod for pod in view.all_pods() if pod.ip and _in_block(pod.ip, peer.block))


def _in_block(ip: str, block: tuple[str, tuple[str, ...]]) -> bool:
    def holds(cidr: str) -> bool:
        base, mask = addresses.network(cidr)
        return addresses.number(ip) & mask == base

    return holds(block[0]) and not any(map(holds, block[1]))


def _made(peers: Ranges | None, ports: Limits | None) -> PolicyRule | None:
    """None for a rule that lets nothing through: it is the same as no rule."""
    return None if peers == [] or ports == [] else {"peers": peers, "ports": ports}


def _ranges(peers: Iterable[Peer], view: View, *, inward: bool) -> Ranges:
    found: Ranges = []
    ips: set[int] = set()
    for peer in peers:
        if peer.block is not None:
            found.append((peer.block[0], list(peer.block[1])))
        elif peer.everybody:
            found.append((view.pod_range, [f"{view.gateway}/32"] if inward else []))
        else:
            members = view.members(peer)
            ips |= {
                addresses.number(pod.ip)
                for pod in members
                if pod.ip and not (inward and pod.ip == view.gateway)
            }
    return found + _collapsed(ips)


def _collapsed(ips: Iterable[int]) -> Ranges:
    """Exactly these addresses in as few ranges as can be: addresses are given out in turn, so thousands become some."""
    found: Ranges = []
    ordered = sorted(ips)
    start = 0
    while start < len(ordered):
        end = start
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        first, count = ordered[start], end - start + 1
        while count:
            size = min(first & -first or 1 << 32, 1 << (count.bit_length() - 1))
            found.append((f"{addresses.text(first)}/{33 - size.bit_length()}", []))
            first, count = first + size, count - size
        start = end + 1
    return found


# What cannot be done.


def unenforceable(obj: Obj) -> list[str]:
    """Each thing in a policy that has no effect here, in words for an event."""
    spec = obj.get("spec") or {}
    found: list[str] = []
    for key, side in (("ingress", "from"), ("egress", "to")):
        for number, rule in enumerate(spec.get(key) or ()):
            where = f"spec.{key}[{number}]"
            found += _odd_ports(rule.get("ports") or (), f"{where}.ports")
            found += _odd_peers(rule.get(side) or (), f"{where}.{side}")
    return found


def _odd_ports(ports: Iterable[Obj], where: str) -> Iterator[str]:
    for number, port in enumerate(ports):
        protocol = port.get("protocol") or "TCP"
        if protocol not in _PROTOCOLS:
            yield f"{where}[{number}]: protocol {protocol} is not known here; the rule lets nothing of it through"


def _odd_peers(peers: Iterable[Obj], where: str) -> Iterator[str]:
    for number, peer in enumerate(peers):
        block = peer.get("ipBlock")
        if block is not None:
            if ":" in block["cidr"]:
                yield f"{where}[{number}].ipBlock: {block['cidr']} matches nothing; the pod network is IPv4 only"
        elif peer.get("podSelector") is None and peer.get("namespaceSelector") is None:
            yield f"{where}[{number}]: a kind of peer that is not known here; it matches nothing"
