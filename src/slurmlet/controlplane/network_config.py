"""What the components that know the pod network read: CoreDNS's Corefile and the API server's egress configuration.

CoreDNS serves names over TLS to holders of a certificate only, on loopback: no stranger can ask it. It has no health,
ready, metrics or pprof port; the gateway, its one client, notices when it does not answer. `loop` is left out: it asks its
own server in clear text, and forwarding to oneself is impossible without a port 53. `reload` would only poll.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from slurmlet.base.errors import SiteError
from slurmlet.base.files import write_json, write_private
from slurmlet.base.host_addresses import LOOPBACK
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.run_files import run_files

CLUSTER_DOMAIN = "cluster.local"
# What a unix socket's name may hold, with its final zero byte.
_LONGEST_SOCKET_NAME = 107
# For a host without nameservers: nothing exists besides the cluster, and whoever asks is told so at once.
_EMPTY_ZONE = ". 30 IN SOA dns.slurmlet. nobody.slurmlet. 1 3600 600 86400 30\n. 30 IN NS dns.slurmlet.\n"
_RESOLV_CONF = Path("/etc/resolv.conf")
_HOSTS = Path("/etc/hosts")


def write_all(files: ClusterFiles, config: ClusterConfig) -> None:
    run = run_files(files)
    write_json(run.egress, egress(files))
    write_private(run.hosts, "".join(f"{line}\n" for line in host_lines(_read(_HOSTS))))
    write_private(run.empty_zone, _EMPTY_ZONE)
    write_private(run.corefile, corefile(files, config, bool(nameservers(_read(_RESOLV_CONF)))))


def egress(files: ClusterFiles) -> dict[str, object]:
    """Pods, Services, webhooks, aggregated APIs and the hub's kubelet API: all through the gateway's socket."""
    name = str(files.gateway_socket)
    if len(name.encode()) > _LONGEST_SOCKET_NAME:
        raise SiteError(
            f"{name} is too long a path for a Unix socket",
            hint="Set SLURMLET_HOME to a directory with a shorter path.",
        )
    connection = {"proxyProtocol": "HTTPConnect", "transport": {"uds": {"udsName": name}}}
    return {
        "apiVersion": "apiserver.k8s.io/v1beta1",
        "kind": "EgressSelectorConfiguration",
        "egressSelections": [{"name": "cluster", "connection": connection}],
    }


def corefile(files: ClusterFiles, config: ClusterConfig, forwards: bool) -> str:
    """`forwards`: whether this host has nameservers; without any, names outside the cluster do not exist."""
    pki = files.pki
    outside = (
        "forward . /etc/resolv.conf {\n        policy sequential\n    }"
        if forwards
        else f"file {_quoted(run_files(files).empty_zone)} ."
    )
    return f"""tls://.:{config.dns_port} {{
    bind {LOOPBACK}
    tls {_quoted(pki / "coredns.crt")} {_quoted(pki / "coredns.key")} {_quoted(pki / "hub-ca.crt")} {{
        client_auth require_and_verify
    }}
    timeouts {{
        idle 1h
    }}
    errors
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {_quoted(run_files(files).kubeconfig("coredns"))}
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 5
    }}
    hosts {_quoted(run_files(files).hosts)} {{
        reload 0
        fallthrough
    }}
    cache 30 {{
        disable success {CLUSTER_DOMAIN}
        disable denial {CLUSTER_DOMAIN}
    }}
    {outside}
}}
"""


def nameservers(resolv_conf: str) -> list[str]:
    lines = (line.split() for line in resolv_conf.splitlines())
    return [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]


def host_lines(hosts: str) -> list[str]:
    """The lines of this host's hosts file that mean the same elsewhere: no loopback, nothing but addresses and names."""
    found = []
    for line in hosts.splitlines():
        words = line.partition("#")[0].split()
        try:
            address = ipaddress.ip_address(words[0]) if len(words) > 1 else None
        except ValueError:
            continue
        names = [
            name for name in words[1:] if name.replace("-", "").replace(".", "").replace("_", "").isalnum()
        ]
        if (
            address is not None
            and names
            and not (address.is_loopback or address.is_multicast or address.is_link_local)
        ):
            found.append(" ".join([str(address), *names]))
    return found


def _quoted(path: Path) -> str:
    """Corefiles know quotes, and a backslash before one."""
    return '"' + str(path).replace('"', '\\"') + '"'


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
