"""Runners as forks of one process that has loaded them already: what an agent needs to start, tell and tidy up."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from typing import Callable, List

from slurmlet.linux import syscalls
from slurmlet.runner.host.scratch import choose_base
from slurmlet.runner.volumes import volume_removal

# What a pod usually needs, so that a fork loads nothing; and what is needed when the archive that we came in is gone.
_LOADED = (
    "shutil", "traceback",
    "slurmlet.runner.pod.pod_main", "slurmlet.runner.host.sandbox", "slurmlet.runner.pod.pod_runner",
    "slurmlet.runner.network.network_attachment", "slurmlet.podnet.netd", "slurmlet.runner.pod.pod_setup",
    "slurmlet.runner.host.image_unpack", "slurmlet.runner.containers.prober", "slurmlet.runner.pod.volume_updates",
)  # fmt: skip


def load_runner() -> None:
    for name in _LOADED:
        importlib.import_module(name)
    # Pages of what is loaded stay shared: the collector of a fork leaves them alone.
    gc.freeze()
    gc.enable()


def guarded(work: Callable[[], int]) -> int:
    """The exit code of `work` in a process that must not return into its parent's stack."""
    try:
        return work()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        return 1


def start_runner(pod_dir: str) -> int:
    """The pid of a new runner for the pod; it dies with the caller."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    os._exit(guarded(lambda: _become_runner(pod_dir, parent)))


def _become_runner(pod_dir: str, parent: int) -> int:
    syscalls.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    _forget_parent()
    os.setsid()
    log = os.open(os.path.join(pod_dir, "job.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(log, target)
    # Also the link's socket and the loop's own descriptors: this process has no business with them.
    os.closerange(3, max(int(name) for name in os.listdir("/proc/self/fd")) + 1)
    from slurmlet.runner.pod import pod_main

    return pod_main.run(pod_dir)


def _forget_parent() -> None:
    """Signals as a process finds them that Slurm has just started."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)


def remove_scratch(uid: str) -> int:
    """Remove what a runner left on this node, in a process of its own (its pid; 0: nothing is left)."""
    return _remove([os.path.join(_pods_here(), uid)])


def sweep(cluster_dir: str, node: str) -> None:
    """Remove what runners of this node left, whose agent is gone. Nobody starts any meanwhile."""
    try:
        names = os.listdir(_pods_here())
    except OSError:
        return
    pid = _remove(
        [os.path.join(_pods_here(), name) for name in names if _started_by(cluster_dir, name) == node]
    )
    if pid:
        os.waitpid(pid, 0)


def _started_by(cluster_dir: str, uid: str) -> str:
    """The node whose agent started the pod, as the hub noted it; "" for pods of other clusters and jobs."""
    try:
        with open(os.path.join(cluster_dir, "pods", uid, "job.json"), encoding="utf-8") as file:
            return str(json.load(file).get("node") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def _pods_here() -> str:
    return os.path.join(choose_base(os.environ, os.geteuid(), os.geteuid()), "pods")


def _remove(paths: List[str]) -> int:
    left = [path for path in paths if os.path.lexists(path)]
    pid = os.fork() if left else 0
    if pid or not left:
        return pid

    def work() -> int:
        _forget_parent()
        return max([volume_removal.main([path]) for path in left])

    os._exit(guarded(work))


def exit_code(status: int) -> int:
    """Of a wait status, as a shell tells it."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
