"""Several sets of workers on one Slurm: each job gets machines that fit it, where it wants them."""

from __future__ import annotations

import pytest

from slurmlet.testbed.provisioning.provision_site import ProvisionSite
from slurmlet.testbed.provisioning.site_objects import NAMESPACE
from slurmlet.testbed.provisioning.site_operator import SiteOperator
from tests.provision_e2e.conftest import MakeFarm
from tests.provision_e2e.worker_machines import eventually

QUICK = {"scaleInAfterSeconds": 4}


def test_a_job_gets_a_machine_of_the_shape_that_fits(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    small = farm("small", more=QUICK)
    large = farm("large", cpus=8, memory_mb=4000, more=QUICK)
    job = site.slurm(
        "sbatch", "--parsable", "--partition=batch", "--output=/dev/null", "--cpus-per-task=8", "--wrap=sleep 2"
    ).strip()  # fmt: skip
    eventually(lambda: large.state(job) == "COMPLETED", 120)
    assert large.job(job)["NodeList"].startswith("large-")
    assert small.replicas() == 0
    eventually(large.settled, 120)


def test_machines_come_from_the_hosts_that_the_selector_allows(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    kubectl = site.management.kubectl
    kubectl("-n", NAMESPACE, "label", "baremetalhost", "host-7", "rack=b", "--overwrite")
    workers = farm(host_labels={"rack": "b"}, more=QUICK)
    job = workers.submit("sleep 2")
    eventually(lambda: workers.state(job) == "RUNNING", 120)
    host = site.management.get("baremetalhost", "host-7", "-n", NAMESPACE)
    (machine,) = workers.machines()
    assert host["spec"]["consumerRef"]["name"] == machine
    eventually(workers.settled, 120)


@pytest.fixture
def by_commands(operator: SiteOperator) -> SiteOperator:
    operator.connect(rest=False)
    return operator


def test_slurm_asked_by_its_commands_serves_as_well(by_commands: SiteOperator, farm: MakeFarm) -> None:
    try:
        workers = farm(more=QUICK)
        job = workers.submit("sleep 2")
        eventually(lambda: workers.state(job) == "COMPLETED", 120)
        eventually(workers.settled, 120)
        assert workers.job(job)["Restarts"] == "0"
    finally:
        by_commands.connect(rest=True)


def test_a_job_that_wants_one_topology_domain_gets_all_its_machines_there(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    near = farm("small", maximum=1, more={**QUICK, "topologyDomain": "rack-a"})
    far = farm("large", cpus=8, memory_mb=4000, maximum=2, more={**QUICK, "topologyDomain": "rack-b"})
    job = site.slurm(
        "sbatch", "--parsable", "--partition=batch", "--output=/dev/null", "--nodes=2", "--switches=1",
        "--wrap=srun sleep 2",
    ).strip()  # fmt: skip
    eventually(lambda: far.state(job) == "COMPLETED", 120)
    assert far.job(job)["NodeList"].startswith("large-")
    assert near.replicas() == 0
    eventually(far.settled, 120)
