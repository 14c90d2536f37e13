"""The agent of an allocation node: holds one host of a Slurm allocation and starts pods there when the hub says so.

It runs no pod itself. Each pod gets the normal runner, in a fork of this process (its modules are loaded already), which
dials the hub on its own; the agent only starts it, tells of its end and kills it when told. What the agent started
dies with it, whatever kills it, and the process Slurm started (`main`) starts an agent that died anew.

With `--run` the cluster itself lives inside this job: a hub that is gone for good means that everything is over.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Set

from slurmlet.agent import runner_forks
from slurmlet.linux import syscalls
from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.protocol import wire
from slurmlet.runner import VERSION
from slurmlet.runner.link.hub_link import Link
from slurmlet.runner.pod.claim import PodDir

if TYPE_CHECKING:
    from slurmlet.protocol.messages import AllocationPart, HubToAgent

_HUB_POLL_S = 0.05
# The supervisor brings a hub that died back within seconds.
_HUB_LOST_S = 20.0
_LOOK_S = 0.5
_REMEMBERED = 1000
# Slurm kills KillWait (30 s unless configured) after SIGTERM.
_SIGNALLED_S = 25.0
_SHORT_GRACE_S = 1.0
# For what the killed left on the disk.
_TIDY_S = 3.0
_FEW_STARTS, _START_AGAIN_S = 5, 0.5


class Options:
    """The command line: `agent [--run] <node directory>`; %N in it stands for this host's name in Slurm."""

    def __init__(self, arguments: List[str]) -> None:
        self.run = arguments[:1] == ["--run"]
        rest = arguments[1:] if self.run else arguments
        if len(rest) != 1:
            raise ValueError("usage: runner agent [--run] <node directory>")
        self.directory = os.path.abspath(rest[0].replace("%N", os.environ.get("SLURMD_NODENAME", "")))


def main(arguments: List[str]) -> int:
    """Keep an agent alive until it ends by itself. Always 0: a job's exit code is for its workload."""
    try:
        options = Options(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    runner_forks.load_runner()
    # Blocked until somebody is there to hear it: the agent forwards the end of the job in its own way.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    for _ in range(_FEW_STARTS):
        pid = os.fork()
        if pid == 0:
            syscalls.die_with_parent(signal.SIGKILL)
            os._exit(runner_forks.guarded(lambda: Agent(PodDir(options.directory), options.run).run()))
        status = _wait_for(pid)
        node = PodDir(options.directory)
        runner_forks.sweep(node.cluster_dir, node.uid)
        if os.WIFEXITED(status) or not os.path.isdir(options.directory):
            break
        print(
            f"the agent was ended by signal {os.WTERMSIG(status)}; starting it again",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(_START_AGAIN_S)
    return 0


def _wait_for(pid: int) -> int:
    def forward(number: int, _frame: Any) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    return os.waitpid(pid, 0)[1]


class Agent:
    def __init__(self, node: PodDir, run: bool) -> None:
        self._node, self._run = node, run
        self._loop = Loop()
        self._link = Link(self._loop, node, self._link_up, self._frame, self._link_down)
        self._running: Dict[str, int] = {}  # pod uid → pid of its runner
        self._ended: Dict[str, int] = {}  # pod uid → exit code
        self._removing: Set[int] = set()
        self._lost: Optional[Timer] = None
        self._lost_s = 0.0
        self._ending = self._signalled_once = False
        self._loop.on_signal(signal.SIGCHLD, self._reap)
        self._loop.on_signal(signal.SIGTERM, self._signalled)
        # Ctrl-C in a run is for its workload, which may go on.
        self._loop.on_signal(signal.SIGINT, (lambda: None) if run else self._signalled)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})

    def run(self) -> int:
        self._dial_when_there()
        self._loop.run()
        # The hub hears of the last pods' ends before the connection goes.
        self._loop.run_until(self._link.flushed, 1.0)
        self._link.close()
        return 0

    # The link.

    def _dial_when_there(self) -> None:
        """In a cluster that is just starting the hub comes later than we do."""
        # Listed, not looked up by name: NFS remembers for long that a name was not there.
        try:
            there = "hub.json" in os.listdir(self._node.cluster_dir)
        except OSError:
            there = False
        if there:
            self._link.start()
            self._watch_for_end()
        else:
            self._loop.later(_HUB_POLL_S, self._dial_when_there)

    def _link_up(self, address: str) -> None:
        if self._lost is not None:
            self._lost.cancel()
        self._link.send(
            wire.control(
                {
                    "type": "hello",
                    "protocol": wire.MAJOR,
                    "minor": wire.MINOR,
                    "node": self._node.uid,
                    "version": VERSION,
                    "host_ip": address,
                    "pods": sorted(self._running),
                    "ended": self._ended,
                    **facts(os.environ),
                }
            )
        )

    def _link_down(self) -> None:
        if self._signalled_once and self._run:
            # The job is ending, and the hub went before it could say so.
            self._end(_SHORT_GRACE_S)
        self._watch_for_end()

    def _watch_for_end(self) -> None:
        if not self._run:
            return
        if self._lost is not None:
            self._lost.cancel()
        self._lost_s = time.monotonic()
        self._lost = self._loop.later(_LOOK_S, self._look_for_end)

    def _look_for_end(self) -> None:
        """The hub does not answer. A run that is over has removed its directory; one whose first host failed, nobody did."""
        try:
            there = self._node.uid in os.listdir(os.path.dirname(self._node.path))
        except OSError:
            there = False
        if there and time.monotonic() - self._lost_s < _HUB_LOST_S:
            self._lost = self._loop.later(_LOOK_S, self._look_for_end)
            return
        print("the run is over; ending", file=sys.stderr, flush=True)
        self._end(0)

    def _frame(self, frame: wire.Frame) -> None:
        message: HubToAgent = wire.parse(frame.payload)
        if message["type"] == "start-pod":
            self._start(message["uid"])
        elif message["type"] == "kill-pod":
            self._signal([message["uid"]], signal.SIGKILL)
        elif message["type"] == "end":
            self._end(message["grace_s"])
        elif message["type"] == "refused":
            print(f"the hub refused this agent: {message['reason']}", file=sys.stderr, flush=True)

    # Pods.

    def _start(self, uid: str) -> None:
        if uid in self._running:
            return
        if uid in self._ended or self._ending or os.sep in uid:
            self._tell_ended(uid, self._ended.get(uid, 1))
            return
        directory = os.path.join(self._node.cluster_dir, "pods", uid)
        self._running[uid] = runner_forks.start_runner(directory)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._removing.discard(pid)
            for uid in [uid for uid, running in self._running.items() if running == pid]:
                del self._running[uid]
                self._ended[uid] = runner_forks.exit_code(status)
                # A pool's host may serve for weeks. The hub was told of each; of old ones it does not ask again.
                for oldest in list(self._ended)[:-_REMEMBERED]:
                    del self._ended[oldest]
                self._tell_ended(uid, self._ended[uid])
                self._clean_up(uid)
        self._leave_when_empty()

    def _tell_ended(self, uid: str, exit_code: int) -> None:
        self._link.send(wire.control({"type": "pod-ended", "uid": uid, "exit_code": exit_code}))

    def _clean_up(self, uid: str) -> None:
        """A runner that was killed leaves its scratch behind."""
        pid = runner_forks.remove_scratch(uid)
        if pid:
            self._removing.add(pid)

    def _signal(self, uids: List[str], number: int) -> None:
        for uid in uids:
            if uid in self._running:
                try:
                    os.kill(self._running[uid], number)
                except ProcessLookupError:
                    pass

    # The end.

    def _signalled(self) -> None:
        self._signalled_once = True
        if not self._run:
            self._end(_SIGNALLED_S)
        elif not self._link.up:
            self._end(_SHORT_GRACE_S)
        else:
            # The same signal reached the workload, which goes first; the hub says when it is our turn.
            self._loop.later(_SIGNALLED_S, lambda: self._end(0))

    def _end(self, grace_s: float) -> None:
        """Pods first, with their grace; then this process."""
        if self._ending and grace_s > 0:
            return
        self._ending = True
        self._signal(list(self._running), signal.SIGTERM)
        self._loop.later(grace_s, lambda: self._signal(list(self._running), signal.SIGKILL))
        # What cannot even be killed (a hung file system) is left to Slurm.
        self._loop.later(grace_s + _TIDY_S, self._loop.stop)
        self._leave_when_empty()

    def _leave_when_empty(self) -> None:
        if self._ending and not self._running and not self._removing:
            self._loop.stop()


def facts(environ: Any) -> AllocationPart:
    """What Slurm says in the environment about this host's part of the allocation; 0 where it says nothing."""
    cpus = _number(environ.get("SLURM_CPUS_ON_NODE", "")) or len(os.sched_getaffinity(0))
    memory_mb = _number(environ.get("SLURM_MEM_PER_NODE", ""))
    memory_mb = memory_mb or cpus * _number(environ.get("SLURM_MEM_PER_CPU", ""))
    gpus = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""
    return {
        "job_id": environ.get("SLURM_JOB_ID", ""),
        "partition": environ.get("SLURM_JOB_PARTITION", ""),
        "host": environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "cpus": cpus,
        "memory_mb": memory_mb,
        "host_memory_mb": _host_memory_mb(),
        "gpus": _number(environ.get("SLURM_GPUS_ON_NODE", ""))
        or len([one for one in gpus.split(",") if one]),
    }


def _host_memory_mb() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return int(file.readline().split()[1]) >> 10


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
