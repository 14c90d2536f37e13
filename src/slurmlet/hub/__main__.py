"""`python -m slurmlet.hub <cluster directory>`, as the supervisor starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from slurmlet.hub.hub import run

sys.exit(run(Path(sys.argv[1])))
