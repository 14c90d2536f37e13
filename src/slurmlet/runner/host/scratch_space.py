"""Room on a node's scratch: makes some by removing images that no pod uses, and says where there is none.

A node's scratch may be small, and nobody looks after it. Which images a pod uses is written into its directory there
(`Scratch.use_image`), whose lock says whether the pod lives.
"""

from __future__ import annotations

import errno
import fcntl
import os

from slurmlet.runner.host.scratch import USES, unused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List, Optional, Set

# How every message about this begins: to try again at once is of no use.
NO_ROOM = "no room on the node's scratch"
# File systems need some room for themselves, and a pod for its own files.
_SLACK_BYTES = 16 << 20
_REMEDY = "Set TMPDIR where the cluster is started to a larger directory of the compute nodes, or remove what fills this one"


class NoRoom(Exception):
    """The message names the path, what is needed, what is free, and the remedy."""


def make_room(images: str, kind: str, needed_bytes: int, remove: Callable[[str], None]) -> None:
    """See to it that an image of this size can be unpacked. Raises NoRoom."""
    wanted_bytes = needed_bytes + _SLACK_BYTES
    if free_bytes(images) >= wanted_bytes:
        return
    for name in _unused_images(images, kind):
        _remove_image(images, name, remove)
        if free_bytes(images) >= wanted_bytes:
            return
    raise NoRoom(
        f"{NO_ROOM}: {images} has {_mib(free_bytes(images))} free, and {_mib(wanted_bytes)} are needed to unpack the "
        f"image. {_REMEDY}"
    )


def free_bytes(path: str) -> int:
    seen = os.statvfs(path)
    return seen.f_bavail * seen.f_frsize


def told(error: Exception) -> str:
    """The error's text; for a full file system with the path, what is free there, and the remedy."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return str(error)
    path = os.path.dirname(str(error.filename or "")) or "/"
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return f"{NO_ROOM}: {error}; {path} has {_mib(free_bytes(path))} free. {_REMEDY}"


def _unused_images(images: str, kind: str) -> List[str]:
    """Unpacked images that no living pod uses, the oldest first."""
    used = _used_images(images)
    if used is None:
        return []
    found = []
    for entry in os.scandir(images):
        digest, _, its_kind = entry.name.rpartition("-")
        # Trees of another kind may hold files of users that this process is not.
        if its_kind == kind and digest not in used and not entry.name.startswith("."):
            found.append((entry.stat(follow_symlinks=False).st_ctime, entry.name))
    return [name for _, name in sorted(found)]


def _used_images(images: str) -> Optional[Set[str]]:
    """None: a pod lives here whose runner, an older one, does not say what it uses."""
    pods = os.path.join(os.path.dirname(images), "pods")
    used: Set[str] = set()
    for uid in os.listdir(pods) if os.path.isdir(pods) else ():
        if unused(os.path.join(pods, uid)):
            continue
        try:
            used.update(os.listdir(os.path.join(pods, uid, USES)))
        except FileNotFoundError:
            if os.path.isdir(os.path.join(pods, uid)):
                return None
    return used


def _remove_image(images: str, name: str, remove: Callable[[str], None]) -> None:
    """Under its lock, and not if somebody began to use it meanwhile."""
    tree, aside = os.path.join(images, name), os.path.join(images, f".old-{name}")
    lock = os.open(os.path.join(images, name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(aside)
        os.rename(tree, aside)
        used = _used_images(images)
        if used is None or name.rpartition("-")[0] in used:
            os.rename(aside, tree)
        else:
            remove(aside)
    except OSError:
        # It is being unpacked just now, or somebody else removed it.
        pass
    finally:
        os.close(lock)


def _mib(count_bytes: int) -> str:
    return f"{count_bytes / (1 << 20):.0f} MiB"
