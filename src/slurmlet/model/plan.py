"""The PodPlan: a pod with everything resolved, ready for its runner (the contract is in ARCHITECTURE.md)."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.model import quantities
from slurmlet.model.downward import Place, field_value, resource_value
from slurmlet.model.environment import command_line, container_environment
from slurmlet.model.sources import Sources, token_of

Obj = Mapping[str, Any]
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEFAULT_MODE = 0o644


@dataclass(frozen=True)
class PlannedImage:
    """An image as the store holds it."""

    image_id: str
    directory: str
    config: Obj  # the "config" part of the OCI image configuration


@dataclass(frozen=True)
class Setting:
    """All a plan is made from, besides the pod itself."""

    cluster: str
    images: Mapping[str, PlannedImage]  # by the reference as written in the pod
    sources: Sources
    place: Place
    services: Mapping[str, str]


def pod_plan(pod: Obj, setting: Setting) -> dict[str, Any]:
    metadata, spec = pod["metadata"], pod["spec"]
    hostname = (spec.get("hostname") or metadata["name"])[:63].rstrip("-.")
    return {
        "uid": metadata["uid"],
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "cluster": setting.cluster,
        "hostname": hostname,
        "restart_policy": spec.get("restartPolicy", "Always"),
        "grace_s": int(spec.get("terminationGracePeriodSeconds", 30)),
        "share_pid": bool(spec.get("shareProcessNamespace")),
        "hosts": [[alias["ip"], *alias.get("hostnames", ())] for alias in spec.get("hostAliases", ())],
        "init_containers": [
            _container(pod, one, setting, hostname) for one in spec.get("initContainers", ())
        ],
        "containers": [_container(pod, one, setting, hostname) for one in spec["containers"]],
        "volumes": {volume["name"]: _volume(pod, volume, setting) for volume in spec.get("volumes", ())},
    }


def check_sources(pod: Obj, sources: Sources) -> None:
    """Raise MissingSource unless everything the pod draws on is there."""
    spec = pod["spec"]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container_environment(pod, container, sources, Place(), {})
    for volume in spec.get("volumes", ()):
        parts = (volume.get("projected") or {}).get("sources") or (volume,)
        for part in parts:
            for kind, key in (("configmap", "configMap"), ("secret", "secret")):
                if key in part:
                    _keyed_files(kind, part[key], sources)


def _container(pod: Obj, container: Obj, setting: Setting, hostname: str) -> dict[str, Any]:
    image = setting.images[container["image"]]
    given = container_environment(pod, container, setting.sources, setting.place, setting.services)
    environment = {"PATH": _DEFAULT_PATH, "HOSTNAME": hostname, **_image_variables(image.config), **given}
    argv = command_line(container, image.config, given)
    if not argv:
        raise RefusedPod(f"container {container['name']}: neither the image nor the pod names a command")
    if any("\0" in word for word in argv):
        raise RefusedPod(f"container {container['name']}: a NUL byte in command or args")
    return {
        "name": container["name"],
        "image": container["image"],
        "image_id": image.image_id,
        "image_dir": image.directory,
        "argv": argv,
        "env": [[name, value] for name, value in environment.items()],
        "cwd": container.get("workingDir") or image.config.get("WorkingDir") or "/",
        "mounts": [
            {
                "volume": mount["name"],
                "path": mount["mountPath"],
                "read_only": bool(mount.get("readOnly")),
                "sub_path": mount.get("subPath", ""),
            }
            for mount in container.get("volumeMounts", ())
        ],
        "tty": bool(container.get("tty")),
        "stdin": bool(container.get("stdin")),
        "stdin_once": bool(container.get("stdinOnce")),
        "termination_message_path": container.get("terminationMessagePath", "/dev/termination-log"),
        "termination_message_policy": container.get("terminationMessagePolicy", "File"),
        "stop_signal": (container.get("lifecycle") or {}).get("stopSignal")
        or image.config.get("StopSignal")
        or "SIGTERM",
        "sidecar": container.get("restartPolicy") == "Always",
        **_security(pod, container, image.config),
    }


def _image_variables(config: Obj) -> dict[str, str]:
    return dict(variable.partition("=")[::2] for variable in config.get("Env") or ())


def _security(pod: Obj, container: Obj, config: Obj) -> dict[str, Any]:
    """The container's security context over the pod's."""
    merged = {**(pod["spec"].get("securityContext") or {}), **(container.get("securityContext") or {})}
    capabilities = merged.get("capabilities") or {}
    uid = merged.get("runAsUser")
    image_user = str(config.get("User") or "")
    if merged.get("runAsNonRoot") and (
        uid == 0 or (uid is None and image_user.split(":")[0] in ("", "0", "root"))
    ):
        raise RefusedPod(
            f"container {container['name']}: securityContext.runAsNonRoot is set and the container would run as root",
            reason="CreateContainerConfigError",
        )
    return {
        "user": {
            "uid": uid,
            "gid": merged.get("runAsGroup"),
            "groups": list(merged.get("supplementalGroups") or ()),
            "name": image_user,
        },
        "read_only_root": bool(merged.get("readOnlyRootFilesystem")),
        "add_caps": list(capabilities.get("add") or ()),
        "drop_caps": list(capabilities.get("drop") or ()),
        "no_new_privs": merged.get("allowPrivilegeEscalation") is False,
        "privileged": bool(merged.get("privileged")),
    }


def _volume(pod: Obj, volume: Obj, setting: Setting) -> dict[str, Any]:
    if "hostPath" in volume:
        return {
            "kind": "host",
            "path": volume["hostPath"]["path"],
            "type": volume["hostPath"].get("type", ""),
        }
    for kind in ("configMap", "secret", "downwardAPI", "projected"):
        if kind in volume:
            mode = int(volume[kind].get("defaultMode", _DEFAULT_MODE))
            parts = volume[kind].get("sources") or () if kind == "projected" else ({kind: volume[kind]},)
            return {"kind": "files", "files": _files(pod, parts, mode, setting), "default_mode": mode}
    empty = volume.get("emptyDir") or {}
    return {"kind": "empty", "medium": empty.get("medium", ""), "size_bytes": _size(empty.get("sizeLimit"))}


def _size(limit: object) -> int | None:
    return None if limit in (None, "0") else quantities.ceil(quantities.parse(limit))


def _files(pod: Obj, parts: Sequence[Obj], mode: int, setting: Setting) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for part in parts:
        for path, data, own_mode in _part_files(pod, part, setting):
            files[path] = {
                "data": base64.b64encode(data).decode(),
                "mode": mode if own_mode is None else int(own_mode),
            }
    return files


def _part_files(pod: Obj, part: Obj, setting: Setting) -> list[tuple[str, bytes, int | None]]:
    if "configMap" in part or "secret" in part:
        kind = "configmap" if "configMap" in part else "secret"
        source = part.get("configMap") or part.get("secret") or {}
        return _keyed_files(kind, source, setting.sources)
    if "serviceAccountToken" in part:
        source = part["serviceAccountToken"]
        return [(source["path"], setting.sources.tokens[token_of(source)].encode(), None)]
    return [
        (item["path"], _downward(pod, item, setting.place).encode(), item.get("mode"))
        for item in part["downwardAPI"].get("items") or ()
    ]


def _keyed_files(kind: str, source: Obj, sources: Sources) -> list[tuple[str, bytes, int | None]]:
    name, optional = source.get("secretName") or source.get("name", ""), bool(source.get("optional"))
    contents = sources.contents(kind, name, optional)
    if contents is None:
        return []
    if not source.get("items"):
        return [(key, value, None) for key, value in contents.items()]
    chosen = []
    for item in source["items"]:
        value = sources.value(kind, name, item["key"], optional)
        if value is not None:
            chosen.append((item["path"], value, item.get("mode")))
    return chosen


def _downward(pod: Obj, item: Obj, place: Place) -> str:
    if "fieldRef" in item:
        return field_value(pod, item["fieldRef"]["fieldPath"], place)
    return resource_value(pod, item["resourceFieldRef"], None, place)
