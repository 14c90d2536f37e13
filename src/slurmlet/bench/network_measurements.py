"""What is measured over a network, with which program, and how its words are read. Pure.

All are compiled programs of Debian, the same files on bare hosts and in pods: a slow client would hide what a network
costs. sockperf tells half a round trip, wrk asks nginx over a new connection each time, iperf3 tells what arrived.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# The ways that are compared.
BARE, POD, SERVICE, HOST, SLIRP, PASTA = "bare", "pod", "service", "host", "slirp4netns", "pasta"
TITLES = {
    BARE: "host → host",
    POD: "pod → pod",
    SERVICE: "pod → Service",
    HOST: "pod → host",
    SLIRP: "slirp4netns → host",
    PASTA: "pasta → host",
}
_DATAGRAM_BYTES = 1400
_CONNECTIONS_AT_ONCE = 16
_PINGS_A_SECOND = 100


@dataclass(frozen=True)
class Ports:
    iperf: int = 5201
    tcp_pings: int = 11111
    udp_pings: int = 11112
    web: int = 8080

    @classmethod
    def from_base(cls, base: int) -> Ports:
        return cls(base, base + 1, base + 2, base + 3)


@dataclass(frozen=True)
class Measurement:
    name: str
    unit: str
    more_is_better: bool
    argv: Callable[[str, Ports, int], list[str]]  # of the client: address, ports, seconds
    read: Callable[[str], float]
    ways: tuple[str, ...] = (BARE, POD, SERVICE, HOST, SLIRP, PASTA)
    # What issue 5 asks of a pod, as a share of bare; None: shown beside the others only.
    wanted: float | None = None

    def among(self, ways: Sequence[str]) -> Measurement:
        """Of these ways only, beside bare: fewer in a round are nearer to each other in time."""
        return replace(self, ways=tuple(way for way in self.ways if way == BARE or way in ways))


def _iperf_tcp(address: str, ports: Ports, seconds: int) -> list[str]:
    return ["iperf3", "-c", address, "-p", str(ports.iperf), "-t", str(seconds), "-O", "1", "-J"]


def _iperf_udp(address: str, ports: Ports, seconds: int) -> list[str]:
    return [*_iperf_tcp(address, ports, seconds), "-u", "-b", "0", "-l", str(_DATAGRAM_BYTES)]


def _tcp_pings(address: str, ports: Ports, seconds: int) -> list[str]:
    return ["sockperf", "ping-pong", "--tcp", "-i", address, "-p", str(ports.tcp_pings), "-t", str(seconds)]


def _udp_pings(address: str, ports: Ports, seconds: int) -> list[str]:
    return ["sockperf", "ping-pong", "-i", address, "-p", str(ports.udp_pings), "-t", str(seconds)]


def _connections(address: str, ports: Ports, seconds: int) -> list[str]:
    many = ["-t", "1", "-c", str(_CONNECTIONS_AT_ONCE), "-d", f"{seconds}s"]
    return ["wrk", *many, "-H", "Connection: close", f"http://{address}:{ports.web}/"]


def _pings(address: str, _ports: Ports, seconds: int) -> list[str]:
    return ["ping", "-n", "-q", "-i", str(1 / _PINGS_A_SECOND), "-c", str(seconds * _PINGS_A_SECOND), address]


def read_iperf(said: str) -> float:
    """Gbit/s that arrived."""
    told = json.loads(said)
    if told.get("error"):
        raise ValueError(told["error"])
    return float(told["end"]["sum_received"]["bits_per_second"]) / 1e9


def read_sockperf(said: str) -> float:
    """Microseconds of a round trip."""
    return 2 * _number(r"avg-lat(?:ency)?= *([\d.]+)", said)


def read_wrk(said: str) -> float:
    failed = re.search(r"Socket errors: (.*)", said)
    if failed and any(int(count) for count in re.findall(r"(?:connect|timeout) (\d+)", failed[1])):
        raise ValueError(f"connections failed: {failed[1]}")
    return _number(r"Requests/sec: *([\d.]+)", said)


def read_ping(said: str) -> float:
    """Microseconds of a round trip; a loss counts as a failure."""
    lost = _number(r"([\d.]+)% packet loss", said)
    if lost:
        raise ValueError(f"{lost:g} % of the pings were lost")
    return 1000 * _number(r"= [\d.]+/([\d.]+)/", said)


def _number(pattern: str, said: str) -> float:
    found = re.search(pattern, said)
    if found is None:
        raise ValueError(f"no figure in: {' '.join(said.split())[-200:]}")
    return float(found[1])


_WITHOUT_SERVICE = (BARE, POD, HOST, SLIRP, PASTA)
MEASUREMENTS = (
    Measurement("TCP bandwidth", "Gbit/s", True, _iperf_tcp, read_iperf, wanted=0.98),
    Measurement("TCP round trip", "µs", False, _tcp_pings, read_sockperf, wanted=1.03),
    Measurement("new connections", "1/s", True, _connections, read_wrk, wanted=0.60),
    Measurement("UDP bandwidth", "Gbit/s", True, _iperf_udp, read_iperf),
    Measurement("UDP round trip", "µs", False, _udp_pings, read_sockperf),
    # A cluster IP answers no pings, in any Kubernetes.
    Measurement("ICMP round trip", "µs", False, _pings, read_ping, ways=_WITHOUT_SERVICE),
)


def nginx_conf(port: int, directory: str) -> str:
    """Answers two letters; one worker, so that both sides have the same; everything it writes is in `directory`."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = " ".join(f"{kind}_temp_path {directory}/{kind};" for kind in kinds)
    return (
        f"daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log stderr crit;\n"
        "events { worker_connections 4096; }\n"
        f"http {{ access_log off; {places}\n"
        f'  server {{ listen {port} backlog=4096; location / {{ return 200 "ok"; }} }}\n}}\n'
    )


def server_commands(ports: Ports, nginx: str) -> dict[str, list[str]]:
    """name → argv of each server; `nginx` is the path of its configuration."""
    return {
        "iperf": ["iperf3", "-s", "-p", str(ports.iperf)],
        "tcp-pings": ["sockperf", "server", "--tcp", "-p", str(ports.tcp_pings)],
        "udp-pings": ["sockperf", "server", "-p", str(ports.udp_pings)],
        "web": ["nginx", "-e", "stderr", "-c", nginx],
    }


# Figures.


@dataclass
class Samples:
    values: list[float] = field(default_factory=list)
    problem: str = ""
    # What bare hosts showed at the time of each, just before and just after it.
    beside: list[float] = field(default_factory=list)

    def add(self, value: float, before: float | None, after: float | None) -> None:
        self.values.append(value)
        around = [bare for bare in (before, after) if bare is not None]
        if around:
            self.beside.append(statistics.mean(around))


@dataclass(frozen=True)
class Figure:
    runs: int
    median: float
    low: float
    high: float
    # Beside bare; None for bare itself.
    ratio: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            **{name: _rounded(getattr(self, name)) for name in ("median", "low", "high")},
            "ratio": None if self.ratio is None else round(self.ratio, 4),
        }


def figure(values: Sequence[float], bare: Sequence[float] | None) -> Figure:
    return Figure(
        len(values),
        statistics.median(values),
        min(values),
        max(values),
        _share(values, bare) if bare else None,
    )


def _share(values: Sequence[float], bare: Sequence[float]) -> float:
    """The median of what neighbours in time say: a machine that grows slower meanwhile does so for both."""
    if len(values) != len(bare):
        return statistics.median(values) / statistics.median(bare)
    return statistics.median(value / beside for value, beside in zip(values, bare, strict=True))


def holds(measurement: Measurement, found: Figure) -> bool | None:
    """Whether a pod's figure is as good as was asked for; None where nothing was asked."""
    if measurement.wanted is None or found.ratio is None:
        return None
    if measurement.more_is_better:
        return found.ratio >= measurement.wanted
    return found.ratio <= measurement.wanted


def as_json(taken: Mapping[tuple[str, str], Samples]) -> dict[str, Any]:
    """{measurement: {unit, more_is_better, wanted, ways: {way: figure | {problem}}}}"""
    return {
        each.name: {
            "unit": each.unit,
            "more_is_better": each.more_is_better,
            "wanted": each.wanted,
            "ways": {way: _told(each, way, taken) for way in each.ways if (each.name, way) in taken},
        }
        for each in MEASUREMENTS
        if any((each.name, way) in taken for way in each.ways)
    }


def _told(measurement: Measurement, way: str, taken: Mapping[tuple[str, str], Samples]) -> dict[str, Any]:
    samples = taken[measurement.name, way]
    if not samples.values:
        return {"problem": samples.problem or "not measured"}
    found = figure(samples.values, samples.beside or None)
    told = {**found.as_json(), "samples": [_rounded(value) for value in samples.values]}
    if way in (POD, SERVICE, HOST):
        told["holds"] = holds(measurement, found)
    if samples.problem:
        told["problem"] = samples.problem
    return told


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
