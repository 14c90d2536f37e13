"""Input that wants to be more than data: it arrives byte for byte, or is refused in words, and never runs anywhere.

Each test has a marker of its own in every hostile text; no file of that name may appear on any host.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import IMAGE, Kubectl, eventually, pod
from tests.e2e.inspecting import Cluster, exists, traces
from tests.e2e.intruding import LAYER

pytestmark = pytest.mark.e2e


@pytest.fixture
def marker(testbed: Testbed) -> Iterator[str]:
    """The name of a file that hostile texts try to make. Nobody may have made it when the test is over."""
    name = f"pwned{uuid.uuid4().hex[:12]}"
    yield name
    assert traces(testbed, name) == []


@pytest.fixture
def here(testbed: Testbed, cluster: str) -> Cluster:
    return Cluster(testbed, cluster)


def texts(marker: str) -> list[str]:
    return [
        f"$(touch /tmp/{marker})",
        f"`touch /tmp/{marker}`",
        f"; touch /tmp/{marker} #",
        f"'; touch /tmp/{marker}; '",
        f'"; touch /tmp/{marker}; "',
        f"\n touch /tmp/{marker}\n",
        f"a\n#SBATCH --output=/tmp/{marker}\nb",
        f"| touch /tmp/{marker} &",
        "line one\nline two\r\n\ttabbed ",
        "--wrap=id", "-o", "%j %A %n %%", "\\", "\\n\\t\\x41", "*", "~", "${HOME}", "$HOME", "!!", " ",
        "Grüße, 世界, 🙂, \u202e\u200b", "\x01\x1b[31m\x7f", "x" * 100_000,
    ]  # fmt: skip


SHOW_ARGUMENTS = 'for word in "$@"; do printf %s "$word" | base64 | tr -d "\\n"; echo; done'


def decoded(log: str) -> list[str]:
    return [base64.b64decode(line).decode() for line in log.splitlines()]


def test_commands_arguments_and_variables_arrive_untouched(kubectl: Kubectl, marker: str) -> None:
    words = texts(marker)
    variables = [{"name": f"V{number}", "value": word} for number, word in enumerate(words)]
    show = "; ".join(f'printf %s "$V{number}" | base64 | tr -d "\\n"; echo' for number in range(len(words)))
    kubectl.apply(
        pod("arguments", ["sh", "-c", SHOW_ARGUMENTS, "sh"], container={"args": words}),
        pod("variables", show, container={"env": variables}),
    )
    for name in ("arguments", "variables"):
        kubectl.wait_phase(name, "Succeeded")
        assert decoded(kubectl("logs", name).stdout) == words


def test_exec_arrives_untouched(kubectl: Kubectl, marker: str) -> None:
    words = [word for word in texts(marker) if len(word) < 1000]
    kubectl.apply(pod("target"))
    kubectl.wait_phase("target", "Running")
    said = kubectl("exec", "target", "--", "sh", "-c", SHOW_ARGUMENTS, "sh", *words).stdout
    assert decoded(said) == words


def test_labels_and_annotations_are_data(kubectl: Kubectl, marker: str) -> None:
    """Also when they are as big as Kubernetes allows, and come back through the downward API."""
    annotations = {f"example.org/a{number}": word for number, word in enumerate(texts(marker))}
    annotations["example.org/big"] = "y" * 100_000
    volume = {"name": "about", "downwardAPI": {"items": [
        {"path": "one", "fieldRef": {"fieldPath": "metadata.annotations['example.org/a0']"}},
        {"path": "all", "fieldRef": {"fieldPath": "metadata.annotations"}},
    ]}}  # fmt: skip
    mounts = {"volumeMounts": [{"name": "about", "mountPath": "/about"}]}
    labels = {f"label-{number}": "v" * 63 for number in range(50)}
    metadata = {"annotations": annotations, "labels": labels}
    kubectl("create", "-f", "-", stdin=json.dumps(
        pod("decorated", "cat /about/one; wc -c < /about/all", container=mounts, volumes=[volume], metadata=metadata)
    ))  # fmt: skip
    kubectl.wait_phase("decorated", "Succeeded")
    one, size = kubectl("logs", "decorated").stdout.rsplit("\n", 2)[0].split(")")
    assert one + ")" == texts(marker)[0]
    assert int(size) > 200_000


SBATCH = "slurmlet.io/sbatch"


def refused_annotations(marker: str) -> list[tuple[str, str]]:
    touch = f"touch /tmp/{marker}"
    lines = [
        f"--wrap='{touch}'", f'--wra "{touch}"', f"--w '{touch}'", f"--output=/tmp/{marker}", f"-o /tmp/{marker}",
        f"-o/tmp/{marker}", f"--out=/tmp/{marker}", f"--error=/tmp/{marker}", f"-e /tmp/{marker}", "--input=/etc/passwd",
        "--export=ALL,PATH=/tmp", "--export-file=/etc/passwd", "--chdir=/", "-D /", "--job-name=x", "-J x",
        "--comment=slurmlet:0:0", "--array=0-9", "-a0-9", "--requeue", "--uid=0", "--gid=0", "--get-user-env",
        "--wait", "-W", "--parsable", "--test-only", "--clusters=other", "-M other", "--container=/", "--propagate",
        "--signal=9@1", "--open-mode=truncate", "--no-kill", "--help", "--version", "--nodefile=/etc/passwd",
        f"--time=1 --wrap='{touch}'", f"/tmp/{marker}.sh", "-- id", "--", "-", "'unbalanced", "--time", "--hold=yes",
        "--time=1\x01", "--partition=batch\n--wrap=x",
    ]  # fmt: skip
    named = [
        ("slurmlet.io/account", f"x\n--wrap={touch}"),
        ("slurmlet.io/partition", f"batch --wrap={touch}"),
        ("slurmlet.io/partition", f"$({touch})"),
        ("slurmlet.io/constraint", f"`{touch}`"),
        ("slurmlet.io/time", f"1; {touch}"),
        ("slurmlet.io/time", ""),
        ("slurmlet.io/gres", "gpu:1 --wrap=id"),
        ("slurmlet.io/ntasks", "1 --wrap=id"),
        ("slurmlet.io/exclusive", f"$({touch})"),
        ("slurm-job.hpk.io/flags", f"--wrap='{touch}'"),
        ("slurmjob.slinky.slurm.net/partition", f"x;{touch}"),
    ]
    return [(SBATCH, line) for line in lines] + named


def test_annotations_reach_sbatch_as_data_or_not_at_all(kubectl: Kubectl, here: Cluster, marker: str) -> None:
    cases = {f"refused-{number}": case for number, case in enumerate(refused_annotations(marker))}
    kubectl.apply(*(pod(name, metadata={"annotations": dict([case])}) for name, case in cases.items()))
    uids = {item["metadata"]["name"]: item["metadata"]["uid"] for item in kubectl.get("pods")["items"]}

    def warnings() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for item in kubectl.get("events")["items"]:
            if item["type"] == "Warning" and item["reason"] in ("PodRefused", "SlurmRefused"):
                found.setdefault(item["involvedObject"]["name"], []).append(item["message"])
        return found

    told = eventually(lambda: len(seen := warnings()) == len(cases) and seen, 90)
    for name, (key, value) in cases.items():
        (message,) = told[name]
        assert key in message, (value, message)
        # A sentence about what is wrong, and one that says what to do.
        assert len(message.split(". ")) > 1, (value, message)
    assert not set(uids.values()) & set(here.jobs()), "a refused pod has no job"
    phases = {item["status"].get("phase") for item in kubectl.get("pods")["items"]}
    assert phases == {"Failed"}


def test_an_accepted_option_stays_one_word(kubectl: Kubectl, here: Cluster, marker: str) -> None:
    """Values that sbatch takes for what they are, however they look; the job is still the pod."""
    value = f"--wrap=touch /tmp/{marker}"
    annotations = {
        "slurmjob.slinky.slurm.net/wckey": value,
        SBATCH: f"--nice=5 --wckey='{value}' --mail-user='$(touch /tmp/{marker})' -t 5 -c2 --overcommit",
    }
    kubectl.apply(pod("words", "echo it is me", metadata={"annotations": annotations}))
    kubectl.wait_phase("words", "Succeeded")
    assert kubectl("logs", "words").stdout == "it is me\n"
    shown = here.testbed.run(["scontrol", "show", "job", kubectl.job_id("words")]).stdout
    assert "TimeLimit=00:05:00" in shown
    assert "CPUs/Task=2" in shown
    assert "Nice=5" in shown


def test_image_names(kubectl: Kubectl, here: Cluster, marker: str) -> None:
    names = [
        f"{IMAGE};touch /tmp/{marker}", f"$(touch /tmp/{marker})", f"`touch /tmp/{marker}`", "--help", "-x",
        "../../../etc/passwd", "localhost:5000/../../x:1", "localhost:5000/busybox:1\n--insecure", "a b", "@sha256:00",
        f"localhost:5000/busybox@sha256:{'0' * 63}z", "localhost:5000/Busybox:1", "x" * 5000, "file:///etc/passwd",
        f"localhost:5000/busybox:{marker}/../1", "%2e%2e/x", "localhost:5000/bü:1",
    ]  # fmt: skip
    wanted = {f"image-{number}": name for number, name in enumerate(names)}
    kubectl.apply(*(pod(name, container={"image": image}) for name, image in wanted.items()))

    def reasons() -> dict[str, str]:
        found = {}
        for item in kubectl.get("pods")["items"]:
            statuses = item["status"].get("containerStatuses") or [{}]
            waiting = (statuses[0].get("state") or {}).get("waiting") or {}
            found[item["metadata"]["name"]] = waiting.get("reason", "")
        return found

    refusals = {"InvalidImageName", "ErrImagePull", "ImagePullBackOff"}
    seen = eventually(lambda: set((now := reasons()).values()) <= refusals and now, 60)
    assert set(seen) == set(wanted)
    assert sum(reason == "InvalidImageName" for reason in seen.values()) >= 12, seen
    uids = {item["metadata"]["uid"] for item in kubectl.get("pods")["items"]}
    assert not uids & set(here.jobs())


def test_the_longest_names(testbed: Testbed, cluster: str, marker: str) -> None:
    namespace = f"n{marker}".ljust(63, "n")
    kubectl = Kubectl(testbed, namespace)
    kubectl("create", "namespace", namespace)
    eventually(lambda: kubectl("get", "serviceaccount", "default", check=False).ok)
    # A dot where the hub cuts names: an event's name must not end in one.
    name = (("p" * 199) + ".").ljust(253, "q")
    container = "c" * 63
    try:
        kubectl("create", "-f", "-", stdin=json.dumps(pod(name, "echo fits", container={"name": container})))
        kubectl.wait_phase(name, "Succeeded")
        assert kubectl("logs", name, "-c", container).stdout == "fits\n"
        kubectl.tells(name, "Submitted", "Started")
        shown = testbed.run(
            ["squeue", "--noheader", "--states=all", "-j", kubectl.job_id(name), "-o", "%j %k"]
        ).stdout
        assert f"pod={namespace}/{name}" in shown
    finally:
        kubectl("delete", "namespace", namespace, "--wait=false")


def mounting(volume: dict[str, Any], **mount: Any) -> dict[str, Any]:
    return {
        "volumes": [{"name": "v", **volume}],
        "container": {"volumeMounts": [{"name": "v", "mountPath": "/v", **mount}]},
    }


def test_host_paths_give_no_more_than_the_user_has(testbed: Testbed, kubectl: Kubectl, marker: str) -> None:
    testbed.run(["sh", "-c", 'echo private > "$HOME/$1"', "sh", f"{marker}.txt"], user="user2")
    kubectl.apply(
        pod(
            "home",
            f"cat /v/{marker}.txt; echo x > /v/made; ls /v",
            **mounting({"hostPath": {"path": "/home/user2"}}),
        ),
        pod("shadow", "cat /v/shadow", **mounting({"hostPath": {"path": "/etc"}})),
        pod(
            "below",
            "true",
            **mounting({"hostPath": {"path": f"/home/user2/{marker}", "type": "DirectoryOrCreate"}}),
        ),
    )
    try:
        for name in ("home", "shadow"):
            kubectl.wait_phase(name, "Failed")
            assert "Permission denied" in kubectl("logs", name).stdout
        told = eventually(
            lambda: [text for reason, text in kubectl.events("below") if reason == "FailedMount"]
        )
        assert "Permission denied" in told[0]
    finally:
        testbed.run(["rm", f"/home/user2/{marker}.txt"], user="user2")


def test_sub_paths_stay_inside(kubectl: Kubectl, marker: str) -> None:
    for bad in ("../..", "/etc", "a/../../b"):
        text = json.dumps(pod("never", **mounting({"emptyDir": {}}, subPath=bad)))
        done = kubectl("create", "-f", "-", stdin=text, check=False)
        assert not done.ok
        assert "subPath" in done.stderr
    plant = "ln -s /home/user1 /v/link; ln -s ../../.. /v/up; mkdir /v/dir; ln -s .. /v/dir/back; ln -s dir /v/inner"
    init = {"name": "plant", "image": IMAGE, "command": ["sh", "-c", plant],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]}  # fmt: skip
    for name, path in (("link", "link"), ("up", "up/home")):
        text = json.dumps(
            pod(f"escape-{name}", "ls /v", initContainers=[init], **mounting({"emptyDir": {}}, subPath=path))
        )
        kubectl("create", "-f", "-", stdin=text)
    fine = pod(
        "inside",
        "echo x > /v/y && ls /v",
        initContainers=[init],
        **mounting({"emptyDir": {}}, subPath="inner"),
    )
    kubectl("create", "-f", "-", stdin=json.dumps(fine))
    for name in ("link", "up"):
        told = eventually(lambda n=name: [t for r, t in kubectl.events(f"escape-{n}") if r == "Failed"])  # type: ignore[misc]
        assert "leads out of its directory" in told[0]
        assert kubectl.phase(f"escape-{name}") != "Running"
    kubectl.wait_phase("inside", "Succeeded")
    assert kubectl("logs", "inside", "-c", "main").stdout.split() == ["back", "y"]


def test_an_image_full_of_links(testbed: Testbed, kubectl: Kubectl, marker: str) -> None:
    """Links of an image lead inside the image, for whoever writes there: the unpacking, mounts, the container."""
    name = f"localhost:5000/links:{marker}"
    layer = testbed.run(["mktemp", "/tmp/layer-XXXXXX"]).stdout.strip()
    testbed.run(["python3", "-c", LAYER, layer, marker])
    testbed.run(["crane", "append", "--base", IMAGE, "--new_layer", layer, "--new_tag", name])
    testbed.run(["rm", layer])
    mounts = [{"name": "v", "mountPath": "/data/mounted"}, {"name": "v", "mountPath": "/up/mounted-too"}]
    show = (
        f"touch /data/mounted/x /up/{marker}-by-container; ls /home/user1; cat /etc/hosts; ls -l /disk 2>&1"
    )
    kubectl.apply(
        pod("links", show, container={"image": name, "volumeMounts": mounts},
            volumes=[{"name": "v", "emptyDir": {}}])
    )  # fmt: skip
    ended = kubectl.wait_phase("links", "Succeeded", "Failed")
    said = kubectl("logs", "links").stdout
    assert f"{marker}-by-container" in said, (said, ended["status"])
    assert f"{marker}-through-link" in said
    assert "Kubernetes-managed hosts file" in said
    # The marker's fixture looks for files in the real home directory.
    testbed.run(["slurmlet", "image", "rm", name])


def test_files_cannot_be_named_out_of_their_volume(kubectl: Kubectl) -> None:
    """The API server refuses these; what it lets through stays in the volume."""
    for key in ("../x", "a/b", "..", "..data", "a\nb"):
        document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "bad"}, "data": {key: "x"}}
        assert not kubectl("create", "-f", "-", stdin=json.dumps(document), check=False).ok, key
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "good"},
            "data": {"-rf": "1", "k": "2"},
        }
    )
    for path in ("../x", "/x", "a/../../x"):
        items = {"configMap": {"name": "good", "items": [{"key": "k", "path": path}]}}
        assert not kubectl(
            "create", "-f", "-", stdin=json.dumps(pod("bad", **mounting(items))), check=False
        ).ok
    kubectl.apply(pod("good", "cd /v; cat ./-rf deep/er; ls", **mounting(
        {"configMap": {"name": "good", "items": [{"key": "-rf", "path": "-rf"}, {"key": "k", "path": "deep/er"}]}}
    )))  # fmt: skip
    kubectl.wait_phase("good", "Succeeded")
    assert kubectl("logs", "good").stdout.split() == ["12-rf", "deep"]


def test_floods_are_bounded(kubectl: Kubectl, here: Cluster) -> None:
    """A termination message of 1 MB, a log line of 10 MB, binary rubbish: cut or carried, and the hub lives on."""
    hub = here.pid("hub")
    kubectl.apply(
        pod("message", "head -c 1000000 /dev/zero | tr '\\0' m > /dev/termination-log; exit 4"),
        pod("rubbish", "head -c 100000 /dev/urandom > /dev/termination-log; exit 5"),
        pod("line", "head -c 10000000 /dev/zero | tr '\\0' l; echo; echo end"),
        pod("binary", "head -c 300000 /dev/urandom; echo; echo end"),
    )
    for name, code in (("message", 4), ("rubbish", 5)):
        state = kubectl.wait_phase(name, "Failed")["status"]["containerStatuses"][0]["state"]["terminated"]
        assert state["exitCode"] == code
        assert 0 < len(state["message"]) <= 4096
    for name in ("line", "binary"):
        kubectl.wait_phase(name, "Succeeded")
    said = kubectl("logs", "line").stdout
    assert said == "l" * 10_000_000 + "\nend\n"
    assert kubectl("logs", "binary", "--tail=1").stdout == "end\n"
    assert here.pid("hub") == hub


def test_a_secret_that_is_no_text_is_refused_as_a_variable(kubectl: Kubectl, here: Cluster) -> None:
    """A runtime's configuration holds text only; as a file the same bytes arrive whole."""
    hub = here.pid("hub")
    data = base64.b64encode(b"\xff\xfe\x80").decode()
    env = [{"name": "RAW", "valueFrom": {"secretKeyRef": {"name": "raw", "key": "k"}}}]
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "raw"}, "data": {"k": data}},
        pod("variable", "true", container={"env": env}),
        pod("file", "base64 /v/k", **mounting({"secret": {"secretName": "raw"}})),
    )
    told = eventually(lambda: [text for reason, text in kubectl.events("variable") if reason == "PodRefused"])
    assert "'RAW' is not UTF-8 text" in told[0]
    assert "volume instead" in told[0]
    kubectl.wait_phase("file", "Succeeded")
    assert kubectl("logs", "file").stdout.strip() == data
    assert here.pid("hub") == hub


def test_a_runner_that_talks_nonsense(kubectl: Kubectl, here: Cluster) -> None:
    """Whoever holds a pod's credential can spoil that pod; the hub and all other pods go on."""
    kubectl.apply(pod("bystander"), pod("liar"))
    kubectl.wait_phase("bystander", "Running")
    uid = kubectl.wait_phase("liar", "Running")["metadata"]["uid"]
    hub = here.read("hub.json")
    program = (
        "import json, socket, ssl, struct, sys, time\n"
        "context = ssl._create_unverified_context()\n"
        "context.load_cert_chain(sys.argv[3])\n"
        "for report in (7, [], {}, {'phase': 1, 'containers': []}, {'phase': 'Running', 'containers': {'main': 3}}):\n"
        "    tls = context.wrap_socket(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5))\n"
        "    hello = {'type': 'hello', 'protocol': 1, 'version': '0.1.0', 'pod_uid': sys.argv[4], 'job_id': '1',\n"
        "             'host': 'x', 'host_ip': '10.0.0.9', 'has_pod': True, 'report': report}\n"
        "    for message in (hello, {'type': 'report', 'seq': 1, 'report': report}, {'type': 'event'}):\n"
        "        text = json.dumps(message).encode()\n"
        "        tls.sendall(struct.pack('!IBI', len(text), 0, 0) + text)\n"
        "    time.sleep(0.3)\n"
    )
    pem = f"{here.root}/pods/{uid}/runner.pem"
    here.testbed.run(
        ["python3", "-c", program, hub["addresses"][0], str(hub["runner_port"]), pem, uid], check=False
    )
    assert kubectl("exec", "bystander", "--", "echo", "unharmed").stdout == "unharmed\n"
    assert here.read("hub.json")["pid"] == hub["pid"]
    assert here.pid("hub") == str(hub["pid"])
    # Its real runner dials in again and sets things right.
    eventually(lambda: kubectl("exec", "liar", "--", "true", check=False).ok, 40)
    assert exists(here.testbed, "login", pem)
