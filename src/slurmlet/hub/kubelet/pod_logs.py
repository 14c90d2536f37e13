"""`kubectl logs`: from the runner while it is there, from the pod's directory when it is gone. One reader for both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.pods.pod_manager import Pods
from slurmlet.hub.pods.pod_worker import PodWorker
from slurmlet.hub.runner_links import LinkLost
from slurmlet.model.container_reports import containers_of
from slurmlet.protocol import wire
from slurmlet.protocol.log_files import LogOptions, NoLog, read_logs
from slurmlet.protocol.messages import OpenLogs
from slurmlet.protocol.pod_report import ContainerReport

_DIAL_IN_S = 5.0
_WAITING_WORDS = {
    "ErrImagePull": "image can't be pulled",
    "ImagePullBackOff": "trying and failing to pull image",
}


async def serve_logs(request: web.Request, settings: Settings, pods: Pods) -> web.StreamResponse:
    where = request.match_info
    worker = pods.named(where["namespace"], where["pod"])
    if worker is None:
        raise web.HTTPNotFound(text=f'pod "{where["pod"]}" not found\n')
    _check_known(worker, where["container"])
    options = _options(request.query)
    _check_started(worker, where["container"], options.previous)
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    if await _from_runner(request, response, worker, where["container"], options):
        return response
    return await _from_files(request, response, settings, worker, where["container"], options)


def _check_known(worker: PodWorker, container: str) -> None:
    """The name becomes part of a path. The API server checks it, but not for those who come through nodes/proxy."""
    spec, pod = worker.state.pod["spec"], worker.state.pod["metadata"]["name"]
    every = (
        *(spec.get("initContainers") or ()),
        *spec["containers"],
        *(spec.get("ephemeralContainers") or ()),
    )
    if container not in {one["name"] for one in every}:
        raise web.HTTPNotFound(text=f'container "{container}" not found in pod "{pod}"\n')


def _options(query: Mapping[str, str]) -> LogOptions:
    """The query of the kubelet API; a bad value is the caller's mistake."""

    def whole(name: str) -> int | None:
        text = query.get(name)
        if text is None:
            return None
        if not text.isdecimal():
            raise web.HTTPBadRequest(text=f"{name}: {text!r} is not a non-negative whole number\n")
        return int(text)

    since = whole("sinceSeconds")
    return LogOptions(
        follow=query.get("follow") == "true",
        previous=query.get("previous") == "true",
        timestamps=query.get("timestamps") == "true",
        since_s=None if since is None else float(since),
        since_time=query.get("sinceTime"),
        tail_lines=whole("tailLines"),
        limit_bytes=whole("limitBytes"),
        log_stream=query.get("stream", "All"),
    )


def _check_started(worker: PodWorker, container: str, previous: bool) -> None:
    """The kubelet's refusals, in its words."""
    status = worker.state.pod.get("status") or {}
    every = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    report = _report_of(worker, container)
    found: Mapping[str, Any] = next((one for one in every if one["name"] == container), {})
    pod = worker.state.pod["metadata"]["name"]
    if previous:
        if (report is None or not report["last"]) and not found.get("lastState"):
            raise web.HTTPBadRequest(
                text=f'previous terminated container "{container}" in pod "{pod}" not found'
            )
        return
    waiting = (found.get("state") or {}).get("waiting")
    if report is not None and (report["state"] != "waiting" or report["last"]):
        return
    if waiting and not found.get("lastState"):
        reason = waiting.get("reason", "ContainerCreating")
        why = _WAITING_WORDS.get(reason, reason)
        raise web.HTTPBadRequest(text=f'container "{container}" in pod "{pod}" is waiting to start: {why}')


def _report_of(worker: PodWorker, container: str) -> ContainerReport | None:
    return containers_of(worker.state.report).get(container)


async def _from_runner(
    request: web.Request, response: web.StreamResponse, worker: PodWorker, container: str, options: LogOptions
) -> bool:
    ended = worker.state.runner_done or worker.state.terminal
    link = worker.state.live_link if ended else await worker.linked(_DIAL_IN_S)
    if link is None or not link.alive:
        return False
    try:
        stream = await link.open(lambda stream: _opening(stream, container, options))
    except LinkLost:
        return False
    try:
        while (item := await stream.receive()) is not None:
            channel, data = item
            if channel == wire.STATUS and "error" in (told := json.loads(data)):
                if response.prepared:
                    break
                raise web.HTTPBadRequest(text=told["error"])
            if channel == wire.STDOUT:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(data)
    finally:
        await stream.close()
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof()
    return True


def _opening(stream: int, container: str, options: LogOptions) -> OpenLogs:
    return {
        "type": "open",
        "stream": stream,
        "what": "logs",
        "container": container,
        "follow": options.follow,
        "previous": options.previous,
        "timestamps": options.timestamps,
        "since_s": options.since_s,
        "since_time": options.since_time,
        "tail_lines": options.tail_lines,
        "limit_bytes": options.limit_bytes,
        "log_stream": options.log_stream,
    }


async def _from_files(
    request: web.Request,
    response: web.StreamResponse,
    settings: Settings,
    worker: PodWorker,
    container: str,
    options: LogOptions,
) -> web.StreamResponse:
    directory = settings.files.pod(worker.state.uid).logs / container
    try:
        pieces = await asyncio.to_thread(read_logs, str(directory), options)
        first = await asyncio.to_thread(next, pieces, b"")
    except (NoLog, FileNotFoundError):
        raise web.HTTPBadRequest(text=f'no log of container "{container}" is left') from None
    await response.prepare(request)
    while first:
        await response.write(first)
        first = await asyncio.to_thread(next, pieces, b"")
    await response.write_eof()
    return response
