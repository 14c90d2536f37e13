"""What the network bench reads out of its programs, and what it makes of the numbers."""

from __future__ import annotations

import ipaddress
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.bar_chart import bars
from slurmlet.base.errors import UserError
from slurmlet.bench import network_measurements
from slurmlet.bench.host_programs import Tree
from slurmlet.bench.network_bench import NetworkBench, _last_line
from slurmlet.bench.network_measurements import (  # fmt: skip
    BARE,
    HOST,
    MEASUREMENTS,
    PASTA,
    POD,
    SERVICE,
    Measurement,
    Ports,
    Samples,
    as_json,
    figure,
    holds,
    nginx_conf,
)
from slurmlet.bench.service_crowd import ENDPOINTS_EACH, objects

NAMES = {each.name: each for each in MEASUREMENTS}


def iperf(bits: float) -> str:
    return json.dumps(
        {"end": {"sum_sent": {"bits_per_second": 2 * bits}, "sum_received": {"bits_per_second": bits}}}
    )


WRK = """Running 2s test @ http://10.244.0.3:8080/
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.02ms    0.2ms    9.00ms   93.07%
{errors}Requests/sec:  14211.55
Transfer/sec:      2.01MB
"""
PING = """PING 10.244.0.3 (10.244.0.3) 56(84) bytes of data.

--- 10.244.0.3 ping statistics ---
200 packets transmitted, {got} received, {lost}% packet loss, time 1990ms
rtt min/avg/max/mdev = 0.101/0.223/0.512/0.034 ms
"""


class TestReading:
    def test_what_arrived_counts_and_not_what_was_sent(self) -> None:
        assert network_measurements.read_iperf(iperf(5e9)) == 5.0

    def test_an_error_of_iperf_is_one(self) -> None:
        with pytest.raises(ValueError, match="refused"):
            network_measurements.read_iperf(
                json.dumps({"error": "unable to connect: Connection refused", "end": {}})
            )

    @pytest.mark.parametrize("word", ["avg-latency", "avg-lat"])
    def test_sockperf_tells_half_a_round_trip(self, word: str) -> None:
        assert network_measurements.read_sockperf(f"sockperf: ====> {word}=12.345 (std-dev=1.5)") == 24.69

    def test_wrk(self) -> None:
        assert network_measurements.read_wrk(WRK.format(errors="")) == 14211.55
        # With "Connection: close" the server hangs up first, which wrk may count as a read error.
        fine = "  Socket errors: connect 0, read 12, write 0, timeout 0\n"
        assert network_measurements.read_wrk(WRK.format(errors=fine)) == 14211.55
        with pytest.raises(ValueError, match="connect 3"):
            network_measurements.read_wrk(
                WRK.format(errors="  Socket errors: connect 3, read 0, write 0, timeout 0\n")
            )

    def test_ping(self) -> None:
        assert network_measurements.read_ping(PING.format(got=200, lost=0)) == 223.0
        with pytest.raises(ValueError, match=r"0\.5 %"):
            network_measurements.read_ping(PING.format(got=199, lost=0.5))

    def test_silence_is_no_figure(self) -> None:
        with pytest.raises(ValueError, match="no figure in: something else"):
            network_measurements.read_sockperf("something else")

    @pytest.mark.parametrize(
        ("said", "last"),
        [
            ('{"error": "unable to connect"}', "unable to connect"),
            ("a\nConnection refused\ncommand terminated with exit code 1\n", "Connection refused"),
            ("sockperf: ERROR: x\nsrun: error: c1: task 0: Exited with exit code 1\n", "sockperf: ERROR: x"),
            ("", ""),
        ],
    )
    def test_the_last_word_of_a_failure(self, said: str, last: str) -> None:
        assert _last_line(said) == last


class TestFigures:
    def test_median_spread_and_share(self) -> None:
        found = figure([9.0, 8.0, 10.0, 7.0, 12.0], [10.0, 20.0, 30.0])
        assert (found.runs, found.median, found.low, found.high, found.ratio) == (5, 9.0, 7.0, 12.0, 0.45)
        assert figure([1.0], None).ratio is None

    def test_rounds_are_compared_with_themselves(self) -> None:
        """The machine became three times as slow: the pod's share did not."""
        assert figure([28.0, 19.0, 10.0], [30.0, 20.0, 10.0]).ratio == 0.95

    def test_a_figure_is_compared_with_what_was_measured_around_it(self) -> None:
        samples = Samples()
        samples.add(19.0, 30.0, 10.0)
        samples.add(9.5, 10.0, None)
        assert samples.beside == [20.0, 10.0]
        assert figure(samples.values, samples.beside).ratio == 0.95

    @pytest.mark.parametrize(
        ("name", "value", "good"),
        [
            ("TCP bandwidth", 9.8, True), ("TCP bandwidth", 9.7, False),
            ("TCP round trip", 10.3, True), ("TCP round trip", 10.4, False),
            ("new connections", 6.0, True), ("new connections", 5.9, False),
            ("UDP bandwidth", 0.1, None),
        ],
    )  # fmt: skip
    def test_what_was_asked_for(self, name: str, value: float, good: bool | None) -> None:
        assert holds(NAMES[name], figure([value], [10.0])) is good

    def test_as_json(self) -> None:
        taken = {
            ("TCP bandwidth", BARE): Samples([10.0, 11.0, 12.0]),
            ("TCP bandwidth", POD): Samples([10.0, 10.9, 12.6], beside=[10.0, 11.0, 12.0]),
            ("TCP bandwidth", HOST): Samples([11.0], problem="Connection refused"),
            ("TCP bandwidth", SERVICE): Samples(problem="the image has no wrk"),
        }
        found = as_json(taken)
        assert list(found) == ["TCP bandwidth"]
        ways: dict[str, Any] = found["TCP bandwidth"]["ways"]
        assert ways[BARE] == {
            "runs": 3, "median": 11.0, "low": 10.0, "high": 12.0, "ratio": None, "samples": [10.0, 11.0, 12.0],
        }  # fmt: skip
        assert (ways[POD]["ratio"], ways[POD]["holds"]) == (1.0, True)
        assert ways[HOST]["problem"] == "Connection refused"
        assert ways[SERVICE] == {"problem": "the image has no wrk"}


def test_both_sides_get_the_same_command_but_for_address_and_port() -> None:
    host = Ports.from_base(20000)
    for each in MEASUREMENTS:
        bare, pod = each.argv("192.0.2.1", host, 2), each.argv("10.244.0.2", Ports(), 2)
        assert len(bare) == len(pod)
        different = [(one, other) for one, other in zip(bare, pod, strict=True) if one != other]
        assert 1 <= len(different) <= 2
    assert len({host.iperf, host.tcp_pings, host.udp_pings, host.web}) == 4


def test_a_cluster_ip_is_not_pinged() -> None:
    assert SERVICE not in NAMES["ICMP round trip"].ways


def test_nginx_writes_only_where_it_may() -> None:
    conf = nginx_conf(8080, "/w")
    assert "listen 8080 " in conf
    assert conf.count("{") == conf.count("}")
    assert conf.count("_temp_path /w/") == 5
    assert "pid /w/" in conf


class TestTree:
    def test_programs_run_through_the_image_s_own_loader(self, tmp_path: Path) -> None:
        for name in ("usr/bin/iperf3", "usr/sbin/nginx", "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        tree, lib = Tree(tmp_path), tmp_path / "usr/lib/x86_64-linux-gnu"
        loader = [str(lib / "ld-linux-x86-64.so.2"), "--library-path", str(lib)]
        assert tree.argv(["nginx", "-c", "x"]) == [*loader, str(tmp_path / "usr/sbin/nginx"), "-c", "x"]
        assert tree.has("iperf3")
        assert not tree.has("pasta")
        with pytest.raises(UserError, match="no pasta"):
            tree.argv(["pasta"])

    def test_an_image_that_is_not_there_is_named_with_the_remedy(self, tmp_path: Path) -> None:
        from slurmlet.images.image_store import Store

        with pytest.raises(UserError) as caught:
            Tree.unpacked(Store(tmp_path / "store"), "localhost:5000/none:1", tmp_path / "tree")
        assert "slurmlet testbed load bench" in str(caught.value.hint)


def test_without_a_cluster_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLET_HOME", str(tmp_path))
    with pytest.raises(UserError, match="cluster 'none' does not exist"):
        NetworkBench("none", "i", ["a", "b"], None)


def test_the_picture_has_a_bar_for_each_value() -> None:
    text = bars("a & b", {"one": [("x", 2.0), ("y", 4.0)], "none": []})
    root = ElementTree.fromstring(text)
    widths = [float(each.get("width") or 0) for each in root.findall("{http://www.w3.org/2000/svg}rect")]
    assert widths[1] * 2 == widths[2]
    assert "a & b" in "".join(root.itertext())


def test_a_crowd_of_services_has_addresses_that_no_pod_gets_soon() -> None:
    made = [objects(number, "10.244.0.0/16") for number in range(1000)]
    ips = {one["addresses"][0] for _, piece in made for one in piece["endpoints"]}
    assert len(ips) == 1000 * ENDPOINTS_EACH
    assert all(ipaddress.ip_address(ip) in ipaddress.ip_network("10.244.128.0/17") for ip in ips)
    service, piece = made[7]
    assert piece["metadata"]["labels"] == {"kubernetes.io/service-name": service["metadata"]["name"]}


def test_chosen_ways_are_measured_beside_bare_in_the_usual_order() -> None:
    by_name = {each.name: each for each in MEASUREMENTS}
    assert by_name["TCP round trip"].among(["host", "pod"]).ways == ("bare", "pod", "host")
    assert by_name["ICMP round trip"].among(["service"]).ways == ("bare",)


class _Rig:
    """A machine whose speed halves with every sample; what it is asked for is noted."""

    def __init__(self) -> None:
        self.speed, self.asked = 1024.0, ""

    def warm_up(self, _measurement: Measurement, way: str) -> str:
        return "not here" if way == PASTA else ""

    def sample(self, _measurement: Measurement, way: str, _seconds: int) -> tuple[float | None, str]:
        self.asked += way[0]
        self.speed /= 2
        return self.speed * (1.25 if way == POD else 1), ""


def test_bare_hosts_are_measured_before_and_after_each_way() -> None:
    rig, said = _Rig(), []
    bench = NetworkBench.__new__(NetworkBench)
    chosen = [NAMES["TCP round trip"].among([POD, HOST, PASTA])]
    taken = bench._rounds(rig, 2, 1, chosen, lambda *told: said.append(told))  # type: ignore[arg-type]
    # The other way round in the second round; pasta is not there to be asked.
    assert rig.asked == "bpbhb" + "bhbpb"
    # The mean of double the speed and half of it.
    assert figure(taken["TCP round trip", POD].values, taken["TCP round trip", POD].beside).ratio == 1.0
    assert len(taken["TCP round trip", BARE].values) == 6
    assert taken["TCP round trip", PASTA].problem == "not here"
