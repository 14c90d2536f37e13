"""Where everything lies on disk. No other module spells out a path of ours.

~/.slurmlet/                      0700; SLURMLET_HOME overrides. On the shared file system.
  _store/                         the image store, shared by all clusters of the user (images/)
  <cluster>/
    cluster.json                  what `slurmlet up` decided: id, ports, partitions, addresses
    kubeconfig                    for people
    hub.json                      where the hub listens now; runners read it each time they dial
    runner.pyz                    the runner, as one file
    pki/                          keys and certificates
    etcd/  logs/  run/            data, component logs, pids and locks
    pods/<uid>/                   one directory per pod: see PodFiles
    volumes/<volume>/             one directory per persistent volume; what pods keep in it

~/.cache/slurmlet/                XDG_CACHE_HOME or SLURMLET_CACHE overrides; may be deleted at any time
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
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


def check_cluster_name(name: str) -> str:
    if not _CLUSTER_NAME.fullmatch(name):
        raise UserError(
            f"cluster name {name!r} is not usable",
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

    @property
    def config(self) -> Path:
        return self.root / "cluster.json"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def hub(self) -> Path:
        return self.root / "hub.json"

    @property
    def runner(self) -> Path:
        return self.root / "runner.pyz"

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
    def volumes(self) -> Path:
        return self.root / "volumes"

    def pod(self, uid: str) -> PodFiles:
        return PodFiles(self.root / "pods" / uid)

    @property
    def pods(self) -> Path:
        return self.root / "pods"
