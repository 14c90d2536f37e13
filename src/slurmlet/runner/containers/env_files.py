"""Variables from files of volumes (valueFrom.fileKeyRef): read when the container starts, for an init container may have
written them. Imported only by pods that use them.

The hub put a mark in the place of each such value; here the marks are replaced in variables, arguments and subPaths.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Callable, List, Optional

from slurmlet.linux.safe_open import open_beneath
from slurmlet.runner.volumes.pod_volumes import VolumeError

if TYPE_CHECKING:
    from slurmlet.protocol.pod_plan import ContainerPlan, EnvironmentFile, MountPlan

_MARK = re.compile("\ufdd0(\\d+)\ufdd1")
_MAX_FILE_BYTES = 1 << 20


class BadEnvFile(VolumeError):
    """In the kubelet's words."""


def resolve(plan: ContainerPlan, volume_path: Callable[[str], str]) -> ContainerPlan:
    """The plan with all values in place. Raises VolumeError, OSError."""
    files = plan["env_files"]
    values = [_value(file, volume_path) for file in files]

    def put(found: re.Match[str]) -> str:
        number = int(found.group(1))
        value, otherwise = values[number], files[number]["otherwise"]
        if value is None and otherwise is None:
            # What is not there is not expanded.
            return f"$({files[number]['name']})"
        return value if value is not None else filled(str(otherwise))

    def filled(text: str) -> str:
        return _MARK.sub(put, text)

    env = []
    for name, value in plan["env"]:
        found = _MARK.fullmatch(value)
        file = files[int(found.group(1))] if found else None
        if file is not None and file["name"] == name and values[int(found.group(1))] is None:  # type: ignore[union-attr]
            instead = file["image"] if file["otherwise"] is None else file["otherwise"]
            if instead is None:
                continue
            value = instead
        env.append([name, filled(value)])
    mounts: List[MountPlan] = [{**mount, "sub_path": filled(mount["sub_path"])} for mount in plan["mounts"]]
    return {**plan, "env": env, "argv": [filled(word) for word in plan["argv"]], "mounts": mounts}


def _value(file: EnvironmentFile, volume_path: Callable[[str], str]) -> Optional[str]:
    """None where the key is missing and may be. An empty value counts as missing, as with a kubelet."""
    root, path, key = volume_path(str(file["volume"])), str(file["path"]), str(file["key"])
    try:
        handle = open_beneath(root, path)
        try:
            with open(f"/proc/self/fd/{handle}", "rb") as opened:
                text = opened.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
        finally:
            os.close(handle)
        value = parse(text, key)
    except (OSError, ValueError) as error:
        raise BadEnvFile(f"couldn't parse env file: {error}") from error
    if not value and not file["optional"]:
        raise BadEnvFile(f'environment variable key "{key}" not found in file "{path}"')
    return value or None


def parse(text: str, key: str) -> str:
    """The value of a key, "" for none: NAME='value' lines, quotes over several lines, comments. Raises ValueError."""
    # Not splitlines: it knows more ends of a line than an env file has.
    lines = iter(enumerate(re.split("\r?\n", text), 1))
    for number, line in lines:
        line = line.lstrip(" \t")
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals:
            raise ValueError(f"invalid environment variable format at line {number}: missing '='")
        if not name or name != name.rstrip(" \t"):
            raise ValueError(f"invalid environment variable format at line {number}: bad variable name")
        # As a shell has it: NAME= 'value' leaves the variable empty.
        found = "" if value.startswith((" ", "\t")) else _quoted(number, value, lines)
        if name == key:
            return found
    return ""


def _quoted(number: int, value: str, lines: Any) -> str:
    where = f"invalid environment variable format at line {number}"
    if not value.startswith("'"):
        raise ValueError(f"{where}: value must be enclosed in single quotes")
    parts, rest = [], value[1:]
    while "'" not in rest:
        parts.append(rest + "\n")
        try:
            number, rest = next(lines)
        except StopIteration:
            raise ValueError(f"{where}: unclosed single quote") from None
    last, _, after = rest.partition("'")
    after = after.lstrip(" \t")
    if after and not after.startswith("#"):
        raise ValueError(
            f"invalid environment variable format at line {number}: unexpected content after closing quote"
        )
    return "".join((*parts, last))
