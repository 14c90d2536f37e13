"""`slurmlet run`: a whole cluster inside one Slurm job. What it gives, how it ends, and that nothing is left of it."""

from __future__ import annotations

import re

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import IMAGE, eventually
from tests.e2e.running import accounted, all_gone, run, started

pytestmark = pytest.mark.e2e

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


def test_an_image_from_a_file(testbed: Testbed) -> None:
    """In the store that all clusters share, so the pods of the run find it."""
    done = run(testbed, "--image", "/home/user1/no-such-image.tar", "--", "true")
    assert done.code == 1
    assert "no-such-image.tar" in done.stderr


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
        test "$old" = "$new" || exit 20
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
            testbed.fault("take-host", failed)
            try:
                code, _ = here.wait(150)
                assert code != 0
            finally:
                testbed.fault("return-host", failed)
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
