"""The control plane's life on a real login host: started, found again, killed in parts and whole, stopped, forgotten."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

MINE = "life"
OTHER = "beside"
ROOT = "/home/user1/.slurmlet"
UP_S = 120

# Each small program runs on the login host as the user; arguments come in sys.argv, never in the text.
PROCESSES_OF = """
import os, sys
from pathlib import Path
root = str(Path.home() / ".slurmlet" / sys.argv[1])
for entry in os.listdir("/proc"):
    if entry.isdigit():
        try:
            words = open(f"/proc/{entry}/cmdline", "rb").read().decode(errors="replace").split("\\0")
        except OSError:
            continue
        if any(word == root or root + "/" in word for word in words):
            print(entry, words[0])
"""
FILES_OF = """
import os, sys
from pathlib import Path
root = Path.home() / ".slurmlet"
print(oct(root.stat().st_mode & 0o777), "d", root)
for where, folders, files in os.walk(root / sys.argv[1]):
    for kind, names in (("d", folders), ("f", files)):
        for name in names:
            path = os.path.join(where, name)
            print(oct(os.lstat(path).st_mode & 0o777), kind, path)
"""
ANONYMOUS_GET = """
import http.client, ssl, sys
context = ssl._create_unverified_context()
if len(sys.argv) > 4:
    context.load_cert_chain(sys.argv[4] + ".crt", sys.argv[4] + ".key")
connection = http.client.HTTPSConnection(sys.argv[1], int(sys.argv[2]), context=context, timeout=5)
try:
    connection.request("GET", sys.argv[3])
    print(connection.getresponse().status)
except (OSError, http.client.HTTPException) as error:
    print("refused", type(error).__name__)
"""


# The TCP ports that a process listens on, one "address port" in a line, addresses as /proc has them (in hex).
LISTENERS_OF = """
import os, sys
inodes = set()
for name in os.listdir(f"/proc/{sys.argv[1]}/fd"):
    link = os.readlink(f"/proc/{sys.argv[1]}/fd/{name}")
    if link.startswith("socket:["):
        inodes.add(link[8:-1])
for table in ("tcp", "tcp6"):
    for line in list(open(f"/proc/{sys.argv[1]}/net/{table}"))[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            address, port = words[1].split(":")
            print(address, int(port, 16))
"""


def program(testbed: Any, text: str, *arguments: str, user: str = "user1") -> str:
    return str(testbed.run(["python3", "-c", text, *arguments], user=user).stdout)


def status(testbed: Any, name: str) -> dict[str, Any]:
    seen = testbed.run(["slurmlet", "status", "-c", name, "-o", "json"], check=False)
    return dict(json.loads(seen.stdout))


def pids(testbed: Any, name: str) -> dict[str, int | None]:
    return {part["name"]: part["pid"] for part in status(testbed, name)["components"]}


def eventually(check: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.3)


def up(testbed: Any, name: str, user: str = "user1") -> Any:
    return testbed.run(["slurmlet", "up", "-c", name], user=user, timeout_s=UP_S)


def purge(testbed: Any, name: str, user: str = "user1") -> None:
    testbed.run(["slurmlet", "down", "-c", name, "--purge", "--yes"], user=user, check=False, timeout_s=UP_S)


@pytest.fixture(scope="module")
def mine(testbed: Any) -> Iterator[str]:
    """A cluster of our own, brought up once; tests that break it bring it up again."""
    up(testbed, MINE)
    yield MINE
    purge(testbed, MINE)


def test_second_up_finds_the_first(testbed: Any, mine: str) -> None:
    before = pids(testbed, mine)
    again = up(testbed, mine)
    assert "already running" in again.stderr
    assert pids(testbed, mine) == before
    assert all(before.values()), before


def test_up_returns_when_a_pod_could_be_scheduled(testbed: Any, mine: str) -> None:
    kubectl = ["slurmlet", "kubectl", "--cluster", mine]
    nodes = json.loads(testbed.run([*kubectl, "get", "nodes", "-o", "json"]).stdout)["items"]
    assert nodes
    for node in nodes:
        ready = [c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready"]
        assert ready == ["True"], node["metadata"]["name"]
    assert testbed.run([*kubectl, "get", "serviceaccount", "default", "-o", "name"]).ok


def test_kubectl_arguments_arrive_untouched(testbed: Any, mine: str) -> None:
    odd = "a 'quoted' $(value)\n--x"
    kubectl = ["slurmlet", "kubectl", "--cluster", mine]
    testbed.run([*kubectl, "create", "configmap", "odd", f"--from-literal=key={odd}"])
    seen = json.loads(testbed.run([*kubectl, "get", "configmap", "odd", "-o", "json"]).stdout)
    assert seen["data"]["key"] == odd


@pytest.mark.parametrize("component", ["kube-scheduler", "etcd"])
def test_killed_component_is_restarted(testbed: Any, mine: str, component: str) -> None:
    before = pids(testbed, mine)[component]
    testbed.run(["kill", "-9", str(before)])
    eventually(lambda: pids(testbed, mine)[component] not in (None, before), f"{component} restarted")
    kubectl = ["slurmlet", "kubectl", "--cluster", mine]
    # Written and read through the restarted one: the object survives, the API answers.
    eventually(
        lambda: testbed.run([*kubectl, "get", "namespace", "default"], check=False).ok, "the API works again"
    )
    restarts = {part["name"]: part["restarts"] for part in status(testbed, mine)["components"]}
    assert restarts[component] == 1


def test_killed_supervisor_leaves_nothing_and_up_repairs(testbed: Any, mine: str) -> None:
    kubectl = ["slurmlet", "kubectl", "--cluster", mine]
    testbed.run([*kubectl, "create", "configmap", "kept"])
    supervisor = json.loads(testbed.run(["cat", f"{ROOT}/{mine}/run/supervisor.json"]).stdout)
    testbed.run(["kill", "-9", str(supervisor["pid"])])
    eventually(lambda: program(testbed, PROCESSES_OF, mine) == "", "no component outlives the supervisor", 10)
    assert testbed.run(["slurmlet", "status", "-c", mine], check=False).code == 1
    up(testbed, mine)
    assert testbed.run([*kubectl, "get", "configmap", "kept"]).ok


def test_everything_on_disk_is_private(testbed: Any, mine: str) -> None:
    lines = program(testbed, FILES_OF, mine).splitlines()
    assert len(lines) > 20
    for line in lines:
        mode, kind, path = line.split(" ", 2)
        # Programs that compute nodes run from here are executable, for their owner alone.
        allowed = 0o700 if kind == "d" or "/bin/" in path else 0o600
        assert int(mode, 8) & ~allowed == 0, line
    assert not testbed.run(["ls", f"{ROOT}/{mine}"], user="user2", check=False).ok


def test_ports_open_to_certificates_only(testbed: Any, mine: str) -> None:
    config = json.loads(testbed.run(["cat", f"{ROOT}/{mine}/cluster.json"]).stdout)
    api = (config["api_address"], str(config["api_port"]))
    for user in ("user1", "user2"):
        assert program(testbed, ANONYMOUS_GET, *api, "/api/v1/namespaces", user=user).strip() == "401"
        assert program(testbed, ANONYMOUS_GET, *api, "/readyz", user=user).strip() == "401"
        for port in (config["etcd_port"], config["etcd_peer_port"]):
            said = program(testbed, ANONYMOUS_GET, "127.0.0.1", str(port), "/health", user=user)
            assert said.startswith("refused"), said
    # The probe itself works: with the client certificate the same door opens.
    pki = f"{ROOT}/{mine}/pki"
    etcd = ("127.0.0.1", str(config["etcd_port"]), "/health")
    assert program(testbed, ANONYMOUS_GET, *etcd, f"{pki}/etcd-client").strip() == "200"
    # A certificate of another authority of the same cluster does not.
    assert program(testbed, ANONYMOUS_GET, *etcd, f"{pki}/admin").startswith("refused")


def test_etcd_is_on_loopback_only(testbed: Any, mine: str) -> None:
    """Its own sockets are looked at: a program of somebody else may listen on the same port of another address."""
    config = json.loads(testbed.run(["cat", f"{ROOT}/{mine}/cluster.json"]).stdout)
    listeners = program(testbed, LISTENERS_OF, str(pids(testbed, mine)["etcd"])).splitlines()
    loopback = "0100007F"
    assert sorted(listeners) == sorted(
        f"{loopback} {config[name]}" for name in ("etcd_port", "etcd_peer_port")
    )


def test_no_secret_in_command_lines(testbed: Any, mine: str) -> None:
    for pid in filter(None, pids(testbed, mine).values()):
        words = testbed.run(["cat", f"/proc/{pid}/cmdline"], user="user2").stdout
        assert words
        assert "PRIVATE" not in words
        assert not testbed.run(["cat", f"/proc/{pid}/environ"], user="user2", check=False).ok


def test_two_clusters_and_two_users_side_by_side(testbed: Any, mine: str) -> None:
    try:
        up(testbed, OTHER)
        up(testbed, MINE, user="user2")
        kubectl = ["slurmlet", "kubectl", "--cluster", OTHER]
        testbed.run([*kubectl, "create", "namespace", "only-here"])
        seen = testbed.run(
            ["slurmlet", "kubectl", "--cluster", mine, "get", "namespace", "only-here"], check=False
        )
        assert "NotFound" in seen.stderr
        listed = {
            line["name"]: line["state"]
            for line in json.loads(testbed.run(["slurmlet", "ls", "-o", "json"]).stdout)
        }
        assert listed[mine] == listed[OTHER] == "running"
        theirs = json.loads(testbed.run(["slurmlet", "ls", "-o", "json"], user="user2").stdout)
        assert MINE in [line["name"] for line in theirs]
        assert OTHER not in [line["name"] for line in theirs]
    finally:
        purge(testbed, OTHER)
        purge(testbed, MINE, user="user2")
    assert status(testbed, mine)["running"]
    assert program(testbed, PROCESSES_OF, OTHER) == ""


def test_no_other_host_takes_a_live_cluster_away_and_a_dead_one_is_forgotten_by_force(
    testbed: Any, mine: str
) -> None:
    force = ["slurmlet", "down", "--force", "-c", OTHER]
    run = f"{ROOT}/{OTHER}/run"
    try:
        up(testbed, OTHER)
        # A record that got lost makes no difference.
        testbed.run(["rm", f"{run}/supervisor.json"])
        for argv in (force, ["slurmlet", "down", "-c", OTHER], ["slurmlet", "up", "-c", OTHER]):
            refused = testbed.run(argv, host="c1", check=False)
            assert refused.code != 0
            assert "ssh login slurmlet" in refused.stderr
        assert (
            testbed.run(["slurmlet", "kubectl", "--cluster", OTHER, "get", "--raw", "/readyz"]).stdout == "ok"
        )
        sign = json.loads(testbed.run(["cat", f"{run}/heartbeat.json"]).stdout)
        assert sign["host"] == "login"
        testbed.run(["kill", "-KILL", str(sign["pid"])])
        # As if a minute had passed.
        testbed.run(["touch", "-d", "1 minute ago", f"{run}/heartbeat.json"])
        assert testbed.run(force, host="c1").ok
        assert program(testbed, PROCESSES_OF, OTHER) == ""
    finally:
        purge(testbed, OTHER)


def test_down_leaves_no_process_port_or_job_and_up_brings_the_data_back(testbed: Any, mine: str) -> None:
    config = json.loads(testbed.run(["cat", f"{ROOT}/{mine}/cluster.json"]).stdout)
    kubectl = ["slurmlet", "kubectl", "--cluster", mine]
    testbed.run([*kubectl, "create", "namespace", "stays"])
    sleeper = ["sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600"]
    ours = testbed.run([*sleeper, f"--comment=slurmlet:{config['id']}:some-pod text"]).stdout.strip()
    foreign = testbed.run([*sleeper, "--comment=slurmlet:00000000:some-pod text"]).stdout.strip()
    try:
        testbed.run(["slurmlet", "down", "-c", mine], timeout_s=UP_S)
        left = testbed.run(["squeue", "--noheader", "--format=%A", "--me"]).stdout.split()
        assert ours not in left
        assert foreign in left
    finally:
        testbed.run(["scancel", foreign])
    assert program(testbed, PROCESSES_OF, mine) == ""
    for port in (config["api_port"], config["etcd_port"], config["etcd_peer_port"]):
        said = program(testbed, ANONYMOUS_GET, "127.0.0.1", str(port), "/")
        assert said.strip() == "refused ConnectionRefusedError"
    up(testbed, mine)
    assert testbed.run([*kubectl, "get", "namespace", "stays"]).ok
    # Kubeconfigs that were copied elsewhere stay good.
    again = json.loads(testbed.run(["cat", f"{ROOT}/{mine}/cluster.json"]).stdout)
    assert again["api_port"] == config["api_port"]
    assert again["id"] == config["id"]


def test_down_works_without_a_supervisor_and_purge_forgets(testbed: Any, mine: str) -> None:
    supervisor = json.loads(testbed.run(["cat", f"{ROOT}/{mine}/run/supervisor.json"]).stdout)
    testbed.run(["kill", "-9", str(supervisor["pid"])])
    done = testbed.run(["slurmlet", "down", "-c", mine, "--purge", "--yes"], timeout_s=UP_S)
    assert "was not running" in done.stderr
    assert program(testbed, PROCESSES_OF, mine) == ""
    assert not testbed.run(["test", "-e", f"{ROOT}/{mine}"], check=False).ok
    gone = testbed.run(["slurmlet", "status", "-c", mine], check=False)
    assert gone.code == 1
    assert "does not exist" in gone.stderr
