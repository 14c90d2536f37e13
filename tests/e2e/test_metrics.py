"""What pods use: the kubelet's own endpoints, `kubectl top`, an autoscaler that acts on it."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import IMAGE, Kubectl, eventually, pod

pytestmark = pytest.mark.e2e

BUSY = "while :; do :; done"
# 50 MiB in a shell variable, and some bytes in the two kinds of scratch. The last word keeps the shell from becoming sleep.
HOLD = (
    "dd if=/dev/zero of=/scratch/f bs=1M count=3 2>/dev/null; dd if=/dev/zero of=/own bs=1M count=2 2>/dev/null; "
    "x=$(head -c 52428800 /dev/zero | tr '\\0' x); echo held; sleep 3600; echo $x"
)
MI = 1 << 20


@pytest.fixture(scope="module")
def space(testbed: Any, cluster: str) -> Iterator[Kubectl]:
    """One namespace with a busy pod, one that holds memory, and an autoscaler at work: their waits overlap."""
    here = Kubectl(testbed, f"t-{uuid.uuid4().hex[:8]}")
    here("create", "namespace", here.namespace)
    eventually(lambda: here("get", "serviceaccount", "default", check=False).ok)
    hold = {
        "name": "hold",
        "image": IMAGE,
        "command": ["sh", "-c", HOLD],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    }
    here.apply(
        pod(
            "busy",
            BUSY,
            metadata={"labels": {"app": "busy"}},
            more_containers=[hold],
            volumes=[{"name": "scratch", "emptyDir": {}}],
        ),
        _deployment(),
        _autoscaler(),
    )
    here.wait_phase("busy", "Running")
    eventually(lambda: "held" in here("logs", "busy", "-c", "hold").stdout)
    yield here
    here("delete", "hpa,deployment,pods", "--all", "--grace-period=0", "--force", "--wait=false", check=False)
    here("delete", "namespace", here.namespace, "--wait=false", check=False)


def _deployment() -> dict[str, Any]:
    container = {
        "name": "main",
        "image": IMAGE,
        "command": ["sh", "-c", BUSY],
        "resources": {"requests": {"cpu": "100m"}},
    }
    template = {
        "metadata": {"labels": {"app": "scaled"}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
    }
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "scaled"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "scaled"}, "spec": spec}


def _autoscaler() -> dict[str, Any]:
    target = {"type": "Utilization", "averageUtilization": 50}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "scaled"},
        "minReplicas": 1,
        "maxReplicas": 2,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "scaled"},
        "spec": spec,
    }


def of_node(kubectl: Kubectl, path: str, node: str = "batch") -> str:
    return kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/{path}").stdout


def top(kubectl: Kubectl, *words: str) -> dict[str, tuple[int, int]]:
    """{name (the last column before the figures): (millicores, MiB)}."""
    rows = [line.split() for line in kubectl("top", *words, "--no-headers").stdout.splitlines()]
    return {row[-3]: (int(row[-2].removesuffix("m")), int(row[-1].removesuffix("Mi"))) for row in rows}


def test_top_of_containers_and_pods(space: Kubectl) -> None:
    by_container = top(space, "pod", "busy", "--containers")
    millicores, _ = by_container["main"]
    # Others use this machine too, so a busy loop may get less than a whole core, never more.
    assert 150 <= millicores <= 1100
    idle, mebibytes = by_container["hold"]
    assert idle < 100
    assert 50 <= mebibytes <= 60
    chosen = top(space, "pod", "-l", "app=busy")
    assert set(chosen) == {"busy"}
    assert 50 <= chosen["busy"][1] <= 60
    assert "scaled" not in str(chosen)


def test_top_of_nodes_is_the_sum_over_the_partition(space: Kubectl) -> None:
    rows = {
        line.split()[0]: line.split() for line in space("top", "node", "--no-headers").stdout.splitlines()
    }
    assert {"batch", "short"} <= set(rows)
    assert int(rows["batch"][1].removesuffix("m")) >= 150
    assert int(rows["batch"][3].removesuffix("Mi")) >= 50


def test_the_metrics_api_itself(space: Kubectl) -> None:
    root = "/apis/metrics.k8s.io/v1beta1"
    one = json.loads(space("get", "--raw", f"{root}/namespaces/{space.namespace}/pods/busy").stdout)
    assert (one["kind"], one["metadata"]["labels"]) == ("PodMetrics", {"app": "busy"})
    assert re.fullmatch(r"[\d.]+s", one["window"])
    assert {each["name"] for each in one["containers"]} == {"main", "hold"}
    listed = json.loads(
        space(
            "get", "--raw", f"{root}/namespaces/{space.namespace}/pods?labelSelector=app%20in%20(busy,x)"
        ).stdout
    )
    assert [each["metadata"]["name"] for each in listed["items"]] == ["busy"]
    missing = space("get", "--raw", f"{root}/namespaces/{space.namespace}/pods/nobody", check=False)
    assert "not found" in missing.stderr
    assert json.loads(space("get", "--raw", f"{root}/nodes/batch").stdout)["usage"]["cpu"].endswith("n")
    api = space.get("apiservice", "v1beta1.metrics.k8s.io")
    assert {one["type"]: one["status"] for one in api["status"]["conditions"]}["Available"] == "True"


def test_nobody_but_the_aggregator_may_ask(space: Kubectl) -> None:
    """The port is open on the host; a stranger there, and a user of the API, have no certificate for it."""
    (slice_,) = space.get(
        "endpointslice", None, "-n", "kube-system", "-l", "kubernetes.io/service-name=slurmlet-metrics"
    )["items"]
    address, port = slice_["endpoints"][0]["addresses"][0], slice_["ports"][0]["port"]
    pki = f"/home/user1/.slurmlet/{space.cluster}/pki"
    script = """
import http.client, ssl, sys
host, port, pki, *names = sys.argv[1:]
context = ssl.create_default_context(cafile=f"{pki}/hub-ca.crt")
if names:
    context.load_cert_chain(f"{pki}/{names[0]}.crt", f"{pki}/{names[0]}.key")
try:
    link = http.client.HTTPSConnection(host, int(port), context=context, timeout=5)
    link.request("GET", "/apis/metrics.k8s.io/v1beta1/pods")
    print(link.getresponse().status)
except (ssl.SSLError, ConnectionError) as error:
    print("refused")
"""
    for names, answer in (
        ((), "refused"),
        (("admin",), "refused"),
        (("kubelet-client",), "refused"),
        (("front-proxy-client",), "200"),
    ):
        argv = ["python3", "-c", script, address, str(port), pki, *names]
        assert space.testbed.run(argv).stdout.strip() == answer, names


def test_summary_in_the_kubelets_shape(space: Kubectl) -> None:
    told = json.loads(of_node(space, "stats/summary"))
    assert told["node"]["nodeName"] == "batch"
    (mine,) = [
        one
        for one in told["pods"]
        if (one["podRef"]["name"], one["podRef"]["namespace"]) == ("busy", space.namespace)
    ]
    assert mine["podRef"]["uid"] == space.pod("busy")["metadata"]["uid"]
    containers = {one["name"]: one for one in mine["containers"]}
    hold = containers["hold"]
    assert 50 * MI <= hold["memory"]["workingSetBytes"] <= 60 * MI
    assert hold["memory"]["rssBytes"] >= 50 * MI
    assert containers["main"]["cpu"]["usageNanoCores"] > 0.15e9
    assert hold["rootfs"]["usedBytes"] >= 2 * MI
    assert hold["rootfs"]["usedBytes"] < 3 * MI
    (volume,) = mine["volume"]
    assert (volume["name"], volume["usedBytes"]) == ("scratch", 3 * MI)
    assert mine["ephemeral-storage"]["usedBytes"] >= 5 * MI
    assert mine["process_stats"]["process_count"] >= 3
    small = json.loads(of_node(space, "stats/summary?only_cpu_and_memory=true"))
    parts = [part for one in small["pods"] for part in (one, *one["containers"])]
    assert not any("volume" in part or "rootfs" in part for part in parts)


def test_resource_metrics_count_up(space: Kubectl) -> None:
    def cpu_s() -> float:
        text = of_node(space, "metrics/resource")
        assert "\nresource_scrape_error 0\n" in text
        wanted = (
            f'container_cpu_usage_seconds_total{{container="main",namespace="{space.namespace}",pod="busy"}} '
        )
        (line,) = [line for line in text.splitlines() if line.startswith(wanted)]
        value, when_ms = line.removeprefix(wanted).split()
        assert abs(int(when_ms) / 1000 - time.time()) < 60
        return float(value)

    first = cpu_s()
    assert eventually(lambda: cpu_s() > first + 1, 25, 2)


def test_pods_are_told_by_node(space: Kubectl) -> None:
    def names(path: str, node: str) -> set[str]:
        items = json.loads(of_node(space, path, node))["items"]
        return {one["metadata"]["name"] for one in items if one["metadata"]["namespace"] == space.namespace}

    assert "busy" in names("pods", "batch")
    assert names("pods", "short") == set()
    assert "busy" in names("runningpods/", "batch")
    assert of_node(space, "healthz") == "ok"


def test_the_hub_tells_about_itself(space: Kubectl) -> None:
    text = of_node(space, "metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['slurmlet_pods{phase="Running"}']) >= 2
    assert float(values['slurmlet_jobs{state="RUNNING"}']) >= 2
    assert float(values["slurmlet_runner_links"]) >= 2
    assert float(values["slurmlet_sbatch_duration_seconds_count"]) >= 2
    assert float(values['slurmlet_api_requests_total{method="PATCH",code="200"}']) > 2
    assert 10 * MI < float(values["process_resident_memory_bytes"]) < 200 * MI


def test_an_autoscaler_scales_on_cpu(space: Kubectl) -> None:
    def scaled() -> Any:
        found = space.get("hpa", "scaled")
        return found["status"].get("desiredReplicas") == 2 and found

    found = eventually(scaled, 60, 1)
    conditions = {one["type"]: one["status"] for one in found["status"]["conditions"]}
    assert conditions["ScalingActive"] == "True"
    assert found["status"]["currentMetrics"][0]["resource"]["current"]["averageUtilization"] > 50
    eventually(lambda: space.get("deployment", "scaled")["status"].get("readyReplicas") == 2, 30)
