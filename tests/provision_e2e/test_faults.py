"""What goes wrong on a real site, on purpose: no job is lost by it, and nothing is left behind."""

from __future__ import annotations

import json

import pytest

from slurmlet.testbed.daemons import Daemons
from slurmlet.testbed.provisioning.infrastructure_provider import FAULT, NEVER_BOOTS
from slurmlet.testbed.provisioning.provision_site import ProvisionSite
from slurmlet.testbed.provisioning.site_objects import NAMESPACE
from slurmlet.testbed.provisioning.site_operator import METRICS_PORT, WEBHOOK_PORT, SiteOperator
from slurmlet.testbed.testbed_plan import LOGIN
from tests.provision_e2e.conftest import MakeFarm
from tests.provision_e2e.worker_machines import Farm, eventually

QUICK = {"scaleInAfterSeconds": 4}


def deleting(farm: Farm) -> bool:
    return any(one["metadata"].get("deletionTimestamp") for one in farm.machines().values())


# What can be seen from outside at each step of a circle.
STEPS = {
    "the job waits": lambda farm: bool(farm.jobs()),
    "replicas rose": lambda farm: farm.replicas() > 0,
    "a Machine is there": lambda farm: bool(farm.machines()),
    "the node has registered": lambda farm: bool(farm.nodes()),
    "the job is over": lambda farm: bool(farm.nodes()) and not farm.jobs(),
    "the node is drained": lambda farm: any("DRAIN" in state for state in farm.nodes().values()),
    "replicas fell": lambda farm: bool(farm.machines()) and farm.replicas() == 0,
    "the Machine is being deleted": deleting,
}


def test_an_operator_killed_at_each_step_goes_on_where_it_was(operator: SiteOperator, farm: MakeFarm) -> None:
    workers = farm(more=QUICK)
    job = workers.submit("sleep 3")
    killed = []
    for step, reached in STEPS.items():
        # Steps that take less time than a look may be over: then the next one is waited for.
        eventually(lambda reached=reached: reached(workers) or workers.settled())
        if workers.settled():
            break
        operator.kill()
        killed.append(step)
        operator.start()
    eventually(workers.settled, 120)
    assert len(killed) >= 5, f"killed only at: {killed}"
    assert workers.state(job) == "COMPLETED"
    assert workers.job(job)["Restarts"] == "0"


def test_nothing_is_done_while_slurmctld_is_away(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    workers = farm(minimum=1, more=QUICK)
    eventually(lambda: len(workers.nodes()) == 1)
    before = set(workers.machines())
    daemons = Daemons(site.bed.paths, LOGIN, site.bed.init(LOGIN))
    # Ended in order: one that is killed forgets nodes that registered since it last saved its state.
    daemons.stop("slurmctld")
    try:
        eventually(lambda: workers.condition("Degraded").get("status") == "True")
        # Nobody knows which of them are idle: a lower minimum changes nothing now.
        patch = json.dumps({"spec": {"min": 0}})
        site.management.kubectl(
            "-n", NAMESPACE, "patch", "workerset", workers.name, "--type=merge", "-p", patch
        )
        generation = workers.worker_set()["metadata"]["generation"]
        eventually(lambda: workers.condition("Degraded").get("observedGeneration") == generation)
        assert set(workers.machines()) == before
        assert workers.replicas() == 1
    finally:
        daemons.start("slurmctld")
    eventually(workers.settled, 120)


def test_a_machine_that_never_registers_is_told_and_its_job_gets_another(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    kubectl = site.management.kubectl
    kubectl("-n", NAMESPACE, "annotate", "baremetalhost", "host-1", f"{FAULT}={NEVER_BOOTS}", "--overwrite")
    try:
        workers = farm(maximum=2, more={**QUICK, "startupDeadlineSeconds": 15})
        job = workers.submit("sleep 2")
        (stuck,) = eventually(lambda: list(workers.machines()))
        eventually(
            lambda: any("never registered" in text and stuck in text for _, text in workers.events()), 120
        )
        # It is free again for the next one, and mended.
        kubectl("-n", NAMESPACE, "annotate", "baremetalhost", "host-1", f"{FAULT}-")
        eventually(lambda: workers.state(job) == "COMPLETED", 120)
        assert not workers.job(job)["NodeList"].startswith(stuck)
        eventually(workers.settled, 120)
    finally:
        kubectl("-n", NAMESPACE, "annotate", "baremetalhost", "host-1", f"{FAULT}-")


def test_jobs_that_come_in_the_instant_of_scale_in_run_once(operator: SiteOperator, farm: MakeFarm) -> None:
    workers = farm(maximum=2, more=QUICK)
    first = workers.submit("sleep 1")
    eventually(lambda: workers.state(first) == "COMPLETED")
    eventually(lambda: any("DRAIN" in state for state in workers.nodes().values()) or workers.settled())
    jobs = [workers.submit("sleep 3") for _ in range(2)]
    eventually(lambda: all(workers.state(job) == "COMPLETED" for job in jobs), 120)
    assert all(workers.job(job)["Restarts"] == "0" for job in jobs)
    eventually(workers.settled, 120)


def test_a_node_that_a_person_drained_stays_as_it_is(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    workers = farm(minimum=1, maximum=2, more=QUICK)
    (node,) = eventually(lambda: list(workers.nodes()))
    site.slurm(
        "scontrol", "update", f"nodename={node}", "state=drain", "reason=looking at its disk", user="root"
    )
    job = workers.submit("sleep 1")
    eventually(lambda: workers.state(job) == "COMPLETED", 120)
    assert workers.job(job)["NodeList"] != node
    # The worker that took its place goes when none is wanted any more; the drained one is a person's.
    patch = json.dumps({"spec": {"min": 0}})
    site.management.kubectl("-n", NAMESPACE, "patch", "workerset", workers.name, "--type=merge", "-p", patch)
    eventually(lambda: node in workers.nodes() and len(workers.nodes()) == 1, 120)
    said = site.slurm("sinfo", "-h", "-n", node, "-o", "%E", user="root")
    assert "looking at its disk" in said
    assert node in workers.machines()


def test_a_machine_deleted_by_hand_keeps_its_job_until_it_ends(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    workers = farm(more=QUICK)
    job = workers.submit("sleep 12", "--requeue")
    eventually(lambda: workers.state(job) == "RUNNING")
    (machine,) = workers.machines()
    site.management.kubectl("-n", NAMESPACE, "delete", "machine", machine, "--wait=false")
    eventually(lambda: any("DRAIN" in state for state in workers.nodes().values()))
    assert workers.state(job) == "RUNNING"
    eventually(lambda: workers.state(job) == "COMPLETED")
    assert workers.job(job)["Restarts"] == "0"
    eventually(lambda: machine not in workers.machines())
    eventually(lambda: machine not in workers.nodes())
    eventually(workers.settled, 120)


def test_of_two_operators_one_leads_and_the_other_takes_over(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    second = SiteOperator(site, "operator-2", METRICS_PORT + 10, WEBHOOK_PORT + 10)
    second.start()
    try:
        workers = farm(more=QUICK)
        job = workers.submit("sleep 1")
        eventually(lambda: workers.state(job) == "COMPLETED")
        # One decision each, not two: never more machines than one job wants.
        assert workers.replicas() <= 1
        operator.kill()
        eventually(workers.settled, 150)
    finally:
        second.stop()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"scaleTargetRef": {"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachineDeployment", "name": "nobody"}},
         "nobody"),
        ({"scaleTargetRef": {"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Nonsense", "name": "x"}}, "Nonsense"),
        ({"slurmCluster": "elsewhere"}, "elsewhere"),
    ],
    ids=["target", "kind", "cluster"],
)  # fmt: skip
def test_bad_input_is_told_in_a_condition_and_changes_nothing(
    operator: SiteOperator, farm: MakeFarm, change: dict[str, object], word: str
) -> None:
    workers = farm(more=change)
    told = eventually(
        lambda: workers.condition("Ready").get("status") == "False" and workers.condition("Ready")
    )
    assert word in told["message"]
    assert workers.replicas() == 0
