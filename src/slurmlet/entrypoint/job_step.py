"""The runner as a step of a job that srun allocated: runs the pod, then ends the job with the pod's exit code.

A batch job ends with its script; an allocation does not end with its step. So the outer process, the only one of the
step that is not in the pod's namespaces, tells slurmctld. It does that before it exits: with the step gone and the job
still there, the hub would have to (and does, where this process was killed or the node has no library of Slurm's).
"""

from __future__ import annotations

import os
import signal
import sys
import time

from slurmlet.runner.host.sandbox import SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List


_TRIES, _AGAIN_S = 5, 1.0


def main(arguments: List[str]) -> int:
    if len(arguments) != 2:
        print("usage: runner step <library> <pod directory>", file=sys.stderr)
        return 2
    library, directory = arguments
    # Until the pod is there to hear them: who dies now leaves a job that nobody ends.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    code = _run(directory)
    _tell(library, code << 8)
    return code


def _run(directory: str) -> int:
    from slurmlet.runner.pod import pod_main

    try:
        return pod_main.run(directory)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _tell(library: str, status: int) -> None:
    """A slurmctld that is away for a moment must not cost the job its exit code."""
    from slurmlet.entrypoint import job_completion

    for _ in range(_TRIES):
        try:
            job_completion.complete(job_completion.load(library), int(os.environ["SLURM_JOB_ID"]), status)
            return
        except job_completion.SlurmAway as error:
            print(error, file=sys.stderr, flush=True)
            time.sleep(_AGAIN_S)
        except (OSError, KeyError, ValueError) as error:
            # Also of a job that is over already: Slurm ended it, and knows better how.
            print(error, file=sys.stderr, flush=True)
            return
