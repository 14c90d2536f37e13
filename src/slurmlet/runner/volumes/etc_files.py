"""The files of /etc that every container of a pod gets: hosts, hostname, resolv.conf. One set for the pod."""

from __future__ import annotations

import os

from slurmlet.runner.host.scratch import Scratch
from slurmlet.runner.volumes.pod_volumes import Mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List

    from slurmlet.protocol.pod_plan import PodPlan
    from slurmlet.runner.network.network_view import Network


def hosts_file(network: Network, names: List[str], extra: List[List[str]]) -> str:
    lines = [
        "# Kubernetes-managed hosts file.",
        "127.0.0.1\tlocalhost",
        "::1\tlocalhost ip6-localhost ip6-loopback",
        "fe00::0\tip6-localnet",
        "fe00::0\tip6-mcastprefix",
        "fe00::1\tip6-allnodes",
        "fe00::2\tip6-allrouters",
        "\t".join([network.address(), *names]),
    ]
    return "\n".join(lines) + "\n" + _aliases(extra)


def host_hosts_file(extra: List[List[str]]) -> str:
    """For a pod that asked for the host's network: what the host's own file says."""
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
            own = file.read()
    except OSError:
        own = ""
    return "# Kubernetes-managed hosts file (host network).\n" + own + _aliases(extra)


def _aliases(extra: List[List[str]]) -> str:
    if not extra:
        return ""
    lines = ["", "# Entries added by HostAliases."]
    lines += ["\t".join(str(word) for word in entry) for entry in extra]
    return "\n".join(lines) + "\n"


def write_etc(scratch: Scratch, network: Network, plan: PodPlan) -> None:
    """hosts, hostname and resolv.conf: one set for the pod, as the kubelet does it."""
    directory = scratch.private_dir("etc")
    names = [str(name) for name in plan.get("host_names") or [network.hostname()]]
    extra = plan.get("hosts") or []
    contents = {
        "hosts": host_hosts_file(extra) if plan.get("host_network") else hosts_file(network, names, extra),
        "hostname": network.hostname() + "\n",
        "resolv.conf": network.resolv_conf(),
    }
    for name, text in contents.items():
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            file.write(text)


def etc_mounts(scratch: Scratch, taken: List[str]) -> List[Mount]:
    directory = scratch.private_dir("etc")
    wanted = [
        (f"/etc/{name}", os.path.join(directory, name)) for name in ("hosts", "hostname", "resolv.conf")
    ]
    return [Mount(source, path, False) for path, source in wanted if path not in taken]
