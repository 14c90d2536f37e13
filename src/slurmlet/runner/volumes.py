"""A pod's volumes on this node, and the mounts of its containers.

Secrets and config maps lie in a tmpfs of the sandbox's own mount namespace: their content never touches a disk and no
process outside the sandbox can open them.
"""

from __future__ import annotations

import binascii
import os
import stat
from typing import Any, Dict, List, Tuple

from slurmlet.runner import linux
from slurmlet.runner.beneath import open_beneath
from slurmlet.runner.bundle import Mount
from slurmlet.runner.scratch import Scratch


class VolumeError(Exception):
    """A volume cannot be set up as written."""


class Volumes:
    def __init__(self, plan: Dict[str, Any], scratch: Scratch) -> None:
        self._plans: Dict[str, Dict[str, Any]] = plan.get("volumes") or {}
        self._scratch = scratch
        self._paths: Dict[str, str] = {}
        self._staged = 0

    def mounts(self, container: Dict[str, Any]) -> List[Mount]:
        """The mounts of one container, its volumes made where this is their first use. Raises VolumeError, OSError."""
        found = []
        for wanted in container.get("mounts") or []:
            source = self._path(str(wanted["volume"]))
            if wanted.get("sub_path"):
                source = self._sub_path(source, str(wanted["sub_path"]))
            kind = self._plans[str(wanted["volume"])]["kind"]
            found.append(Mount(source, str(wanted["path"]), bool(wanted.get("read_only")) or kind == "files"))
        # Outer paths first, or an outer mount would hide an inner one.
        return sorted(found, key=lambda mount: os.path.normpath(mount.path).count("/"))

    def _path(self, name: str) -> str:
        if name not in self._paths:
            if name not in self._plans:
                raise VolumeError(f"no volume named {name!r} in the pod")
            self._paths[name] = self._make(name, self._plans[name])
        return self._paths[name]

    def _make(self, name: str, plan: Dict[str, Any]) -> str:
        if plan["kind"] == "files":
            return write_files(self._scratch.private_dir("volumes", name), plan)
        if plan["kind"] == "empty":
            return self._empty(name, plan)
        if plan["kind"] == "host":
            return host_path(str(plan["path"]), str(plan.get("type") or ""))
        raise VolumeError(f"volume {name!r} is of the unknown kind {plan['kind']!r}")

    def _empty(self, name: str, plan: Dict[str, Any]) -> str:
        path = os.path.join(self._scratch.pod, "volumes", name)
        os.makedirs(path, mode=0o755, exist_ok=True)
        if plan.get("medium") == "Memory":
            size = f",size={int(plan['size_bytes'])}" if plan.get("size_bytes") else ""
            linux.mount("tmpfs", path, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777" + size)
        # The kubelet's mode for emptyDir; anybody in the pod may write, scratch itself is 0700.
        os.chmod(path, 0o1777 if plan.get("medium") == "Memory" else 0o777)
        return path

    def _sub_path(self, volume: str, path: str) -> str:
        """Bind what was opened, not its name: a container of this pod could swap the name for a link meanwhile."""
        try:
            found = open_beneath(volume, path, make_dirs=os.path.isdir(volume))
        except OSError as error:
            raise VolumeError(f"subPath {path!r}: {error}") from error
        try:
            self._staged += 1
            target = os.path.join(self._scratch.private_dir("staged"), str(self._staged))
            if stat.S_ISDIR(os.fstat(found).st_mode):
                os.mkdir(target)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            linux.bind(f"/proc/self/fd/{found}", target)
            return target
        finally:
            os.close(found)


def write_files(directory: str, plan: Dict[str, Any]) -> str:
    for relative, file in (plan.get("files") or {}).items():
        parts = [part for part in relative.split("/") if part not in ("", ".")]
        if not parts or ".." in parts or relative.startswith("/"):
            raise VolumeError(f"bad file name {relative!r}")
        path = os.path.join(directory, *parts)
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        mode = file.get("mode")
        mode = int(mode if mode is not None else plan.get("default_mode") or 0o644) & 0o777
        handle = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(binascii.a2b_base64(file["data"]))
            os.fchmod(handle, mode)
    return directory


_CHECKS: Dict[str, Tuple[Any, str]] = {
    "Directory": (stat.S_ISDIR, "a directory"),
    "DirectoryOrCreate": (stat.S_ISDIR, "a directory"),
    "File": (stat.S_ISREG, "a file"),
    "FileOrCreate": (stat.S_ISREG, "a file"),
    "Socket": (stat.S_ISSOCK, "a socket"),
    "CharDevice": (stat.S_ISCHR, "a character device"),
    "BlockDevice": (stat.S_ISBLK, "a block device"),
}


def host_path(path: str, kind: str) -> str:
    """A path of the host, seen with the user's own rights, checked as the kubelet checks hostPath types."""
    if not path.startswith("/"):
        raise VolumeError(f"hostPath {path!r} is not absolute")
    # Without a type, runtimes make a missing directory too.
    if kind == "DirectoryOrCreate" or (not kind and not os.path.lexists(path)):
        os.makedirs(path, mode=0o755, exist_ok=True)
    elif kind == "FileOrCreate" and not os.path.exists(path):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise VolumeError(f"hostPath type check failed: {path}: {error.strerror}") from error
    check = _CHECKS.get(kind)
    if check is not None and not check[0](mode):
        raise VolumeError(f"hostPath type check failed: {path} is not {check[1]}")
    return path
