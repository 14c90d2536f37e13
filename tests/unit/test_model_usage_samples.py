"""Samples to rates, quantities, PodMetrics and the kubelet's summary."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.model import stats_summary, usage_samples
from slurmlet.model.usage_samples import ContainerSample, Measured, PodSample, Space

POD: dict[str, Any] = {
    "metadata": {"name": "web", "namespace": "n", "uid": "u-1", "labels": {"app": "web"}},
    "status": {"startTime": "2026-01-01T00:00:00Z"},
}
START = "2026-01-01T00:00:00Z"
START_S = 1767225600.0


def container(cpu_s: float, name: str = "main", started_at: str = START, **more: Any) -> ContainerSample:
    return ContainerSample(name, started_at, cpu_s, 50 << 20, 40 << 20, 3, **more)


def at(offset_s: float, *containers: ContainerSample, **more: Any) -> PodSample:
    return PodSample(START_S + offset_s, containers, **more)


@pytest.mark.parametrize(
    ("measured", "cores", "window_s"),
    [
        (Measured(at(110, container(15)), at(100, container(5))), 1.0, 10.0),
        (Measured(at(110, container(5)), at(100, container(5))), 0.0, 10.0),
        # A first look: since the container started.
        (Measured(at(20, container(5))), 0.25, 20.0),
        # The run before is not this run.
        (
            Measured(at(110, container(2, started_at="2026-01-01T00:01:46Z")), at(100, container(99))),
            0.5,
            4.0,
        ),
        # A container that came later than the sample before.
        (Measured(at(110, container(11)), at(100, container(3, "other"))), 0.1, 110.0),
        # A counter that fell is no negative usage.
        (Measured(at(110, container(4)), at(100, container(5))), 0.0, 10.0),
    ],
)
def test_cores_between_two_samples(measured: Measured, cores: float, window_s: float) -> None:
    assert usage_samples.cpu_cores(measured, "main") == pytest.approx((cores, window_s))


def test_a_clock_that_is_behind_the_start_gives_no_nonsense() -> None:
    cores, window_s = usage_samples.cpu_cores(Measured(at(-5, container(0.0))), "main")
    assert (cores, window_s > 0) == (0.0, True)


def test_pod_metrics_as_metrics_server_writes_them() -> None:
    two = Measured(at(110, container(15), container(0, "idle")), at(100, container(5), container(0, "idle")))
    assert usage_samples.pod_metrics(POD, two) == {
        "kind": "PodMetrics",
        "apiVersion": "metrics.k8s.io/v1beta1",
        "metadata": {
            "name": "web", "namespace": "n", "labels": {"app": "web"}, "creationTimestamp": "2026-01-01T00:01:50Z",
        },
        "timestamp": "2026-01-01T00:01:50Z",
        "window": "10s",
        "containers": [
            {"name": "main", "usage": {"cpu": "1000000000n", "memory": "51200Ki"}},
            {"name": "idle", "usage": {"cpu": "0n", "memory": "51200Ki"}},
        ],
    }  # fmt: skip
    assert usage_samples.pod_metrics(POD, Measured(at(110))) is None


def test_node_metrics_are_the_sum_over_its_pods() -> None:
    one = Measured(at(110, container(15)), at(100, container(5)))
    found = usage_samples.node_metrics({"metadata": {"name": "batch"}}, [one, one], START_S)
    assert found["usage"] == {"cpu": "2000000000n", "memory": "102400Ki"}
    empty = usage_samples.node_metrics({"metadata": {"name": "batch"}}, [], START_S)
    assert (empty["usage"]["cpu"], empty["timestamp"]) == ("0n", START)


@pytest.mark.parametrize(
    ("seconds", "text"), [(10.0, "10s"), (10.5, "10.5s"), (0.0, "0s"), (1.2345, "1.234s")]
)
def test_durations_as_go_writes_them(seconds: float, text: str) -> None:
    assert usage_samples.go_duration(seconds) == text


def test_an_answer_of_a_runner() -> None:
    space = dict.fromkeys(
        ("used_bytes", "inodes_used", "capacity_bytes", "available_bytes", "inodes", "inodes_free"), 7
    )
    told = {
        "started_at": START, "cpu_s": 1.5, "memory_bytes": 2, "rss_bytes": 1, "processes": 4, "rootfs": space, "logs": None,
    }  # fmt: skip
    found = usage_samples.sample(
        {"at": 5.0, "containers": {"main": told}, "volumes": {"v": space, "gone": None}}
    )
    assert found.containers == (ContainerSample("main", START, 1.5, 2, 1, 4, Space(7, 7, 7, 7, 7, 7)),)
    assert list(found.volumes) == ["v"]
    assert found.has_space
    for broken in (
        {},
        {"at": 1, "containers": {"m": {}}, "volumes": {}},
        {"at": 1, "containers": [], "volumes": {}},
    ):
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            usage_samples.sample(broken)


NODE = stats_summary.NodeFacts("batch", START, START_S + 110, ended_cpu_s=100.0, memory_bytes=1 << 30)


def test_the_kubelets_summary() -> None:
    room = Space(10, 1, 1000, 900, 50, 49)
    now = at(110, container(15, rootfs=room, logs=room), volumes={"v": room})
    told = stats_summary.summary(NODE, [(POD, Measured(now, at(100, container(5))))])
    assert told["node"]["cpu"] == {
        "time": "2026-01-01T00:01:50Z", "usageNanoCores": 10**9, "usageCoreNanoSeconds": 115 * 10**9,
    }  # fmt: skip
    assert told["node"]["memory"]["availableBytes"] == (1 << 30) - (50 << 20)
    (pod,) = told["pods"]
    assert pod["podRef"] == {"name": "web", "namespace": "n", "uid": "u-1"}
    assert pod["containers"][0]["rootfs"]["usedBytes"] == 10
    assert (pod["volume"][0]["name"], pod["volume"][0]["availableBytes"]) == ("v", 900)
    assert pod["ephemeral-storage"]["usedBytes"] == 30
    assert pod["process_stats"] == {"process_count": 3}
    (small,) = stats_summary.summary(NODE, [(POD, Measured(now))], only_cpu_and_memory=True)["pods"]
    assert not {"volume", "ephemeral-storage"} & set(small)
    assert "rootfs" not in small["containers"][0]


def test_resource_metrics_as_the_kubelet_exposes_them() -> None:
    text = stats_summary.exposition(
        stats_summary.resource_metrics(NODE, [(POD, Measured(at(110, container(15))))], errors=3)
    )
    lines = text.splitlines()
    assert (
        'container_cpu_usage_seconds_total{container="main",namespace="n",pod="web"} 15 1767225710000'
        in lines
    )
    assert 'container_start_time_seconds{container="main",namespace="n",pod="web"} 1767225600' in lines
    assert "node_cpu_usage_seconds_total 115 1767225710000" in lines
    assert 'pod_memory_working_set_bytes{namespace="n",pod="web"} 52428800 1767225710000' in lines
    assert lines[-1] == "resource_scrape_error 1"
    assert text.endswith("\n")


def test_label_values_are_escaped() -> None:
    family = stats_summary.Family("m", "gauge", "h")
    family.add(0.25, {"l": 'a"b\\c\nd'})
    assert stats_summary.exposition([family, stats_summary.Family("empty", "gauge", "h")]) == (
        '# HELP m h\n# TYPE m gauge\nm{l="a\\"b\\\\c\\nd"} 0.25\n'
    )
