"""An admission webhook server: AdmissionReview v1 in and out, over TLS, for validating and mutating webhooks.

A handler that fails or takes too long is an HTTP error: whether the request is let through then is for the configuration's
failurePolicy to say, never for this server. Nothing a caller sends is trusted beyond its shape. An API server does not say
who it is: where an answer is not for everybody who reaches the port, the path ends in a token that only the configuration
and the server know.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

log = logging.getLogger(__name__)
Obj = dict[str, Any]
_VERSION = "admission.k8s.io/v1"
# Object, old object and options, of at most 3 MiB that the API server takes in a request.
_BODY_LIMIT_BYTES = 8 << 20
# Below the API server's default of 10 s, so that the reason comes from here.
_TIMEOUT_S = 8.0


@dataclass(frozen=True)
class Review:
    """What the API server asks about. `object` is empty for a DELETE, `old_object` for a CREATE."""

    uid: str
    operation: str
    kind: str
    namespace: str
    name: str
    user: str
    groups: tuple[str, ...]
    object: Obj
    old_object: Obj
    dry_run: bool
    request: Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    allowed: bool = True
    message: str = ""
    code: int = 403
    warnings: tuple[str, ...] = ()
    # The object as it should be; a mutating webhook's answer is the difference.
    changed: Mapping[str, Any] | None = None


Handler = Callable[[Review], Awaitable[Verdict]]


def denied(message: str, code: int = 403) -> Verdict:
    return Verdict(allowed=False, message=message, code=code)


class WebhookServer:
    """Handlers by path. The context may be changed under it (webhook_certificates).

    `tokens`: those that are good now, of which one must follow the path; None: the path alone is enough.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        tokens: Callable[[], Collection[str]] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._handlers, self._tokens, self._timeout_s = dict(handlers), tokens, timeout_s
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, context: ssl.SSLContext) -> int:
        """Returns the port, for who asked for any."""
        app = web.Application(client_max_size=_BODY_LIMIT_BYTES)
        for path, handler in self._handlers.items():
            served = path if self._tokens is None else f"{path}/{{token}}"
            app.router.add_post(served, self._route(path, handler))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=self._timeout_s)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=context).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Requests under way are answered first."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _admits(self, given: str) -> bool:
        """In a time that does not tell how much of a token was right."""
        if self._tokens is None:
            return True
        return any(hmac.compare_digest(given.encode(), good.encode()) for good in self._tokens() if good)

    def _route(self, path: str, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            if not self._admits(request.match_info.get("token", "")):
                return web.Response(status=404)
            # aiohttp answers 413 by itself where the body is beyond the limit.
            raw = await request.read()
            try:
                review = _review(json.loads(raw))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                return web.Response(status=400, text=f"no AdmissionReview of {_VERSION}: {error!r}")
            try:
                async with asyncio.timeout(self._timeout_s):
                    verdict = await handler(review)
                return web.json_response(_answer(review, verdict))
            except TimeoutError:
                log.warning(
                    "webhook %s: %s %s took over %.1f s", path, review.kind, review.name, self._timeout_s
                )
                return web.Response(status=504, text=f"no verdict within {self._timeout_s:.1f} s")
            except Exception as error:
                log.exception("webhook %s: %s %s/%s", path, review.kind, review.namespace, review.name)
                return web.Response(status=500, text=f"the webhook failed: {type(error).__name__}")

        return answer


def _review(document: Any) -> Review:
    if (document["apiVersion"], document["kind"]) != (_VERSION, "AdmissionReview"):
        raise ValueError(f"{document['apiVersion']} {document['kind']}")
    request = document["request"]
    user = request.get("userInfo") or {}
    return Review(
        uid=str(request["uid"]),
        operation=str(request["operation"]),
        kind=str(request["kind"]["kind"]),
        namespace=request.get("namespace") or "",
        name=request.get("name") or "",
        user=user.get("username") or "",
        groups=tuple(user.get("groups") or ()),
        object=request.get("object") or {},
        old_object=request.get("oldObject") or {},
        dry_run=bool(request.get("dryRun")),
        request=request,
    )


def _answer(review: Review, verdict: Verdict) -> Obj:
    response: Obj = {"uid": review.uid, "allowed": verdict.allowed}
    if not verdict.allowed:
        response["status"] = {"message": verdict.message, "code": verdict.code}
    elif verdict.changed is not None:
        patch = json_patch(review.object, verdict.changed)
        if patch:
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    if verdict.warnings:
        response["warnings"] = list(verdict.warnings)
    return {"apiVersion": _VERSION, "kind": "AdmissionReview", "response": response}


def json_patch(before: Mapping[str, Any], after: Mapping[str, Any], at: str = "") -> list[Obj]:
    """RFC 6902: what makes `before` into `after`. Lists are replaced whole: their order is part of them."""
    steps: list[Obj] = []
    for name in [*before, *(name for name in after if name not in before)]:
        path = f"{at}/{name.replace('~', '~0').replace('/', '~1')}"
        if name not in after:
            steps.append({"op": "remove", "path": path})
        elif name not in before:
            steps.append({"op": "add", "path": path, "value": after[name]})
        elif isinstance(before[name], dict) and isinstance(after[name], dict):
            steps += json_patch(before[name], after[name], path)
        elif type(before[name]) is not type(after[name]) or before[name] != after[name]:
            steps.append({"op": "replace", "path": path, "value": after[name]})
    return steps
