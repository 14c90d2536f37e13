"""`python -m slurmlet.gateway <cluster directory>`, as the supervisor starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from slurmlet.gateway.gateway import run

sys.exit(run(Path(sys.argv[1])))
