"""A running pod's volumes kept in order: newer contents from the hub, limits watched."""

from __future__ import annotations

import sys

from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.pod.pod_lifecycle import Lifecycle
from slurmlet.runner.volumes.pod_volumes import MountFailed, limit_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurmlet.protocol.messages import Volumes

    pass


def begin(context: PodContext, lifecycle: Lifecycle) -> None:
    """Start the pod as soon as its image volumes are there."""

    def prepared(error: str) -> None:
        if error:
            context.reporter.event("Warning", "FailedMount", f"Unable to mount image volumes: {error}")
            context.reporter.problem("FailedMount", f"an image volume could not be unpacked: {error}")
            lifecycle.stop(0)
            return
        lifecycle.start()
        if any(limit_bytes(plan) for plan in context.plan["volumes"].values()):
            _watch_limits(context, lifecycle)
        limits = context.plan["storage_limits"]
        if limits["pod"] or limits["containers"]:
            from slurmlet.runner.pod.storage_limits import StorageWatch

            StorageWatch(context, lifecycle, lambda message: _evict(context, lifecycle, message)).start()

    context.volumes.prepare(context.children, prepared)


def refresh(context: PodContext, message: Volumes) -> None:
    """The hub's `volumes` message. A volume that cannot be written keeps what it has, as with a kubelet."""
    try:
        context.volumes.refresh(message.get("volumes") or {})
    except MountFailed as error:
        print(f"refresh: {error}", file=sys.stderr, flush=True)
        context.reporter.event("Warning", error.event, str(error))


def _watch_limits(context: PodContext, lifecycle: Lifecycle) -> None:
    from slurmlet.runner.pod import eviction

    def evict(message: str) -> None:
        _evict(context, lifecycle, message)

    eviction.UsageWatch(context.loop, context.children, context.volumes.limited, evict).start()


def _evict(context: PodContext, lifecycle: Lifecycle, message: str) -> None:
    from slurmlet.runner.pod import eviction

    context.reporter.event("Warning", eviction.REASON, message)
    context.reporter.problem(eviction.REASON, message)
    lifecycle.stop(eviction.GRACE_S)
