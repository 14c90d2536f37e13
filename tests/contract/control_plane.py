"""A real etcd and a real kube-apiserver on loopback, as ordinary processes, with the command lines that `slurmlet up` uses.

No controller manager and no scheduler: what lives in the API server alone can be tried, and it is there in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.host_addresses import LOOPBACK, free_port
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import components, pki
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.credentials import Credentials, by_certificate
from slurmlet.upstream import binaries as upstream

READY_S = 60.0


@dataclass(frozen=True)
class ControlPlane:
    url: str
    keys: Path

    @property
    def credentials(self) -> Credentials:
        """Those of an administrator."""
        return by_certificate(self.url, *(self.keys / name for name in ("ca.crt", "admin.crt", "admin.key")))

    def client(self) -> ApiClient:
        return ApiClient(self.credentials)


@contextlib.contextmanager
def control_plane(root: Path) -> Iterator[ControlPlane]:
    binaries = upstream.ensure(["etcd", "kube-apiserver"], download=False, build=False)
    files, config = ClusterFiles(root), _config()
    pki.ensure(files.pki, pki.leaves("localhost", [], config.service_range))
    files.etcd.mkdir()
    changed = ("--bind-address=", "--advertise-address=", "--egress-selector-config-file=")
    api = [one for one in components.apiserver(files, config, binaries) if not one.startswith(changed)]
    commands = [components.etcd(files, config, binaries), [*api, f"--bind-address={LOOPBACK}"]]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for argv in commands:
            with (root / f"{Path(argv[0]).name}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(argv, stdout=log, stderr=log, env={"HOME": str(root)}, cwd=root)
                )
        made = ControlPlane(config.local_api_url, files.pki)
        asyncio.run(_ready(made, processes, root))
        yield made
    finally:
        # Nothing of it is needed afterwards, and an API server takes its time to end well.
        for process in reversed(processes):
            process.kill()
            process.wait(10)


def _config() -> ClusterConfig:
    ports = [free_port(LOOPBACK) for _ in range(3)]
    return ClusterConfig(
        name="contract", id="deadbeef", created_at="", kubernetes="", host="localhost", addresses=(),
        api_address=LOOPBACK, api_port=ports[0], etcd_port=ports[1], etcd_peer_port=ports[2],
        service_range="10.96.0.0/16", partitions=None, ephemeral=True,
    )  # fmt: skip


async def _ready(made: ControlPlane, processes: list[subprocess.Popen[bytes]], root: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    async with made.client() as client:
        while True:
            try:
                # What it makes for itself once it serves: the last of its roles, and its namespaces.
                await client.get("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/system:basic-user")
                await client.get("/api/v1/namespaces/default")
                return
            except ApiError as error:
                ended = [process.args for process in processes if process.poll() is not None]
                if ended or time.monotonic() > deadline_s:
                    said = (root / "kube-apiserver.log").read_text(errors="replace")[-3000:]
                    raise AssertionError(f"no API server (ended: {len(ended)}): {error}\n{said}") from error
                await asyncio.sleep(0.1)


def environment() -> dict[str, str]:
    """Of a Python that a test starts for itself."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


@contextlib.asynccontextmanager
async def all_closed() -> AsyncIterator[None]:
    """Ends when every socket that was opened within is closed: one whose TLS handshake was cut short with its task takes a
    moment, and a loop that ends before leaves it behind."""
    before = _open_sockets()
    yield
    async with asyncio.timeout(60):
        while _open_sockets() > before:
            await asyncio.sleep(0.01)


def _open_sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(entry.readlink()).startswith("socket:")
    return found
