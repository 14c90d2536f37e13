"""What runs: the command line and environment of every component. Pure.

Every port a component listens on asks for a certificate; the controller manager and the scheduler listen on none.
Nothing secret is in an argv or an environment: both are public on a shared host.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.host_addresses import LOOPBACK
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.run_files import run_files

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns")
GATEWAY = "gateway"
HUB = "hub"
# A login host is shared: a control plane of one user needs no more threads than this at once.
_MAX_PROCS = 4
HEALTHY_AFTER_S = 60.0
# Names and ways in are waited for: DNS comes back within 2 s.
_PROMPT_S = 5.0
_PATIENCE_S = 30 * 24 * 3600
# CN of the certificate with which the API server calls aggregated APIs (pki.py, which takes long to import).
FRONT_PROXY = "slurmlet:front-proxy"
# Proxies of the site are for the outside; the components only talk to this host and to each other.
_KEPT_VARIABLES = ("HOME", "PATH", "LANG", "TMPDIR", "USER", "LOGNAME")
# The hub reads squeue and sacct in threads; by default the C library keeps a heap for each of them, and what they gave back.
_FEW_ARENAS = {"MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Component:
    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    # Starts when the API server is ready: before that it would only take CPU from it, and the controller manager
    # gives up after 10 s.
    needs_api: bool = False
    # Starts once the hub has begun its work: it grants CoreDNS the right to read Services.
    needs_hub: bool = False
    stop_grace_s: float = 10.0
    # One that ran this long did not fail at its start: the next one comes soon.
    healthy_after_s: float = HEALTHY_AFTER_S


def components(
    files: ClusterFiles, config: ClusterConfig, binaries: Path, environment: Mapping[str, str], cpus: int
) -> list[Component]:
    """In the order of starting; stopping goes the other way."""
    small = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
    small["GOMAXPROCS"] = str(max(1, min(cpus, _MAX_PROCS)))
    return [
        Component("etcd", tuple(etcd(files, config, binaries)), small),
        Component("kube-apiserver", tuple(apiserver(files, config, binaries)), small),
        Component(
            "kube-controller-manager",
            tuple(controller_manager(files, config, binaries)),
            small,
            needs_api=True,
        ),
        Component("kube-scheduler", tuple(scheduler(files, binaries)), small, needs_api=True),
        Component(
            "coredns",
            tuple(coredns(files, binaries)),
            small,
            needs_api=True,
            needs_hub=True,
            stop_grace_s=2.0,
            healthy_after_s=_PROMPT_S,
        ),
        Component(
            GATEWAY,
            (sys.executable, "-P", "-m", "slurmlet.gateway", str(files.root)),
            small,
            healthy_after_s=_PROMPT_S,
        ),
        Component(
            HUB,
            (sys.executable, "-P", "-m", "slurmlet.hub", str(files.root)),
            {**environment, **_FEW_ARENAS},
        ),
    ]


def etcd(files: ClusterFiles, config: ClusterConfig, binaries: Path) -> list[str]:
    client_url = f"https://{LOOPBACK}:{config.etcd_port}"
    peer_url = f"https://{LOOPBACK}:{config.etcd_peer_port}"
    pki = files.pki
    return [
        str(binaries / "etcd"),
        f"--name={config.id}",
        f"--data-dir={files.etcd / 'data'}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        "--client-cert-auth",
        f"--trusted-ca-file={pki / 'etcd-ca.crt'}",
        f"--cert-file={pki / 'etcd-server.crt'}",
        f"--key-file={pki / 'etcd-server.key'}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster={config.id}={peer_url}",
        "--peer-client-cert-auth",
        f"--peer-trusted-ca-file={pki / 'etcd-ca.crt'}",
        f"--peer-cert-file={pki / 'etcd-server.crt'}",
        f"--peer-key-file={pki / 'etcd-server.key'}",
        "--tls-min-version=TLS1.3",
        # One member has nobody to catch up: little history, and a database that cannot eat the home quota.
        "--snapshot-count=5000",
        "--max-wals=2",
        f"--quota-backend-bytes={2 << 30}",
        "--log-level=warn",
        *(["--unsafe-no-fsync"] if config.ephemeral else []),
    ]


def apiserver(files: ClusterFiles, config: ClusterConfig, binaries: Path) -> list[str]:
    pki = files.pki
    return [
        str(binaries / "kube-apiserver"),
        f"--etcd-servers=https://{LOOPBACK}:{config.etcd_port}",
        f"--etcd-cafile={pki / 'etcd-ca.crt'}",
        f"--etcd-certfile={pki / 'etcd-client.crt'}",
        f"--etcd-keyfile={pki / 'etcd-client.key'}",
        "--bind-address=0.0.0.0",
        f"--secure-port={config.api_port}",
        f"--advertise-address={config.api_address}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        "--tls-min-version=VersionTLS12",
        f"--client-ca-file={pki / 'ca.crt'}",
        "--anonymous-auth=false",
        "--authorization-mode=RBAC",
        "--allow-privileged=true",
        f"--service-cluster-ip-range={config.service_range}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--kubelet-certificate-authority={pki / 'hub-ca.crt'}",
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        # Aggregated APIs (the hub's metrics API is one) are called at their endpoints: nothing on this host knows the
        # addresses of Services.
        "--enable-aggregator-routing=true",
        # Only the gateway knows the way to pods and Services.
        f"--egress-selector-config-file={run_files(files).egress}",
        f"--requestheader-client-ca-file={pki / 'front-proxy-ca.crt'}",
        f"--requestheader-allowed-names={FRONT_PROXY}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-uid-headers=X-Remote-Uid",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front-proxy-client.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy-client.key'}",
        # A Node is a partition. Jobs run on in one that is drained, and Slurm itself ends those of a host that fails:
        # to evict pods because their partition takes no new jobs would only do harm.
        f"--default-not-ready-toleration-seconds={_PATIENCE_S}",
        f"--default-unreachable-toleration-seconds={_PATIENCE_S}",
        f"--encryption-provider-config={pki / 'encryption.json'}",
        "--enable-bootstrap-token-auth=false",
        # Beta and off by default; projected volumes may show trust bundles.
        "--feature-gates=ClusterTrustBundle=true,ClusterTrustBundleProjection=true",
        "--runtime-config=certificates.k8s.io/v1beta1/clustertrustbundles=true",
        "--endpoint-reconciler-type=lease",
        "--profiling=false",
        "--max-requests-inflight=200",
        "--max-mutating-requests-inflight=100",
        "--event-ttl=1h",
        "--v=0",
    ]


def controller_manager(files: ClusterFiles, config: ClusterConfig, binaries: Path) -> list[str]:
    pki = files.pki
    return [
        str(binaries / "kube-controller-manager"),
        f"--kubeconfig={run_files(files).kubeconfig('kube-controller-manager')}",
        "--secure-port=0",
        "--leader-elect=false",
        "--use-service-account-credentials",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--service-account-private-key-file={pki / 'service-accounts.key'}",
        f"--service-cluster-ip-range={config.service_range}",
        f"--cluster-name={config.name}",
        # The hub holds every node's lease; it may be away for a restart. Pods tolerate that, and a drained partition, for
        # a month (see the API server); NoExecute taints of the user's own evict as everywhere.
        "--node-monitor-period=5s",
        "--node-monitor-grace-period=2m",
        "--terminated-pod-gc-threshold=1000",
        # A third of upstream's: one user's autoscalers are few, and a queue is already slower than a node.
        "--horizontal-pod-autoscaler-sync-period=5s",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
        "--profiling=false",
        "--v=0",
    ]


def coredns(files: ClusterFiles, binaries: Path) -> list[str]:
    return [str(binaries / "coredns"), "-conf", str(run_files(files).corefile)]


def scheduler(files: ClusterFiles, binaries: Path) -> list[str]:
    return [
        str(binaries / "kube-scheduler"),
        f"--config={files.scheduler_config}",
        "--secure-port=0",
        "--v=0",
    ]
