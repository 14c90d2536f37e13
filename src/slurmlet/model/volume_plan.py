"""A pod's volumes and mounts as the runner gets them: all resolved, nothing left to look up. Pure.

Tokens may be left out of the sources: their files then say `keep`, and the runner leaves what it has (a refresh of a
config map must not cost a new token).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.model import quantities, trust_bundles
from slurmlet.model.claims import claim_name, mounted
from slurmlet.model.container_environment import expand
from slurmlet.model.downward_api import Place, field_value, resource_value
from slurmlet.model.pod_sources import MissingSource, Sources, token_of
from slurmlet.protocol.pod_plan import FilesVolume, MountPlan, ProjectedFile, Volume

Obj = Mapping[str, Any]
FILE_KINDS = ("configMap", "secret", "downwardAPI", "projected")
_DEFAULT_MODE = 0o644
# (path, content or None to keep what is there, mode or None for the volume's default)
File = tuple[str, bytes | None, int | None]


def volume_plan(
    pod: Obj, volume: Obj, sources: Sources, place: Place, image_dirs: Mapping[str, str]
) -> Volume:
    """One volume. Raises MissingSource, which names the volume, while something is not there."""
    if any(kind in volume for kind in FILE_KINDS):
        return files_plan(pod, volume, sources, place)
    if "hostPath" in volume:
        host = volume["hostPath"]
        return {"kind": "host", "path": host["path"], "type": host.get("type") or ""}
    if claim_name(pod, volume):
        found = mounted(pod, volume, *sources.claims.get(volume["name"], (None, None)))
        return {
            "kind": "host",
            "path": found.path,
            "type": found.type,
            "read_only": found.read_only,
            "owned": found.ours,
        }
    if "image" in volume:
        reference = volume["image"].get("reference") or ""
        return {"kind": "image", "image": reference, "image_dir": image_dirs.get(reference, "")}
    empty = volume.get("emptyDir") or {}
    limit = empty.get("sizeLimit")
    return {
        "kind": "empty",
        "medium": empty.get("medium") or "",
        "size_bytes": quantities.ceil(quantities.parse(limit)) or None if limit is not None else None,
        "limit": str(limit or ""),
    }


def files_plan(pod: Obj, volume: Obj, sources: Sources, place: Place) -> FilesVolume:
    """A volume of files that the API holds."""
    kind = next(kind for kind in FILE_KINDS if kind in volume)
    default_mode = int(volume[kind].get("defaultMode", _DEFAULT_MODE))
    parts = volume[kind].get("sources") or () if kind == "projected" else ({kind: volume[kind]},)
    files: dict[str, ProjectedFile] = {}
    try:
        for part in parts:
            for path, data, mode in _part_files(pod, part, sources, place):
                files[path] = {"mode": default_mode if mode is None else int(mode)}
                if data is None:
                    files[path]["keep"] = True
                else:
                    files[path]["data"] = base64.b64encode(data).decode()
                if "serviceAccountToken" in part:
                    files[path]["token"] = True
    except MissingSource as missing:
        raise MissingSource(missing.message, volume=str(volume["name"])) from missing
    return {"kind": "files", "files": files, "default_mode": default_mode}


def shows_pod(volume: Obj) -> bool:
    """Whether the volume shows the pod itself, and so changes with it."""
    parts = (volume.get("projected") or {}).get("sources") or ()
    return "downwardAPI" in volume or any("downwardAPI" in part for part in parts)


def _part_files(pod: Obj, part: Obj, sources: Sources, place: Place) -> list[File]:
    if "configMap" in part:
        return _keyed_files("configmap", part["configMap"], sources)
    if "secret" in part:
        return _keyed_files("secret", part["secret"], sources)
    if "serviceAccountToken" in part:
        token = sources.tokens.get(token_of(part["serviceAccountToken"]))
        return [(part["serviceAccountToken"]["path"], None if token is None else token.encode(), None)]
    if "clusterTrustBundle" in part:
        source = part["clusterTrustBundle"]
        return [(source["path"], trust_bundles.anchors(source, sources.trust_bundles), None)]
    return [
        (item["path"], _downward(pod, item, place).encode(), item.get("mode"))
        for item in (part.get("downwardAPI") or {}).get("items") or ()
    ]


def _keyed_files(kind: str, source: Obj, sources: Sources) -> list[File]:
    name, optional = source.get("secretName") or source.get("name", ""), bool(source.get("optional"))
    contents = sources.contents(kind, name, optional)
    if contents is None:
        return []
    if not source.get("items"):
        return [(key, value, None) for key, value in contents.items()]
    chosen: list[File] = []
    for item in source["items"]:
        value = contents.get(item["key"])
        if value is not None:
            chosen.append((item["path"], value, item.get("mode")))
        elif not optional:
            what = (
                "configmap references non-existent config"
                if kind == "configmap"
                else "references non-existent secret"
            )
            raise MissingSource(f"{what} key: {item['key']}")
    return chosen


def _downward(pod: Obj, item: Obj, place: Place) -> str:
    if "fieldRef" in item:
        return field_value(pod, item["fieldRef"]["fieldPath"], place)
    return resource_value(pod, item["resourceFieldRef"], None, place)


# Mounts


def mount_plans(container: Obj, environment: Mapping[str, str]) -> Iterator[MountPlan]:
    for mount in container.get("volumeMounts", ()):
        read_only = bool(mount.get("readOnly"))
        recursive = mount.get("recursiveReadOnly") or "Disabled"
        yield {
            "volume": mount["name"],
            "path": mount["mountPath"],
            "read_only": read_only,
            "recursive_read_only": "" if recursive == "Disabled" else recursive,
            "sub_path": sub_path(container, mount, environment),
        }


def mount_status(mount: Obj) -> dict[str, Any]:
    """A mount as the container's status shows it, in the form the API server keeps."""
    status = {"name": mount["name"], "mountPath": mount["mountPath"]}
    if not mount.get("readOnly"):
        return status
    # "IfPossible" is up to the node's kernel, so nothing is promised for it.
    recursive = "Enabled" if mount.get("recursiveReadOnly") == "Enabled" else "Disabled"
    return {**status, "readOnly": True, "recursiveReadOnly": recursive}


def sub_path(container: Obj, mount: Obj, environment: Mapping[str, str]) -> str:
    """subPath, or subPathExpr with the container's variables put in."""
    template = mount.get("subPathExpr")
    if not template:
        return str(mount.get("subPath") or "")
    asked = _Asked(environment)
    path = expand(template, asked)
    if asked.missing:
        raise _bad_sub_path(container, f"missing value for {', '.join(sorted(asked.missing))}")
    if path.startswith("/"):
        raise _bad_sub_path(container, f"error SubPath `{path}` must not be an absolute path")
    if ".." in path.split("/"):
        raise _bad_sub_path(container, f"unable to provision SubPath `{path}`: must not contain '..'")
    return path


class _Asked(Mapping[str, str]):
    """Variables, with a note of those that were asked for and have no value."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.missing: set[str] = set()

    def __getitem__(self, name: str) -> str:
        value = self._environment.get(name, "")
        if not value:
            self.missing.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._environment)

    def __len__(self) -> int:
        return len(self._environment)


def _bad_sub_path(container: Obj, why: str) -> RefusedPod:
    return RefusedPod(
        f"container {container['name']}: volumeMounts.subPathExpr: {why}", reason="CreateContainerConfigError"
    )
