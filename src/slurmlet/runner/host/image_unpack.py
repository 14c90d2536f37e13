"""An image's rootfs.tar becomes a directory on this node, once, for all pods of the user.

Runs in a forked child (children.call). The tree appears under its final name only when it is complete. The archive is
not trusted: no entry may land outside the tree, hard links stay inside, device nodes are left out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from slurmlet.runner.host.sandbox import SUBUID, Mapping
from slurmlet.runner.host.scratch_space import NO_ROOM, NoRoom, make_room, told

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Costs 6 ms to import, and only the fork that unpacks needs it.
    import tarfile
    from typing import IO, Callable, Dict, Iterable, List, Set, Tuple

_COPY_BYTES = 8 << 20
# What names and links of an archive can be to blame for; all else is the node's doing.
_ARCHIVE_ERRORS = frozenset(
    (errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.EINVAL)
)


class BadArchive(Exception):
    """The archive tries to reach outside its tree, or is no archive."""


def unpack_once(image_dir: str, images: str, mapping: Mapping) -> str:
    """The unpacked tree of an image of the store; other runners of this node wait or find it done."""
    name = f"{os.path.basename(image_dir.rstrip('/'))}-{mapping.kind}"
    tree = os.path.join(images, name)
    marker = os.path.join(images, name + ".boot")
    boot = _boot_id()
    lock = os.open(os.path.join(images, name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(tree):
            if _read(marker) == boot:
                return tree
            # The node went down since: what was not yet on disk then is missing from the tree.
            remove_tree(tree)
        temporary = os.path.join(images, f".new-{name}")
        remove_tree(temporary)
        os.mkdir(temporary, 0o755)
        archive = os.path.join(image_dir, "rootfs.tar")
        try:
            make_room(images, mapping.kind, os.stat(archive).st_size, remove_tree)
            unpack(archive, temporary, mapping)
            os.rename(temporary, tree)
        except OSError as error:
            # Others may have filled it meanwhile.
            text = told(error)
            remove_tree(temporary)
            if text.startswith(NO_ROOM):
                raise NoRoom(text) from error
            raise
        except BaseException:
            remove_tree(temporary)
            raise
        with open(marker, "w", encoding="ascii") as file:
            file.write(boot)
        return tree
    finally:
        os.close(lock)


def find_unpacked(image_dir: str, images: str, mapping: Mapping) -> str:
    """The tree if it is there and good, else ""; saves the fork that unpack_once needs."""
    name = f"{os.path.basename(image_dir.rstrip('/'))}-{mapping.kind}"
    tree = os.path.join(images, name)
    ready = _read(os.path.join(images, name + ".boot")) == _boot_id() and os.path.isdir(tree)
    return tree if ready else ""


def _boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id") or "unknown"


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def remove_tree(path: str) -> None:
    """Also where directories lack permissions; we own all of it. What refuses is left, and nothing is raised."""
    import shutil

    opened: Set[str] = set()

    def open_up(function: Callable[..., object], name: str, _info: object) -> None:
        try:
            os.chmod(os.path.dirname(name), 0o700)
            if os.path.islink(name):
                os.unlink(name)
            elif os.path.isdir(name) and name not in opened:
                opened.add(name)
                os.chmod(name, 0o700)
                shutil.rmtree(name, onerror=open_up)
            elif function is os.unlink:
                os.unlink(name)
        except OSError:
            pass

    if os.path.lexists(path):
        shutil.rmtree(path, onerror=open_up)


def remove_trees(paths: List[str]) -> None:
    for path in paths:
        remove_tree(path)


def unpack(archive: str, root: str, mapping: Mapping) -> None:
    import tarfile

    from slurmlet.linux.safe_tar import headers, open_tar

    try:
        with open(archive, "rb") as raw, open_tar(raw) as tar:
            _Unpacker(root, mapping, raw).run(headers(tar))
    except tarfile.TarError as error:
        raise BadArchive(f"{archive}: {error}") from error


class _Unpacker:
    def __init__(self, root: str, mapping: Mapping, raw: IO[bytes]) -> None:
        self._root = os.path.realpath(root)
        self._mapping = mapping
        self._raw = raw
        # Directory of the archive -> where it really lies; saves a walk for each of its files.
        self._places: Dict[str, str] = {"": self._root}
        self._dir_times: List[Tuple[str, int]] = []

    def run(self, members: Iterable[tarfile.TarInfo]) -> None:
        for member in members:
            try:
                self._entry(member)
            except OSError as error:
                if error.errno not in _ARCHIVE_ERRORS:
                    raise
                raise BadArchive(f"{member.name!r}: {error.strerror}") from error
        for path, when in reversed(self._dir_times):
            os.utime(path, (when, when), follow_symlinks=False)

    def _entry(self, member: tarfile.TarInfo) -> None:
        parts = _clean(member.name)
        if not parts:
            if member.isdir():
                os.chmod(self._root, member.mode & 0o7777)
            return
        target = os.path.join(self._place("/".join(parts[:-1])), parts[-1])
        if member.isdir():
            self._directory(target, member)
            return
        if member.isdev() and not member.isfifo():
            return
        if _clear(target):
            # Other entries may have been resolved through what lay under this name.
            self._places = {"": self._root}
            # And a link put in its place must not lead to where the times of its directories would be set.
            gone = target + "/"
            self._dir_times = [each for each in self._dir_times if not (each[0] + "/").startswith(gone)]
        if member.issym():
            os.symlink(member.linkname, target)
        elif member.islnk():
            self._hard_link(target, member)
            return
        elif member.isfifo():
            os.mkfifo(target)
        else:
            self._file(target, member)
        self._finish(target, member)

    def _directory(self, target: str, member: tarfile.TarInfo) -> None:
        try:
            os.mkdir(target)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(target).st_mode):
                if _clear(target):
                    self._places = {"": self._root}
                os.mkdir(target)
        self._finish(target, member)
        self._dir_times.append((target, int(member.mtime)))

    def _hard_link(self, target: str, member: tarfile.TarInfo) -> None:
        parts = _clean(member.linkname)
        if not parts:
            raise BadArchive(f"{member.name}: hard link to nothing")
        source = os.path.join(self._place("/".join(parts[:-1])), parts[-1])
        try:
            os.link(source, target, follow_symlinks=False)
        except FileNotFoundError as error:
            raise BadArchive(f"{member.name}: hard link to {member.linkname}, which is not there") from error
        except PermissionError as error:
            if not os.path.isdir(source):
                raise
            raise BadArchive(
                f"{member.name}: hard link to {member.linkname}, which is a directory"
            ) from error

    def _file(self, target: str, member: tarfile.TarInfo) -> None:
        handle = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if member.sparse is not None:
                raise BadArchive(f"{member.name}: sparse files are not supported")
            offset, end = member.offset_data, member.offset_data + member.size
            while offset < end:
                copied = os.sendfile(handle, self._raw.fileno(), offset, min(_COPY_BYTES, end - offset))
                if not copied:
                    raise BadArchive(f"{member.name}: the archive ends too early")
                offset += copied
        finally:
            os.close(handle)

    def _finish(self, target: str, member: tarfile.TarInfo) -> None:
        if (
            self._mapping.kind == SUBUID
            and member.uid < self._mapping.uids
            and member.gid < self._mapping.gids
        ):
            os.chown(target, member.uid, member.gid, follow_symlinks=False)
        if not member.issym():
            # After the chown, which would take setuid bits away.
            os.chmod(target, member.mode & 0o7777)
        if not member.isdir():
            os.utime(target, (int(member.mtime), int(member.mtime)), follow_symlinks=False)

    def _place(self, directory: str) -> str:
        """Where a directory of the archive really lies, links resolved inside the tree; made where missing."""
        known = self._places.get(directory)
        if known is not None:
            return known
        place = self._root
        todo = directory.split("/")[::-1]
        links = 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                place = place if place == self._root else os.path.dirname(place)
                continue
            step = os.path.join(place, part)
            try:
                mode = os.lstat(step).st_mode
            except FileNotFoundError:
                os.mkdir(step, 0o755)
                place = step
                continue
            if stat.S_ISDIR(mode):
                place = step
            elif stat.S_ISLNK(mode):
                links += 1
                if links > 40:
                    raise BadArchive(f"{directory}: too many links")
                link = os.readlink(step)
                place = self._root if link.startswith("/") else place
                todo.extend(link.split("/")[::-1])
            else:
                _clear(step)
                os.mkdir(step, 0o755)
                place = step
        self._places[directory] = place
        return place


def _clean(name: str) -> List[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BadArchive(f"{name!r} leads out of the image")
    return parts


def _clear(path: str) -> bool:
    """Make room for an entry; True when a directory or a link had to go."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        remove_tree(path)
    else:
        os.unlink(path)
    return stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
