"""Small questions to the API server, for `up` and `status`: standard library only, so that asking costs no imports.

Reads; writes no object. The hub's client is in kube/.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from slurmlet.base.host_addresses import LOOPBACK
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import cluster_config as configs


@dataclass(frozen=True)
class NodeState:
    name: str
    ready: bool
    reason: str


class ApiProbe:
    """Asks on this host, as the admin, over one connection that is made again when it breaks."""

    def __init__(self, files: ClusterFiles, timeout_s: float = 3.0) -> None:
        self._files = files
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPSConnection | None = None
        self._context: ssl.SSLContext | None = None

    def get(self, path: str) -> tuple[int, bytes] | None:
        return self.ask("GET", path)

    def ask(self, method: str, path: str) -> tuple[int, bytes] | None:
        """Status and body, or None while nobody answers."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.request(method, path, headers={"Accept": "application/json"})
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            self.close()
            return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> http.client.HTTPSConnection:
        # Read anew each time: the supervisor may have chosen another port.
        config = configs.load_existing(self._files)
        if self._context is None:
            # Once: while a control plane starts, every millisecond spent here is one that it lacks.
            self._context = ssl.create_default_context(cafile=str(self._files.pki / "ca.crt"))
            self._context.load_cert_chain(self._files.pki / "admin.crt", self._files.pki / "admin.key")
        return http.client.HTTPSConnection(
            LOOPBACK, config.api_port, timeout=self._timeout_s, context=self._context
        )

    def ready(self) -> bool:
        answer = self.get("/readyz")
        return answer is not None and answer[0] == 200

    def unready_checks(self) -> list[str]:
        """Names of the API server's own checks that fail."""
        answer = self.get("/readyz?verbose")
        lines = answer[1].decode(errors="replace").splitlines() if answer else []
        return [line[3:].split(" ")[0] for line in lines if line.startswith("[-]")]

    def nodes(self, latest: bool = False) -> list[NodeState]:
        """`latest`: not from the API server's cache, which may be a moment behind."""
        path = "/api/v1/nodes" if latest else "/api/v1/nodes?resourceVersion=0"
        return [_node_state(item) for item in self._items(path)]

    def metrics(self, node: str) -> str:
        """The hub's own figures, in Prometheus' form, as a kubelet serves them; "" when it does not answer."""
        answer = self.get(f"/api/v1/nodes/{quote(node, safe='')}/proxy/metrics")
        return answer[1].decode(errors="replace") if answer is not None and answer[0] == 200 else ""

    def refresh(self, node: str) -> None:
        """Let the hub look at Slurm's partitions now, so that the Nodes say what is; a hub that cannot is let be."""
        self.ask("POST", f"/api/v1/nodes/{quote(node, safe='')}/proxy/slurm/refresh")

    def has_default_account(self) -> bool:
        answer = self.get("/api/v1/namespaces/default/serviceaccounts/default")
        return answer is not None and answer[0] == 200

    def pods_by_phase(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for item in self._items("/api/v1/pods?resourceVersion=0"):
            phase = item.get("status", {}).get("phase", "Unknown")
            counts[phase] = counts.get(phase, 0) + 1
        return counts

    def pod_address(self, namespace: str, name: str) -> str:
        """ "" when there is no such pod, or it has no address."""
        answer = self.get(f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}")
        if answer is None or answer[0] != 200:
            return ""
        with contextlib.suppress(json.JSONDecodeError):
            return str(json.loads(answer[1]).get("status", {}).get("podIP") or "")
        return ""

    def _items(self, path: str) -> list[dict[str, Any]]:
        answer = self.get(path)
        if answer is None or answer[0] != 200:
            return []
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(answer[1]).get("items") or []
        return []


def _node_state(item: dict[str, Any]) -> NodeState:
    for condition in item.get("status", {}).get("conditions", ()):
        if condition.get("type") == "Ready":
            return NodeState(
                item["metadata"]["name"], condition.get("status") == "True", condition.get("reason", "")
            )
    return NodeState(item["metadata"]["name"], False, "NoReadyCondition")
