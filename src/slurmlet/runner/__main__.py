"""`python3 -m slurmlet.runner <pod dir>`."""

import sys

from slurmlet.runner.main import main

sys.exit(main())
