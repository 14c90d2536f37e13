"""Node-local scratch: where images are unpacked and a pod's writable files lie, on this node only.

/tmp is shared with strangers: a directory there is used only if it is ours, 0700 and no link; anything else is left
alone and a fresh private one is made.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import Mapping


class Scratch:
    def __init__(self, base: str, pod_uid: str) -> None:
        self.base = base
        self.images = os.path.join(base, "images")
        self.pod = os.path.join(base, "pods", pod_uid)
        # A tmpfs in the sandbox's own mount namespace: secrets, bundles (they hold the environment), crun's state.
        self.private = os.path.join(self.pod, "private")
        for path in (self.images, self.pod, self.private):
            os.makedirs(path, mode=0o700, exist_ok=True)

    def run_dir(self, container: str, run: int) -> str:
        """Writable layer and mount point of one run of a container."""
        path = os.path.join(self.pod, "containers", container, str(run))
        os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    def private_dir(self, *names: str) -> str:
        path = os.path.join(self.private, *names)
        os.makedirs(path, mode=0o755, exist_ok=True)
        return path


def choose_base(environ: Mapping[str, str], uid: int, name_uid: int) -> str:
    """The user's scratch on this node. `uid` is how we see ourselves (0 inside), name_uid goes into the name."""
    parents = [environ.get("SLURM_TMPDIR", ""), environ.get("TMPDIR", ""), "/tmp"]
    parent = next(
        path for path in parents if path and os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
    )
    path = os.path.join(os.path.abspath(parent), f"slurmlet-{name_uid}")
    if private_and_ours(path, uid):
        return path
    import tempfile

    fresh = tempfile.mkdtemp(prefix=f"slurmlet-{name_uid}-", dir=parent)
    print(f"{path} is not ours alone; using {fresh}", file=sys.stderr, flush=True)
    return fresh


def private_and_ours(path: str, uid: int) -> bool:
    """Make the directory if it is missing; True when it is a real directory, ours and closed to others."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError:
        return False
    seen = os.lstat(path)
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == uid and not seen.st_mode & 0o077
