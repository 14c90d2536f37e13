"""`kubectl attach`, and `kubectl run -it`: a client at the streams of a container's own process.

All that a client sees is made in the runner (`runner/streams/attach_session.py`); when it leaves, the container goes on.
"""

from __future__ import annotations

from aiohttp import web

from slurmlet.hub.kubelet.exec import serve_command
from slurmlet.hub.kubelet.remote_command import Wants
from slurmlet.hub.pods.pod_manager import Pods
from slurmlet.protocol.messages import Open


async def serve_attach(request: web.Request, pods: Pods) -> web.StreamResponse:
    def asked(stream: int, container: str, want: Wants) -> Open:
        return {
            "type": "open",
            "stream": stream,
            "what": "attach",
            "container": container,
            "stdin": want.stdin,
            "stdout": want.stdout,
            "stderr": want.stderr,
            "tty": want.tty,
        }

    return await serve_command(request, pods, asked)
