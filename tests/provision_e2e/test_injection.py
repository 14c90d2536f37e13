"""The Injection Webhook between a real API server and machines that cannot boot without what it adds."""

from __future__ import annotations

import base64
import re

import yaml

from slurmlet.testbed.provisioning.provision_site import ProvisionSite
from slurmlet.testbed.provisioning.site_objects import NAMESPACE, NAMESPACE_LABEL
from slurmlet.testbed.provisioning.site_operator import SiteOperator
from tests.provision_e2e.conftest import RESULTS, MakeFarm
from tests.provision_e2e.worker_machines import Farm, eventually

HISTOGRAM = "slurmlet_provision_injection_duration_seconds"


def metadata(site: ProvisionSite, farm: Farm) -> list[dict[str, str]]:
    """Of every machine of the farm that has got some."""
    names = {one["spec"]["infrastructureRef"]["name"] for one in farm.machines().values()}
    found = []
    for name in sorted(names):
        secret = site.management.get("secret", f"{name}-metadata", "-n", NAMESPACE)
        if secret is not None:
            found.append(yaml.safe_load(base64.b64decode(secret["data"]["metaData"])))
    return found


def test_no_machine_boots_while_the_webhook_is_down_and_all_do_when_it_is_back(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    workers = farm(autoscaled=False)
    workers.scale(1)
    # Cluster API and the bootstrap provider are done with it: only the metadata may be missing now.
    eventually(lambda: all(one["spec"]["bootstrap"].get("dataSecretName") for one in workers.machines().values())
               and workers.machines())  # fmt: skip
    operator.kill()
    workers.scale(2)
    eventually(lambda: len(workers.machines()) == 2)
    operator.start()
    eventually(lambda: len(workers.nodes()) == 2, 120)
    assert all("name" in one for one in metadata(site, workers))


def test_metal3_of_before_and_labels_of_the_first_slinky_serve_as_well(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    site.make_slinky("slurm-before", old=True)
    workers = farm(autoscaled=False)
    site.management.kubectl(
        "-n", NAMESPACE, "label", "metal3datatemplate", workers.name, "--overwrite", f"{NAMESPACE_LABEL}=slurm-before"
    )  # fmt: skip
    site.start_provider("v1beta1")
    try:
        workers.scale(1)
        eventually(lambda: len(workers.nodes()) == 1, 120)
        (data,) = site.management.items(
            "metal3datas.v1beta1.infrastructure.cluster.x-k8s.io", "-n", NAMESPACE
        )
        secret = site.management.get("secret", f"{data['metadata']['name']}-metadata", "-n", NAMESPACE)
        assert secret["metadata"]["ownerReferences"][0]["apiVersion"].endswith("/v1beta1")
    finally:
        site.start_provider()


def test_a_broken_link_is_told_and_mended(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    workers = farm(autoscaled=False)
    kubectl = site.management.kubectl
    template = ("-n", NAMESPACE, "label", "metal3datatemplate", workers.name, "--overwrite")
    kubectl(*template, f"{NAMESPACE_LABEL}=nowhere")
    workers.scale(1)
    eventually(lambda: any("nowhere" in text for _, text in workers.events()))
    assert not workers.nodes()
    kubectl(*template, f"{NAMESPACE_LABEL}=slurm")
    eventually(lambda: len(workers.nodes()) == 1, 120)


def test_each_call_is_counted_and_its_time_is_known(
    site: ProvisionSite, operator: SiteOperator, farm: MakeFarm
) -> None:
    workers = farm(autoscaled=False)
    workers.scale(3)
    eventually(lambda: len(workers.nodes()) == 3, 120)
    text = operator.metrics()
    counts = [
        float(one) for one in re.findall(rf"^{HISTOGRAM}_count{{.*injected.*}} (\S+)$", text, re.MULTILINE)
    ]
    sums = [float(one) for one in re.findall(rf"^{HISTOGRAM}_sum{{.*injected.*}} (\S+)$", text, re.MULTILINE)]
    assert sum(counts) >= 3
    (RESULTS / "injection.txt").write_text(
        f"{sum(counts):.0f} injections, {sum(sums) / sum(counts) * 1000:.1f} ms each on average\n\n"
        + "\n".join(line for line in text.splitlines() if line.startswith(HISTOGRAM))
        + "\n"
    )
