"""The kubelet's HTTP API, for all nodes at once: logs, exec, and what tools ask of a kubelet.

TLS with client certificates; only the API server's own certificate is let in.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.kubelet.attach import serve_attach
from slurmlet.hub.kubelet.exec import serve_exec
from slurmlet.hub.kubelet.kubelet_stats import StatServer
from slurmlet.hub.kubelet.pod_logs import serve_logs
from slurmlet.hub.kubelet.port_forward import serve_forward
from slurmlet.hub.pods.pod_manager import Pods

API_SERVER = "slurmlet:kubelet-client"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Less than `slurmlet status` waits for an answer.
_REFRESH_S = 2.5


@web.middleware
async def _only_the_api_server(request: web.Request, handler: Handler) -> web.StreamResponse:
    certificate = request.transport.get_extra_info("peercert") if request.transport else None
    names = [v for part in (certificate or {}).get("subject", ()) for k, v in part if k == "commonName"]
    if names != [API_SERVER]:
        raise web.HTTPForbidden(text="only the API server may ask\n")
    return await handler(request)


class KubeletServer:
    def __init__(
        self, settings: Settings, pods: Pods, stats: StatServer, refresh: Callable[[], Awaitable[None]]
    ) -> None:
        """`refresh` looks at Slurm's partitions and brings the Nodes up to date."""
        self._settings = settings
        self._pods = pods
        self._stats = stats
        self._refresh_nodes = refresh

    async def start(self, port: int) -> web.AppRunner:
        app = web.Application(middlewares=[_only_the_api_server])
        app.router.add_get("/healthz", self._healthz)
        app.router.add_post("/slurm/refresh", self._refresh)
        self._stats.add_routes(app.router)
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        for method in ("GET", "POST"):
            app.router.add_route(method, "/exec/{namespace}/{pod}/{container}", self._exec)
            app.router.add_route(method, "/attach/{namespace}/{pod}/{container}", self._attach)
            app.router.add_route(method, "/portForward/{namespace}/{pod}", self._forward)
        # Cancellation tells a handler that its client went away: a follower must not wait for the next line.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", port, ssl_context=self._tls()).start()
        return runner

    def _tls(self) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(settings.pki("hub-ca.crt")))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(str(settings.pki("hub-server.crt")), str(settings.pki("hub-server.key")))
        return context

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _refresh(self, _: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_REFRESH_S):
                await self._refresh_nodes()
        except TimeoutError:
            return web.Response(status=504, text="Slurm has not answered yet\n")
        return web.Response(text="ok")

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        return await serve_logs(request, self._settings, self._pods)

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        return await serve_exec(request, self._pods)

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        return await serve_attach(request, self._pods)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        return await serve_forward(request, self._pods)
