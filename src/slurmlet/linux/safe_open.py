"""Opening a path below a directory that a container (or a hostile image) may have filled with links.

Every step is taken from an open directory with O_NOFOLLOW, and links are resolved by hand, so nothing outside the
directory can be reached, even while somebody swaps entries under our hands.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List


_MAX_LINKS = 40


class Escape(OSError):
    """The path leads out of its directory."""


def open_beneath(root: str, path: str, *, links_from_root: bool = False, make_dirs: bool = False) -> int:
    """An O_PATH descriptor of `path` below `root`.

    links_from_root: absolute links start at `root` again (an image's tree); otherwise they are an Escape, as is any
    `..` above the root. make_dirs: missing directories are made (0755), as the kubelet does for subPath.
    """
    stack: List[int] = [os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    todo = _parts(path)[::-1]
    links = 0
    try:
        while todo:
            part = todo.pop()
            if part == "..":
                if len(stack) > 1:
                    os.close(stack.pop())
                elif not links_from_root:
                    raise Escape(f"{path!r} leads out of its directory")
                continue
            fd = _step(stack[-1], part, make_dirs)
            if not stat.S_ISLNK(os.fstat(fd).st_mode):
                stack.append(fd)
                continue
            target = os.readlink("", dir_fd=fd)
            os.close(fd)
            links += 1
            if links > _MAX_LINKS:
                raise Escape(f"{path!r}: too many links")
            if target.startswith("/"):
                if not links_from_root:
                    raise Escape(f"{path!r} leads out of its directory")
                _close(stack[1:])
                del stack[1:]
            todo.extend(_parts(target)[::-1])
        return stack.pop()
    finally:
        _close(stack)


def read_beneath(root: str, path: str, max_bytes: int = 4 << 20) -> bytes:
    """The content of a regular file of an image, or b"" where there is none."""
    try:
        found = open_beneath(root, path, links_from_root=True)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return b""
        with open(f"/proc/self/fd/{found}", "rb") as file:
            return file.read(max_bytes)
    except OSError:
        return b""
    finally:
        os.close(found)


def _step(parent: int, part: str, make_dirs: bool) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(part, flags, dir_fd=parent)
    except FileNotFoundError:
        if not make_dirs:
            raise
    try:
        os.mkdir(part, 0o755, dir_fd=parent)
    except FileExistsError:
        pass
    return os.open(part, flags, dir_fd=parent)


def _parts(path: str) -> List[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _close(fds: List[int]) -> None:
    for fd in fds:
        os.close(fd)
