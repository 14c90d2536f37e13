"""A container's environment and command line, resolved in the kubelet's order.

Image variables first, then service variables, envFrom, env; `$(NAME)` expands from what stands before it, `$$` is a
plain dollar, an unknown name stays as written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.model.downward_api import Place, field_value, resource_value
from slurmlet.model.pod_sources import Sources
from slurmlet.protocol.pod_plan import EnvironmentFile

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")


def expand(text: str, variables: Mapping[str, str]) -> str:
    def replace(found: re.Match[str]) -> str:
        if found.group() == "$$":
            return "$"
        return variables.get(found.group(1), found.group())

    return _REFERENCE.sub(replace, text)


def container_environment(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    sources: Sources,
    place: Place,
    services: Mapping[str, str],
    files: list[EnvironmentFile] | None = None,
) -> dict[str, str]:
    """Everything but the image's own variables. Raises MissingSource while something is not there yet.

    What only a file of a volume will tell (fileKeyRef) is put down in `files`; its place is held by a mark that the
    runner replaces in variables and arguments when the container starts.
    """
    files = [] if files is None else files
    declared = _from_sources(container, sources)
    for variable in container.get("env", ()):
        known = {**services, **declared}
        if variable.get("value"):
            declared[variable["name"]] = expand(variable["value"], known)
            continue
        value_from = variable.get("valueFrom")
        if value_from and "fileKeyRef" in value_from:
            files.append(_file(variable["name"], value_from["fileKeyRef"], known))
            declared[variable["name"]] = file_mark(len(files) - 1)
            continue
        value = _value_from(pod, container, value_from, sources, place) if value_from else ""
        if value is not None:
            declared[variable["name"]] = value
    for name, value in declared.items():
        _check(container["name"], name, value)
    return {**services, **declared}


def file_mark(number: int) -> str:
    """Of characters that are none: Unicode keeps them out of text."""
    return f"\ufdd0{number}\ufdd1"


def _file(name: str, reference: Mapping[str, Any], known: Mapping[str, str]) -> EnvironmentFile:
    return {
        "name": name,
        "volume": reference["volumeName"],
        "path": reference["path"],
        "key": reference["key"],
        "optional": bool(reference.get("optional")),
        "otherwise": known.get(name),
        "image": None,
    }


def _check(container: str, name: str, value: str) -> None:
    if "\0" in name or "\0" in value or "=" in name:
        raise RefusedPod(
            f"container {container}: variable {name!r} has a NUL byte, or '=' in its name",
            hint="Mount the secret or config map as a volume instead.",
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # Runtimes take their configuration as JSON, which holds text only; a kubelet cannot pass such a value on either.
        raise RefusedPod(
            f"container {container}: the value of variable {name!r} is not UTF-8 text",
            hint="Mount the secret or config map as a volume instead.",
        ) from error


def _from_sources(container: Mapping[str, Any], sources: Sources) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        for kind, key in (("configmap", "configMapRef"), ("secret", "secretRef")):
            reference = source.get(key)
            if reference is None:
                continue
            contents = sources.contents(kind, reference.get("name", ""), bool(reference.get("optional")))
            prefix = source.get("prefix", "")
            found.update({prefix + name: _text(value) for name, value in (contents or {}).items()})
    return found


def _value_from(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    value_from: Mapping[str, Any],
    sources: Sources,
    place: Place,
) -> str | None:
    if "fieldRef" in value_from:
        return field_value(pod, value_from["fieldRef"]["fieldPath"], place)
    if "resourceFieldRef" in value_from:
        return resource_value(pod, value_from["resourceFieldRef"], container, place)
    for kind, key in (("configmap", "configMapKeyRef"), ("secret", "secretKeyRef")):
        if key in value_from:
            reference = value_from[key]
            value = sources.value(
                kind, reference.get("name", ""), reference["key"], bool(reference.get("optional"))
            )
            return None if value is None else _text(value)
    raise RefusedPod(
        f"container {container['name']}: env valueFrom {', '.join(value_from)} is not supported yet"
    )


def _text(value: bytes) -> str:
    # A secret may hold any bytes; what is no text is refused where all of the environment is known.
    return value.decode(errors="surrogateescape")


def command_line(
    container: Mapping[str, Any], image_config: Mapping[str, Any], variables: Mapping[str, str]
) -> list[str]:
    """command replaces Entrypoint and Cmd; args alone replace Cmd."""
    command: Sequence[str] = [expand(word, variables) for word in container.get("command") or ()]
    args: Sequence[str] = [expand(word, variables) for word in container.get("args") or ()]
    if command:
        return [*command, *args]
    entrypoint = image_config.get("Entrypoint") or []
    return [*entrypoint, *(args or image_config.get("Cmd") or [])]
