"""`python -m slurmlet.jobcluster …`: what `slurmlet run` becomes inside its job; it loads less than the command does."""

from __future__ import annotations

import sys

from slurmlet.base.errors import SlurmletError
from slurmlet.jobcluster import arguments, step_tasks

if __name__ == "__main__":
    try:
        sys.exit(step_tasks.run(arguments.parse(sys.argv[1:])))
    except SlurmletError as error:
        print(f"slurmlet: {error.message}\n  {error.hint}", file=sys.stderr)
        sys.exit(1)
