"""Slurm is asked seldom, jobs are known by more than their comment, and a limit on jobs makes no storm."""

from __future__ import annotations

import re

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import IMAGE, Kubectl, Limits, eventually, pod
from tests.e2e.inspecting import Cluster

pytestmark = pytest.mark.e2e


@pytest.fixture
def here(testbed: Testbed, cluster: str) -> Cluster:
    return Cluster(testbed, cluster)


def requests_of(kubectl: Kubectl, kind: str) -> int:
    """How many requests of a kind the hub has made to Slurm."""
    text = kubectl("get", "--raw", "/api/v1/nodes/batch/proxy/metrics").stdout
    found = re.search(rf'^slurmlet_slurm_requests_total{{request="{kind}"}} (\d+)', text, re.MULTILINE)
    return int(found[1]) if found else 0


def test_many_pods_at_a_limit_of_jobs_wait_in_one_line(kubectl: Kubectl, limits: Limits) -> None:
    limits("user1", MaxSubmitJobs=4)
    before, pods = requests_of(kubectl, "submit"), 24
    container = {"name": "main", "image": IMAGE, "command": ["true"]}
    spec = {"parallelism": pods, "completions": pods, "backoffLimit": 0}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    kubectl.apply(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "many"},
            "spec": {**spec, "template": template},
        }
    )

    def told() -> bool:
        events = kubectl.get("events", None, "--field-selector", "reason=SubmissionLimited")["items"]
        return any("AssocMaxSubmitJobLimit" in item["message"] for item in events)

    eventually(told)
    eventually(lambda: kubectl.get("job", "many")["status"].get("succeeded") == pods, 180, 1)
    assert requests_of(kubectl, "submit") - before < 4 * pods


def test_a_job_whose_comment_is_rewritten_stays_the_pods(
    kubectl: Kubectl, here: Cluster, testbed: Testbed
) -> None:
    """As plugins of a site do. A new hub knows nothing but what Slurm and the pod's directory tell."""
    kubectl.apply(pod("kept"))
    kubectl.wait_phase("kept", "Running")
    job_id = kubectl.job_id("kept")
    testbed.run(["scontrol", "update", f"JobId={job_id}", "Comment=site policy"])
    here.signal(here.pid("hub"), "KILL")
    eventually(lambda: kubectl("exec", "kept", "--", "true", check=False).ok)
    found = kubectl.pod("kept")
    assert found["metadata"]["annotations"]["slurmlet.io/job-id"] == job_id
    assert found["status"]["containerStatuses"][0]["restartCount"] == 0
    kubectl("delete", "pod", "kept", "--wait=false")
    ask = ["squeue", "--noheader", "-j", job_id, "-o", "%T"]
    eventually(lambda: testbed.run(ask, check=False).stdout.strip() in ("", "COMPLETING", "COMPLETED"))


def test_status_tells_how_often_slurm_is_asked(kubectl: Kubectl, testbed: Testbed) -> None:
    said = testbed.run(["slurmlet", "status", "-c", kubectl.cluster]).stdout
    assert re.search(r"^Slurm +\d+ requests to slurmctld in the last minute$", said, re.MULTILINE)
