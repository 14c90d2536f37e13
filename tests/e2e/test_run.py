"""`slurmlet run`: a whole cluster inside one Slurm job. What it gives, how it ends, and that nothing is left of it."""

from __future__ import annotations

import re
import time
import uuid
from pathlib import Path

import pytest

from slurmlet.testbed.faults import inject
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.server_images import load
from tests.e2e.conftest import IMAGE, eventually
from tests.e2e.inspecting import processes
from tests.e2e.running import READY, SLEEPER, accounted, all_gone, run, started
from tests.e2e.terminals import Terminal

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples" / "run"

WEB = f"""
apiVersion: apps/v1
kind: Deployment
metadata: {{name: web}}
spec:
  replicas: 3
  selector: {{matchLabels: {{app: web}}}}
  template:
    metadata: {{labels: {{app: web}}}}
    spec:
      terminationGracePeriodSeconds: 1
      topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: DoNotSchedule
        labelSelector: {{matchLabels: {{app: web}}}}
      containers:
      - name: main
        image: {IMAGE}
        command: [sh, -c, "mkdir /www; echo page-of-web > /www/index.html; exec httpd -f -p 80 -h /www"]
"""
NODES = "{range .items[*]}node {.metadata.name} {.status.allocatable.cpu} {.status.allocatable.memory}{'\\n'}{end}"
PODS = "{range .items[*]}pod {.spec.nodeName}{'\\n'}{end}"
SPREAD = f"""
set -e
kubectl get nodes -o jsonpath="{NODES}"
kubectl apply -f - >/dev/null
kubectl expose deployment web --port=80 >/dev/null
kubectl rollout status deployment web --timeout=60s >/dev/null
kubectl get pods -l app=web -o jsonpath="{PODS}"
kubectl exec deployment/web -- sh -c 'for n in 1 2 3 4 5 6 7 8 9; do wget -qO- http://web && break; sleep 0.5; done'
kubectl create job once --image={IMAGE} -- echo a-word-from-a-job >/dev/null
kubectl wait --for=condition=complete job/once --timeout=60s >/dev/null
kubectl logs job/once
echo job $SLURM_JOB_ID
"""


@pytest.fixture(scope="module", autouse=True)
def stores(testbed: Testbed) -> None:
    """What a person does once: a run's own hub is on a compute host, which need not reach a registry."""
    for user in ("user1", "user2"):
        testbed.run(["slurmlet", "image", "pull", IMAGE], user=user)


def test_three_nodes_with_services_names_logs_and_exec(testbed: Testbed) -> None:
    words = ["slurmlet", "run", "-N3", "-c2", "--mem=700", "--", "sh", "-c", SPREAD]
    done = testbed.run(words, stdin=WEB, timeout_s=150, check=False)
    assert done.code == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith("node ")] == [f"node c{n} 2 700Mi" for n in (1, 2, 3)]
    assert sorted(line for line in said if line.startswith("pod ")) == ["pod c1", "pod c2", "pod c3"]
    assert "page-of-web" in said, "a Service by its name, from a pod"
    assert "a-word-from-a-job" in said
    assert done.stderr == "", "quiet in a pipe"
    job_id = next(line.split()[1] for line in said if line.startswith("job "))
    assert accounted(testbed, job_id) == "COMPLETED 0:0"
    all_gone(testbed, job_id)


def test_the_command_finds_what_ksi_workloads_read(testbed: Testbed) -> None:
    script = """
    echo $SLURM_JOB_ID $K8S_CLUSTER_NAME $K8S_PORT
    ask="curl -s -o /dev/null -w %{http_code}\\n --cacert $K8S_CLUSTER_CA $K8S_CLUSTER_API/api/v1/nodes"
    $ask -H "Authorization: Bearer $K8S_CLUSTER_API_TOKEN"
    $ask
    case $K8S_CLUSTER_API in https://*:$K8S_PORT) echo its port;; esac
    stat -c %a $KUBECONFIG
    """
    done = run(testbed, "-v", "--", "sh", "-c", script)
    assert done.code == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ run-\d+-[0-9a-f]{10} \d+", first)
    assert rest == ["200", "401", "its port", "600"]
    assert re.search(r"API server\n.*1 node Ready\n.*workload starts", done.stderr)
    assert not re.search(r"eyJ[\w-]+\.eyJ", done.stdout + done.stderr), "no token is printed"


@pytest.mark.parametrize(
    ("script", "code", "account"),
    [
        ("exit 0", 0, "COMPLETED 0:0"),
        ("exit 1", 1, "FAILED 1:0"),
        ("exit 7", 7, "FAILED 7:0"),
        ("exit 137", 137, "FAILED 137:0"),
        ("kill -TERM $$", 143, "FAILED 0:15"),
    ],
)
def test_the_commands_end_is_the_jobs_end(testbed: Testbed, script: str, code: int, account: str) -> None:
    done = run(testbed, "-N2", "--", "sh", "-c", f"echo $SLURM_JOB_ID; {script}")
    assert done.code == code, done.stderr
    assert accounted(testbed, done.stdout.strip()) == account
    all_gone(testbed, done.stdout.strip())


def test_a_command_that_is_not_there(testbed: Testbed) -> None:
    done = run(testbed, "--", "no-such-program")
    assert done.code == 127
    assert "no-such-program" in done.stderr


class TestInsideAnAllocation:
    def test_a_batch_script(self, testbed: Testbed) -> None:
        script = "#!/bin/sh\nslurmlet run -- sh -c 'kubectl get nodes -o name; exit 5'\n"
        argv = ["sbatch", "--parsable", "--wait", "-N2", "-o", "/home/user1/run-%j.out"]
        done = testbed.run(argv, stdin=script, check=False, timeout_s=90)
        job_id = done.stdout.strip()
        said = testbed.run(["cat", f"/home/user1/run-{job_id}.out"]).stdout
        assert said.splitlines()[:2] == ["node/c1", "node/c2"] or said.count("node/") == 2, said
        assert accounted(testbed, job_id) == "FAILED 5:0"
        all_gone(testbed, job_id)

    def test_a_step_of_the_persons_own(self, testbed: Testbed) -> None:
        argv = ["srun", "-N2", "slurmlet", "run", "--", "sh", "-c", "kubectl get nodes -o name; exit 3"]
        done = testbed.run(argv, check=False, timeout_s=90)
        assert done.code == 3, done.stderr
        assert done.stdout.count("node/") == 2

    def test_a_shell_of_salloc(self, testbed: Testbed) -> None:
        argv = ["salloc", "-N2", "slurmlet", "run", "--", "kubectl", "get", "nodes", "-o", "name"]
        done = testbed.run(argv, check=False, timeout_s=90)
        assert done.code == 0, done.stderr
        assert done.stdout.count("node/") == 2


class TestManifests:
    def manifest(self, testbed: Testbed, name: str, command: str) -> str:
        path = f"/home/user1/{name}.yaml"
        text = f"""
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      containers: [{{name: main, image: "{IMAGE}", command: [sh, -c, "{command}"]}}]
"""
        testbed.run(["tee", path], stdin=text)
        return path

    def test_one_that_ends_well_is_followed_to_its_end(self, testbed: Testbed) -> None:
        path = self.manifest(testbed, "well", "for i in 1 2 3; do echo line $i; sleep 0.3; done")
        done = run(testbed, "--manifest", path, "--wait")
        assert done.code == 0, done.stderr
        assert done.stdout.splitlines() == ["line 1", "line 2", "line 3"]

    def test_one_that_fails_fails_the_run_and_leaves_its_logs(self, testbed: Testbed) -> None:
        path = self.manifest(testbed, "badly", "echo last words; exit 4")
        kept = testbed.run(["mktemp", "-d", "/home/user1/kept-XXXXXX"]).stdout.strip()
        done = run(testbed, "--manifest", path, "--wait", "--keep-logs", kept)
        assert done.code == 1
        assert "failed: Job badly" in done.stderr
        assert "main exited with 4" in done.stderr
        logs = testbed.run(
            ["sh", "-c", f"cat {kept}/default/badly-*/main.log; cat {kept}/all.txt; ls {kept}"]
        ).stdout
        assert "last words" in logs
        assert "job.batch/badly" in logs
        assert "events.txt" in logs


# Under another name than any registry or earlier test gave it.
RENAMED = """
import io, json, sys, tarfile
with tarfile.open(sys.argv[1]) as old, tarfile.open(sys.argv[2], "w") as new:
    for entry in old:
        data = old.extractfile(entry).read()
        if entry.name == "manifest.json":
            (image,) = json.loads(data)
            data = json.dumps([{**image, "RepoTags": [sys.argv[3]]}]).encode()
            entry.size = len(data)
        new.addfile(entry, io.BytesIO(data))
"""


class TestImages:
    def test_one_from_a_file_is_there_for_the_pods(self, testbed: Testbed) -> None:
        name, path = f"localhost:5000/from-a-file:{uuid.uuid4().hex[:8]}", "/home/user1/from-a-file.tar"
        testbed.run(["python3", "-c", RENAMED, "/opt/slurmlet/images/busybox.tar", path, name])
        script = f"""
        kubectl run p --image={name} --image-pull-policy=Never --restart=Never -- echo it runs >/dev/null
        kubectl wait --for=jsonpath='{{.status.phase}}'=Succeeded pod/p --timeout=60s >/dev/null && kubectl logs p
        """
        try:
            done = run(testbed, "--image", path, "--", "sh", "-c", script)
            assert done.code == 0, done.stderr
            assert done.stdout == "it runs\n"
        finally:
            testbed.run(["slurmlet", "image", "rm", name], check=False)

    def test_one_that_is_not_there(self, testbed: Testbed) -> None:
        done = run(testbed, "--image", "/home/user1/no-such-image.tar", "--", "true")
        assert done.code == 1
        assert "no-such-image.tar" in done.stderr


class TestTerminal:
    """What a person at a terminal has of it."""

    def test_without_a_command_it_is_a_shell(self, testbed: Testbed) -> None:
        terminal = Terminal(testbed, "slurmlet", "run", "-N2")
        try:
            terminal.until("workload starts", 60)
            terminal.type("tty && stty size; kubectl get nodes -o name; echo job=$SLURM_JOB_ID.\n")
            said = terminal.until("node/c2", 30)
            assert "/dev/pts/" in said
            assert "24 80" in said
            assert "node/c1" in said
            job_id = re.search(r"job=(\d+)\.", terminal.until(".\r\n"))
            assert job_id
            # Of what runs in the shell, not of the run.
            terminal.type("sleep 300\n")
            time.sleep(1)
            terminal.type("\x03")
            terminal.type("echo still-$((40 + 2))\n")
            terminal.until("still-42")
            terminal.type("exit 6\n")
            assert terminal.process.wait(30) == 6
            all_gone(testbed, job_id.group(1))
        finally:
            terminal.close()

    def test_ctrl_c_ends_a_command_that_does_not_mind_it(self, testbed: Testbed) -> None:
        terminal = Terminal(
            testbed, "slurmlet", "run", "-N2", "--", "sh", "-c", "echo job=$SLURM_JOB_ID.; cat; sleep 300"
        )
        try:
            job_id = re.search(r"job=(\d+)\.", terminal.until(".\r\n", 60))
            assert job_id
            terminal.type("what is typed\n")
            # By the terminal, then by cat.
            terminal.until("what is typed\r\nwhat is typed\r\n")
            terminal.type("\x03")
            assert terminal.process.wait(30) != 0
            all_gone(testbed, job_id.group(1))
        finally:
            terminal.close()

    @pytest.mark.parametrize("signal", ["TERM", "HUP", "KILL"])
    def test_signals_to_what_was_typed(self, testbed: Testbed, signal: str) -> None:
        with started(testbed, "sleep 300", "-N2") as here:
            fronts = [
                one
                for one in processes(testbed, "login", "slurmlet run")
                if READY in one.line and "srun" not in one.line
            ]
            testbed.run(["kill", f"-{signal}", fronts[0].pid])
            all_gone(testbed, here.job_id, here.uids)

    def test_ctrl_c_twice_ends_everything(self, testbed: Testbed) -> None:
        script = f"""
        i=1; {SLEEPER}; kubectl wait --for=condition=Ready pod --all
        trap 'echo still here' INT
        echo job=$SLURM_JOB_ID.
        while true; do sleep 0.2; done
        """
        terminal = Terminal(testbed, "slurmlet", "run", "-N2", "--", "sh", "-c", script)
        try:
            job_id = re.search(r"job=(\d+)\.", terminal.until(".\r\n", 60))
            assert job_id
            terminal.type("\x03")
            terminal.until("still here")
            terminal.type("\x03")
            assert terminal.process.wait(30) != 0
            all_gone(testbed, job_id.group(1))
        finally:
            terminal.close()


class TestFaults:
    """Whatever dies, nothing is left: no process, no directory, no mount, no job."""

    def test_a_cancelled_job(self, testbed: Testbed) -> None:
        with started(testbed, "sleep 300", "-N3") as here:
            assert len(here.uids) == 3
            testbed.run(["scancel", here.job_id])
            here.wait()
            assert accounted(testbed, here.job_id).startswith("CANCELLED")
            all_gone(testbed, here.job_id, here.uids)

    def test_the_command_hears_the_signal_first(self, testbed: Testbed) -> None:
        with started(testbed, "trap 'echo last act >&2; exit 9' TERM; sleep 300 & wait", "-N2") as here:
            here.kill(here.first_host, here.chain()["guard"], "TERM")
            code, said = here.wait()
            assert code == 9, said
            assert "last act" in said
            all_gone(testbed, here.job_id, here.uids)

    def test_a_job_at_its_time_limit(self, testbed: Testbed) -> None:
        with started(testbed, "sleep 300", "-N2", "--time=1") as here:
            here.wait(150)
            assert accounted(testbed, here.job_id).startswith("TIMEOUT")
            all_gone(testbed, here.job_id, here.uids)

    @pytest.mark.parametrize("which", ["guard", "driver", "supervisor"])
    def test_what_holds_the_run_together_is_killed(self, testbed: Testbed, which: str) -> None:
        with started(testbed, "sleep 300", "-N3") as here:
            here.kill(here.first_host, here.chain()[which])
            code, _ = here.wait()
            assert code != 0
            all_gone(testbed, here.job_id, here.uids, within_s=40)

    def test_a_hub_that_dies_comes_back_and_pods_run_on(self, testbed: Testbed) -> None:
        script = """
        old=$(kubectl get pods -o jsonpath='{.items[*].status.containerStatuses[*].containerID}')
        cat >/dev/null
        kubectl wait --for=condition=Ready node --all --timeout=60s >/dev/null
        new=$(kubectl get pods -o jsonpath='{.items[*].status.containerStatuses[*].containerID}')
        test "$old" = "$new" || { echo "$old, then $new" >&2; exit 20; }
        for n in 1 2 3 4 5 6 7 8 9; do kubectl exec sleeper-1 -- true && exit 21; sleep 2; done
        """
        with started(testbed, script, "-N3") as here:
            host = here.first_host
            hub = here.processes(host, "slurmlet.hub")[0]
            here.kill(host, hub.pid)
            eventually(lambda: [one for one in here.processes(host, "slurmlet.hub") if one.pid != hub.pid])
            out, err = here.process.communicate(b"", timeout=90)
            assert here.process.returncode == 21, (out, err)
            all_gone(testbed, here.job_id, here.uids)

    def test_an_agent_that_dies_takes_its_pods_and_comes_back(self, testbed: Testbed) -> None:
        script = """
        cat >/dev/null
        kubectl wait --for=jsonpath='{.status.phase}'=Failed pod --all --timeout=60s >/dev/null || exit 31
        kubectl get pod sleeper-1 -o jsonpath='{.status.reason}'
        kubectl wait --for=condition=Ready node --all --timeout=60s >/dev/null || exit 32
        kubectl run again --image=IMAGE --restart=Never -- true >/dev/null
        kubectl wait --for=jsonpath='{.status.phase}'=Succeeded pod/again --timeout=60s >/dev/null && exit 33
        """.replace("IMAGE", IMAGE)
        with started(testbed, script, "-N1") as here:
            agents = here.processes(here.first_host, "runner.pyz agent")
            outer = next(one for one in agents if one.parent not in {other.pid for other in agents})
            inner = next(one for one in agents if one.parent == outer.pid)
            here.kill(here.first_host, inner.pid)
            out, err = here.process.communicate(b"", timeout=150)
            assert here.process.returncode == 33, (out, err)
            assert out.decode().strip() == "RunnerLost"
            all_gone(testbed, here.job_id, here.uids)

    def test_a_host_that_fails(self, testbed: Testbed) -> None:
        with started(testbed, "sleep 300", "-N3") as here:
            failed = next(host for host in ("c3", "c2") if host != here.first_host)
            inject(testbed, "take-host", failed)
            try:
                code, _ = here.wait(150)
                assert code != 0
            finally:
                inject(testbed, "return-host", failed)
            argv = ["sinfo", "-h", "-n", failed, "-t", "idle,mixed,alloc", "-o", "%D"]
            eventually(lambda: testbed.run(argv).stdout.strip(), 60)
            all_gone(testbed, here.job_id, here.uids, within_s=60)


def test_ten_runs_at_once_by_two_users(testbed: Testbed) -> None:
    script = f"""
    kubectl run p --image={IMAGE} --restart=Never -- true >/dev/null
    kubectl wait --for=jsonpath='{{.status.phase}}'=Succeeded pod/p --timeout=200s >/dev/null || exit 99
    echo $SLURM_JOB_ID $K8S_CLUSTER_NAME
    exit $0
    """
    argv = ["slurmlet", "run", "--timeout", "200", "--", "sh", "-c", script]
    started = [
        (user, number, testbed.popen([*argv, str(number)], user=user))
        for number in range(5)
        for user in ("user1", "user2")
    ]
    ended = [(user, number, process, process.communicate(timeout=280)) for user, number, process in started]
    assert [process.returncode for _, _, process, _ in ended] == [number for _, number, _, _ in ended], ended
    said = [out.decode().split() for *_, (out, _) in ended]
    assert len({name for _, name in said}) == 10
    for (user, *_), (job_id, _) in zip(ended, said, strict=True):
        all_gone(testbed, job_id, user=user)


class TestExamples:
    """examples/run as people find them, with the testbed's image in place of a registry's."""

    def run(self, testbed: Testbed, name: str, *words: str, image: str = IMAGE) -> str:
        path = f"/home/user1/{name}"
        testbed.run(["tee", path], stdin=(EXAMPLES / name).read_text().replace("busybox:1", image))
        done = run(testbed, *words, "--", "env", f"IMAGE={image}", "sh", path, timeout_s=150)
        assert done.code == 0, done.stderr
        return done.stdout

    def test_following_a_jobs_logs(self, testbed: Testbed) -> None:
        assert "step 5" in self.run(testbed, "job-follow-logs.sh")

    def test_training_on_three_nodes(self, testbed: Testbed) -> None:
        said = self.run(testbed, "job-training.sh", "-N3")
        ranks = [line.split()[1] for line in said.splitlines() if line.startswith("rank ")]
        assert sorted(ranks) == ["0", "1", "2"]

    def test_the_api_with_a_token(self, testbed: Testbed) -> None:
        assert self.run(testbed, "kube-api.sh", "-N2").count("kubernetes.io/hostname") == 2

    def test_a_workload_in_yaml(self, testbed: Testbed) -> None:
        path = "/home/user1/workload.yaml"
        testbed.run(["tee", path], stdin=(EXAMPLES / "workload.yaml").read_text().replace("busybox:1", IMAGE))
        done = run(testbed, "-N2", "--manifest", path, "--wait", timeout_s=150)
        assert done.code == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"{n} squared is {n * n}" for n in range(4)]

    def test_a_benchmark_in_a_pod(self, testbed: Testbed) -> None:
        load(testbed, ["sysbench"])
        said = self.run(testbed, "pod-sysbench.sh", "-c2", image="localhost:5000/sysbench:1")
        assert "Number of threads: 2" in said
        assert "events per second:" in said

    def test_a_web_server_behind_a_node_port(self, testbed: Testbed) -> None:
        load(testbed, ["servers"])
        said = self.run(testbed, "pod-nginx.sh", "-N2", image="localhost:5000/servers:1")
        assert "Welcome to nginx on web-" in said
