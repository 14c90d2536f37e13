"""`kubectl attach`, and `kubectl run -it`: a client at the streams of a container's own process.

All that a client sees is made in the runner (`runner/streams/attach_session.py`); when it leaves, the container goes on.
"""

from __future__ import annotations

from aiohttp import web

from slurmlet.hub.kubelet.exec import serve_command
from slurmlet.hub.pods.pod_manager import Pods


async def serve_attach(request: web.Request, pods: Pods) -> web.StreamResponse:
    return await serve_command(request, pods, "attach")
