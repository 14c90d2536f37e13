"""The parts of the provisioning test site that need no machine: its objects and upstream's manifests."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import yaml

from slurmlet.base.errors import UserError
from slurmlet.testbed import config_files, daemons
from slurmlet.testbed.provisioning import cluster_api, metal3_kinds, site_objects
from slurmlet.testbed.provisioning.infrastructure_provider import render_metadata
from slurmlet.testbed.testbed_plan import LOGIN, Plan

DYNAMIC = Plan(dynamic=True, accounting=False)


class TestPlan:
    def test_it_has_a_controller_and_no_compute_host(self) -> None:
        assert DYNAMIC.hosts == (LOGIN,)
        assert daemons.services_of(DYNAMIC, LOGIN) == ("slurmctld", "slurmrestd")

    def test_its_slurm_takes_nodes_that_register_themselves(self) -> None:
        text = config_files.slurm_conf(DYNAMIC)
        for line in ("AuthType=auth/slurm", "MaxNodeCount=64", "PartitionName=batch Nodes=small,large"):
            assert line in text
        assert "auth/munge" not in text

    def test_nodes_that_are_always_down_tell_slurm_the_shape_of_workers_to_come(self) -> None:
        text = config_files.slurm_conf(DYNAMIC)
        nodes = [line for line in text.splitlines() if line.startswith("NodeName=shape-")]
        assert all("State=DOWN" in line for line in nodes)
        assert any("CPUs=4 RealMemory=2000 Feature=small" in line for line in nodes)

    def test_the_ordinary_testbed_keeps_munge_and_its_nodes(self) -> None:
        text = config_files.slurm_conf(Plan())
        assert "AuthType=auth/munge" in text
        assert "auth/slurm" not in text
        assert text.count("NodeName=") == 3

    def test_there_is_none_with_accounting(self) -> None:
        with pytest.raises(UserError, match="accounting"):
            Plan(dynamic=True)


class TestUpstreamManifests:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> cluster_api.ClusterApi:
        def crd(group: str, versions: int) -> dict[str, object]:
            return {"spec": {"group": group, "versions": [{}] * versions}}

        (tmp_path / "crds").mkdir()
        for number, (group, versions) in enumerate(
            [("cluster.x-k8s.io", 2), ("ipam.cluster.x-k8s.io", 2), ("slinky.slurm.net", 1)]
        ):
            (tmp_path / "crds" / f"{number}.yaml").write_text(yaml.safe_dump(crd(group, versions)))
        hook = {"name": "a", "clientConfig": {"service": {"name": "s", "namespace": "n", "path": "/mutate"}}}
        configuration = {"metadata": {"name": "mutating"}, "webhooks": [hook]}
        (tmp_path / "webhooks.yaml").write_text(yaml.safe_dump(configuration))
        return cluster_api.ClusterApi(tmp_path)

    def test_kinds_of_several_versions_are_converted_by_the_controller(
        self, parts: cluster_api.ClusterApi
    ) -> None:
        core, ipam, slinky = parts.crds("https://127.0.0.1:1", b"ca")
        for one in (core, ipam):
            client = one["spec"]["conversion"]["webhook"]["clientConfig"]
            assert client == {
                "url": "https://127.0.0.1:1/convert",
                "caBundle": base64.b64encode(b"ca").decode(),
            }
        assert "conversion" not in slinky["spec"]

    def test_webhooks_are_called_at_the_address_under_their_own_paths(
        self, parts: cluster_api.ClusterApi
    ) -> None:
        (made,) = parts.webhooks("https://127.0.0.1:1", b"ca")
        assert made["webhooks"][0]["clientConfig"]["url"] == "https://127.0.0.1:1/mutate"
        assert "service" not in made["webhooks"][0]["clientConfig"]

    @pytest.mark.parametrize("recipe", ["clusterapi", "slinky"])
    def test_recipes_pin_a_version(self, recipe: str) -> None:
        assert cluster_api.version(recipe).startswith("v1.")


class TestMetal3:
    def test_both_versions_are_served_and_one_is_stored(self) -> None:
        for crd in metal3_kinds.definitions():
            versions = crd["spec"]["versions"]
            assert [one["storage"] for one in versions].count(True) == 1
            assert all(one["served"] for one in versions)

    def test_metadata_is_rendered_from_names_strings_and_indexes(self) -> None:
        template = {
            "strings": [{"key": "a", "value": "b"}],
            "objectNames": [{"key": "name", "object": "machine"}],
            "indexes": [{"key": "i", "offset": 10, "step": 2, "prefix": "n"}],
        }
        made = render_metadata(template, {"machine": "m"}, 3)
        assert made == {"a": "b", "name": "m", "i": "n16"}


class TestObjects:
    def test_a_machine_deployment_begins_with_no_machine(self) -> None:
        made = {one["kind"]: one for one in site_objects.workers(site_objects.Workers(name="w"))}
        assert made["MachineDeployment"]["spec"]["replicas"] == 0
        assert made["WorkerSet"]["spec"]["scaleTargetRef"]["name"] == "w"
        assert made["Metal3DataTemplate"]["metadata"]["labels"] == {"slurm-controller-namespace": "slurm"}
