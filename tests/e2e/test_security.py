"""user2 against user1 on shared hosts: nothing to read, nobody answers, no secret in sight.

Every refusal stands beside a proof that the same probe succeeds for the owner, so a probe that never worked cannot pass.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import Kubectl, eventually, pod
from tests.e2e.inspecting import Cluster
from tests.e2e.intruding import FORGE, HELLO, KNOCK, LOOK_AROUND, MODES

pytestmark = pytest.mark.e2e

UP_S = 180
THEIRS = "theirs"
PYTHON = "/opt/slurmlet/venv/bin/python"  # has cryptography; any user of the site could bring their own


@dataclass(frozen=True)
class Victim:
    """user1's pod with secrets in it, running."""

    kubectl: Kubectl
    cluster: Cluster
    marker: str
    uid: str
    host: str


@pytest.fixture(scope="module")
def victim(testbed: Testbed, cluster: str) -> Iterator[Victim]:
    name = f"t-{uuid.uuid4().hex[:8]}"
    kubectl = Kubectl(testbed, name)
    kubectl("create", "namespace", name)
    try:
        yield make_victim(kubectl)
    finally:
        kubectl("delete", "namespace", name, "--wait=false", check=False)


def make_victim(kubectl: Kubectl) -> Victim:
    eventually(lambda: kubectl("get", "serviceaccount", "default", check=False).ok)
    marker = f"marker{uuid.uuid4().hex}"
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "treasure"},
        "stringData": {"key": marker},
    }
    uses = {
        "env": [{"name": "TREASURE", "valueFrom": {"secretKeyRef": {"name": "treasure", "key": "key"}}}],
        "volumeMounts": [{"name": "treasure", "mountPath": "/treasure"}],
    }
    volumes = [{"name": "treasure", "secret": {"secretName": "treasure"}}]
    # A batch job: its script is one more thing to look at.
    queued = {"annotations": {"slurmlet.io/launch": "batch"}}
    kubectl.apply(secret, pod("victim", container=uses, volumes=volumes, metadata=queued), pod("other"))
    seen = kubectl.wait_phase("victim", "Running")
    kubectl.wait_phase("other", "Running")
    assert kubectl("exec", "victim", "--", "cat", "/treasure/key").stdout == marker
    assert kubectl("exec", "victim", "--", "sh", "-c", 'echo "$TREASURE"').stdout == f"{marker}\n"
    host = seen["metadata"]["annotations"]["slurmlet.io/host"]
    return Victim(kubectl, Cluster(kubectl.testbed, kubectl.cluster), marker, seen["metadata"]["uid"], host)


@pytest.fixture(scope="module")
def theirs(testbed: Testbed) -> Iterator[Kubectl]:
    """user2's own cluster."""
    testbed.run(["slurmlet", "up", "-c", THEIRS], user="user2", timeout_s=UP_S)
    yield Kubectl(testbed, "default", user="user2", cluster=THEIRS)
    testbed.run(
        ["slurmlet", "down", "-c", THEIRS, "--purge", "--yes"], user="user2", timeout_s=UP_S, check=False
    )


def python(testbed: Testbed, text: str, *arguments: str, user: str = "user2", host: str = "login") -> str:
    return testbed.run([PYTHON, "-c", text, *arguments], user=user, host=host).stdout


def listening_ports(testbed: Testbed, uid: int, host: str = "login") -> dict[int, str]:
    """Port → local address (hexadecimal) of every TCP socket of a user that listens, from /proc/net."""
    text = testbed.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], host=host, user="root").stdout
    rows = [line.split() for line in text.splitlines() if ":" in line.split()[0]]
    return {int(row[1].split(":")[1], 16): row[1] for row in rows if row[3] == "0A" and int(row[7]) == uid}


def modes(testbed: Testbed, root: str, host: str = "login") -> list[tuple[int, int, str]]:
    lines = testbed.run(["python3", "-c", MODES, root], user="root", host=host).stdout.splitlines()
    return [(int(mode, 8), int(uid), path) for mode, uid, path in (line.split(" ", 2) for line in lines)]


def test_state_is_closed_to_others(testbed: Testbed, victim: Victim) -> None:
    found = modes(testbed, "/home/user1/.slurmlet")
    assert any(path.endswith(f"/pods/{victim.uid}/runner.pem") for _, _, path in found)
    # What pods keep in volumes has the modes they gave it; the volume's own directory is the wall.
    ours = [
        one for one in found if "/volumes/" not in one[2] or one[2].partition("/volumes/")[2].count("/") == 0
    ]
    assert [(oct(mode), path) for mode, _, path in ours if mode & 0o077] == []
    assert {uid for _, uid, _ in ours} == {1001}
    # Homes are open at many sites: the wall must be our own directory.
    testbed.run(["chmod", "755", "/home/user1"])
    try:
        for argv in (["ls", "/home/user1/.slurmlet"], ["cat", f"{victim.cluster.root}/kubeconfig"]):
            assert testbed.run(argv, user="user1").ok
            assert "Permission denied" in testbed.run(argv, user="user2", check=False).stderr
    finally:
        testbed.run(["chmod", "700", "/home/user1"])


def test_scratch_is_closed_to_others(testbed: Testbed, victim: Victim) -> None:
    root = "/tmp/slurmlet-1001"
    (mode, uid, _), *inside = modes(testbed, root, victim.host)
    assert (oct(mode), uid) == ("0o700", 1001)
    assert any(f"/pods/{victim.uid}" in path for _, _, path in inside)
    assert testbed.run(["ls", root], host=victim.host).ok
    assert not testbed.run(["ls", root], host=victim.host, user="user2", check=False).ok
    open_pods = [path for mode, _, path in inside if path == f"{root}/pods/{victim.uid}" and mode & 0o077]
    assert open_pods == []


def test_secrets_never_reach_a_disk(testbed: Testbed, victim: Victim) -> None:
    """Neither the shared file system (etcd's files included) nor anything on the node; root looks."""
    grep = ["grep", "-rlF", "-D", "skip"]
    # That root finds a text of the same pod says that it looks in the right places.
    known = testbed.run([*grep, victim.uid, "/home"], user="root").stdout
    assert f"{victim.cluster.root}/etcd/" in known
    assert testbed.run([*grep, victim.marker, "/home"], user="root", check=False).stdout == ""
    places = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/var/lib/slurm", "/var/log"]
    assert (
        testbed.run([*grep, victim.marker, *places], host=victim.host, user="root", check=False).stdout == ""
    )


def test_every_port_refuses_strangers(testbed: Testbed, victim: Victim, theirs: Kubectl) -> None:
    own = Cluster(testbed, THEIRS, "user2")
    pki = f"{own.root}/pki"
    python(testbed, FORGE, "/home/user2/forged", victim.uid)
    pairs = [
        f"{pki}/{name}.crt,{pki}/{name}.key" for name in ("admin", "hub", "kubelet-client", "etcd-client")
    ]
    pairs += [f"/home/user2/forged/{number}.pem" + f",/home/user2/forged/{number}.pem" for number in range(4)]
    ports = listening_ports(testbed, 1001)
    hub, config = victim.cluster.read("hub.json"), victim.cluster.read("cluster.json")
    named = {hub["runner_port"], hub["kubelet_port"], config["api_port"]}
    assert named <= set(ports)
    for port, address in ports.items():
        where = "127.0.0.1" if address.startswith("0100007F") else config["api_address"]
        answers = dict(
            line.rsplit(" ", 1) for line in python(testbed, KNOCK, where, str(port), "/", *pairs).splitlines()
        )
        assert len(answers) == 2 + len(pairs)
        allowed = {"refused", "400", "401", "403"} if port == config["api_port"] else {"refused"}
        # A TLS server may say in plain HTTP that it wants TLS.
        assert answers.pop("plain") in {"refused", "400"}, (port, answers)
        assert set(answers.values()) <= allowed, (port, answers)
    # The same probe, the right certificate.
    mine = f"{victim.cluster.root}/pki"
    admin = python(testbed, KNOCK, config["api_address"], str(config["api_port"]), "/version",
                   f"{mine}/admin.crt,{mine}/admin.key", user="user1")  # fmt: skip
    assert admin.splitlines()[-1].endswith(" 200")
    testbed.run(["rm", "-rf", "/home/user2/forged"], user="user2")


def test_kubelet_port_is_for_the_api_server_alone(testbed: Testbed, victim: Victim) -> None:
    hub, root = victim.cluster.read("hub.json"), victim.cluster.root
    pod_pem = f"{root}/pods/{victim.uid}/runner.pem"
    named = {
        "server": f"{root}/pki/kubelet-client.crt,{root}/pki/kubelet-client.key",
        "runner": f"{pod_pem},{pod_pem}",
        "admin": f"{root}/pki/admin.crt,{root}/pki/admin.key",
    }
    for path in ("/healthz", "/pods"):
        said = python(
            testbed, KNOCK, hub["addresses"][0], str(hub["kubelet_port"]), path, *named.values(), user="user1"
        )
        answers = dict(line.rsplit(" ", 1) for line in said.splitlines())
        assert [answers[pair] for pair in named.values()] == ["200", "403", "refused"], answers
        assert answers["anonymous"] == "refused"


def test_a_runner_speaks_for_its_own_pod_alone(testbed: Testbed, victim: Victim) -> None:
    hub = victim.cluster.read("hub.json")
    other = victim.kubectl.pod("other")["metadata"]["uid"]

    job = victim.kubectl.job_id("other")

    def hello(pem: str, uid: str) -> str:
        told = {
            "type": "hello", "protocol": 1, "minor": 1, "pod_uid": uid, "job_id": job, "host": "x",
            "host_ip": hub["addresses"][0], "version": "0.1.0", "has_pod": False, "report": None,
        }  # fmt: skip
        arguments = (
            hub["addresses"][0],
            str(hub["runner_port"]),
            f"{victim.cluster.root}/{pem}",
            json.dumps(told),
        )
        return python(testbed, HELLO, *arguments, user="user1").strip()

    assert hello(f"pods/{victim.uid}/runner.pem", other) == "refused"
    testbed.run(
        [
            "sh",
            "-c",
            'cat "$1.crt" "$1.key" > ~/joined.pem',
            "sh",
            f"{victim.cluster.root}/pki/kubelet-client",
        ]
    )
    assert hello("../../joined.pem", other) == "refused"
    testbed.run(["rm", "/home/user1/joined.pem"])
    # The probe itself works: the other pod's own credential gets that pod's plan. Its real runner then dials in again.
    assert hello(f"pods/{other}/runner.pem", other) == "pod"
    eventually(lambda: victim.kubectl("exec", "other", "--", "true", check=False).ok, 30)


def test_nothing_secret_in_ps_proc_or_slurm(testbed: Testbed, victim: Victim) -> None:
    job = victim.kubectl.job_id("victim")
    seen = [python(testbed, LOOK_AROUND, host=host) for host in ("login", victim.host)]
    assert "kube-apiserver" in seen[0]
    assert victim.uid in seen[1], "the runner is in sight, so its secrets could be"
    for argv in (
        ["ps", "-efww"],
        ["scontrol", "show", "job", "-dd", job],
        ["squeue", "-o", "%all"],
        ["sacct", "-a", "-P", "-o", "ALL"],
        ["scontrol", "write", "batch_script", job, "-"],
        ["scontrol", "show", "nodes"],
    ):
        done = testbed.run(argv, user="user2", check=False)
        seen.append(done.stdout + done.stderr)
    # What the owner sees may not hold a secret either: job scripts end up in accounting databases.
    seen.append(testbed.run(["scontrol", "write", "batch_script", job, "-"]).stdout)
    assert f"/pods/{victim.uid}" in seen[-1]
    secrets = {victim.marker, *key_lines(testbed), token(victim)}
    assert len(secrets) > 20
    text = "\n".join(seen)
    assert [secret for secret in secrets if secret in text] == []


def key_lines(testbed: Testbed) -> set[str]:
    """Every line of every private key of user1."""
    found = testbed.run(["grep", "-rhE", "^[A-Za-z0-9+/=]{40,}$", "/home/user1/.slurmlet", "--include=*.key",
                         "--include=*.pem"])  # fmt: skip
    return set(found.stdout.split())


def token(victim: Victim) -> str:
    path = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    return victim.kubectl("exec", "victim", "--", "cat", path).stdout.split(".")[-1]


def test_a_pod_cannot_reach_its_runners_credential(testbed: Testbed, victim: Victim) -> None:
    inside = (
        "ls -d /home/user1/.slurmlet /tmp/slurmlet-1001 2>&1; cat /proc/[0-9]*/cmdline | tr '\\0' ' '; "
        "echo; env; ls -l /proc/self/fd"
    )
    seen = victim.kubectl("exec", "victim", "--", "sh", "-c", inside).stdout
    assert "sleep 3600" in seen
    for word in ("runner.pyz", "runner.pem", victim.uid, "SLURM_", "SLURMLET_", "socket:"):
        assert word not in seen, word
    assert seen.count("No such file") == 2


def test_no_secret_of_another_namespace(testbed: Testbed, victim: Victim, kubectl: Kubectl) -> None:
    """The hub may read every secret; a pod must not make it fetch one of another namespace."""
    name = f"../../{victim.kubectl.namespace}/secrets/treasure"
    volumes = [{"name": "stolen", "secret": {"secretName": name}}]
    mounts = {"volumeMounts": [{"name": "stolen", "mountPath": "/stolen"}]}
    env = {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": name, "key": "key"}}}]}
    created = []
    for pod_name, changes in (
        ("by-volume", {"container": mounts, "volumes": volumes}),
        ("by-env", {"container": env}),
    ):
        text = json.dumps(pod(pod_name, "cat /stolen/key; env", **changes))
        if kubectl("create", "-f", "-", stdin=text, check=False).ok:
            created.append(pod_name)
    for pod_name in created:
        told = eventually(lambda n=pod_name: [m for r, m in kubectl.events(n) if r.startswith("Failed")], 20)  # type: ignore[misc]
        assert "not found" in told[0]
        assert victim.marker not in kubectl("logs", pod_name, check=False).stdout
        assert kubectl.phase(pod_name) == "Pending"


def test_two_users_side_by_side(testbed: Testbed, victim: Victim, theirs: Kubectl) -> None:
    theirs.apply(pod("mine", "echo hello from user2"))
    theirs.wait_phase("mine", "Succeeded")
    assert theirs("logs", "mine").stdout == "hello from user2\n"
    assert [item["metadata"]["name"] for item in theirs.get("pods", None, "-A")["items"]] == ["mine"]
    assert victim.kubectl.phase("victim") == "Running"
    job = victim.kubectl.job_id("victim")
    assert not testbed.run(["scancel", job], user="user2", check=False).ok
    assert not testbed.run(["kill", victim.cluster.pid("hub")], user="user2", check=False).ok
    attach = testbed.run(["srun", f"--jobid={job}", "--overlap", "id"], user="user2", check=False)
    assert not attach.ok
    assert victim.kubectl.phase("victim") == "Running"


@pytest.mark.parametrize("squat", ["directory", "link", "file"])
def test_scratch_taken_by_a_stranger(testbed: Testbed, theirs: Kubectl, squat: str) -> None:
    """The roles turned round (user2's scratch is nobody else's business here): user1 was there first."""
    host, taken = "c3", "/tmp/slurmlet-1002"
    testbed.run(["rm", "-rf", taken], host=host, user="root")
    trap = testbed.run(["mktemp", "-d", "/tmp/trap-XXXXXX"], host=host).stdout.strip()
    testbed.run(["chmod", "777", trap], host=host)
    make = {
        "directory": ["mkdir", "-m", "777", taken],
        "link": ["ln", "-s", trap, taken],
        "file": ["touch", taken],
    }
    testbed.run(make[squat], host=host)
    here = {"annotations": {"slurmlet.io/sbatch": f"--nodelist={host}"}}
    name = f"squatted-{squat}"
    try:
        theirs.apply(pod(name, "echo fine", metadata=here))
        theirs.wait_phase(name, "Succeeded")
        assert theirs("logs", name).stdout == "fine\n"
        for path in (taken, trap):
            assert (
                testbed.run(
                    ["find", f"{path}/", "-mindepth", "1"], host=host, user="root", check=False
                ).stdout
                == ""
            )
    finally:
        testbed.run(["rm", "-rf", taken, trap], host=host, user="root")
    # Nothing of the substitute stays behind, or a squatter could fill the node's disk with our images.
    left = testbed.run(
        ["find", "/tmp", "-maxdepth", "1", "-name", "slurmlet-1002-*"], host=host, user="root"
    ).stdout
    assert len(left.split()) <= 1
