"""What tests say about a provisioning site: jobs, Slurm's nodes and Machines in a few words, and waiting for facts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.testbed.provisioning.provision_site import ProvisionSite
from slurmlet.testbed.provisioning.site_objects import NAMESPACE, Workers, workers


def eventually(probe: Callable[[], Any], timeout_s: float = 90, every_s: float = 0.3) -> Any:
    """What `probe` returns once it is true; fails with its last answer."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        last = probe()
        if last:
            return last
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s; last answer: {last!r}"
        time.sleep(every_s)


@dataclass(frozen=True)
class Farm:
    """One MachineDeployment of a site and the jobs that are meant for it."""

    site: ProvisionSite
    spec: Workers

    @property
    def name(self) -> str:
        return self.spec.name

    def make(self) -> Farm:
        self.site.management.apply(*workers(self.spec))
        return self

    def remove(self) -> None:
        """Whatever the test left: the WorkerSet first, so that nothing is made again."""
        kubectl = self.site.management.kubectl
        for job in self.jobs():
            self.site.slurm("scancel", job, user="root", check=False)
        kubectl("-n", NAMESPACE, "delete", "workersets", self.name, "--ignore-not-found", check=False)
        self.scale(0)
        for machine in self.machines():
            self._unhook(machine)
        eventually(lambda: not self.machines(), 120)
        for node in self.nodes() if not self.spec.cloud_nodes else ():
            self.site.slurm("scontrol", "delete", f"nodename={node}", user="root", check=False)
        kinds = "machinedeployments,metal3machinetemplates,metal3datatemplates,slurmworkerconfigtemplates"
        kubectl("-n", NAMESPACE, "delete", kinds, self.name, "--ignore-not-found")

    def _unhook(self, machine: str) -> None:
        """With the WorkerSet gone nobody else takes the operator's hooks off."""
        found = self.machines().get(machine) or {"metadata": {}}
        hooks = [
            one
            for one in found["metadata"].get("annotations") or {}
            if one.startswith(("pre-drain.delete.hook", "pre-terminate.delete.hook"))
        ]
        for hook in hooks:
            self.site.management.kubectl(
                "-n", NAMESPACE, "annotate", "machine", machine, f"{hook}-", check=False
            )

    def scale(self, replicas: int) -> None:
        self.site.management.kubectl(
            "-n", NAMESPACE, "scale", "machinedeployment", self.name, f"--replicas={replicas}"
        )

    def submit(self, command: str, *options: str) -> str:
        """The id of a batch job of user1 in this farm's partition."""
        said = self.site.slurm(
            "sbatch", "--parsable", f"--partition={self.name}", "--output=/dev/null", *options,
            f"--wrap={command}",
        )  # fmt: skip
        return said.strip().partition(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """`scontrol show job` as a map."""
        said = self.site.slurm("scontrol", "show", "job", "-o", number)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def state(self, number: str) -> str:
        return self.job(number)["JobState"]

    def jobs(self) -> list[str]:
        return self.site.slurm("squeue", "-h", "-o", "%A", f"--partition={self.name}", user="root").split()

    def nodes(self) -> dict[str, str]:
        """Slurm's nodes of this farm: name → state with flags."""
        said = self.site.slurm("scontrol", "show", "nodes", "-o", user="root", check=False)
        found = {}
        for line in said.splitlines():
            words = dict(re.findall(r"(\S+?)=(\S*)", line))
            if words.get("NodeName", "").startswith(f"{self.name}-"):
                found[words["NodeName"]] = words["State"]
        return found

    def machines(self) -> dict[str, dict[str, Any]]:
        listed = self.site.management.items("machines", "-n", NAMESPACE, "-l", f"workers={self.name}")
        return {one["metadata"]["name"]: one for one in listed}

    def replicas(self) -> int:
        found = self.site.management.get("machinedeployment", self.name, "-n", NAMESPACE)
        return int(found["spec"]["replicas"])

    def worker_set(self) -> dict[str, Any]:
        return dict(self.site.management.get("workerset", self.name, "-n", NAMESPACE))

    def condition(self, kind: str) -> dict[str, Any]:
        for one in (self.worker_set().get("status") or {}).get("conditions") or ():
            if one["type"] == kind:
                return dict(one)
        return {}

    def settled(self) -> bool:
        """Nothing is left of any worker, neither at the API server nor in Slurm."""
        return not self.machines() and not self.nodes() and self.replicas() == 0

    def events(self) -> list[tuple[str, str]]:
        listed = self.site.management.items("events", "-n", NAMESPACE)
        return [(one.get("reason", ""), one.get("message", "")) for one in listed]

    def logs(self) -> str:
        """For a failing test: what the parts said last."""
        parts = []
        for name in ("operator", "infrastructure-provider"):
            try:
                parts.append(f"== {name}\n" + "\n".join(self.site.management.log(name).splitlines()[-40:]))
            except (OSError, SlurmletError):
                continue
        parts.append(json.dumps(self.worker_set().get("status"), indent=1) if self.spec.autoscaled else "")
        return "\n".join(parts)
