"""One pod in this job: claim it, make the sandbox, run it there. The exit code is the pod's.

Imports are late on purpose: the outer process stays as small as it can, and a runner that loses the claim leaves
without having loaded anything.
"""

from __future__ import annotations

import os
import sys


def run(directory: str) -> int:
    from slurmlet.runner.pod.claim import PodDir, claim

    pod = PodDir(os.path.abspath(directory))
    job_id = os.environ.get("SLURM_JOB_ID", "none")
    # Files on the shared file system are made with modes of their own; the rest lies below a 0700 scratch.
    os.umask(0o022)
    holder = claim(pod, job_id)
    if holder:
        print(f"pod {pod.uid} belongs to Slurm job {holder}; this job ({job_id}) leaves", file=sys.stderr)
        return 0
    from slurmlet.runner.host import sandbox

    def inside(told: sandbox.Inside) -> int:
        from slurmlet.runner.pod.pod_runner import run_pod

        return run_pod(pod, job_id, told)

    try:
        return sandbox.enter(inside)
    except sandbox.SandboxError as error:
        from slurmlet.runner.link.reporter import write_failure

        print(str(error), file=sys.stderr)
        write_failure(pod.report, "NoSandbox", str(error))
        return 1
