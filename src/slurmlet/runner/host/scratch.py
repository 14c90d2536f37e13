"""Node-local scratch: where images are unpacked and a pod's writable files lie, on this node only.

/tmp is shared with strangers: a directory there is used only if it is ours, 0700 and no link; anything else is left
alone and a fresh private one is made. A runner that was killed leaves its pod's files behind; the next one of the user
on this node removes them.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Mapping


# In a pod's directory: a file for each image that the pod uses, by the name of its directory in the store.
USES = "uses"
# Between making a pod's directory and locking it lies a moment in which it looks abandoned.
_YOUNG_S = 60.0


class Scratch:
    def __init__(self, base: str, pod_uid: str) -> None:
        self.base = base
        self.images = os.path.join(base, "images")
        self.pod = os.path.join(base, "pods", pod_uid)
        # A short name: sockets in it may have paths of 108 bytes at most.
        # A tmpfs in the sandbox's own mount namespace: secrets, bundles (they hold the environment), crun's state.
        self.private = os.path.join(self.pod, "p")
        for path in (self.images, self.pod, self.private, os.path.join(self.pod, USES)):
            os.makedirs(path, mode=0o700, exist_ok=True)
        # Held as long as this process lives: says to others that the pod's files are in use.
        self._lock = os.open(self.pod, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def use_image(self, image_dir: str) -> None:
        """Before it is looked for: from now on nobody on this node removes it to make room."""
        name = os.path.basename(image_dir.rstrip("/"))
        os.close(os.open(os.path.join(self.pod, USES, name), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def abandoned(self) -> List[str]:
        """Directories of pods of this user whose runner is gone."""
        pods = os.path.dirname(self.pod)
        found = [os.path.join(pods, name) for name in os.listdir(pods)]
        return [path for path in found if path != self.pod and unused(path)]

    def run_dir(self, container: str, run: int) -> str:
        """Writable layer and mount point of one run of a container."""
        path = os.path.join(self.pod, "containers", container, str(run))
        os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    def private_dir(self, *names: str) -> str:
        path = os.path.join(self.private, *names)
        os.makedirs(path, mode=0o755, exist_ok=True)
        return path


def unused(path: str) -> bool:
    """Whether the runner of this pod's directory is gone."""
    try:
        if time.time() - os.stat(path).st_ctime < _YOUNG_S:
            return False
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


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

    # One substitute for all: a squatter must not make us fill the disk with a copy of each image for each pod.
    for name in sorted(os.listdir(parent)):
        earlier = os.path.join(parent, name)
        if name.startswith(f"slurmlet-{name_uid}-") and private_and_ours(earlier, uid):
            return earlier
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
