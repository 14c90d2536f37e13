"""The site itself, without an operator: a MachineDeployment scaled by hand becomes Slurm nodes, and none again."""

from __future__ import annotations

import base64

import pytest

from slurmlet.testbed.provisioning import site_objects
from slurmlet.testbed.provisioning.provision_site import ProvisionSite
from slurmlet.testbed.provisioning.site_objects import Workers
from tests.provision_e2e.worker_machines import Farm, eventually

USER_DATA = """\
## template: jinja
#cloud-config
write_files:
- {{path: /etc/slurm/slurm.key, owner: 'slurm:slurm', permissions: '0600', encoding: b64, content: {key}}}
runcmd:
- mkdir -p /var/log/slurm /var/lib/slurm/slurmd
- [slurmd, -Z, --conf-server, '{server}', -N, '{{{{ ds.meta_data.name }}}}', --conf, CPUs=4 RealMemory=2000 Feature=small]
"""


@pytest.fixture
def by_hand(site: ProvisionSite) -> Farm:
    key = base64.b64encode((site.bed.paths.etc / "slurm/slurm.key").read_bytes()).decode()
    text = USER_DATA.format(key=key, server="10.213.77.1:6817")
    farm = Farm(site, Workers(autoscaled=False))
    templates = [one for one in site_objects.workers(farm.spec) if one["kind"].startswith("Metal3")]
    site.management.apply(
        site_objects.secret("by-hand", value=text),
        *templates,
        site_objects.machine_deployment(farm.name, {"dataSecretName": "by-hand"}),
    )
    return farm


def test_machines_become_nodes_that_run_jobs_and_go_again(site: ProvisionSite, by_hand: Farm) -> None:
    by_hand.scale(2)
    nodes = eventually(lambda: len(found := by_hand.nodes()) == 2 and found)
    assert set(nodes) == set(by_hand.machines())
    job = by_hand.submit("srun hostname", "--nodes=2")
    assert eventually(lambda: by_hand.state(job) == "COMPLETED")
    by_hand.scale(0)
    eventually(lambda: not by_hand.machines())
    hosts = site.management.items("baremetalhosts", "-n", site_objects.NAMESPACE)
    assert not any((one["spec"].get("consumerRef")) for one in hosts)
    assert all(site.machines.init(number) is None for number in range(1, len(hosts) + 1))
    by_hand.remove()
