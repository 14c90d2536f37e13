"""Where the runner begins: claim the pod, make the sandbox, run the pod in it, exit with the pod's exit code.

Imports are late on purpose: the outer process stays as small as it can, and a runner that loses the claim leaves
without having loaded anything.
"""

from __future__ import annotations

import gc
import os
import sys

from slurmlet.runner.lean.typing import List, Optional


def main(argv: Optional[List[str]] = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    # Loading makes much and leaves nothing to collect; looking for it is a twentieth of a start.
    gc.disable()
    if arguments[:1] == ["agent"]:
        from slurmlet.runner import agent

        return agent.main(arguments[1:])
    if arguments[:1] == ["step"]:
        from slurmlet.runner import stepping

        return stepping.main(arguments[1:])
    if arguments[:1] == ["complete"]:
        from slurmlet.runner import completing

        return completing.main(arguments[1:])
    if len(arguments) != 1:
        print("usage: runner <pod directory> | runner agent <node directory>", file=sys.stderr)
        return 2
    from slurmlet.runner.claiming import PodDir, claim

    pod = PodDir(os.path.abspath(arguments[0]))
    job_id = os.environ.get("SLURM_JOB_ID", "none")
    # Files on the shared file system are made with modes of their own; the rest lies below a 0700 scratch.
    os.umask(0o022)
    holder = claim(pod, job_id)
    if holder:
        print(f"pod {pod.uid} belongs to Slurm job {holder}; this job ({job_id}) leaves", file=sys.stderr)
        return 0
    from slurmlet.runner import sandbox

    def inside(told: sandbox.Inside) -> int:
        from slurmlet.runner.running import run_pod

        return run_pod(pod, job_id, told)

    try:
        return sandbox.enter(inside)
    except sandbox.SandboxError as error:
        from slurmlet.runner.reporting import leave_word

        print(str(error), file=sys.stderr)
        leave_word(pod, "NoSandbox", str(error))
        return 1
