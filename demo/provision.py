"""`make provision-demo`: from zero workers to zero workers, on one machine, with a picture at the end.

Three jobs of different lengths are submitted to a Slurm without workers. Machines are made for them by Cluster API, join
Slurm, run the jobs, and go, each when it has become idle. The picture is written to build/provision/demo.svg.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slurmlet.base.console import Steps
from slurmlet.base.errors import SlurmletError
from slurmlet.testbed.config_files import SHAPE_PREFIX
from slurmlet.testbed.provisioning import site_objects, timeline
from slurmlet.testbed.provisioning.provision_site import (
    ProvisionSite,
    SiteSettings,
    definitions_in,
    running_site,
)
from slurmlet.testbed.provisioning.site_operator import SiteOperator
from slurmlet.testbed.provisioning.timeline_recorder import Recorder
from slurmlet.testbed.testbed_plan import NAME_VARIABLE

ROOT = Path(__file__).parents[1]
PACKAGING = ROOT / "packaging" / "provision"
RESULTS = ROOT / "build" / "provision"
WORKERS = site_objects.Workers(maximum=3, more={"scaleInAfterSeconds": 10})
# Seconds of work of each job; each wants a machine of its own.
JOBS = (8, 8, 25)
LIMIT_S = 180.0


def main() -> int:
    os.environ.setdefault(NAME_VARIABLE, "run-provisiondemo")
    RESULTS.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    title("A site: Slurm without workers, a management cluster with Cluster API, six machines that are off")
    with running_site(SiteSettings(), definitions_in(PACKAGING / "crds")) as site:
        operator = SiteOperator(site)
        with Steps().step("Installing and starting the operator of slurmlet provision"):
            operator.install(PACKAGING / "manifests" / "install.yaml")
            operator.start()
            site.management.apply(*site_objects.workers(WORKERS))
        circle(site, operator)
        operator.stop()
    print(
        f"\nThe whole circle took {time.monotonic() - began_s:.0f} s, the site's own start and end included."
    )
    return 0


def circle(site: ProvisionSite, operator: SiteOperator) -> None:
    print("Slurm knows the shape of workers to come by nodes that are always down:")
    show(site, "sinfo", "-o", "%P %D %t")
    recorder = Recorder(site)
    recorder.start()
    title(f"Three jobs of {', '.join(f'{seconds} s' for seconds in JOBS)}, each for a machine of its own")
    submitted_s = time.time()
    for seconds in JOBS:
        show(
            site,
            "sbatch",
            f"--partition={WORKERS.name}",
            "--exclusive",
            "--output=/dev/null",
            f"--wrap=sleep {seconds}",
        )
    print(f"\n{operator.ask('plan').stdout}")
    wait(lambda: "RUNNING" in queue(site), "a job to run")
    show(site, "squeue", "-o", "%.6i %.9P %.8u %.2t %.6M %R")
    told = operator.ask("status").stdout.splitlines()
    print("\n".join(line for line in told if SHAPE_PREFIX not in line))
    wait(lambda: not queue(site).strip(), "the jobs to end")
    title("All jobs are over: idle machines are drained, deleted, and their records removed")
    wait(lambda: not machines(site) and not workers_in_slurm(site), "the last machine to go")
    show(site, "sinfo", "-o", "%P %D %t")
    samples = recorder.stop()
    requeues = site.slurm("sh", "-c", "scontrol show jobs -o | grep -o 'Restarts=[1-9]' || true").split()
    title("What happened")
    print(timeline.text(samples, submitted_s))
    print(f"Requeued or killed jobs: {len(requeues)}")
    target = RESULTS / "demo.svg"
    target.write_text(
        timeline.picture(samples, "slurmlet provision: three jobs, from zero workers to zero workers")
    )
    (RESULTS / "demo.txt").write_text(timeline.text(samples, submitted_s))
    print(f"The picture: {target.relative_to(ROOT)}")


def queue(site: ProvisionSite) -> str:
    return site.slurm("squeue", "-h", "-o", "%T")


def machines(site: ProvisionSite) -> list[site_objects.Obj]:
    return site.management.items("machines", "-n", site_objects.NAMESPACE)


def workers_in_slurm(site: ProvisionSite) -> bool:
    names = site.slurm("sinfo", "-h", "-N", "-o", "%N").split()
    return any(name.startswith(f"{WORKERS.name}-") for name in names)


def wait(ready: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not ready():
        if time.monotonic() > deadline_s:
            raise SlurmletError(f"waited {LIMIT_S:.0f} s for {what}")
        time.sleep(0.5)


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m", flush=True)


def show(site: ProvisionSite, *argv: str) -> None:
    print(f"\033[1muser1@login $ {' '.join(argv)}\033[0m")
    print(site.slurm(*argv), end="", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlurmletError as error:
        sys.exit(f"{error.message}\n{error.hint}")
