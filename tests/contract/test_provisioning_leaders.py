"""Two operators at once: one leads, the other follows it; metrics and health are served by both."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from slurmlet.base.host_addresses import LOOPBACK, free_port
from slurmlet.operators.provisioning.resource_definitions import custom_resource_definitions
from tests.contract.control_plane import ControlPlane, environment
from tests.contract.provisioning_kinds import foreign_kinds, install
from tests.contract.provisioning_site import kubeconfig

PATIENCE_S = 60.0


class Operator:
    def __init__(self, config: Path, log: Path) -> None:
        self.metrics_port, self.webhook_port = free_port(LOOPBACK), free_port(LOOPBACK)
        argv = [
            sys.executable, "-c", "from slurmlet.cli.main import main; main()", "provision", "run",
            "--kubeconfig", str(config), "--namespace", "default", "--metrics-port", str(self.metrics_port),
            "--webhook-port", str(self.webhook_port), "--webhook-name", LOOPBACK, "--without", "dns",
        ]  # fmt: skip
        with log.open("wb") as file:
            self.process = subprocess.Popen(argv, stdout=file, stderr=file, env=environment())
        self._log = log

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.metrics_port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""
        except OSError:
            return 0, ""

    def leads(self) -> bool:
        return "slurmlet_provision_leading 1" in self.get("/metrics")[1]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def until(true: Any, *operators: Operator) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, [one.said() for one in operators]
        time.sleep(0.1)


def test_one_of_two_operators_leads_and_the_other_follows_it(api_plane: ControlPlane, tmp_path: Path) -> None:
    async def prepare() -> None:
        async with api_plane.client() as client:
            await install(client, [*custom_resource_definitions(), *foreign_kinds()])

    asyncio.run(prepare())
    config = tmp_path / "kubeconfig"
    config.write_text(kubeconfig(api_plane))
    config.chmod(0o600)
    operators = [Operator(config, tmp_path / f"{number}.log") for number in range(2)]
    try:
        until(lambda: all(one.get("/readyz")[0] == 200 for one in operators), *operators)
        until(lambda: any(one.leads() for one in operators), *operators)
        assert sum(one.leads() for one in operators) == 1
        leader = next(one for one in operators if one.leads())
        other = next(one for one in operators if one is not leader)
        assert json.loads(other.get("/healthz")[1]) == {"leading": False}
        until(lambda: "slurmlet_provision_reconciles_total" in leader.get("/metrics")[1], leader)
        assert leader.end() == 0, leader.said()
        until(other.leads, other)
        assert other.end() == 0, other.said()
    finally:
        for one in operators:
            one.process.kill()
            one.process.wait(10)


def test_a_part_that_there_is_not_is_refused(api_plane: ControlPlane, tmp_path: Path) -> None:
    config = tmp_path / "kubeconfig"
    config.write_text(kubeconfig(api_plane))
    command = [sys.executable, "-c", "from slurmlet.cli.main import main; main()", "provision", "run"]
    argv = [*command, "--kubeconfig", str(config), "--without", "nothing"]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 1
    assert "there is no such part" in done.stderr
