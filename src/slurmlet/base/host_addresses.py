"""This host's addresses and free ports. No port number of ours is ever fixed: login hosts are shared.

Reads /proc only; sends nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from slurmlet.base.errors import SiteError, UserError

LOOPBACK = "127.0.0.1"
_LOCAL_ENTRY = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")


def host_name() -> str:
    return socket.gethostname()


def host_addresses(proc: Path = Path("/proc/net")) -> list[str]:
    """Every address another host might dial, IPv4 first; neither loopback nor link-local."""
    found = _LOCAL_ENTRY.findall(_read(proc / "fib_trie"))
    for line in _read(proc / "if_inet6").splitlines():
        raw = bytes.fromhex(line.split()[0])
        found.append(str(ipaddress.IPv6Address(raw)))
    return [
        address
        for address in dict.fromkeys(found)
        if not (ipaddress.ip_address(address).is_loopback or ipaddress.ip_address(address).is_link_local)
    ]


def routed_networks(proc: Path = Path("/proc/net")) -> list[ipaddress.IPv4Network]:
    """Every IPv4 range that this host already has a way to, but the default route; its own addresses among them."""
    found = [
        ipaddress.IPv4Network(f"{address}/32") for address in _LOCAL_ENTRY.findall(_read(proc / "fib_trie"))
    ]
    for line in _read(proc / "route").splitlines()[1:]:
        words = line.split()
        base, mask = (int.from_bytes(bytes.fromhex(words[place]), "little") for place in (1, 7))
        if mask:
            found.append(ipaddress.IPv4Network((base & mask, mask.bit_count())))
    return list(dict.fromkeys(found))


def dialled_addresses() -> list[str]:
    """This host's IPv4 addresses in the order another host should try them: first what its name stands for."""
    every = [address for address in host_addresses() if ipaddress.ip_address(address).version == 4]
    named = _named_addresses()
    return list(dict.fromkeys([*(address for address in named if address in every), *every]))


def _named_addresses() -> list[str]:
    with contextlib.suppress(OSError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host_name(), None, socket.AF_INET)]
    return []


def advertised_address(addresses: Sequence[str], wanted: str | None = None) -> str:
    """The one address the API server tells the cluster: the wanted one, that of the host's name, or the first."""
    if wanted is not None:
        if wanted not in addresses:
            raise UserError(
                f"{wanted!r} is not an address of this host", hint=f"Choose one of: {', '.join(addresses)}."
            )
        return wanted
    ipv4 = [address for address in addresses if ipaddress.ip_address(address).version == 4]
    if not ipv4:
        raise SiteError(
            "this host has no IPv4 address besides loopback",
            hint="Compute nodes must reach this host: run slurmlet on a login node with a network.",
        )
    return next((address for address in _named_addresses() if address in ipv4), ipv4[0])


def free_port(address: str, preferred: int | None = None) -> int:
    """A port that was free on `address` a moment ago; `preferred` when it is."""
    # Somebody may take it before the component binds it: the supervisor then picks another (supervising.py).
    for port in [preferred, 0] if preferred else [0]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((address, port))
                return int(probe.getsockname()[1])
    raise SiteError(f"no free TCP port on {address}")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
