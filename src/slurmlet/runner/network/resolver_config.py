"""/etc/resolv.conf of a pod: what the plan says, merged with the host's own where the pod's dnsPolicy wants that.

The rules (order, duplicates, limits) are the kubelet's; `model/resolv_conf.py` makes the plan's part.
"""

from __future__ import annotations

from slurmlet.linux.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterable, List, Optional

    from slurmlet.protocol.pod_plan import ResolverPlan


_MAX_NAMESERVERS = 3
_MAX_SEARCHES = 32
_MAX_SEARCH_BYTES = 2048
_MAX_DOMAIN_BYTES = 253
_FILE = "/etc/resolv.conf"
# Where systemd-resolved keeps the servers that its stub on the host's loopback asks.
_BEHIND_STUB = "/run/systemd/resolve/resolv.conf"


class Resolver(Record):
    nameservers: List[str]
    searches: List[str]
    options: List[str]


def resolv_conf(plan: Optional[ResolverPlan]) -> str:
    """The text for this plan on this host; None: the host's own."""
    return host_file() if plan is None else merged(plan, host_file())


def merged(plan: ResolverPlan, host_text: str) -> str:
    host, base = parse(host_text), plan.get("base")
    if base is None:
        start = host
    else:
        behind = host.searches if base.get("host_searches") else []
        start = Resolver(base["nameservers"], _unique([*base["searches"], *behind]), base["options"])
    return _text(
        Resolver(
            _unique([*start.nameservers, *plan["nameservers"]])[:_MAX_NAMESERVERS],
            _limited(_unique([*start.searches, *plan["searches"]])),
            _with_options(start.options, plan["options"]),
        )
    )


def parse(text: str) -> Resolver:
    """Servers add up; the last search line counts; of an option the last mention does."""
    nameservers: List[str] = []
    searches: List[str] = []
    options: Dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "nameserver" and len(words) > 1:
            nameservers.append(words[1])
        elif words[0] == "search":
            # The same domain with and without its dot is one.
            searches = [_bare(word) for word in words[1:] if word != "."]
        elif words[0] == "options":
            options.update((word.partition(":")[0], word) for word in words[1:])
    return Resolver(nameservers, searches, list(options.values()))


def host_file() -> str:
    text = _read(_FILE)
    servers = parse(text).nameservers
    if servers and all(server.startswith("127.") or server == "::1" for server in servers):
        # The host's loopback is not the pod's.
        return _read(_BEHIND_STUB) or text
    return text


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _bare(domain: str) -> str:
    return domain[:-1] if domain.endswith(".") else domain


def _unique(words: Iterable[str]) -> List[str]:
    return list(dict.fromkeys(words))


def _limited(searches: List[str]) -> List[str]:
    """As many as resolvers take: more, or longer ones, make some of them abort."""
    kept = [one for one in searches[:_MAX_SEARCHES] if len(one) <= _MAX_DOMAIN_BYTES]
    while len(" ".join(kept)) > _MAX_SEARCH_BYTES:
        kept.pop()
    return kept


def _with_options(known: List[str], more: Iterable[List[Optional[str]]]) -> List[str]:
    found = {}
    for option in known:
        name, _, value = option.partition(":")
        found[name] = value
    found.update((str(name), value or "") for name, value in more)
    return [f"{name}:{value}" if value else name for name, value in found.items()]


def _text(resolver: Resolver) -> str:
    lines = []
    if resolver.searches:
        lines.append("search " + " ".join(resolver.searches))
    lines += [f"nameserver {server}" for server in resolver.nameservers]
    if resolver.options:
        lines.append("options " + " ".join(resolver.options))
    return "".join(line + "\n" for line in lines)
