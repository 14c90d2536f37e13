"""Slurm's own power saving as the driver: slurmctld asks for nodes, machines are booted as these nodes and go again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from slurmlet.testbed.provisioning.provision_site import ProvisionSite
from slurmlet.testbed.provisioning.site_objects import NAMESPACE
from slurmlet.testbed.provisioning.site_operator import SiteOperator
from tests.provision_e2e.conftest import MakeFarm
from tests.provision_e2e.worker_machines import eventually


@pytest.fixture
def carried_out(site: ProvisionSite, operator: SiteOperator) -> Iterator[list[str]]:
    """What slurmctld asked its programs for, carried out by `slurmlet provision` as they would do it."""
    requests = site.bed.paths.opt / "power" / "requests"
    done: list[str] = requests.read_text().splitlines()
    first, ending = len(done), threading.Event()

    def follow() -> None:
        while not ending.wait(0.3):
            for line in requests.read_text().splitlines()[len(done) :]:
                verb, nodes = line.split()
                said = operator.ask(verb, nodes, "--namespace", NAMESPACE)
                done.append(line if said.ok else f"{line}: {said.stderr}")

    thread = threading.Thread(target=follow, name="power programs", daemon=True)
    thread.start()
    asked: list[str] = []
    yield asked
    ending.set()
    thread.join(30)
    asked += done[first:]


def test_slurm_switches_machines_on_and_off(
    site: ProvisionSite, carried_out: list[str], farm: MakeFarm
) -> None:
    workers = farm("cloud", features=(), cloud_nodes="cloud-[1-2]", maximum=2)
    job = workers.submit("sleep 2")
    (machine,) = eventually(lambda: list(workers.machines()))
    eventually(lambda: workers.state(job) == "COMPLETED", 180)
    node = workers.job(job)["NodeList"]
    assert node in ("cloud-1", "cloud-2")
    assert workers.job(job)["Restarts"] == "0"
    assert workers.machines()[machine]["metadata"]["annotations"]["slurmlet.io/slurm-node"] == node
    eventually(lambda: not workers.machines(), 120)
    eventually(lambda: "POWERED_DOWN" in site.slurm("scontrol", "show", "node", node, user="root"), 120)
    # The node is as good as new: the next job starts a machine again.
    again = workers.submit("sleep 1")
    eventually(lambda: workers.state(again) == "COMPLETED", 180)
    eventually(lambda: not workers.machines(), 120)
