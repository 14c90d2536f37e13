"""From zero workers, no hand on it: a job is submitted, a machine is made for it, and nothing of it is left in the end."""

from __future__ import annotations

import base64
import time

from slurmlet.testbed.provisioning import timeline
from slurmlet.testbed.provisioning.provision_site import ProvisionSite
from slurmlet.testbed.provisioning.site_objects import NAMESPACE
from slurmlet.testbed.provisioning.site_operator import SiteOperator
from slurmlet.testbed.provisioning.timeline_recorder import Recorder
from tests.provision_e2e.conftest import RESULTS, MakeFarm
from tests.provision_e2e.worker_machines import eventually


def secret(site: ProvisionSite, name: str, key: str) -> str:
    found = site.management.get("secret", name, "-n", NAMESPACE)
    return base64.b64decode(found["data"][key]).decode()


def test_a_job_makes_its_machine_and_the_machine_goes_when_it_is_idle(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    workers = farm(more={"scaleInAfterSeconds": 5})
    recorder = Recorder(site)
    recorder.start()
    assert workers.settled()

    submitted_s = time.time()
    job = workers.submit("sleep 4")
    (machine,) = eventually(lambda: list(workers.machines()))
    eventually(lambda: workers.state(job) == "RUNNING")
    assert set(workers.nodes()) == {machine}

    infrastructure = workers.machines()[machine]["spec"]["infrastructureRef"]["name"]
    key = (site.bed.paths.etc / "slurm/slurm.key").read_bytes()
    assert base64.b64encode(key).decode() in secret(site, f"{infrastructure}-metadata", "metaData")
    bootstrap = secret(site, workers.machines()[machine]["spec"]["bootstrap"]["dataSecretName"], "value")
    assert "PRIVATE KEY" not in bootstrap
    assert "client-certificate" not in bootstrap

    eventually(lambda: workers.state(job) == "COMPLETED")
    eventually(workers.settled)
    samples = recorder.stop()
    assert workers.job(job)["Restarts"] == "0"

    log = site.controller_log()
    drained = log.index(f"update_node: node {machine} reason set to: slurmlet-provision:")
    assert log.index(f"JobId={job} WEXITSTATUS 0") < drained, "the node was drained before its job had ended"
    (RESULTS / "circle.svg").write_text(timeline.picture(samples, "One job, from submission to nothing left"))
    (RESULTS / "circle.txt").write_text(timeline.text(samples, submitted_s))


def test_several_nodes_for_one_job_and_none_for_a_held_one(operator: SiteOperator, farm: MakeFarm) -> None:
    workers = farm(maximum=3, more={"scaleInAfterSeconds": 5})
    held = workers.submit("true", "--hold")
    wide = workers.submit("srun sleep 2", "--nodes=2")
    later = workers.submit("true", f"--dependency=afterok:{held}")
    eventually(lambda: workers.state(wide) == "COMPLETED")
    assert workers.state(held) == "PENDING"
    assert workers.state(later) == "PENDING"
    eventually(workers.settled)


def test_the_plan_says_what_it_would_do_and_why(operator: SiteOperator, farm: MakeFarm) -> None:
    workers = farm(maximum=0)
    job = workers.submit("true")
    said = eventually(lambda: job in (text := operator.ask("plan").stdout) and text)
    assert "WorkerSet" in said
    assert workers.name in operator.ask("status").stdout
