"""Volumes of files (config maps, secrets, tokens …) laid out and changed as the kubelet does it.

    <volume>/..data            -> ..2026_01_31_12_00_00.123456
    <volume>/..2026_01_…/key      the content
    <volume>/key               -> ..data/key

A change writes a new dated directory and swaps `..data` by one rename, so a reader sees all of the old or all of the
new. Programs that watch their configuration wait for exactly this rename.
"""

from __future__ import annotations

import binascii
import os
import time

from slurmlet.runner.host.image_unpack import remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Optional, Set

    from slurmlet.protocol.pod_plan import FilesVolume, ProjectedFile


DATA, _NEW_DATA = "..data", "..data_tmp"


class BadName(Exception):
    """A file that would lie outside its volume, or over the links that make the swap work."""


def project(directory: str, plan: FilesVolume, group: Optional[int] = None) -> bool:
    """Bring the volume to what the plan says; False when it is so already. `group`: who owns the files (fsGroup)."""
    files = {_clean(name): file for name, file in (plan.get("files") or {}).items()}
    data = os.path.join(directory, DATA)
    old = os.readlink(data) if os.path.islink(data) else ""
    if old and not _differs(os.path.join(directory, old), files):
        _link_names(directory, files)
        return False
    fresh = _dated_directory(directory)
    try:
        _write(os.path.join(directory, fresh), files, int(plan.get("default_mode") or 0o644), group)
        new = os.path.join(directory, _NEW_DATA)
        if os.path.lexists(new):
            os.unlink(new)
        os.symlink(fresh, new)
        os.rename(new, data)
    except BaseException:
        remove_tree(os.path.join(directory, fresh))
        raise
    _link_names(directory, files)
    _unlink_names(directory, files)
    if old:
        remove_tree(os.path.join(directory, old))
    return True


def _clean(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or name.startswith("/") or ".." in parts or parts[0].startswith(".."):
        raise BadName(f"bad file name {name!r}")
    return "/".join(parts)


def _content(file: ProjectedFile) -> bytes:
    return binascii.a2b_base64(file.get("data") or "")


def _differs(directory: str, files: Dict[str, ProjectedFile]) -> bool:
    present: Set[str] = set()
    for place, _, names in os.walk(directory):
        present.update(os.path.relpath(os.path.join(place, name), directory) for name in names)
    if present != set(files):
        return True
    for name, file in files.items():
        with open(os.path.join(directory, name), "rb") as have:
            if have.read() != _content(file):
                return True
    return False


def _dated_directory(directory: str) -> str:
    stamp = time.strftime("..%Y_%m_%d_%H_%M_%S.", time.gmtime())
    while True:
        name = stamp + str(int.from_bytes(os.urandom(4), "big"))
        try:
            os.mkdir(os.path.join(directory, name), 0o755)
            return name
        except FileExistsError:
            continue


def _write(directory: str, files: Dict[str, ProjectedFile], default_mode: int, group: Optional[int]) -> None:
    for name, file in files.items():
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        mode = file.get("mode")
        mode = int(mode if mode is not None else default_mode) & 0o777
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(_content(file))
            if group is not None:
                os.fchown(handle, -1, group)
                mode |= 0o440
            os.fchmod(handle, mode)


def _link_names(directory: str, files: Dict[str, ProjectedFile]) -> None:
    for name in _top_names(files):
        path = os.path.join(directory, name)
        if not os.path.lexists(path):
            os.symlink(f"{DATA}/{name}", path)


def _unlink_names(directory: str, files: Dict[str, ProjectedFile]) -> None:
    wanted = set(_top_names(files))
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if not name.startswith("..") and name not in wanted and os.path.islink(path):
            os.unlink(path)


def _top_names(files: Dict[str, ProjectedFile]) -> List[str]:
    return sorted({name.split("/")[0] for name in files})
