"""`slurmlet provision run` as a process with the installed manifests' service account: webhooks, bootstrap, metrics, end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from slurmlet.base.host_addresses import free_port
from slurmlet.cli.provision import command
from slurmlet.kube.client import ApiClient
from slurmlet.kube.conditions import is_true
from slurmlet.operators.provisioning import provisioning_metrics
from slurmlet.operators.provisioning.operator_settings import PARTS
from slurmlet.operators.provisioning.resource_definitions import packaging_dir
from slurmlet.operators.provisioning.webhook_service import INJECTION_CONFIGURATION
from tests.contract.control_plane import ControlPlane, environment
from tests.contract.provisioning_manifests import manifests
from tests.contract.provisioning_site import Site, b64, run
from tests.contract.test_provisioning_admission import until_injected
from tests.contract.test_provisioning_bootstrap import Rig as Bootstrap
from tests.contract.test_provisioning_injection import Told
from tests.contract.test_provisioning_manifests import NAMESPACE, _admission, applied

Obj = dict[str, Any]


def arguments() -> list[str]:
    deployment = next(one for one in manifests() if one["kind"] == "Deployment")
    found: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


def test_the_deployment_calls_the_command_by_options_that_it_has() -> None:
    shown = CliRunner().invoke(command, ["run", "--help"]).output
    assert arguments()[:2] == ["provision", "run"]
    options = [one.partition("=")[0] for one in arguments()[2:]]
    assert [one for one in options if one not in shown] == []
    values = yaml.safe_load((packaging_dir() / "chart" / "values.yaml").read_text())
    switched = {name for name, value in values.items() if isinstance(value, dict) and "enabled" in value}
    assert len(switched) == len(PARTS)


@contextmanager
def process(kubeconfig: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = [
        str(Path(sys.executable).with_name("slurmlet")),
        *arguments(),
        *options,
        f"--kubeconfig={kubeconfig}",
    ]
    with kubeconfig.with_suffix(".log").open("wb") as log:
        started = subprocess.Popen(argv, stdout=log, stderr=log, env=environment())
    try:
        yield started
    finally:
        started.kill()
        started.wait(20)


async def kubeconfig_of_operator(client: ApiClient, plane: ControlPlane, path: Path) -> Path:
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/slurmlet-provision"
    made = await client.create(f"{accounts}/token", {"spec": {"expirationSeconds": 600}})
    authority = b64((plane.keys / "ca.crt").read_bytes())
    document = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x", "namespace": NAMESPACE}}],
        "clusters": [
            {"name": "x", "cluster": {"server": plane.url, "certificate-authority-data": authority}}
        ],
        "users": [{"name": "x", "user": {"token": made["status"]["token"]}}],
    }
    path.write_text(json.dumps(document))
    return path


async def fetched(url: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""
        except OSError:
            return 0, ""

    return await asyncio.to_thread(fetch)


def test_the_operator_serves_injects_and_bootstraps_until_it_is_told_to_end(
    api_plane: ControlPlane, tmp_path: Path
) -> None:
    async def scenario(client: ApiClient) -> None:
        await applied(client, "install.yaml")
        place = Site(client, api_plane, NAMESPACE, "operator-slurm")
        await place.namespace(place.slurm)
        await place.kubeconfig("beta")
        await place.controller("beta")
        await place.slurm_cluster("beta", {"namespace": place.slurm, "cluster": "beta"})
        metrics, webhooks = free_port("127.0.0.1"), free_port("127.0.0.1")
        hook = (await client.get(_admission(INJECTION_CONFIGURATION)))["webhooks"][0]
        hook["clientConfig"] = {"url": f"https://127.0.0.1:{webhooks}/"}
        await client.patch(_admission(INJECTION_CONFIGURATION), {"webhooks": [hook]})
        options = [
            f"--metrics-port={metrics}", f"--webhook-port={webhooks}", "--webhook-name=127.0.0.1",
            "--webhook-address=127.0.0.1", "--metrics-address=127.0.0.1",
        ]  # fmt: skip
        path = await kubeconfig_of_operator(client, api_plane, tmp_path / "operator")
        with process(path, *options) as operator:
            url = f"http://127.0.0.1:{metrics}"
            while (await fetched(f"{url}/readyz"))[0] != 200:
                assert operator.poll() is None, path.with_suffix(".log").read_text()
                await asyncio.sleep(0.1)
            await until_injected(
                place, await place.machine("b-0", {"slurmlet.io/slurm-cluster": "beta"}, version="v1beta2")
            )
            bootstrap = Bootstrap(place, Told())
            await bootstrap.cluster("beta-cluster")
            await bootstrap.config("b-0", {}, machine="b-0", cluster="beta-cluster")
            await bootstrap.until("b-0", lambda found: is_true(found, "Ready"))
            _, text = await fetched(f"{url}/metrics")
            assert 'slurmlet_provision_injection_duration_seconds_count{outcome="injected"}' in text
            assert "slurmlet_provision_leading 1" in text
            operator.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(operator.wait, 20) == 0
        assert "Traceback" not in path.with_suffix(".log").read_text()

    try:
        run(api_plane, scenario)
    finally:
        run(api_plane, _forgotten)


async def _forgotten(client: ApiClient) -> None:
    """A configuration that nobody answers for would refuse the Secrets of other tests."""
    await client.delete(_admission(INJECTION_CONFIGURATION), {})


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    sources = "".join(path.read_text() for path in Path(provisioning_metrics.__file__).parent.rglob("*.py"))
    known = set(re.findall(r'"(slurmlet_provision_\w+)"', sources))
    known |= {f"slurmlet_provision_{name}" for name, _, _ in provisioning_metrics._GAUGES}
    board = (packaging_dir() / "chart" / "dashboards" / "slurmlet-provision.json").read_text()
    asked = {
        re.sub("_(bucket|count|sum)$", "", one)
        for one in re.findall(r"slurmlet_provision_\w+(?=[{\[])", board)
    }
    assert len(asked) > 10
    assert asked <= known
