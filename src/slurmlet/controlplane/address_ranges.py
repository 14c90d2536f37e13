"""The address ranges of pods and Services: chosen once, at a cluster's first `up`, and kept.

A range that this host already has a way to would hide real machines from pods, so defaults move out of the way and an
explicit choice that collides is refused. What only a compute node sees is for `slurmlet doctor --node` to find.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from slurmlet.base.errors import SiteError, UserError

Network = ipaddress.IPv4Network
POD_RANGE = "10.244.0.0/16"
SERVICE_RANGE = "10.96.0.0/16"
# Site networks often take all of 10.0.0.0/8. The last two are kept for carriers and for benchmarks: nobody's hosts.
_LATER = (
    "172.28.0.0/16",
    "172.29.0.0/16",
    "192.168.0.0/16",
    "100.100.0.0/16",
    "100.101.0.0/16",
    "198.18.0.0/16",
    "198.19.0.0/16",
)
_POD_CANDIDATES = (POD_RANGE, *(f"10.{second}.0.0/16" for second in (245, 246, 247, 234, 235)), *_LATER)
_SERVICE_CANDIDATES = (
    SERVICE_RANGE,
    *(f"10.{second}.0.0/16" for second in (97, 98, 99, 112, 113)),
    *_LATER[::-1],
)


@dataclass(frozen=True)
class Wanted:
    """The ranges given; None: a free one is chosen."""

    pods: str | None = None
    services: str | None = None


@dataclass(frozen=True)
class Ranges:
    pods: str
    services: str


def choose(taken: Sequence[Network], asked: Wanted, kept: Ranges | None = None) -> Ranges:
    """`kept` is what an earlier `up` decided, with "" for what it did not know of yet."""
    kept = kept or Ranges("", "")
    pods, services = asked.pods, asked.services
    for field, wanted, before in (("pod", pods, kept.pods), ("service", services, kept.services)):
        if wanted is not None and before and wanted != before:
            raise UserError(
                f"--{field}-range {wanted}: the range of this cluster is {before} and cannot be changed",
                hint="Ranges are set when a cluster is created: run `slurmlet down --purge` first, "
                "or create another cluster with -c NAME.",
            )
    chosen_services = kept.services or _chosen("service", services, _SERVICE_CANDIDATES, taken, (12, 24))
    in_use = [*taken, Network(chosen_services)]
    if pods is None:
        return Ranges(kept.pods or _free("pod", _POD_CANDIDATES, in_use), chosen_services)
    checked = kept.pods or _checked("pod", pods, taken, (8, 24))
    if Network(checked).overlaps(Network(chosen_services)):
        raise UserError(
            f"--pod-range {checked} overlaps the range of Services, {chosen_services}",
            hint="Choose two ranges that do not overlap.",
        )
    return Ranges(checked, chosen_services)


def _chosen(
    field: str,
    wanted: str | None,
    candidates: Sequence[str],
    taken: Sequence[Network],
    sizes: tuple[int, int],
) -> str:
    return _free(field, candidates, taken) if wanted is None else _checked(field, wanted, taken, sizes)


def _free(field: str, candidates: Sequence[str], taken: Sequence[Network]) -> str:
    for candidate in candidates:
        if not any(Network(candidate).overlaps(other) for other in taken):
            return candidate
    raise SiteError(
        f"every range that slurmlet tries for {field}s overlaps a route of this host",
        hint=f"Choose one that is free on all hosts: slurmlet up --{field}-range 198.18.0.0/17",
    )


def _checked(field: str, wanted: str, taken: Sequence[Network], sizes: tuple[int, int]) -> str:
    try:
        network = Network(wanted)
    except ValueError as error:
        raise UserError(
            f"--{field}-range {wanted}: {error}", hint="Use CIDR notation, such as 10.244.0.0/16."
        ) from error
    if not sizes[0] <= network.prefixlen <= sizes[1]:
        raise UserError(
            f"--{field}-range {wanted} must have a prefix length between /{sizes[0]} and /{sizes[1]}",
            hint="/16 gives 65,000 addresses.",
        )
    for other in taken:
        if network.overlaps(other):
            raise UserError(
                f"--{field}-range {wanted} overlaps {other}, in which this host has a route or an address",
                hint="Choose a range that no host of the site uses, or leave the option out.",
            )
    return str(network)
