"""What the pod network costs: the same programs between two hosts, between pods on these hosts, and through Services.

Every round measures all ways one after the other, each round from another beginning, and the bare hosts before and after
each: a machine that others use too is fast and slow by turns, and only neighbours in time can be compared. Servers are
started once; only clients come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.base.layout import ClusterFiles, store_dir
from slurmlet.base.processes import CommandError, run
from slurmlet.bench.host_programs import HostSide, Tree
from slurmlet.bench.network_measurements import (  # fmt: skip
    BARE,
    HOST,
    MEASUREMENTS,
    PASTA,
    POD,
    SERVICE,
    SLIRP,
    Measurement,
    Ports,
    Samples,
    nginx_conf,
    server_commands,
)
from slurmlet.bench.service_crowd import crowded
from slurmlet.images.image_store import Store
from slurmlet.model.slurm_values import JobSpec
from slurmlet.slurm.commands import CommandSlurm
from slurmlet.upstream.binaries import find

_READY_S = 120
_EXEC_LIMIT_S = 120.0
_FIRST_TRIES_S = 30.0
_CPUS, _MEMORY_MB = 2, 256
_POD_PORTS = Ports()

OnSample = Callable[[int, str, str, float | None, str], None]  # round, measurement, way, value, problem
Taken = dict[tuple[str, str], Samples]


class NetworkBench:
    """Needs a running cluster of this user, two hosts of the partition, and an image with the measuring programs."""

    def __init__(
        self, cluster: str, image: str, hosts: Sequence[str], partition: str | None, services: int = 0
    ) -> None:
        kubectl = find("kubectl")
        files = ClusterFiles.named(cluster)
        if kubectl is None or not files.kubeconfig.exists():
            raise UserError(f"cluster {cluster!r} does not exist", hint=f"Run: slurmlet up -c {cluster}")
        self._kubectl = [str(kubectl), "--kubeconfig", str(files.kubeconfig)]
        self._image = image
        self._cluster, self._crowd = cluster, services
        self._size = JobSpec("", "", partition=partition or "", cpus_per_task=_CPUS, memory_mb=_MEMORY_MB)
        self._partition = partition
        self._client, self._server = hosts or _two_hosts(partition)
        self._name = f"bench-{os.getpid()}"

    def measure(
        self, runs: int, seconds: int, measurements: Sequence[Measurement], on_sample: OnSample
    ) -> Taken:
        # In the home directory: all hosts must see it.
        with tempfile.TemporaryDirectory(
            prefix=".slurmlet-bench-", dir=Path.home(), ignore_cleanup_errors=True
        ) as name:
            work = Path(name)
            tree = Tree.unpacked(Store(store_dir()), self._image, work / "tree")
            hosts = HostSide(tree, self._client, self._server, work, self._size)
            with crowded(self._cluster, self._name, self._crowd), self._servers(hosts, work) as rig:
                return self._rounds(rig, runs, seconds, measurements, on_sample)

    def _rounds(
        self, rig: _Rig, runs: int, seconds: int, measurements: Sequence[Measurement], on_sample: OnSample
    ) -> Taken:
        taken: Taken = {}
        order = [(each, way) for each in measurements for way in each.ways]
        for each, way in order:
            problem = rig.warm_up(each, way)
            taken[each.name, way] = Samples(problem=problem)
            if problem:
                on_sample(0, each.name, way, None, problem)

        def sampled(number: int, each: Measurement, way: str) -> float | None:
            samples = taken[each.name, way]
            if samples.problem:
                return None
            value, samples.problem = rig.sample(each, way, seconds)
            on_sample(number + 1, each.name, way, value, samples.problem)
            return value

        for number in range(runs):
            for each in measurements:
                ways = [way for way in each.ways if way != BARE]
                turn = number % max(1, len(ways))
                bare = [sampled(number, each, BARE)]
                for way in (*ways[turn:], *ways[:turn]):
                    value = sampled(number, each, way)
                    if value is not None:
                        bare.append(sampled(number, each, BARE))
                        taken[each.name, way].add(value, *bare[-2:])
                taken[each.name, BARE].values += [value for value in bare if value is not None]
        return taken

    @contextlib.contextmanager
    def _servers(self, hosts: HostSide, work: Path) -> Iterator[_Rig]:
        (work / "nginx-pod.conf").write_text(nginx_conf(_POD_PORTS.web, "/tmp"))
        # Unprivileged, above the ports that kernels give to clients on their own.
        host_ports = Ports.from_base(random.randrange(20000, 30000, 10))  # noqa: S311
        try:
            hosts.start(host_ports)
            manifest = {"apiVersion": "v1", "kind": "List", "items": self._objects(work)}
            run([*self._kubectl, "create", "-f", "-"], stdin=json.dumps(manifest))
            wait = [
                "wait",
                "--for=condition=Ready",
                f"--timeout={_READY_S}s",
                "pod",
                "-l",
                f"bench={self._name}",
            ]
            run([*self._kubectl, *wait], timeout_s=_READY_S + 10)
            pod = self._get("pod", f"{self._name}-server")
            service = self._get("service", self._name)
            targets = {
                POD: (pod["status"]["podIP"], _POD_PORTS),
                SERVICE: (service["spec"]["clusterIP"], _POD_PORTS),
                **dict.fromkeys((BARE, HOST, SLIRP, PASTA), (pod["status"]["hostIP"], host_ports)),
            }
            yield _Rig(hosts, [*self._kubectl, "exec", f"{self._name}-client", "--"], targets)
        finally:
            everything = [
                "delete",
                "pod,service",
                "-l",
                f"bench={self._name}",
                "--wait=true",
                "--ignore-not-found",
            ]
            run([*self._kubectl, *everything], timeout_s=_READY_S, check=False)
            hosts.stop()

    def _get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run([*self._kubectl, "get", kind, name, "-o", "json"]).stdout)
        return found

    def _objects(self, work: Path) -> list[dict[str, Any]]:
        servers = server_commands(_POD_PORTS, "/bench/nginx-pod.conf")
        selector = {"bench": self._name, "role": "server"}
        udp = {"protocol": "UDP"}
        ports = [
            {"name": "iperf", "port": _POD_PORTS.iperf},
            {"name": "iperf-udp", "port": _POD_PORTS.iperf, **udp},
            {"name": "tcp-pings", "port": _POD_PORTS.tcp_pings},
            {"name": "udp-pings", "port": _POD_PORTS.udp_pings, **udp},
            {"name": "web", "port": _POD_PORTS.web},
        ]
        return [
            self._pod("server", self._server, work, servers),
            self._pod("client", self._client, work, {"main": ["sleep", "86400"]}),
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": self._name, "labels": {"bench": self._name}},
                "spec": {"selector": selector, "ports": ports},
            },
        ]

    def _pod(self, role: str, host: str, work: Path, commands: dict[str, list[str]]) -> dict[str, Any]:
        mount = {"name": "bench", "mountPath": "/bench"}
        containers: list[dict[str, Any]] = [
            {
                "name": name,
                "image": self._image,
                "imagePullPolicy": "IfNotPresent",
                "command": command,
                "volumeMounts": [mount],
            }
            for name, command in commands.items()
        ]
        # Jobs as large as those of the bare side.
        containers[0]["resources"] = {"requests": {"cpu": str(_CPUS), "memory": f"{_MEMORY_MB}Mi"}}
        annotations = {"slurmlet.io/sbatch": f"--nodelist={host}"}
        if self._partition is not None:
            annotations["slurmlet.io/partition"] = self._partition
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{self._name}-{role}",
                "labels": {"bench": self._name, "role": role},
                "annotations": annotations,
            },
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": False,
                "containers": containers,
                "volumes": [{"name": "bench", "hostPath": {"path": str(work)}}],
            },
        }


class _Rig:
    """Everything is up: one client at a time, in one of the ways."""

    def __init__(self, hosts: HostSide, in_pod: list[str], targets: dict[str, tuple[str, Ports]]) -> None:
        self._hosts, self._in_pod, self._targets = hosts, in_pod, targets

    def warm_up(self, measurement: Measurement, way: str) -> str:
        """ "" once it works: a server may need a moment to listen. Else what is wrong."""
        problem = self._hosts.can(way)
        if problem:
            return problem
        deadline_s = time.monotonic() + _FIRST_TRIES_S
        while True:
            value, problem = self.sample(measurement, way, 1)
            if value is not None or time.monotonic() > deadline_s:
                return problem
            time.sleep(1)

    def sample(self, measurement: Measurement, way: str, seconds: int) -> tuple[float | None, str]:
        address, ports = self._targets[way]
        command = measurement.argv(address, ports, seconds)
        try:
            if way in (POD, SERVICE, HOST):
                done = run([*self._in_pod, *command], timeout_s=_EXEC_LIMIT_S, check=False)
            else:
                done = self._hosts.run(way, command)
            if not done.ok:
                return None, _last_line(done.stderr) or _last_line(done.stdout) or f"exit status {done.code}"
            return measurement.read(done.stdout), ""
        except CommandError as error:
            return None, error.message
        except ValueError as error:
            return None, str(error)


def _last_line(text: str) -> str:
    """What a program said last of its failure; iperf3 says it in JSON."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"])
    noise = ("exit code", "Exited with exit", "Terminating StepId")
    lines = [line for line in text.strip().splitlines() if not any(word in line for word in noise)]
    return lines[-1][:200] if lines else ""


def _two_hosts(partition: str | None) -> tuple[str, str]:
    listed = asyncio.run(CommandSlurm().nodes())
    with_room = (node for node in listed if node.has_room)
    hosts = [node.name for node in with_room if partition is None or partition in node.partitions]
    if len(hosts) < 2:
        raise SlurmletError(
            "fewer than two hosts have free resources", hint="Run sinfo, or name two hosts: --hosts A,B"
        )
    return hosts[0], hosts[1]


__all__ = ["MEASUREMENTS", "NetworkBench", "Taken"]
