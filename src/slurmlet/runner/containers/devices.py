"""The host's devices that a container gets beside its own: GPUs where it asked for some, all where it is privileged.

Only those that this user may open. Rare, so imported only then.

Never makes a device: in a user namespace nobody can. A bind mount of the host's own node is as good.
"""

from __future__ import annotations

import os
import stat
from typing import Dict, Iterator, List

# What every container has of its own, or must not have of the host's: terminals, shared memory, message queues.
_OWN = frozenset(
    ["null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts", "shm", "mqueue", "fd"]
)
# A host with thousands of disks: enough is enough, each is a mount.
_MOST = 512


_GPUS = ("nvidia", "kfd", "dri")
# Which of the host's GPUs are the job's: Slurm says so to the job, and the container's libraries look there.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")


def gpus(root: str = "/dev") -> List[str]:
    return [path for path in usable(root) if path[len(root) + 1 :].startswith(_GPUS)]


def gpu_variables() -> Dict[str, str]:
    return {name: os.environ[name] for name in _VISIBLE if name in os.environ}


def usable(root: str = "/dev") -> List[str]:
    """Paths of devices below `root` that can be opened for reading or writing, in their order."""
    return sorted(_found(root, top=True))[:_MOST]


def _found(folder: str, top: bool = False) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if top and entry.name in _OWN:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _found(entry.path)
        elif _is_usable_device(entry):
            yield entry.path


def _is_usable_device(entry: os.DirEntry[str]) -> bool:
    try:
        mode = entry.stat(follow_symlinks=False).st_mode
    except OSError:
        return False
    is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
    return is_device and (os.access(entry.path, os.R_OK) or os.access(entry.path, os.W_OK))
