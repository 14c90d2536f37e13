"""An OCI runtime as the runner uses it: real processes, whatever the program answers, and every way it can fail."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.linux import syscalls
from slurmlet.linux.event_loop import Loop
from slurmlet.runner.containers import oci_runtime
from slurmlet.runner.containers.container_runtime import CONFIG_ERROR, CREATE_ERROR, SECCOMP, USERS, Start
from slurmlet.runner.containers.oci_runtime import NoRuntime, OciRuntime, PodNamespaces, find_runtime
from slurmlet.runner.containers.root_overlay import Roots, copy_tree
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.host.sandbox import SINGLE, SUBUID, Mapping
from tests.unit.overlaying import making_loop
from tests.unit.runner_pod import container_plan

# What a runtime is asked for, as the last of its arguments tell: it starts a process and leaves, or says why not.
STARTS = """
while [ $# -gt 1 ]; do
  case $1 in --pid-file) pids=$2;; --console-socket) console=$2;; esac
  shift
done
sleep 10 > /dev/null 2>&1 &
[ -z "$pids" ] || echo $! > "$pids"
"""
SAYS = """
while [ $# -gt 1 ]; do case $1 in --log) log=$2;; esac; shift; done
printf '%s' '{words}' > "$log"
exit 3
"""


class Node:
    def __init__(self, directory: Path, loop: Loop) -> None:
        self.directory, self.loop = directory, loop
        self.children = Children(loop)
        self.images, self.state = directory / "images", directory / "state"
        self.images.mkdir()
        self.image = directory / "sha256-1"
        self.image.mkdir()
        with tarfile.open(self.image / "rootfs.tar", "w") as tar:
            entry = tarfile.TarInfo("etc/passwd")
            words = b"root:x:0:0::/root:/bin/sh\n"
            entry.size = len(words)
            tar.addfile(entry, io.BytesIO(words))
        self.started: list[tuple[int, int, str]] = []
        self.exited: list[tuple[int, int]] = []
        self.created: list[tuple[str, str]] = []
        self.null = os.open(os.devnull, os.O_RDWR)

    def runtime(
        self, script: str, kind: str = SINGLE, name: str = "crun", enter: Callable[[], None] | None = None
    ) -> OciRuntime:
        program = self.directory / name
        program.write_text(f"#!/bin/sh\n{script}")
        program.chmod(0o755)
        pod = PodNamespaces(Mapping(kind, 1 if kind == SINGLE else 65536, 65536), "pod1", enter=enter)
        return OciRuntime(self.children, str(program), str(self.state), str(self.images), pod)

    def create(self, runtime: OciRuntime, **plan: Any) -> tuple[str, str]:
        made: Any = container_plan("a", image_dir=str(self.image), **plan)
        run_dir = self.directory / "run"
        runtime.create("c1", made, str(run_dir), lambda error, reason: self.created.append((error, reason)))
        self.turn(lambda: bool(self.created))
        return self.created.pop()

    def start(self, tty: bool = False) -> Start:
        stdio = (self.null, self.null, self.null)
        return Start(
            stdio, tty, lambda *told: self.started.append(told), lambda *told: self.exited.append(told)
        )

    def turn(self, done: Callable[[], bool]) -> None:
        assert self.loop.run_until(done, 60)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    before = signal.getsignal(signal.SIGCHLD)
    with pytest.MonkeyPatch.context() as patch, making_loop() as loop:
        # Without a namespace of our own nothing can be mounted: the root is a copy.
        patch.setattr(syscalls, "mount", _refused)
        patch.setattr(oci_runtime, "_hide_hybrid_cgroups", lambda: None)
        made = Node(tmp_path, loop)
        yield made
        os.close(made.null)
    signal.signal(signal.SIGCHLD, before)


def _refused(_source: str, target: str, kind: str, *_more: Any) -> None:
    raise PermissionError(1, f"mount {kind} on {target}: Operation not permitted")


def test_a_container_is_started_signalled_and_deleted(node: Node) -> None:
    runtime = node.runtime(STARTS)
    assert node.create(runtime) == ("", "")
    assert (node.directory / "run" / "root" / "etc" / "passwd").exists(), "the root is a copy of the image"
    runtime.start("c1", [], node.start())
    node.turn(lambda: bool(node.started))
    ((pid, master, error),) = node.started
    assert (master, error) == (-1, "")
    config = json.loads((node.state / "c1" / "config.json").read_text())
    assert config["process"]["args"] == ["a"]
    assert runtime.user("c1") == {"uid": 0, "gid": 0, "groups": [0]}
    # It was left by the program that started it, so without a PID namespace it is not ours to reap.
    runtime.signal("c1", signal.SIGKILL)
    runtime.delete("c1")
    node.turn(lambda: not (node.state / "c1").exists())
    runtime.signal("c1", signal.SIGTERM)
    runtime.delete("c1")
    assert pid > 0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (SAYS.replace("{words}", '{"level":"error","msg":"no such program"}'), "no such program"),
        (SAYS.replace("{words}", "plain words"), "plain words"),
        ("exit 4\n", "the runtime ended with 4 and said nothing"),
        # It says that all is well, and there is no pid.
        ("exit 0\n", "crun: [Errno 2] No such file or directory"),
    ],
)
def test_a_runtime_that_does_not_start_a_container_says_why(node: Node, script: str, words: str) -> None:
    runtime = node.runtime(script)
    node.create(runtime)
    runtime.start("c1", [], node.start())
    node.turn(lambda: bool(node.started))
    ((pid, _, error),) = node.started
    assert pid == 0
    assert words in error
    assert list(node.state.glob("log.*")) == list(node.state.glob("pid.*")) == []


def test_a_runtime_that_cannot_even_be_started_is_told(node: Node) -> None:
    runtime = node.runtime("")
    node.create(runtime)
    (node.directory / "crun").unlink()
    runtime.start("c1", [], node.start())
    assert "No such file" in node.started[0][2]


def test_what_cannot_enter_the_pods_network_is_told(node: Node) -> None:
    def enter() -> None:
        raise PermissionError(1, "setns: not yours")

    runtime = node.runtime(STARTS, enter=enter)
    node.create(runtime)
    runtime.start("c1", [], node.start())
    assert "setns: not yours" in node.started[0][2]


def test_a_terminal_that_is_promised_and_not_sent_is_an_error(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = f"{sys.executable} -IS -c '\nimport socket, sys\n"
    program = (
        'console = socket.socket(socket.AF_UNIX)\nconsole.connect(sys.argv[1])\nconsole.send(b"nothing")\''
    )
    runtime = node.runtime(STARTS + begin + program + ' "$console"\n')
    node.create(runtime)
    # A short name, for the plain way in which the stand-in connects.
    short = Path("/tmp") / f"tty-{os.getpid()}"
    short.mkdir()
    monkeypatch.setattr(runtime, "_fresh", lambda what: str(short / what))
    runtime.start("c1", [], node.start(tty=True))
    node.turn(lambda: bool(node.started))
    assert "the runtime sent no terminal" in node.started[0][2]
    assert list(short.iterdir()) == []
    short.rmdir()


def test_a_command_in_a_container_that_is_gone_is_refused(node: Node) -> None:
    node.runtime(STARTS).exec("c1", ["true"], node.start())
    assert node.started == [(0, -1, "the container has ended")]


def test_a_user_that_the_image_does_not_know_is_an_error_of_creation(node: Node) -> None:
    runtime = node.runtime(STARTS)
    who = {"uid": None, "gid": None, "groups": [], "name": "nobody-here", "strict": False}
    error, reason = node.create(runtime, user=who)
    assert "nobody-here" in error
    assert reason == CREATE_ERROR


def test_a_uid_beyond_the_users_own_is_an_error_of_configuration(node: Node) -> None:
    runtime = node.runtime(STARTS, kind=SUBUID)
    who = {"uid": 70000, "gid": 0, "groups": [], "name": "", "strict": False}
    error, reason = node.create(runtime, user=who)
    assert "70000" in error
    assert reason == CONFIG_ERROR


def test_an_image_that_is_not_there_is_an_error_of_creation(node: Node) -> None:
    (node.image / "rootfs.tar").unlink()
    error, reason = node.create(node.runtime(STARTS))
    assert "rootfs.tar" in error
    assert reason == CREATE_ERROR


def test_runc_with_one_uid_runs_root_only_and_filters_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked: list[bool] = []
    from slurmlet.runner.containers import fake_syscalls

    monkeypatch.setattr(fake_syscalls, "fake_for_all_children", lambda: faked.append(True))
    runtime = node.runtime(STARTS, name="runc")
    assert faked == [True]
    assert set(runtime.lacks) >= {SECCOMP, USERS}
    who = {"uid": 1000, "gid": 0, "groups": [], "name": "", "strict": False}
    error, reason = node.create(runtime, user=who)
    assert "securityContext.runAsUser: runc cannot run" in error
    assert reason == CONFIG_ERROR
    assert node.create(runtime) == ("", "")
    runtime.start("c1", [], node.start())
    node.turn(lambda: bool(node.started))
    config = json.loads((node.state / "c1" / "config.json").read_text())
    assert "seccomp" not in config["linux"]
    runtime.signal("c1", signal.SIGKILL)


def test_the_nodes_crun_comes_before_our_runc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci_runtime, "find_program", lambda _name: "")
    with pytest.raises(NoRuntime, match="neither crun nor a runc"):
        find_runtime(str(tmp_path))
    ours = tmp_path / "bin" / "runc"
    ours.parent.mkdir()
    ours.touch(0o755)
    assert find_runtime(str(tmp_path)) == str(ours)
    crun = tmp_path / "crun"
    crun.touch(0o755)
    monkeypatch.setattr(oci_runtime, "find_program", lambda name: str(crun) if name == "crun" else "")
    assert find_runtime(str(tmp_path)) == str(crun)


def test_those_who_share_a_containers_mounts_are_found() -> None:
    """In a PID namespace that several share, the end of the first process ends no others: they are killed one by one."""
    with subprocess.Popen(["sleep", "60"]) as same:
        found = oci_runtime._sharing_mounts(os.getpid())
        same.kill()
    assert same.pid in found
    assert os.getpid() not in found
    assert oci_runtime._sharing_mounts(same.pid) == [], "it is gone"


# Roots.


@pytest.mark.parametrize("works", [True, False])
def test_fuse_is_the_second_way_to_a_root_and_a_copy_the_third(
    node: Node, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    asked = node.directory / "asked"
    fuse = node.directory / "fuse-overlayfs"
    fuse.write_text(f'#!/bin/sh\necho "$2" > {asked}\nexit {0 if works else 1}\n')
    fuse.chmod(0o755)
    monkeypatch.setattr("slurmlet.runner.containers.root_overlay.find_program", lambda _name: str(fuse))
    tree = node.directory / "tree, with: odd"
    tree.mkdir()
    (tree / "file").write_text("words")
    made: list[tuple[str, str]] = []
    run = node.directory / "run"
    Roots(node.children).make(str(tree), str(run), lambda *told: made.append(told))
    node.turn(lambda: bool(made))
    assert made == [(str(run / "root"), "")]
    assert f"lowerdir={node.directory}/tree\\, with\\: odd,upperdir=" in asked.read_text()
    assert (run / "root" / "file").exists() is not works


def test_a_copied_root_keeps_links_and_modes_and_leaves_sockets_out(tmp_path: Path) -> None:
    tree, root = tmp_path / "tree", tmp_path / "root"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "su").write_text("su")
    (tree / "bin" / "su").chmod(0o755)
    (tree / "sh").symlink_to("bin/su")
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tree / "s"))
    root.mkdir()
    copy_tree(str(tree), str(root))
    assert sorted(each.name for each in root.iterdir()) == ["bin", "sh"]
    assert (root / "bin" / "su").stat().st_mode & 0o777 == 0o755
    assert (root / "sh").is_symlink()
