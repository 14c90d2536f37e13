"""A container's root: the image below, a fresh writable layer above, mounted in the sandbox.

Tried in this order, and the first that works on this node is kept: the kernel's overlay in the user namespace
(Linux ≥ 5.11, not on Lustre or NFS), fuse-overlayfs, a plain copy.
"""

from __future__ import annotations

import os
import sys

from slurmlet.linux import syscalls
from slurmlet.linux.programs import find_program
from slurmlet.runner.host.child_processes import Children

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List


class Roots:
    """Makes root file systems; remembers which way works here."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._kernel_works = True

    def make(self, tree: str, run_dir: str, on_done: Callable[[str, str], None]) -> None:
        """on_done gets (path of the root, "") or ("", what went wrong)."""
        upper, work, root = (os.path.join(run_dir, name) for name in ("upper", "work", "root"))
        for path in (upper, work, root):
            os.makedirs(path, mode=0o755, exist_ok=True)
        # The mode of the container's / is that of the upper directory.
        os.chmod(upper, os.stat(tree).st_mode & 0o7777)
        if self._kernel_works:
            try:
                syscalls.mount(
                    "overlay", root, "overlay", syscalls.MS_NODEV, overlay_options(tree, upper, work)
                )
                on_done(root, "")
                return
            except OSError as error:
                print(f"overlay: {error}; using another way", file=sys.stderr, flush=True)
                self._kernel_works = False
        fuse = find_program("fuse-overlayfs")
        if not fuse:
            self._copy(tree, root, on_done)
            return
        options = f"lowerdir={_escape(tree)},upperdir={_escape(upper)},workdir={_escape(work)}"
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

        def mounted(code: int, _signal: int) -> None:
            if code == 0:
                on_done(root, "")
            else:
                self._copy(tree, root, on_done)

        self._children.spawn([fuse, "-o", options, root], mounted, stdio=(null, 2, 2))
        os.close(null)

    def _copy(self, tree: str, root: str, on_done: Callable[[str, str], None]) -> None:
        self._children.call(
            lambda: copy_tree(tree, root), lambda _value, error: on_done("" if error else root, error)
        )

    @staticmethod
    def drop(run_dir: str) -> None:
        try:
            syscalls.unmount(os.path.join(run_dir, "root"))
        except OSError:
            pass


def overlay_options(tree: str, upper: str, work: str) -> str:
    # userxattr: trusted.* attributes are not ours to write in a user namespace.
    return f"lowerdir={_escape(tree)},upperdir={_escape(upper)},workdir={_escape(work)},userxattr"


def _escape(path: str) -> str:
    return "".join("\\" + char if char in ",:\\" else char for char in path)


def copy_tree(tree: str, root: str) -> None:
    import shutil

    shutil.copytree(tree, root, symlinks=True, dirs_exist_ok=True, copy_function=_copy_file)
    shutil.copystat(tree, root)


def _copy_file(source: str, target: str) -> List[str]:
    # FIFOs and sockets of an image are made anew by whoever needs them.
    import shutil

    if os.path.isfile(source) or os.path.islink(source):
        shutil.copy2(source, target, follow_symlinks=False)
        seen = os.lstat(source)
        os.chown(target, seen.st_uid, seen.st_gid, follow_symlinks=False)
    return []
