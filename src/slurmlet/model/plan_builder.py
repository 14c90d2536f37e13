"""The PodPlan (`protocol/pod_plan.py`): a pod with everything resolved, ready for its runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.model.container_environment import command_line, container_environment
from slurmlet.model.downward_api import Place
from slurmlet.model.hostnames import Names, names_of
from slurmlet.model.network_plan import PodNetwork, network_plan, uses_host_network
from slurmlet.model.pod_job import asks_for_gpus
from slurmlet.model.pod_resources import storage_limits
from slurmlet.model.pod_sources import Sources
from slurmlet.model.probes import hook, probes
from slurmlet.model.resolv_conf import resolv_conf_plan
from slurmlet.model.security_context import container_security
from slurmlet.model.volume_plan import mount_plans, volume_plan
from slurmlet.protocol.pod_plan import ContainerPlan, EnvironmentFile, NetworkPlan, PodPlan, Policy, Volume

Obj = Mapping[str, Any]
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


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
    # None: pods share the network of their host.
    network: PodNetwork | None = None
    policy: Policy | None = None


def pod_plan(pod: Obj, setting: Setting) -> PodPlan:
    metadata, spec = pod["metadata"], pod["spec"]
    names = names_of(pod, setting.place.host)
    return {
        "uid": metadata["uid"],
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "cluster": setting.cluster,
        "hostname": names.kernel,
        "host_names": list(names.hosts),
        "host_network": bool(spec.get("hostNetwork")),
        "host_ipc": bool(spec.get("hostIPC")),
        "sysctls": [
            [one["name"], one["value"]] for one in (spec.get("securityContext") or {}).get("sysctls") or ()
        ],
        "restart_policy": spec.get("restartPolicy", "Always"),
        "grace_s": int(spec.get("terminationGracePeriodSeconds", 30)),
        "share_pid": bool(spec.get("shareProcessNamespace")),
        "hosts": [[alias["ip"], *alias.get("hostnames", ())] for alias in spec.get("hostAliases", ())],
        "init_containers": [
            container_plan(pod, one, setting, names) for one in spec.get("initContainers", ())
        ],
        "containers": [container_plan(pod, one, setting, names) for one in spec["containers"]],
        "volumes": {volume["name"]: _volume(pod, volume, setting) for volume in spec.get("volumes", ())},
        "storage_limits": storage_limits(spec),
        "fs_group": (spec.get("securityContext") or {}).get("fsGroup"),
        "network": _network(pod, setting),
        "resolv_conf": resolv_conf_plan(pod, setting.network.dns_ip if setting.network is not None else ""),
    }


def _network(pod: Obj, setting: Setting) -> NetworkPlan | None:
    network, place = setting.network, setting.place
    if network is None or (uses_host_network(pod) and not place.overlay_ip):
        return None
    return network_plan(pod, network, place.overlay_ip or place.pod_ip, setting.policy)


def check_sources(pod: Obj, sources: Sources) -> None:
    """Raise MissingSource unless everything the pod draws on is there. Volumes first, as with a kubelet."""
    spec = pod["spec"]
    for volume in spec.get("volumes", ()):
        volume_plan(pod, volume, sources, Place(), {})
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container_environment(pod, container, sources, Place(), {})


def check_containers(pod: Obj, setting: Setting) -> None:
    """Raise RefusedPod for what only the image tells: no command, root where that is forbidden."""
    names = names_of(pod, setting.place.host)
    if not setting.place.host_ip:
        # The address comes with the host: what is made of it (subPathExpr) must not look empty before.
        setting = replace(setting, place=replace(setting.place, host_ip="0.0.0.0"))
    for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
        container_plan(pod, container, setting, names)


def container_plan(pod: Obj, container: Obj, setting: Setting, names: Names) -> ContainerPlan:
    """One container, complete. An ephemeral container is planned alone, when it comes."""
    image = setting.images[container["image"]]
    files: list[EnvironmentFile] = []
    given = container_environment(pod, container, setting.sources, setting.place, setting.services, files)
    own = _image_variables(image.config)
    environment = {"PATH": _DEFAULT_PATH, "HOSTNAME": names.kernel, **own, **given}
    argv = command_line(container, image.config, given)
    if not argv:
        raise RefusedPod(f"container {container['name']}: neither the image nor the pod sets a command")
    if any("\0" in word for word in argv):
        raise RefusedPod(f"container {container['name']}: a NUL byte in command or args")
    security = container_security(pod, container, str(image.config.get("User") or ""))
    return {
        "name": container["name"],
        "image": container["image"],
        "image_id": image.image_id,
        "image_dir": image.directory,
        "argv": argv,
        "env": [[name, value] for name, value in environment.items()],
        "env_files": [{**file, "image": own.get(file["name"])} for file in files],
        "cwd": container.get("workingDir") or image.config.get("WorkingDir") or "/",
        "mounts": list(mount_plans(container, given)),
        "tty": bool(container.get("tty")),
        "stdin": bool(container.get("stdin")),
        "stdin_once": bool(container.get("stdinOnce")),
        "termination_message_path": container.get("terminationMessagePath", "/dev/termination-log"),
        "termination_message_policy": container.get("terminationMessagePolicy", "File"),
        "stop_signal": (container.get("lifecycle") or {}).get("stopSignal")
        or image.config.get("StopSignal")
        or "SIGTERM",
        "sidecar": container.get("restartPolicy") == "Always",
        "restart_policy": container.get("restartPolicy") or "",
        "restart_rules": [
            {
                "action": rule["action"],
                "operator": rule["exitCodes"]["operator"],
                "values": list(rule["exitCodes"].get("values") or ()),
            }
            for rule in container.get("restartPolicyRules") or ()
        ],
        "gpus": asks_for_gpus(container),
        "probes": probes(container),
        "post_start": hook(container, "postStart"),
        "pre_stop": hook(container, "preStop"),
        "user": security["user"],
        "read_only_root": security["read_only_root"],
        "add_caps": security["add_caps"],
        "drop_caps": security["drop_caps"],
        "no_new_privs": security["no_new_privs"],
        "privileged": security["privileged"],
        "unmasked_proc": security["unmasked_proc"],
        "selinux": security["selinux"],
        "seccomp": security["seccomp"],
    }


def _image_variables(config: Obj) -> dict[str, str]:
    return dict(variable.partition("=")[::2] for variable in config.get("Env") or ())


def _volume(pod: Obj, volume: Obj, setting: Setting) -> Volume:
    directories = {reference: image.directory for reference, image in setting.images.items()}
    return volume_plan(pod, volume, setting.sources, setting.place, directories)
