"""The API of the shared cluster through one long-lived `kubectl proxy`.

Tests look at pods thousands of times, and a kubectl for each look is a tenth of a second of a core. What a person types
(apply, exec, logs, wait …) is still typed.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from slurmlet.testbed.hosts import Testbed

_CORE, _APPS, _BATCH = "/api/v1", "/apis/apps/v1", "/apis/batch/v1"
# As kubectl calls them → where they are, and whether in a namespace.
_KINDS = {
    **dict.fromkeys(("pod", "pods"), (_CORE, "pods", True)),
    **dict.fromkeys(("service", "services"), (_CORE, "services", True)),
    **dict.fromkeys(("event", "events"), (_CORE, "events", True)),
    **dict.fromkeys(("pvc", "persistentvolumeclaim"), (_CORE, "persistentvolumeclaims", True)),
    **dict.fromkeys(("serviceaccount",), (_CORE, "serviceaccounts", True)),
    **dict.fromkeys(("node", "nodes"), (_CORE, "nodes", False)),
    **dict.fromkeys(("pv",), (_CORE, "persistentvolumes", False)),
    **dict.fromkeys(("deployment", "deployments"), (_APPS, "deployments", True)),
    **dict.fromkeys(("statefulset",), (_APPS, "statefulsets", True)),
    **dict.fromkeys(("job", "jobs"), (_BATCH, "jobs", True)),
}
_QUERIES = {"-l": "labelSelector", "--field-selector": "fieldSelector"}
_START_S, _LIMIT_S = 10.0, 30.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        # By the directory's descriptor: paths of sockets have to be short.
        directory = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            self.sock.connect(f"/proc/self/fd/{directory}/{self._path.name}")
        finally:
            os.close(directory)


class Reader:
    """Asks; whatever is not answered with what was wanted is None, and kubectl's to tell."""

    def __init__(self, testbed: Testbed, kubectl: list[str], user: str) -> None:
        self._testbed, self._user = testbed, user
        self._kubectl = kubectl
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: _Connection | None = None

    def get(self, kind: str, name: str | None, namespace: str, *more: str) -> Any:
        path = path_of(kind, name, namespace, *more)
        return self.ask("GET", path) if path is not None else None

    def ask(self, verb: str, path: str, body: Any = None) -> Any:
        text = None if body is None else json.dumps(body)
        for _ in range(2):
            try:
                connection = self._connected()
                connection.request(verb, path, text, {"Content-Type": "application/json"} if text else {})
                answer = connection.getresponse()
                said = answer.read()
                return json.loads(said) if answer.status < 300 else None
            except (OSError, http.client.HTTPException, ValueError):
                # A proxy that was killed by the test, or whose server is gone.
                self.close()
        return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._testbed.stop(self._process)
        self._connection = self._process = None

    def _connected(self) -> _Connection:
        if self._connection is None:
            home = Path(self._testbed.environment(self._user)["HOME"])
            name = f".e2e-proxy-{os.getpid()}.sock"
            outside = self._testbed.paths.home / self._user / name
            outside.unlink(missing_ok=True)
            silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            argv = [*self._kubectl, "proxy", f"--unix-socket={home / name}"]
            self._process = self._testbed.popen(argv, user=self._user, **silent)
            deadline_s = time.monotonic() + _START_S
            while not outside.exists():
                # It starts also where no server is.
                assert self._process.poll() is None, "kubectl proxy does not start"
                assert time.monotonic() < deadline_s, "kubectl proxy makes no socket"
                time.sleep(0.01)
            self._connection = _Connection(outside)
        return self._connection


def path_of(kind: str, name: str | None, namespace: str, *more: str) -> str | None:
    """Where the API has what `kubectl get kind name …` shows, or None for what only kubectl knows."""
    if kind not in _KINDS or len(more) % 2 or any(word not in _QUERIES for word in more[::2]):
        return None
    group, plural, namespaced = _KINDS[kind]
    path = f"{group}/namespaces/{namespace}/{plural}" if namespaced else f"{group}/{plural}"
    if name is not None:
        return f"{path}/{quote(name)}"
    query = urlencode({_QUERIES[word]: value for word, value in zip(more[::2], more[1::2], strict=True)})
    return f"{path}?{query}" if query else path
