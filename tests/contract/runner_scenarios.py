# ruff: noqa: PTH103, PTH110, PTH118, PTH123, PTH208, PTH211
"""What a runner must do, each as a function of a Rig. Played on a testbed host by tests/e2e/test_runner_alone.py.

python3 runner_scenarios.py <work dir> <image dir> <certificates> <scenario> -- <runner argv …>
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
import time
from typing import Any

from runner_names import SCENARIO_NAMES
from runner_rig import Rig

from slurmlet.protocol import wire


def container(rig: Rig, script: str, **fields: Any) -> dict[str, Any]:
    plan = {
        "name": "main",
        "image": "busybox:1",
        "image_id": "busybox@sha256:00",
        "image_dir": rig.image_dir,
        "argv": ["/bin/sh", "-c", script],
        "env": [["PATH", "/bin"]],
        "cwd": "/",
        "user": {"uid": None, "gid": None, "groups": [], "name": ""},
        "mounts": [],
        "tty": False,
        "stdin": False,
        "stdin_once": False,
        "read_only_root": False,
        "termination_message_path": "/dev/termination-log",
        "termination_message_policy": "File",
        "stop_signal": "SIGTERM",
        "sidecar": False,
        "add_caps": [],
        "drop_caps": [],
        "no_new_privs": False,
        "privileged": False,
        "unmasked_proc": False,
        "selinux": False,
        "seccomp": "Unconfined",
        "env_files": [],
        "restart_policy": "",
        "restart_rules": [],
        "probes": {},
        "post_start": None,
        "pre_stop": None,
        "gpus": False,
    }
    return {**plan, **fields}


def pod(
    rig: Rig, *containers: dict[str, Any], init: list[dict[str, Any]] | None = None, **fields: Any
) -> dict[str, Any]:
    plan = {
        "uid": rig.uid,
        "name": "pod1",
        "namespace": "default",
        "cluster": "default",
        "hostname": "pod1",
        "restart_policy": "Never",
        "grace_s": 3,
        "share_pid": False,
        "hosts": [["10.1.2.3", "alias"]],
        "init_containers": init or [],
        "containers": list(containers),
        "volumes": {},
        "host_names": ["pod1"],
        "host_network": False,
        "host_ipc": False,
        "sysctls": [],
        "storage_limits": {"containers": {}, "pod": None},
        "fs_group": None,
        "network": None,
        "resolv_conf": None,
    }
    return {**plan, **fields}


def done(rig: Rig, code: int) -> dict[str, Any]:
    rig.wait(lambda: rig.byes, "bye")
    assert rig.exit_code() == code, (rig.exit_code(), rig.said())
    with open(os.path.join(rig.pod_dir, "report.json")) as file:
        report: dict[str, Any] = json.load(file)
    assert report == rig.byes[-1]
    assert report["phase"] == "Done"
    assert report["exit_code"] == code
    left = os.listdir(os.path.join(rig.scratch, f"slurmlet-{os.getuid()}", "pods"))
    assert left == [], left
    return report


def log_text(rig: Rig, name: str = "main", run: int = 0) -> str:
    with open(os.path.join(rig.pod_dir, "logs", name, f"{run}.log")) as file:
        return "".join(line.split(" ", 3)[3] for line in file)


def hello(rig: Rig) -> None:
    rig.start(
        pod(
            rig,
            container(
                rig, "echo out; echo err >&2; hostname; cat /etc/hosts; echo fine > /dev/termination-log"
            ),
        )
    )
    report = done(rig, 0)
    main = report["containers"]["main"]
    assert (main["state"], main["reason"], main["exit_code"]) == ("terminated", "Completed", 0), main
    assert main["message"] == "fine\n"
    text = log_text(rig)
    assert "out\n" in text
    assert "err\n" in text
    assert "pod1\n" in text
    assert "10.1.2.3\talias" in text
    assert [event["reason"] for event in rig.events] == ["Created", "Started"]
    phases = [each["phase"] for each in rig.reports]
    assert "Running" in phases, phases
    said = rig.hellos[0]
    assert said["pod_uid"] == rig.uid
    assert said["job_id"] == "42"
    assert said["host_ip"] == "127.0.0.1"


def exit_codes(rig: Rig) -> None:
    rig.start(
        pod(
            rig,
            container(rig, "exit 7"),
            container(
                rig, "kill -9 $$; sleep 1", name="other", argv=["/bin/sh", "-c", "sh -c 'kill -9 $$'; exit 3"]
            ),
        )
    )
    report = done(rig, 7)
    assert report["containers"]["main"]["reason"] == "Error"
    assert report["containers"]["other"]["exit_code"] == 3


def identity_of_root(rig: Rig) -> None:
    """Programs that chown, change their user or make devices as root get on with it."""
    script = "id -u; id -g; chown 5:5 /bin/busybox; echo $?; su app -s /bin/sh -c 'echo switched' || echo no"
    rig.start(pod(rig, container(rig, script + "; touch /new; mknod /dev1 c 1 3 2>/dev/null; echo mknod $?")))
    done(rig, 0)
    mapping = os.environ.get("RIG_MAPPING", "single")
    trees = os.listdir(os.path.join(rig.scratch, f"slurmlet-{os.getuid()}", "images"))
    assert any(name.endswith("-" + mapping) for name in trees), trees
    # With one uid the device is a pretence, with many the kernel says no.
    expected = ["0", "0", "0", "switched", "mknod", "0" if mapping == "single" else "1"]
    assert log_text(rig).split() == expected, log_text(rig)


def identity(rig: Rig) -> None:
    """Whatever the mapping, a container is who the plan or the image says."""
    numbers = {"uid": 1234, "gid": 77, "groups": [], "name": ""}
    number = container(rig, "id -u; id -g; touch /tmp/x && echo wrote", user=numbers)
    app = {"uid": None, "gid": None, "groups": [], "name": "app"}
    named = container(rig, "id -un; id -g; echo $HOME", name="named", user=app)
    rig.start(pod(rig, number, named))
    done(rig, 0)
    assert log_text(rig).split() == ["1234", "77", "wrote"], log_text(rig)
    assert log_text(rig, "named").split()[:2] == ["app", "1000"], log_text(rig, "named")


def start_error(rig: Rig) -> None:
    rig.start(pod(rig, container(rig, "", argv=["/no/such/program"])))
    report = done(rig, 128)
    main = report["containers"]["main"]
    assert (main["state"], main["reason"], main["exit_code"]) == ("terminated", "StartError", 128), main
    assert "/no/such/program" in main["message"]
    assert rig.events[-1]["reason"] == "Failed"


def order(rig: Rig) -> None:
    """Init containers in turn, sidecars kept and stopped last, volumes shared."""
    share = {
        "mounts": [
            {"volume": "work", "path": "/desk", "read_only": False, "recursive_read_only": "", "sub_path": ""}
        ]
    }
    init = [
        container(rig, "echo one >> /desk/order", name="one", **share),
        container(
            rig,
            "trap 'echo side-ends >> /desk/order; exit 0' TERM; echo side >> /desk/order; while :; do sleep 0.1; done",
            name="side",
            sidecar=True,
            **share,
        ),
        container(
            rig,
            "until grep -q side /desk/order; do sleep 0.1; done; echo two >> /desk/order",
            name="two",
            **share,
        ),
    ]
    main = container(rig, "sleep 0.5; echo main >> /desk/order; cat /desk/order", **share)
    rig.start(
        pod(
            rig,
            main,
            init=init,
            volumes={"work": {"kind": "empty", "medium": "", "size_bytes": None, "limit": ""}},
        )
    )
    report = done(rig, 0)
    assert log_text(rig).split() == ["one", "side", "two", "main"], log_text(rig)
    assert report["init_containers"]["side"]["exit_code"] == 0, report["init_containers"]["side"]
    assert report["init_containers"]["one"]["ready"] is True


def init_failure(rig: Rig) -> None:
    rig.start(pod(rig, container(rig, "echo never"), init=[container(rig, "exit 9", name="first")]))
    report = done(rig, 9)
    assert report["containers"]["main"]["state"] == "waiting"
    assert report["containers"]["main"]["reason"] == "PodInitializing"


def volumes(rig: Rig) -> None:
    secret = base64.b64encode(b"s3cret").decode()
    plans = {
        "secret": {
            "kind": "files",
            "files": {"a/token": {"data": secret, "mode": 0o400}},
            "default_mode": 0o644,
        },
        "memory": {"kind": "empty", "medium": "Memory", "size_bytes": 1 << 20, "limit": ""},
        "host": {"kind": "host", "path": os.path.join(rig.work, "made"), "type": "DirectoryOrCreate"},
    }
    mounts = [
        {
            "volume": "secret",
            "path": "/etc/secret",
            "read_only": True,
            "recursive_read_only": "",
            "sub_path": "",
        },
        {
            "volume": "secret",
            "path": "/single",
            "read_only": True,
            "recursive_read_only": "",
            "sub_path": "a/token",
        },
        {
            "volume": "memory",
            "path": "/memory",
            "read_only": False,
            "recursive_read_only": "",
            "sub_path": "",
        },
        {"volume": "host", "path": "/data", "read_only": False, "recursive_read_only": "", "sub_path": "x/y"},
        {"volume": "host", "path": "/ro", "read_only": True, "recursive_read_only": "", "sub_path": ""},
    ]
    script = """
        cat /etc/secret/a/token /single; echo; stat -c %a /etc/secret/a/token
        (echo x > /etc/secret/b) 2>&1 || echo ro
        (echo x > /ro/b) 2>/dev/null || echo ro2
        echo kept > /data/file; cat /ro/x/y/file; mount | grep ' /memory ' | cut -d' ' -f5
        dd if=/dev/zero of=/memory/big bs=1M count=3 2>/dev/null || echo full
        until [ -e /data/seen ]; do sleep 0.1; done
    """
    rig.start(pod(rig, container(rig, script, mounts=mounts), volumes=plans))
    rig.wait_state("main", "running")
    made = os.path.join(rig.work, "made", "x", "y")
    # Its content lies in the sandbox's own mount namespace: nothing of it is on the node's disk.
    for directory, _, files in os.walk(rig.scratch):
        assert not [name for name in files if name == "token"], directory
    open(os.path.join(made, "seen"), "w").close()
    done(rig, 0)
    with open(os.path.join(made, "file")) as file:
        assert file.read() == "kept\n"
    lines = log_text(rig).split("\n")
    assert lines[0] == "s3crets3cret", lines
    assert "400" in lines
    assert "ro" in lines
    assert "ro2" in lines
    assert lines[-4:-1] == ["kept", "tmpfs", "full"], lines


def hostile_sub_path(rig: Rig) -> None:
    """A link planted in a volume must not lead a subPath out of it; the pod fails with a reason, in bounded time."""
    made = os.path.join(rig.work, "planted")
    os.makedirs(made, exist_ok=True)
    os.symlink("/etc", os.path.join(made, "out"))
    mounts = [
        {"volume": "host", "path": "/data", "read_only": False, "recursive_read_only": "", "sub_path": "out"}
    ]
    plan = pod(
        rig,
        container(rig, "ls /data", mounts=mounts),
        volumes={"host": {"kind": "host", "path": made, "type": ""}},
    )
    rig.start(plan)
    rig.wait(lambda: rig.container("main").get("reason") == "CreateContainerConfigError", "a config error")
    assert "leads out" in rig.container("main")["message"], rig.container("main")
    rig.send(wire.control({"type": "stop", "grace_s": 0, "reason": "test"}))
    rig.wait(lambda: rig.byes, "bye")


def restarts(rig: Rig) -> None:
    """OnFailure: at once, then after a back-off; previous log and last state are kept; fresh files each time."""
    script = "ls /mark 2>/dev/null; touch /mark; echo run; exit 4"
    rig.start(pod(rig, container(rig, script), restart_policy="OnFailure"))
    rig.wait(lambda: rig.container("main").get("reason") == "CrashLoopBackOff", "CrashLoopBackOff")
    seen = rig.container("main")
    assert seen["restart_count"] == 1, seen
    assert seen["last"]["exit_code"] == 4
    assert seen["message"] == f"back-off 10s restarting failed container=main pod=pod1_default({rig.uid})", (
        seen
    )
    assert rig.events[-1]["reason"] == "BackOff"
    assert rig.logs("main") == b"run\n"
    assert rig.logs("main", previous=True) == b"run\n"
    rig.send(wire.control({"type": "stop", "grace_s": 1, "reason": "deleted"}))
    rig.wait(lambda: rig.byes, "bye")
    assert rig.exit_code() != 0


def logs(rig: Rig) -> None:
    script = "mkfifo /fifo; for i in 1 2 3 4 5; do echo line $i; done; echo oops >&2; read x < /fifo; echo last; sleep 0.5"
    rig.start(pod(rig, container(rig, script)))
    rig.wait_state("main", "running")
    rig.wait(lambda: {"oops", "line 5"} <= set(log_text(rig).splitlines()), "all lines")
    everything = rig.logs("main")
    assert everything.endswith((b"oops\n", b"line 5\n")), everything
    assert rig.logs("main", tail_lines=0) == b""
    assert rig.logs("main", limit_bytes=9, log_stream="Stdout") == b"line 1\nli"
    assert rig.logs("main", log_stream="Stderr") == b"oops\n"
    stamped = rig.logs("main", timestamps=True, tail_lines=1).decode()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z ", stamped), stamped
    assert rig.logs("main", since_s=3600) == everything
    assert rig.logs("main", since_time="2999-01-01T00:00:00Z") == b""
    following = rig.open("logs", container="main", follow=True, tail_lines=0)
    status, _, err = rig.execute("main", ["/bin/sh", "-c", "echo go > /fifo"])
    assert status == {"exit_code": 0}, (status, err)
    following.wait_closed()
    assert bytes(following.out) == b"last\n", bytes(following.out)
    done(rig, 0)


def exec_plain(rig: Rig) -> None:
    rig.start(
        pod(
            rig,
            container(rig, "sleep 60", env=[["PATH", "/bin"], ["COLOUR", "blue $(x) `y` \"'\n"]], cwd="/tmp"),
        )
    )
    rig.wait_state("main", "running")
    blob = os.urandom(3 << 20)
    status, out, err = rig.execute("main", ["cat"], stdin=blob)
    assert status == {"exit_code": 0}, (status, err)
    assert out == blob, (len(out), len(blob))
    status, out, err = rig.execute("main", ["sh", "-c", 'pwd; printf %s "$COLOUR"; echo oops >&2; exit 42'])
    assert (status, out, err) == ({"exit_code": 42}, b"/tmp\nblue $(x) `y` \"'\n", b"oops\n"), (
        status,
        out,
        err,
    )
    status, _, _ = rig.execute("main", ["sh", "-c", "kill -9 $$"])
    assert status == {"exit_code": 137}
    status, _, _ = rig.execute("main", ["no-such-program"])
    assert status["exit_code"] == 127, status
    assert "no-such-program" in status["error"]
    # A child left behind that holds the pipes must not hold the session.
    status, out, _ = rig.execute("main", ["sh", "-c", "sleep 30 & echo said"])
    assert (status, out) == ({"exit_code": 0}, b"said\n")
    stream = rig.open(
        "exec",
        container="main",
        command=["sh", "-c", "yes | head -c 2000000"],
        stdin=False,
        stdout=True,
        stderr=True,
        tty=False,
    )
    stream.granting = False
    rig.wait(lambda: stream.received_unpaid == wire.INITIAL_WINDOW, "a full window")
    time.sleep(0.3)
    assert not stream.closed
    with rig.changed:
        stream.granting = True
        stream.grant()
    stream.wait_closed()
    assert len(stream.out) == 2000000
    rig.send(wire.control({"type": "stop", "grace_s": 0, "reason": "test"}))
    done(rig, 137)


def exec_tty(rig: Rig) -> None:
    rig.start(pod(rig, container(rig, "sleep 60")))
    rig.wait_state("main", "running")
    stream = rig.open(
        "exec", container="main", command=["sh"], stdin=True, stdout=True, stderr=False, tty=True
    )
    stream.send(wire.RESIZE, b'{"Width": 101, "Height": 33}')
    stream.send(wire.STDIN, b"stty size; tty\n")
    rig.wait(lambda: b"33 101" in stream.out and b"/dev/pts/" in stream.out, "the size")
    stream.send(wire.RESIZE, b'{"Width": 90, "Height": 20}')
    stream.send(wire.STDIN, b"stty size\n")
    rig.wait(lambda: b"20 90" in stream.out, "the new size")
    stream.send(wire.STDIN, b"trap 'echo caught' INT; echo as''leep; sleep 30\n")
    rig.wait(lambda: b"asleep\r\n" in stream.out, "the trap is set")
    stream.send(wire.STDIN, b"\x03")
    rig.wait(lambda: b"caught\r\n" in stream.out, "Ctrl-C")
    stream.send(wire.STDIN, b"exit 5\n")
    stream.wait_closed()
    assert stream.status == {"exit_code": 5}, stream.status
    rig.send(wire.control({"type": "stop", "grace_s": 0, "reason": "test"}))
    done(rig, 137)


def stop(rig: Rig) -> None:
    """A polite one ends on SIGTERM, a deaf one by SIGKILL after the grace, and Slurm's signal does the same."""
    polite = container(rig, "trap 'echo bye; exit 0' TERM; while :; do sleep 0.1; done")
    deaf = container(rig, "trap '' TERM; while :; do sleep 0.1; done", name="deaf")
    rig.start(pod(rig, polite, deaf, restart_policy="Always"))
    rig.wait_state("deaf", "running")
    rig.wait_state("main", "running")
    time.sleep(0.3)
    began_s = time.monotonic()
    rig.send(wire.control({"type": "stop", "grace_s": 1, "reason": "deleted"}))
    report = done(rig, 137)
    assert 0.9 < time.monotonic() - began_s < 4
    assert report["containers"]["main"]["exit_code"] == 0
    assert report["containers"]["deaf"]["signal"] == 9
    assert "bye\n" in log_text(rig)
    assert [event["message"] for event in rig.events if event["reason"] == "Killing"] == [
        "Stopping container main",
        "Stopping container deaf",
    ]


def signalled(rig: Rig) -> None:
    rig.start(
        pod(
            rig,
            container(rig, "trap 'exit 0' TERM; echo ready; while :; do sleep 0.1; done"),
            restart_policy="Always",
        )
    )
    rig.wait_state("main", "running")
    rig.wait(lambda: "ready" in log_text(rig), "the trap is set")
    assert rig.process is not None
    rig.process.send_signal(signal.SIGTERM)
    report = done(rig, 1)
    assert report["problem"] == {"reason": "Terminated", "message": "the Slurm job was signalled"}


def killed(rig: Rig) -> None:
    """kill -9 of the runner takes every process of the pod with it."""
    marker = f"sleep 4{os.getpid()}"
    rig.start(pod(rig, container(rig, f"{marker} & {marker}")))
    rig.wait_state("main", "running")
    assert rig.process is not None
    rig.process.kill()
    rig.process.wait()
    deadline_s = time.monotonic() + 5
    while _alive(marker):
        assert time.monotonic() < deadline_s, "a process of the pod outlived its runner"
        time.sleep(0.05)


def _alive(marker: str) -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if marker.encode() in file.read().replace(b"\0", b" "):
                    found.append(name)
        except OSError:
            continue
    return [name for name in found if name != str(os.getpid())]


def hub_away(rig: Rig) -> None:
    """The pod lives on without its hub, and ends without it; a new hub hears the whole story."""
    rig.start(pod(rig, container(rig, "echo one; until [ -e /go ]; do sleep 0.1; done; echo two")))
    rig.wait_state("main", "running")
    rig.vanish()
    time.sleep(0.5)
    rig.reports.clear()
    rig.listen()
    rig.wait(lambda: len(rig.hellos) == 2, "a second hello")
    assert rig.hellos[1]["has_pod"] is True
    assert rig.hellos[1]["report"]["containers"]["main"]["state"] == "running"
    status, _, _ = rig.execute("main", ["touch", "/go"])
    assert status == {"exit_code": 0}
    done(rig, 0)
    assert log_text(rig) == "one\ntwo\n"


def late_hub(rig: Rig) -> None:
    rig.start(pod(rig, container(rig, "echo hi")), listen=False)
    time.sleep(1)
    assert rig.process is not None
    assert rig.process.poll() is None
    rig.listen()
    done(rig, 0)


def claimed(rig: Rig) -> None:
    with open(os.path.join(rig.pod_dir, "claim"), "w") as file:
        file.write("41\n")
    rig.start(pod(rig, container(rig, "echo hi")))
    assert rig.exit_code() == 0
    assert "belongs to Slurm job 41" in rig.said()
    assert rig.hellos == []


def shared_pids(rig: Rig) -> None:
    one = container(
        rig,
        "sleep 1; ps; ls /proc/1/root /proc/1/cwd/; cat /proc/1/mem 2>&1 | head -c 100; ls -la /proc/1/fd; exit 0",
    )
    rig.start(pod(rig, one, container(rig, "exec sleep 47", name="other"), share_pid=True))
    rig.wait_state("main", "terminated")
    text = log_text(rig)
    assert "sleep 47" in text, text
    assert "etc" not in text, text
    rig.send(wire.control({"type": "stop", "grace_s": 0, "reason": "test"}))
    done(rig, 137)


def container_tty(rig: Rig) -> None:
    rig.start(
        pod(rig, container(rig, "tty; stty size >/dev/null && echo sized; sleep 0.2", tty=True, stdin=True))
    )
    done(rig, 0)
    assert "/dev/pts/0" in log_text(rig)
    assert "sized" in log_text(rig)


def read_only_root(rig: Rig) -> None:
    rig.start(
        pod(
            rig,
            container(
                rig, "touch /x 2>/dev/null || echo refused; touch /dev/shm/y && echo shm", read_only_root=True
            ),
        )
    )
    done(rig, 0)
    assert log_text(rig).split() == ["refused", "shm"]


def fallback_message(rig: Rig) -> None:
    rig.start(
        pod(rig, container(rig, "echo it broke; exit 3", termination_message_policy="FallbackToLogsOnError"))
    )
    report = done(rig, 3)
    assert report["containers"]["main"]["message"] == "it broke\n"


def wrong_hub(rig: Rig) -> None:
    """A hub with another name's certificate gets nothing, however good its authority."""
    rig.hub_certificate = "other.pem"
    rig.start(pod(rig, container(rig, "echo hi")))
    rig.wait(lambda: "link to the hub" in rig.said(), "a complaint")
    assert rig.hellos == []
    rig.vanish()
    rig.hub_certificate = "hub.pem"
    rig.listen()
    done(rig, 0)


def main(argv: list[str]) -> int:
    work, image_dir, certificates, name = argv[:4]
    rig = Rig(work, argv[argv.index("--") + 1 :], image_dir, certificates)
    try:
        assert name in SCENARIO_NAMES
        globals()[name](rig)
    except BaseException:
        print(rig.said() if os.path.exists(os.path.join(rig.pod_dir, "job.log")) else "", file=sys.stderr)
        raise
    finally:
        rig.end()
    print(f"{name}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
