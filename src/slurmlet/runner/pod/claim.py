"""One pod, one job: the first runner to make the pod's `claim` file has the pod, a second one leaves.

Two jobs for one pod can only come from a hub that died between sbatch and its bookkeeping. Names of files in the
pod's directory are spelled here for the runner (base/layout.py spells them for everybody else).
"""

from __future__ import annotations

import os

from slurmlet.linux.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Tuple

    from slurmlet.protocol.cluster_files import HubFile


class PodDir(Record):
    """The pod's directory on the shared file system."""

    path: str

    @property
    def uid(self) -> str:
        return os.path.basename(self.path)

    @property
    def cluster_dir(self) -> str:
        return os.path.dirname(os.path.dirname(self.path))

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    @property
    def credential(self) -> str:
        return self.file("runner.pem")

    @property
    def chain(self) -> Tuple[str, Optional[str]]:
        return self.credential, None

    @property
    def hub_ca(self) -> str:
        return self.file("hub-ca.pem")

    @property
    def report(self) -> str:
        return self.file("report.json")

    @property
    def logs(self) -> str:
        return self.file("logs")

    def hub(self) -> HubFile:
        """Where the hub listens now: {addresses, runner_port, server_name, pod_network}. Raises OSError or ValueError."""
        import json

        with open(os.path.join(self.cluster_dir, "hub.json"), encoding="utf-8") as file:
            found: HubFile = json.load(file)
        return found


def claim(pod: PodDir, job_id: str) -> str:
    """Returns "" when the pod is ours (also after a requeue of the same job), else the job that has it."""
    path = pod.file("claim")
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        with open(path, encoding="utf-8") as file:
            holder = file.read().strip()
        # An empty claim is one whose writer died in between; the name was made by somebody else all the same.
        return "" if holder == job_id else holder or "unknown"
    with os.fdopen(handle, "w") as file:
        file.write(job_id + "\n")
    return ""
