"""The subcommands of runner.pyz: a pod in a job of its own, an agent, a step that ends its job, the end of a job.

Imports are late on purpose: each start loads what it needs and no more.
"""

from __future__ import annotations

import gc
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional


USAGE = "usage: runner POD_DIRECTORY | runner agent NODE_DIRECTORY"


def main(argv: Optional[List[str]] = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    # Loading makes much and leaves nothing to collect; looking for it is a twentieth of a start.
    gc.disable()
    if arguments[:1] == ["agent"]:
        from slurmlet.agent import agent

        return agent.main(arguments[1:])
    if arguments[:1] == ["step"]:
        from slurmlet.entrypoint import job_step

        return job_step.main(arguments[1:])
    if arguments[:1] == ["complete"]:
        from slurmlet.entrypoint import job_completion

        return job_completion.main(arguments[1:])
    if len(arguments) != 1:
        print(USAGE, file=sys.stderr)
        return 2
    from slurmlet.runner.pod import pod_main

    return pod_main.run(arguments[0])
