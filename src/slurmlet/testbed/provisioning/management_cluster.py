"""The management cluster: upstream etcd, API server, controller manager and Cluster API as processes of host login.

They run in the network and pid namespaces of the host that Slurm's controller runs on, with the machine's own files: they
end with the host, whatever became of the process that started them. One administrator's token is all there is to log in
with; the network is the testbed's own.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir, write_private
from slurmlet.base.processes import Completed, run, stop_group
from slurmlet.kube.webhook_certificates import issue
from slurmlet.testbed.host_namespaces import listens, wait_until
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.provisioning.cluster_api import ClusterApi
from slurmlet.testbed.testbed_plan import LOGIN, address_of
from slurmlet.upstream import binaries

Obj = dict[str, Any]
API_PORT, ETCD_PORT, WEBHOOK_PORT, HEALTH_PORT, DIAGNOSTICS_PORT = 6443, 2379, 9443, 9440, 9444
_LIFETIME_S = 30 * 24 * 3600.0
_START_S = 90.0


@dataclass
class ManagementCluster:
    """Started by `start`, ended by `stop` or with the testbed's host."""

    bed: Testbed
    parts: ClusterApi
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.bed.paths.run / "management"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @cached_property
    def binaries(self) -> Path:
        return binaries.ensure(["etcd", "kube-apiserver", "kube-controller-manager", "kubectl"])

    def start(self) -> None:
        """Returns when Cluster API answers."""
        private_dir(self.root)
        authority, token = self._make_keys(), self._make_tokens()
        write_private(self.kubeconfig, kubeconfig(f"https://127.0.0.1:{API_PORT}", authority, token))
        self.launch("etcd", self._etcd())
        self._await_port(ETCD_PORT, "etcd")
        self.launch("kube-apiserver", self._apiserver())
        wait_until(self._ready, _START_S, "the API server to be ready", pause_s=0.2)
        self.launch("kube-controller-manager", self._controller_manager())
        self._start_cluster_api()

    def stop(self) -> None:
        for name in reversed(list(self._processes)):
            self.end(name)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout_s: float = 60
    ) -> Completed:
        argv = [str(self.binaries / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]
        return run(self._inside(argv, pid=False), stdin=stdin, check=check, timeout_s=timeout_s)

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Server-side: a CRD does not fit into the annotation that `apply` would otherwise write."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text, timeout_s=120)

    def get(self, *words: str) -> Any:
        """What `kubectl get … -o json` says; None where there is no such object."""
        done = self.kubectl("get", *words, "-o", "json", "--ignore-not-found")
        return json.loads(done.stdout) if done.stdout.strip() else None

    def items(self, *words: str) -> list[Obj]:
        """All that `kubectl get …` finds, which may be nothing."""
        found = self.get(*words)
        return list(found["items"]) if found else []

    def launch(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start a program in host login's network; its words go to <root>/<name>.log."""
        with (self.root / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._inside(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "HOME": str(self.root), **(env or {})},
                start_new_session=True,
            )

    def launch_on_machine(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """As `launch`, for what boots hosts and so has to see the machine's processes; it ends with this process."""
        with (self.root / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig=TERM", "--", *self._inside(argv, pid=False)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def end(self, name: str, *, kill: bool = False) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        if kill:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        else:
            stop_group(process, 10.0)

    def running(self, name: str) -> bool:
        return name in self._processes and self._processes[name].poll() is None

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def _inside(self, argv: Sequence[str], *, pid: bool = True) -> list[str]:
        init = self.bed.init(LOGIN)
        return ["nsenter", f"--target={init.pid}", "--net", *(["--pid"] if pid else []), "--", *argv]

    def _make_keys(self) -> bytes:
        served = issue(["127.0.0.1", "localhost", "kubernetes.default.svc", address_of(LOGIN)], _LIFETIME_S)
        write_private(self.root / "ca.crt", served.authority)
        write_private(self.root / "apiserver.crt", served.certificate)
        write_private(self.root / "apiserver.key", served.key)
        key = ec.generate_private_key(ec.SECP256R1())
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        write_private(self.root / "service-accounts.key", private)
        write_private(self.root / "service-accounts.pub", public)
        return served.authority

    def _make_tokens(self) -> str:
        token = secrets.token_hex(16)
        write_private(self.root / "tokens.csv", f'{token},admin,admin,"system:masters"\n')
        return token

    def _etcd(self) -> list[str]:
        client, peer = f"http://127.0.0.1:{ETCD_PORT}", f"http://127.0.0.1:{ETCD_PORT + 1}"
        return [
            str(self.binaries / "etcd"),
            f"--data-dir={self.root / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _apiserver(self) -> list[str]:
        return [
            str(self.binaries / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
            "--bind-address=0.0.0.0",
            f"--advertise-address={address_of(LOGIN)}",
            f"--secure-port={API_PORT}",
            f"--tls-cert-file={self.root / 'apiserver.crt'}",
            f"--tls-private-key-file={self.root / 'apiserver.key'}",
            f"--token-auth-file={self.root / 'tokens.csv'}",
            "--anonymous-auth=false",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={self.root / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={self.root / 'service-accounts.key'}",
            "--allow-privileged=true",
            "--endpoint-reconciler-type=none",
            "--profiling=false",
            "--v=0",
        ]

    def _controller_manager(self) -> list[str]:
        return [
            str(self.binaries / "kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig}",
            "--secure-port=0",
            "--leader-elect=false",
            f"--root-ca-file={self.root / 'ca.crt'}",
            f"--service-account-private-key-file={self.root / 'service-accounts.key'}",
            # No kubelet stands behind the Nodes here; their pods are to stay all the same.
            "--controllers=*,-node-lifecycle-controller,-pod-garbage-collector-controller,-taint-eviction-controller",
            "--kube-api-qps=100",
            "--kube-api-burst=200",
            "--profiling=false",
            "--v=0",
        ]

    def _start_cluster_api(self) -> None:
        served = issue(["127.0.0.1"], _LIFETIME_S)
        keys = private_dir(self.root / "cluster-api-webhook")
        write_private(keys / "tls.crt", served.certificate)
        write_private(keys / "tls.key", served.key)
        url = f"https://127.0.0.1:{WEBHOOK_PORT}"
        crds = self.parts.crds(url, served.authority)
        self.apply(*crds)
        names = [f"crd/{crd['metadata']['name']}" for crd in crds]
        self.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names, timeout_s=90)
        self.launch(
            "cluster-api",
            [
                str(self.parts.controller),
                f"--webhook-port={WEBHOOK_PORT}",
                f"--webhook-cert-dir={keys}",
                f"--health-addr=127.0.0.1:{HEALTH_PORT}",
                f"--diagnostics-address=127.0.0.1:{DIAGNOSTICS_PORT}",
                "--insecure-diagnostics=true",
            ],
            {"KUBECONFIG": str(self.kubeconfig), "POD_NAMESPACE": "default"},
        )
        self._await_port(WEBHOOK_PORT, "cluster-api")
        self.apply(*self.parts.webhooks(url, served.authority))

    def _ready(self) -> bool:
        self._check("kube-apiserver")
        return self.kubectl("get", "--raw", "/readyz", check=False, timeout_s=10).ok

    def _await_port(self, port: int, name: str) -> None:
        init = self.bed.init(LOGIN)

        def ready() -> bool:
            self._check(name)
            return listens(init, port)

        wait_until(ready, _START_S, f"{name} to listen", pause_s=0.1)

    def _check(self, name: str) -> None:
        if not self.running(name):
            tail = "\n".join(self.log(name).splitlines()[-10:])
            raise SlurmletError(f"{name} of the management cluster ended; the end of its log:\n{tail}")


def kubeconfig(server: str, authority: bytes, token: str, namespace: str = "default") -> str:
    """JSON is YAML."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "here",
                    "cluster": {
                        "server": server,
                        "certificate-authority-data": base64.b64encode(authority).decode(),
                    },
                }
            ],
            "users": [{"name": "here", "user": {"token": token}}],
            "contexts": [
                {"name": "here", "context": {"cluster": "here", "user": "here", "namespace": namespace}}
            ],
            "current-context": "here",
        }
    )
