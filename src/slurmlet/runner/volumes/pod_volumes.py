"""A pod's volumes on this node, and the mounts of its containers.

Secrets and config maps lie in a tmpfs of the sandbox's own mount namespace: their content never touches a disk and no
process outside the sandbox can open them.
"""

from __future__ import annotations

import os
import stat

from slurmlet.linux import syscalls
from slurmlet.linux.record import Record
from slurmlet.linux.safe_open import open_beneath
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.host.image_unpack import find_unpacked, unpack_once
from slurmlet.runner.host.sandbox import SUBUID, Mapping
from slurmlet.runner.host.scratch import Scratch
from slurmlet.runner.volumes.projected_files import BadName, project

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Tuple

    from slurmlet.protocol.pod_plan import (
        ContainerPlan,
        EmptyVolume,
        FilesVolume,
        MountPlan,
        PodPlan,
        ProjectedFile,
        Volume,
    )


# As the kubelet's documentation promises for image volumes; read-only besides.
_IMAGE_OPTIONS = ("noexec", "nosuid", "nodev")


class Mount(Record):
    source: str
    path: str
    read_only: bool
    # Further options of a bind mount, such as noexec.
    options: Tuple[str, ...] = ()


class VolumeError(Exception):
    """A container's mounts cannot be made as written."""

    event, reason = "Failed", "CreateContainerConfigError"


class MountFailed(VolumeError):
    """A volume cannot be set up; the kubelet's words, its event and its reason."""

    event, reason = "FailedMount", "ContainerCreating"

    def __init__(self, volume: str, why: object) -> None:
        super().__init__(f'MountVolume.SetUp failed for volume "{volume}" : {why}')


class Volumes:
    def __init__(self, plan: PodPlan, scratch: Scratch, mapping: Mapping) -> None:
        self._plans: Dict[str, Volume] = plan.get("volumes") or {}
        self._scratch, self._mapping = scratch, mapping
        self._paths: Dict[str, str] = {}
        self._staged = 0
        group = plan.get("fs_group")
        # With one uid there is one group, and every file is the container's own already.
        usable = group is not None and mapping.kind == SUBUID and int(group) < mapping.gids
        self._group: Optional[int] = int(group) if usable and group is not None else None

    # Before the first container.

    def prepare(self, children: Children, on_done: Callable[[str], None]) -> None:
        """Unpack the images of image volumes, one after another; on_done gets "" or what went wrong."""
        waiting = [plan["image_dir"] for plan in self._plans.values() if plan["kind"] == "image"]

        def next_one(_tree: Any, error: str) -> None:
            if error or not waiting:
                on_done(error)
                return
            directory = waiting.pop()
            self._scratch.use_image(directory)
            if find_unpacked(directory, self._scratch.images, self._mapping):
                next_one("", "")
                return
            children.call(lambda: unpack_once(directory, self._scratch.images, self._mapping), next_one)

        next_one("", "")

    # For each run of a container.

    def mounts(self, container: ContainerPlan) -> List[Mount]:
        """The mounts of one container, its volumes made where this is their first use. Raises VolumeError, OSError."""
        found = [self._mount(wanted) for wanted in container.get("mounts") or []]
        # Outer paths first, or an outer mount would hide an inner one.
        return sorted(found, key=lambda mount: os.path.normpath(mount.path).count("/"))

    def _mount(self, wanted: MountPlan) -> Mount:
        name = str(wanted["volume"])
        source, plan = self.path(name), self._plans[name]
        read_only = bool(wanted.get("read_only") or plan.get("read_only")) or plan["kind"] in (
            "files",
            "image",
        )
        if wanted.get("sub_path"):
            source = self._sub_path(source, str(wanted["sub_path"]), plan)
        if wanted.get("recursive_read_only"):
            source = self._all_read_only(name, source, wanted["recursive_read_only"] == "Enabled")
        options = _IMAGE_OPTIONS if plan["kind"] == "image" else ()
        return Mount(source, str(wanted["path"]), read_only, options)

    def path(self, name: str) -> str:
        """Where the volume lies, made where this is its first use. Raises VolumeError."""
        if name not in self._paths:
            if name not in self._plans:
                raise VolumeError(f"no volume named {name!r} in the pod")
            try:
                self._paths[name] = self._make(name, self._plans[name])
            except (OSError, BadName, VolumeError) as error:
                raise MountFailed(name, error) from error
        return self._paths[name]

    def _make(self, name: str, plan: Volume) -> str:
        if plan["kind"] == "files":
            path = self._scratch.private_dir("volumes", name)
            project(path, plan, self._group)
            return path
        if plan["kind"] == "empty":
            return self._empty(name, plan)
        if plan["kind"] == "image":
            tree = find_unpacked(plan["image_dir"], self._scratch.images, self._mapping)
            if not tree:
                raise OSError(f"image {plan['image']} is not unpacked")
            return tree
        if plan["kind"] == "host":
            path = host_path(str(plan["path"]), str(plan.get("type") or ""))
            # A persistent volume of ours is made 0700: enough for one uid, not for the users of an image.
            if plan.get("owned") and self._mapping.kind == SUBUID and os.stat(path).st_uid == os.geteuid():
                self._open_to_pod(path)
            return path
        raise VolumeError(f"volume {name!r} is of the unknown kind {plan['kind']!r}")

    def _empty(self, name: str, plan: EmptyVolume) -> str:
        path = os.path.join(self._scratch.pod, "volumes", name)
        os.makedirs(path, mode=0o755, exist_ok=True)
        if plan.get("medium") == "Memory":
            size = f",size={plan['size_bytes']}" if plan["size_bytes"] else ""
            syscalls.mount("tmpfs", path, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=1777" + size)
        self._open_to_pod(path, 0o1777 if plan.get("medium") == "Memory" else 0o777)
        return path

    def _open_to_pod(self, path: str, mode: int = 0o777) -> None:
        """The kubelet's mode for emptyDir: anybody in the pod may write; nobody else passes the 0700 above it."""
        if self._group is not None:
            os.chown(path, -1, self._group)
            mode |= stat.S_ISGID
        os.chmod(path, mode)

    def _sub_path(self, volume: str, path: str, plan: Volume) -> str:
        """Bind what was opened, not its name: a container of this pod could swap the name for a link meanwhile."""
        image = plan["kind"] == "image"
        make = os.path.isdir(volume) and not image and not plan.get("read_only")
        fresh = make and not os.path.lexists(os.path.join(volume, path))
        try:
            found = open_beneath(volume, path, links_from_root=image, make_dirs=make)
        except OSError as error:
            raise VolumeError(f"failed to prepare subPath {path!r}: {error}") from error
        try:
            if fresh:
                os.chmod(f"/proc/self/fd/{found}", os.stat(volume).st_mode & 0o7777)
            return self._stage(f"/proc/self/fd/{found}", stat.S_ISDIR(os.fstat(found).st_mode))
        finally:
            os.close(found)

    def _all_read_only(self, name: str, source: str, must: bool) -> str:
        staged = self._stage(source, os.path.isdir(source))
        try:
            syscalls.read_only_below(staged)
        except OSError as error:
            if must:
                raise VolumeError(
                    f'volume "{name}" requested recursive read-only mode, but it is not supported by this node: {error}'
                ) from error
        return staged

    def _stage(self, source: str, is_dir: bool) -> str:
        self._staged += 1
        target = os.path.join(self._scratch.private_dir("staged"), str(self._staged))
        if is_dir:
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        syscalls.bind(source, target)
        return target

    # While the pod runs.

    def refresh(self, volumes: Dict[str, FilesVolume]) -> None:
        """Newer contents of volumes of files. A mount by subPath keeps what it has, as with a kubelet."""
        for name, newer in volumes.items():
            plan = self._plans.get(name)
            if plan is None or plan["kind"] != "files":
                continue
            kept = plan.get("files") or {}
            newer = {
                **newer,
                "files": {path: _or_kept(file, kept.get(path)) for path, file in newer["files"].items()},
            }
            if name in self._paths:
                try:
                    project(self._paths[name], newer, self._group)
                except (OSError, BadName) as error:
                    raise MountFailed(name, error) from error
            self._plans[name] = newer

    def on_disk(self) -> List[str]:
        """Where the emptyDirs are that take room on the node's disk."""
        return [
            path
            for name, path in self._paths.items()
            if self._plans[name]["kind"] == "empty" and self._plans[name].get("medium") != "Memory"
        ]

    def limited(self) -> Dict[str, Tuple[str, int, str]]:
        """emptyDirs on disk that have a limit: name → (path, bytes, the limit as written)."""
        return {
            name: (self._paths[name], limit_bytes(plan), plan["limit"])
            for name, plan in self._plans.items()
            if name in self._paths and plan["kind"] == "empty" and limit_bytes(plan)
        }


def limit_bytes(plan: Volume) -> int:
    """Of an emptyDir on disk; 0: it has none."""
    return plan["size_bytes"] or 0 if plan["kind"] == "empty" and plan["medium"] != "Memory" else 0


def _or_kept(file: ProjectedFile, kept: Optional[ProjectedFile]) -> ProjectedFile:
    return {**file, "data": kept.get("data", "") if kept else ""} if file.get("keep") else file


_CHECKS: Dict[str, Tuple[Callable[[int], bool], str]] = {
    "Directory": (stat.S_ISDIR, "a directory"),
    "DirectoryOrCreate": (stat.S_ISDIR, "a directory"),
    "File": (stat.S_ISREG, "a file"),
    "FileOrCreate": (stat.S_ISREG, "a file"),
    "Socket": (stat.S_ISSOCK, "a socket file"),
    "CharDevice": (stat.S_ISCHR, "a character device"),
    "BlockDevice": (stat.S_ISBLK, "a block device"),
}


def host_path(path: str, kind: str) -> str:
    """A path of the host, seen with the user's own rights, checked as the kubelet checks hostPath types."""
    if not path.startswith("/"):
        raise VolumeError(f"hostPath {path!r} is not absolute")
    # Without a type, runtimes make a missing directory too.
    if not os.path.exists(path):
        if kind in ("DirectoryOrCreate", ""):
            os.makedirs(path, mode=0o755, exist_ok=True)
        elif kind == "FileOrCreate":
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = 0
    check = _CHECKS.get(kind)
    if check is not None and not check[0](mode):
        raise VolumeError(f"hostPath type check failed: {path} is not {check[1]}")
    return path
