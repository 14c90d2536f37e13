"""`python3 -m slurmlet.entrypoint POD_DIRECTORY`."""

import sys

from slurmlet.entrypoint.main import main

sys.exit(main())
