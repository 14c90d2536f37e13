"""Sockets behave in a pod as on any Linux: every promise of network_socketcases.py, judged from inside a container."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.testbed.testbed_plan import address_of
from tests.e2e import network_socketcases
from tests.e2e.conftest import eventually
from tests.e2e.network_pods import Net, network_namespace, placed

pytestmark = pytest.mark.e2e

CASES = sorted(network_socketcases.cases())
TEXT = Path(network_socketcases.__file__).read_text()
WHERE = {"as root": {}, "as somebody": {"securityContext": {"runAsUser": 1000}}}


@pytest.fixture(scope="module")
def net(testbed: Any, cluster: str) -> Iterator[Net]:
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    with network_namespace(testbed, cluster) as net:
        for name, more in zip(("root", "somebody"), WHERE.values(), strict=True):
            net.apply(placed(name, "sleep 3600", container={"env": [address], **more}))
        net.ready("root", "somebody")
        yield net


@pytest.fixture(scope="module")
def verdicts(net: Net) -> dict[str, dict[str, str]]:
    """user → case → what went wrong. All cases in one go: a pod of its own for each would take minutes."""

    def judge(name: str) -> dict[str, str]:
        said = net.run(name, "python3", "-", stdin=TEXT, timeout_s=200)
        return dict(json.loads(said.stdout))

    return {"as root": judge("root"), "as somebody": judge("somebody")}


@pytest.mark.parametrize("user", WHERE)
@pytest.mark.parametrize("case", CASES)
def test_in_a_pod(verdicts: dict[str, dict[str, str]], case: str, user: str) -> None:
    assert verdicts[user][case] == ""


def test_the_judge_is_right_about_a_bare_host(testbed: Any) -> None:
    said = testbed.run(
        ["env", f"POD_IP={address_of('c3')}", "python3", "-"], host="c3", stdin=TEXT, timeout_s=200
    )
    assert {case: wrong for case, wrong in json.loads(said.stdout).items() if wrong} == {}


def test_netds_work_with_the_library_that_was_laid_ready(testbed: Any, net: Net) -> None:
    """Else all of this file, and every measurement, would be about its stand-in in Python."""
    pods = json.loads(net("get", "pods", "-o", "json").stdout)["items"]
    hosts = {pod["status"]["hostIP"] for pod in pods}
    look = "cat /proc/[0-9]*/maps 2>/dev/null | grep -c netfast- || true"
    for host in (name for name in ("c1", "c2", "c3") if address_of(name) in hosts):
        assert int(testbed.run(["sh", "-c", look], host=host, user="root").stdout) > 0


def test_a_low_port_needs_no_privilege(net: Net) -> None:
    program = "import socket; s = socket.create_server(('', 443)); print(s.getsockname()[1])"
    assert net.run("somebody", "python3", "-c", program).stdout == "443\n"


def test_ss_shows_addresses_of_the_pod_only(net: Net) -> None:
    program = (
        "import socket, subprocess; l = socket.create_server(('', 8081)); c = socket.create_connection(('127.0.0.1', 8081));"
        "a, _ = l.accept(); subprocess.run(['ss', '-Htan'])"
    )
    said = net.run("root", "python3", "-c", program).stdout
    assert any(
        line.split()[0] == "LISTEN" and line.split()[3] == "0.0.0.0:8081" for line in said.splitlines()
    ), said


def test_many_programs_start_and_end_with_sockets(net: Net) -> None:
    """Short-lived processes with short-lived sockets, side by side: nothing is mixed up, nothing is left."""
    net.run("root", "python3", "-c", CHURN, timeout_s=90)
    assert eventually(lambda: ":9" not in net.run("root", "ss", "-Hltn").stdout, 5)


CHURN = """
import os, socket, sys
children = []
for number in range(40):
    child = os.fork()
    if not child:
        port = 9000 + number
        for _ in range(25):
            with socket.create_server(("", port)) as listening, socket.create_connection(("127.0.0.1", port), 10) as client:
                accepted, peer = listening.accept()
                assert peer == client.getsockname() and accepted.getsockname()[1] == port
                client.sendall(str(port).encode()); assert accepted.recv(9) == str(port).encode()
                accepted.close()
        os._exit(0)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(any(codes))
"""
