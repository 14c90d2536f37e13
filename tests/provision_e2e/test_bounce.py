"""The thesis's experiment of jobs with different lengths, under our rule and under its own, side by side.

Its cool-down of five minutes is twelve seconds here, the jobs are as much shorter. Under its rule the long job never lives
longer than the cool-down: the last running jobs do not count, and the machines go from under them.
"""

from __future__ import annotations

import itertools
import threading
import time

from slurmlet.testbed.provisioning import timeline
from slurmlet.testbed.provisioning.provision_site import ProvisionSite
from slurmlet.testbed.provisioning.site_operator import SiteOperator
from slurmlet.testbed.provisioning.timeline import Sample
from slurmlet.testbed.provisioning.timeline_recorder import Recorder
from tests.provision_e2e.conftest import RESULTS, MakeFarm
from tests.provision_e2e.worker_machines import Farm, eventually

COOL_DOWN_S = 12
SHORT_S, LONG_S = 5, 30


def submit_three(farm: Farm) -> tuple[list[str], str]:
    """Two short jobs and a long one, each of a node of its own; the ids of all and of the long one."""
    long = farm.submit(f"sleep {LONG_S}", "--exclusive", "--requeue")
    short = [farm.submit(f"sleep {SHORT_S}", "--exclusive", "--requeue") for _ in range(2)]
    return [long, *short], long


def bounces(samples: list[Sample], name: str) -> int:
    """How often replicas rose again after they had fallen."""
    counts = [one.replicas.get(name, 0) for one in samples]
    changes = [after - before for before, after in itertools.pairwise(counts) if after != before]
    return sum(1 for before, after in itertools.pairwise(changes) if before < 0 < after)


def keep(samples: list[Sample], rule: str, restarts: int, bounced: int) -> None:
    title = f"Three jobs under {rule}: {restarts} requeues, {bounced} bounces"
    name = rule.replace(" ", "-").replace("'s", "")
    (RESULTS / f"bounce-{name}.svg").write_text(timeline.picture(samples, title))
    (RESULTS / f"bounce-{name}.txt").write_text(f"{title}\n{timeline.text(samples)}")


def test_jobs_of_different_lengths_are_neither_requeued_nor_killed(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    workers = farm(maximum=3, more={"scaleInAfterSeconds": COOL_DOWN_S})
    recorder = Recorder(site)
    recorder.start()
    jobs, _ = submit_three(workers)
    eventually(lambda: all(workers.state(job) == "COMPLETED" for job in jobs), 180)
    eventually(workers.settled, 120)
    samples = recorder.stop()
    restarts = sum(int(workers.job(job)["Restarts"]) for job in jobs)
    bounced = bounces(samples, workers.name)
    keep(samples, "our rule", restarts, bounced)
    assert restarts == 0
    assert bounced == 0


def test_under_the_thesiss_rule_the_long_job_is_requeued(site: ProvisionSite, farm: MakeFarm) -> None:
    workers = farm("large", maximum=3, autoscaled=False)
    recorder = Recorder(site)
    ending = threading.Event()
    recorder.start()
    rule = threading.Thread(target=thesis_rule, args=(workers, ending), daemon=True)
    jobs, long = submit_three(workers)
    rule.start()
    try:
        eventually(lambda: int(workers.job(long)["Restarts"]) >= 2, 240)
    finally:
        ending.set()
        rule.join(30)
    samples = recorder.stop()
    restarts = sum(int(workers.job(job)["Restarts"]) for job in jobs)
    keep(samples, "the thesis's rule", restarts, bounces(samples, workers.name))
    assert workers.state(long) != "COMPLETED"


def thesis_rule(farm: Farm, ending: threading.Event) -> None:
    """KEDA on pending jobs with a cool-down, the scaling webhook, and the detach handler that sets nodes DOWN."""
    quiet_since_s = time.monotonic()
    while not ending.wait(1.0):
        said = farm.site.slurm("squeue", "-h", "-t", "PENDING", "-o", "%A", f"--partition={farm.name}")
        pending, replicas = len(said.split()), farm.replicas()
        if pending:
            quiet_since_s = time.monotonic()
            if min(pending, farm.spec.maximum) > replicas:
                farm.scale(min(pending, farm.spec.maximum))
        elif replicas and time.monotonic() - quiet_since_s > COOL_DOWN_S:
            nodes = list(farm.nodes())
            farm.scale(0)
            for node in nodes:
                farm.site.slurm(
                    "scontrol", "update", f"nodename={node}", "state=down", "reason=deprovision",
                    user="root", check=False,
                )  # fmt: skip
                farm.site.slurm("scontrol", "delete", f"nodename={node}", user="root", check=False)
