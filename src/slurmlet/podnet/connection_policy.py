"""NetworkPolicy as the hub resolved it for this one pod: ranges and ports, ready to be asked on every connection. Pure."""

from __future__ import annotations

from typing import Any, FrozenSet, List, NamedTuple, Optional, Tuple

from slurmlet.podnet import addresses

Network = Tuple[int, int]
_ONE = 0xFFFFFFFF


class Rule(NamedTuple):
    # None: anybody. Single addresses apart from ranges: selected pods are many, and a set is asked at once.
    singles: Optional[FrozenSet[int]]
    ranges: Tuple[Tuple[Network, Tuple[Network, ...]], ...]
    # None: any. (protocol number, first, last)
    ports: Optional[Tuple[Tuple[int, int, int], ...]]


# None: not isolated, everything is allowed.
Rules = Optional[List[Rule]]


def parse(raw: Any) -> Rules:
    return None if raw is None else [_rule(each) for each in raw]


def _rule(raw: Any) -> Rule:
    ports = raw.get("ports")
    limits = None if ports is None else tuple((int(p), int(first), int(last)) for p, first, last in ports)
    peers = raw.get("peers")
    if peers is None:
        return Rule(None, (), limits)
    singles, ranges = set(), []
    for cidr, excepted in peers:
        found = addresses.network(cidr)
        if found[1] == _ONE and not excepted:
            singles.add(found[0])
        else:
            ranges.append((found, tuple(addresses.network(each) for each in excepted)))
    return Rule(frozenset(singles), tuple(ranges), limits)


def allows(rules: Rules, ip: int, protocol: int, port: int) -> bool:
    if rules is None:
        return True
    return any(_port_matches(rule, protocol, port) and _peer_matches(rule, ip) for rule in rules)


def allows_unnamed(rules: Rules, protocol: int, port: int) -> bool:
    """Of an address that no range here can name, an IPv6 one: only rules that ask for nobody in particular let it pass."""
    if rules is None:
        return True
    return any(rule.singles is None and _port_matches(rule, protocol, port) for rule in rules)


def _port_matches(rule: Rule, protocol: int, port: int) -> bool:
    if rule.ports is None:
        return True
    return any(known == protocol and first <= port <= last for known, first, last in rule.ports)


def _peer_matches(rule: Rule, ip: int) -> bool:
    if rule.singles is None or ip in rule.singles:
        return True
    for (base, mask), excepted in rule.ranges:
        if ip & mask == base and not any(ip & inner == start for start, inner in excepted):
            return True
    return False
