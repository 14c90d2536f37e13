"""The runner as a step of a job that srun allocated: runs the pod in a child, then ends the job with the pod's exit code.

A batch job ends with its script; an allocation does not end with its step. So this process, the only one of the step
that is not the pod's, waits, and tells slurmctld. It does that before it exits: with the step gone and the job still
there, the hub would have to (and does, where this process was killed or the node has no library of Slurm's).
"""

from __future__ import annotations

import os
import sys
import time

from slurmlet.runner import linux
from slurmlet.runner.lean import signal
from slurmlet.runner.lean.typing import List

_TRIES, _AGAIN_S = 5, 1.0


def main(arguments: List[str]) -> int:
    if len(arguments) != 2:
        print("usage: runner step <library> <pod directory>", file=sys.stderr)
        return 2
    library, directory = arguments
    parent = os.getpid()
    # Slurm signals every process of the step: the pod's runner hears it too, and it is its end that ends this one.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    pid = os.fork()
    if pid == 0:
        os._exit(_become_runner(directory, parent))
    status = _wait_for(pid)
    _tell(library, status)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _become_runner(directory: str, parent: int) -> int:
    code = 1
    try:
        linux.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            return code
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from slurmlet.runner.main import main as run

        code = run([directory])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _wait_for(pid: int) -> int:
    while True:
        found, status = os.waitpid(pid, 0)
        if found == pid:
            return status


def _tell(library: str, status: int) -> None:
    """A slurmctld that is away for a moment must not cost the job its exit code."""
    from slurmlet.runner import completing

    for _ in range(_TRIES):
        try:
            completing.complete(completing.load(library), int(os.environ["SLURM_JOB_ID"]), status)
            return
        except completing.SlurmAway as error:
            print(error, file=sys.stderr, flush=True)
            time.sleep(_AGAIN_S)
        except (OSError, KeyError, ValueError) as error:
            # Also of a job that is over already: Slurm ended it, and knows better how.
            print(error, file=sys.stderr, flush=True)
            return
