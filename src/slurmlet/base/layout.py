"""Where everything lies on disk. No other module spells out a path of ours.

~/.slurmlet/                      0700; SLURMLET_HOME overrides. On the shared file system.
  _store/                         the image store, shared by all clusters of the user (images/)
  _runs/<job>-<random>/           what the hosts of one `slurmlet run` share, as long as it runs
  <cluster>/
    cluster.json                  what `slurmlet up` decided: id, ports, partitions, addresses
    kubeconfig                    for the user
    hub.json                      where the hub listens now; runners read it each time they dial
    gateway.json                  the gateway's ports and state; its next start takes the same ports
    runner.pyz                    the runner, as one file
    bin/                          netd's native library, where this host could compile it
    pki/                          keys and certificates
    etcd/  logs/  run/            data, component logs, pids and locks
    pods/<uid>/                   one directory per pod: see PodFiles
    pool.json                     how many pool nodes are wanted, of what kind
    nodes/<name>/                 one directory per allocation node: credential and log of its agent
    shared                        only in a cluster inside one job (`slurmlet run`): a link to a directory below
                                  _runs/, which then holds what other hosts read: hub.json, runner.pyz, pods/, nodes/,
                                  volumes/; the rest lies on its first host alone
    volumes/<volume>/             one directory per persistent volume; what pods keep in it

~/.cache/slurmlet/                XDG_CACHE_HOME or SLURMLET_CACHE overrides; may be deleted at any time
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slurmlet.base.errors import UserError

DEFAULT_CLUSTER = "default"
_CLUSTER_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


def home_dir() -> Path:
    """The root of all state of this user."""
    override = os.environ.get("SLURMLET_HOME")
    return Path(override).expanduser().absolute() if override else Path.home() / ".slurmlet"


def cache_dir() -> Path:
    """What can be made again: upstream binaries, the testbed's root."""
    override = os.environ.get("SLURMLET_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "slurmlet"


def store_dir() -> Path:
    # The underscore keeps it apart from every possible cluster name.
    return home_dir() / "_store"


def runs_dir() -> Path:
    return home_dir() / "_runs"


def check_cluster_name(name: str) -> str:
    if not _CLUSTER_NAME.fullmatch(name):
        raise UserError(
            f"cluster name {name!r} is not valid",
            hint="Use 1 to 32 lower-case letters, digits and inner hyphens, such as 'default' or 'exp-2'.",
        )
    return name


@dataclass(frozen=True)
class PodFiles:
    """The files one pod leaves on the shared file system, until its API object is gone."""

    root: Path

    @property
    def credential(self) -> Path:
        """PEM: the runner's certificate and key, 0600."""
        return self.root / "runner.pem"

    @property
    def hub_ca(self) -> Path:
        return self.root / "hub-ca.pem"

    @property
    def claim(self) -> Path:
        """Made with O_EXCL by the first runner of the pod; a second job for the same pod sees it and leaves."""
        return self.root / "claim"

    @property
    def job(self) -> Path:
        """JSON: what the hub knows of the submission (intent before sbatch, job id after)."""
        return self.root / "job.json"

    @property
    def report(self) -> Path:
        """JSON: the runner's newest PodReport; the last word when the hub was away at the end."""
        return self.root / "report.json"

    @property
    def job_log(self) -> Path:
        """What the runner itself said (stdout and stderr of the Slurm job)."""
        return self.root / "job.log"

    @property
    def logs(self) -> Path:
        """logs/<container>/<restart count>.log in the kubelet's CRI format."""
        return self.root / "logs"


@dataclass(frozen=True)
class ClusterFiles:
    """The state directory of one cluster."""

    root: Path

    @classmethod
    def named(cls, name: str) -> ClusterFiles:
        return cls(home_dir() / check_cluster_name(name))

    @property
    def name(self) -> str:
        return self.root.name

    @cached_property
    def shared(self) -> Path:
        """Where other hosts read. Asked once: it never changes in the life of a cluster."""
        link = self.root / "shared"
        return link.readlink() if link.is_symlink() else self.root

    @property
    def config(self) -> Path:
        return self.root / "cluster.json"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def hub(self) -> Path:
        return self.shared / "hub.json"

    @property
    def gateway(self) -> Path:
        return self.root / "gateway.json"

    @property
    def gateway_socket(self) -> Path:
        """The way to pods and Services for the API server and `slurmlet proxy`: a unix socket, 0600."""
        return self.run / "gateway.sock"

    @property
    def runner(self) -> Path:
        return self.shared / "runner.pyz"

    @property
    def libraries(self) -> Path:
        """What is compiled for runners, beside runner.pyz; may be empty."""
        return self.shared / "bin"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def etcd(self) -> Path:
        return self.root / "etcd"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def scheduler_config(self) -> Path:
        """KubeSchedulerConfiguration; absent in a cluster that an earlier version of slurmlet started."""
        return self.run / "scheduler.json"

    @property
    def token(self) -> Path:
        """Only of a cluster inside one job: for programs that speak to the API server without a certificate."""
        return self.run / "token"

    @property
    def volumes(self) -> Path:
        return self.shared / "volumes"

    def pod(self, uid: str) -> PodFiles:
        return PodFiles(self.shared / "pods" / uid)

    @property
    def pods(self) -> Path:
        return self.shared / "pods"

    def node(self, name: str) -> PodFiles:
        """Of an allocation node's agent: `credential`, `hub_ca` and `job_log` mean the same as for a pod."""
        return PodFiles(self.nodes / name)

    @property
    def pool(self) -> Path:
        """Size of the pool; absent: no pool."""
        return self.root / "pool.json"

    @property
    def nodes(self) -> Path:
        return self.shared / "nodes"
