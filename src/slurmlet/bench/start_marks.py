"""The first act of what is measured: an empty file on the shared file system, whose modification time is the moment.

On a site with several clocks the difference between them is in every figure, on both sides of a comparison.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from slurmlet.base.errors import SlurmletError

PATIENCE_S = 120.0
_LOOK_S = 0.005


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """In the home directory: all hosts must see it."""
    with tempfile.TemporaryDirectory(prefix=".slurmlet-bench-", dir=Path.home()) as name:
        yield Path(name)


def moment_s(mark: Path) -> float:
    """When the file was made."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(FileNotFoundError):
            return mark.stat().st_mtime
        time.sleep(_LOOK_S)
    raise SlurmletError(
        f"no job or pod started within {PATIENCE_S:g} s", hint="Run: squeue; slurmlet kubectl get pods"
    )
