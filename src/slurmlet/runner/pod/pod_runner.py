"""The real runner, PID 1 of the sandbox: link, pod and loop put together, from hello to bye."""

from __future__ import annotations

import gc
import os
import signal
import sys

from slurmlet.linux import syscalls
from slurmlet.linux.event_loop import Loop
from slurmlet.protocol import wire
from slurmlet.runner import VERSION
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.host.sandbox import SIGNALS, Inside
from slurmlet.runner.link import reporter
from slurmlet.runner.link.hub_link import Link
from slurmlet.runner.link.reporter import Reporter
from slurmlet.runner.pod.claim import PodDir
from slurmlet.runner.streams.link_streams import Refused, Stream, Streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional

    from slurmlet.podnet.network_namespace import Making
    from slurmlet.protocol.messages import Ask, HubToRunner, Open, PodOrder
    from slurmlet.protocol.pod_plan import PodPlan
    from slurmlet.protocol.pod_report import PodUsage
    from slurmlet.runner.containers.pod_context import PodContext
    from slurmlet.runner.host.scratch import Scratch
    from slurmlet.runner.network.network_attachment import PodNetwork
    from slurmlet.runner.network.network_view import Network
    from slurmlet.runner.pod.pod_lifecycle import Lifecycle
    from slurmlet.runner.pod.resource_usage import Usage
    from slurmlet.runner.streams.link_streams import Session

# Slurm kills what is left KillWait (30 s unless configured) after SIGTERM; some of it is for the last report.
SIGNALLED_GRACE_S = 25.0
BYE_WAIT_S = 3.0
_STARTED_S = 2.0
# What a pod will need, in the order of its needs. Loaded while the hub answers, one in each turn of the loop.
_AHEAD = (
    "volumes.pod_volumes", "containers.oci_runtime", "containers.pod_context", "pod.pod_lifecycle", "pod.pod_setup",
    "pod.volume_updates",
)  # fmt: skip


def run_pod(pod: PodDir, job_id: str, inside: Inside) -> int:
    return Runner(pod, job_id, inside).run()


class Runner:
    def __init__(self, pod: PodDir, job_id: str, inside: Inside) -> None:
        self._pod, self._job_id, self._inside = pod, job_id, inside
        self._loop = Loop()
        self._children = Children(self._loop)
        self._link = Link(self._loop, pod, self._link_up, self._frame, self._link_down)
        self._reporter = Reporter(self._loop, pod.report, self._link.send)
        self._streams = Streams(self._link.send, self._open_session)
        self._lifecycle: Optional[Lifecycle] = None
        self._context: Optional[PodContext] = None
        self._scratch: Optional[Scratch] = None
        self._usage: Optional[Usage] = None
        self._making: Optional[Making] = None
        self._pod_network: Optional[PodNetwork] = None
        self._address = "127.0.0.1"
        self._exit_code = 0
        self._loop.on_signal(signal.SIGTERM, self._signalled)
        # A Ctrl-C at a terminal in front of a hand-started runner reaches every process of the group.
        self._loop.on_signal(signal.SIGINT, self._signalled)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._loop.reading(inside.lifeline, self._orphaned)

    def run(self) -> int:
        # main.py has stopped it for the time of loading.
        self._loop.later(_STARTED_S, gc.enable)
        self._begin_network()
        self._link.start()
        self._loop.soon(lambda: self._load_ahead(list(_AHEAD)))
        self._loop.run()
        self._say_bye()
        self._clean_up()
        return self._exit_code

    def _begin_network(self) -> None:
        """Most pods want a network of their own, and the kernel can make it while we have other things to do."""
        try:
            wanted = bool(self._pod.hub().get("pod_network"))
        except (OSError, ValueError):
            return
        if wanted:
            from slurmlet.runner.network import network_attachment

            self._making = network_attachment.begin()

    def _load_ahead(self, names: List[str]) -> None:
        if names and self._lifecycle is None:
            __import__("slurmlet.runner." + names.pop(0))
            self._loop.soon(lambda: self._load_ahead(names))

    # The link.

    def _link_up(self, address: str) -> None:
        self._address = address
        has_pod = self._lifecycle is not None
        self._link.send(
            wire.control(
                {
                    "type": "hello",
                    "protocol": wire.MAJOR,
                    "minor": wire.MINOR,
                    "pod_uid": self._pod.uid,
                    "job_id": self._job_id,
                    "host": os.uname().nodename,
                    "host_ip": address,
                    "version": VERSION,
                    "has_pod": has_pod,
                    "report": self._reporter.report if has_pod else None,
                }
            )
        )
        if has_pod:
            self._reporter.send_again()
        if self._pod_network is not None:
            self._pod_network.introduce()

    def _link_down(self) -> None:
        self._streams.abandon_all()

    def _frame(self, frame: wire.Frame) -> None:
        if frame.kind != wire.CONTROL:
            self._streams.frame(frame)
            return
        message: HubToRunner = wire.parse(frame.payload)
        if message["type"] == "network":
            if self._pod_network is not None:
                self._pod_network.told(frame.payload, message)
        elif message["type"] == "open":
            self._streams.open(message)
        elif message["type"] == "ack":
            self._reporter.acked(message["seq"])
        elif message["type"] == "ask":
            self._answer(message)
        elif message["type"] == "refused":
            print(f"the hub refused this runner: {message['reason']}", file=sys.stderr, flush=True)
        else:
            self._told_of_pod(message)

    def _told_of_pod(self, message: PodOrder) -> None:
        if message["type"] == "pod":
            if self._lifecycle is None:
                self._begin(message["pod"])
        elif message["type"] == "stop":
            if "problem" in message:
                self._reporter.problem(message["problem"]["reason"], message["problem"]["message"])
            self._stop(message["grace_s"])
        elif self._context is None or self._lifecycle is None:
            return
        elif message["type"] == "volumes":
            from slurmlet.runner.pod import volume_updates

            volume_updates.refresh(self._context, message)
        elif message["type"] == "ephemeral":
            self._lifecycle.add_ephemeral(message["container"])
        elif message["type"] == "container":
            self._lifecycle.redefine(message["container"])

    # The pod.

    def _begin(self, plan: PodPlan) -> None:
        from slurmlet.runner.pod import pod_setup, volume_updates
        from slurmlet.runner.pod.pod_lifecycle import Lifecycle

        around = pod_setup.Around(self._loop, self._children, self._reporter, self._pod, self._inside.mapping)
        try:
            self._scratch = pod_setup.make_scratch(self._pod)
            pod_setup.mount_private(self._scratch)
            network = self._make_network(plan, self._scratch)
            self._context = pod_setup.make_context(around, plan, self._scratch, network)
        except pod_setup.Forbidden as error:
            self._reporter.event("Warning", "SysctlForbidden", str(error))
            self._reporter.problem("SysctlForbidden", str(error))
            self._end_without_pod(1)
            return
        except (OSError, pod_setup.NoRuntime) as error:
            from slurmlet.runner.host.scratch_space import told

            self._reporter.problem("NodeNotUsable", told(error))
            self._end_without_pod(1)
            return
        self._lifecycle = Lifecycle(self._context, self._done)
        volume_updates.begin(self._context, self._lifecycle)
        self._sweep()

    def _make_network(self, plan: PodPlan, scratch: Scratch) -> Network:
        if not plan.get("network"):
            from slurmlet.runner.network.network_view import HostNetwork

            if self._making is not None:
                self._making.abandon()
            return HostNetwork(plan, self._address)
        from slurmlet.runner.network.network_attachment import Parts, PodNetwork

        libraries = os.path.join(self._pod.cluster_dir, "bin")
        parts = Parts(self._loop, self._children, scratch, self._link.send, libraries, self._making)
        self._pod_network = PodNetwork(parts, plan, self._address)
        self._pod_network.introduce()
        return self._pod_network

    def _sweep(self) -> None:
        """What runners that were killed left on this node. After the pod's own start: nobody waits for it."""
        from slurmlet.runner.host.image_unpack import remove_trees

        assert self._scratch is not None
        left = self._scratch.abandoned()
        if left:
            self._children.call(lambda: remove_trees(left), lambda _value, _error: None)

    def _open_session(self, message: Open, stream: Stream) -> Session:
        if message["what"] == "forward":
            from slurmlet.runner.streams.forwarded_port import forward

            return forward(self._context, message, stream)
        name = str(message["container"])
        container = self._lifecycle.find(name) if self._lifecycle is not None else None
        if container is None:
            raise Refused(f"container {name} is not in this pod", "NotFound")
        assert self._context is not None
        if message["what"] == "exec":
            from slurmlet.runner.streams.exec_session import ExecSession

            return ExecSession(self._context, container, message, stream)
        if message["what"] == "attach":
            from slurmlet.runner.streams.attach_session import AttachSession

            return AttachSession(self._loop, container, message, stream)
        from slurmlet.protocol.log_files import LogOptions
        from slurmlet.runner.streams.log_follow import LogSession

        options = LogOptions.from_message(message)
        return LogSession(self._loop, container, options, stream, str(self._context.plan["name"]))

    def _answer(self, message: Ask) -> None:
        """What the pod uses, now; null before it has begun."""

        def answer(usage: Optional[PodUsage]) -> None:
            self._link.send(wire.control({"type": "answer", "id": message["id"], "usage": usage}))

        if self._context is None or self._lifecycle is None or message.get("what") != "usage":
            answer(None)
            return
        if self._usage is None:
            from slurmlet.runner.pod.resource_usage import Usage

            self._usage = Usage(self._context, self._lifecycle)
        self._usage.ask(bool(message.get("disk")), answer)

    # The end.

    def _signalled(self) -> None:
        self._reporter.problem("Terminated", "the Slurm job was signalled")
        grace_s = float(self._context.plan.get("grace_s") or 0) if self._context is not None else 0.0
        self._stop(min(grace_s, SIGNALLED_GRACE_S))

    def _stop(self, grace_s: float) -> None:
        if self._lifecycle is not None:
            self._lifecycle.stop(grace_s)
        else:
            self._end_without_pod(0)

    def _end_without_pod(self, exit_code: int) -> None:
        self._reporter.report["exit_code"] = exit_code
        self._reporter.set_phase(reporter.DONE)
        self._done(exit_code)

    def _done(self, exit_code: int) -> None:
        self._exit_code = exit_code
        # In a turn of its own: whoever called us still has things to say.
        self._loop.soon(self._loop.stop)

    def _orphaned(self) -> None:
        # The outer process never writes: end-of-file, it is gone and so is the job.
        os._exit(1)

    def _say_bye(self) -> None:
        self._reporter.bye()
        # Log followers get the rest of what they read while the hub writes down the end.
        acked = self._loop.run_until(
            lambda: self._reporter.all_acked and self._link.flushed() and not self._streams.busy, BYE_WAIT_S
        )
        if not acked and not self._reporter.all_acked:
            print(
                "the hub did not confirm the last report; it lies in report.json", file=sys.stderr, flush=True
            )
        self._link.close()

    def _clean_up(self) -> None:
        if self._scratch is None:
            return
        from slurmlet.runner.host.image_unpack import remove_tree

        syscalls.unmount_below(self._scratch.pod)
        remove_tree(self._scratch.pod)
