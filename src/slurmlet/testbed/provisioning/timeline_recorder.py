"""Records a site's timeline: changes at the API server as they come, Slurm by looking often.

A thread of its own that stands in the network of host login: the API server of a site listens nowhere else. Only reads.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.kube.client import ApiClient
from slurmlet.kube.controller import Informer
from slurmlet.kube.credentials import from_kubeconfig
from slurmlet.linux import syscalls
from slurmlet.testbed.provisioning.provision_site import ProvisionSite
from slurmlet.testbed.provisioning.site_objects import NAMESPACE
from slurmlet.testbed.provisioning.timeline import Sample, sample
from slurmlet.testbed.testbed_plan import LOGIN

_CORE = f"/apis/cluster.x-k8s.io/v1beta2/namespaces/{NAMESPACE}"
_WATCHED = {
    "Machine": f"{_CORE}/machines",
    "MachineDeployment": f"{_CORE}/machinedeployments",
    "Secret": f"/api/v1/namespaces/{NAMESPACE}/secrets",
}
_SLURM = "squeue -h -a -o '%i %T'; echo --; sinfo -h -N -o '%N %T' | sort -u"


@dataclass
class Recorder:
    """From `start` to `stop`."""

    site: ProvisionSite
    every_s: float = 0.3
    samples: list[Sample] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Returns when the first sample is there."""
        begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(begun,), name="timeline", daemon=True)
        self._thread.start()
        if not begun.wait(60):
            raise SlurmletError("the timeline could not be begun within 60 s")

    def stop(self) -> list[Sample]:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(30)
        return self.samples

    def _run(self, begun: threading.Event) -> None:
        # Of this thread alone.
        space = os.open(f"/proc/{self.site.bed.init(LOGIN).pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            syscalls.setns(space, syscalls.CLONE_NEWNET)
        finally:
            os.close(space)
        asyncio.run(self._record(begun))

    async def _record(self, begun: threading.Event) -> None:
        async with ApiClient(from_kubeconfig(self.site.management.kubeconfig)) as client:
            informers = {kind: Informer(client, path) for kind, path in _WATCHED.items()}
            tasks = [asyncio.create_task(one.run(), name=f"watch {kind}") for kind, one in informers.items()]
            for informer in informers.values():
                await informer.synced.wait()
            said = ["", ""]

            def note(_: Mapping[str, Any] = {}) -> None:
                objects = [
                    {**one, "kind": kind} for kind, seen in informers.items() for one in seen.objects()
                ]
                self.samples.append(sample(time.time(), said[0], said[1], objects))

            for informer in informers.values():
                informer.on_change(note)
            while not self._ending.is_set():
                try:
                    text = await asyncio.to_thread(self.site.slurm, "sh", "-c", _SLURM, user="root")
                    said[:] = text.split("--\n", 1)
                    note()
                    begun.set()
                except SlurmletError:
                    pass  # Slurm is away for a test's sake
                await asyncio.sleep(self.every_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
