"""One container of the pod, from its first start to its last end, and its part of the report.

It says what happened and does what it is told; whether to start again is decided in lifecycle.py.
"""

from __future__ import annotations

import os
import time

from slurmlet.linux.event_loop import Timer
from slurmlet.protocol.log_files import LogWriter
from slurmlet.runner.containers.container_output import Outputs
from slurmlet.runner.containers.container_runtime import CONFIG_ERROR, CREATE_ERROR, Start, unsupported
from slurmlet.runner.containers.container_stop import Termination
from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.containers.probe_actions import Action
from slurmlet.runner.containers.prober import Probes
from slurmlet.runner.containers.restart_backoff import Backoff, spoken
from slurmlet.runner.containers.termination_message import termination_message
from slurmlet.runner.host.image_unpack import remove_tree
from slurmlet.runner.host.scratch_space import NO_ROOM, told
from slurmlet.runner.link import reporter
from slurmlet.runner.volumes.etc_files import etc_mounts
from slurmlet.runner.volumes.pod_volumes import Mount, VolumeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List, Optional

    from slurmlet.protocol.pod_plan import ContainerPlan

INIT, SIDECAR, MAIN, EPHEMERAL = "init", "sidecar", "main", "ephemeral"
MAX_CREATE_FAILURES = 5


class Container:
    def __init__(
        self, context: PodContext, plan: ContainerPlan, kind: str, on_change: Callable[[Container], None]
    ) -> None:
        self.plan, self.kind, self.name = plan, kind, str(plan["name"])
        # As it came; `plan` may be filled in anew for each run.
        self._asked = plan
        self._context, self._on_change = context, on_change
        # The kubelet's word for a container that is yet to run, the same for all of the pod.
        self._creating = "PodInitializing" if context.plan.get("init_containers") else "ContainerCreating"
        self.report = reporter.new_container_report(self._creating, str(plan.get("image") or ""))
        self.container_id = ""
        self.log_listeners: List[Callable[[], None]] = []
        self.create_failures = 0
        # It was given another image while it ran, and starts again with it whatever its policy says.
        self.redefined = False
        self._pid = 0
        self.busy = False
        self._stopping = False
        self._backoff = Backoff()
        self._timer: Optional[Timer] = None
        self._termination = Termination(context, self)
        self._probes: Optional[Probes] = None
        self._hook: Optional[Action] = None
        self._started_at = ""
        self._oom_kills = 0
        self._finished_s = 0.0
        self._run, self._run_dir = -1, ""
        self._log: Optional[LogWriter] = None
        self._outputs: Optional[Outputs] = None

    @property
    def running(self) -> bool:
        return bool(self._pid)

    @property
    def ended(self) -> bool:
        """Nothing of it runs, is being started, or waits to be started."""
        return not self._pid and not self.busy and self._timer is None

    @property
    def terminated(self) -> bool:
        return bool(self.report["state"] == "terminated")

    @property
    def failed(self) -> bool:
        return self.terminated and self.report["exit_code"] != 0

    @property
    def log_dir(self) -> str:
        return os.path.join(self._context.logs, self.name)

    @property
    def writable_dirs(self) -> List[str]:
        """The writable layer of what runs now."""
        return [os.path.join(self._run_dir, "upper")] if self._run_dir else []

    @property
    def run(self) -> int:
        return self._run

    @property
    def root_pid(self) -> int:
        return self._pid

    @property
    def outputs(self) -> Optional[Outputs]:
        """The streams of what runs now."""
        return self._outputs if self._pid else None

    # Starting.

    def start(self) -> None:
        self.busy, self.redefined = True, False
        self._run += 1
        self._waiting(self._creating if self._run == 0 else self.report["reason"], self.report["message"])
        self.container_id = os.urandom(32).hex()
        try:
            if self._asked.get("env_files"):
                from slurmlet.runner.containers import env_files

                self.plan = env_files.resolve(self._asked, self._context.volumes.path)
        except VolumeError as problem:
            self._not_created(str(problem), problem.event, problem.reason)
            return
        runtime = self._context.runtime
        cannot = unsupported(self._context.plan, self.plan, runtime.lacks)
        if cannot:
            self._not_created(cannot, reason=CONFIG_ERROR)
            return
        self._run_dir = self._context.scratch.run_dir(self.name, self._run)
        runtime.create(self.container_id, self.plan, self._run_dir, self._created)

    def _created(self, error: str, reason: str) -> None:
        if error or self._stopping:
            self._not_created(error, reason=reason)
            return
        try:
            mounts = self._mounts()
            self._log = LogWriter(self.log_dir, self._run, self._notify_log_listeners)
        except VolumeError as problem:
            self._not_created(str(problem), problem.event, problem.reason)
            return
        except OSError as problem:
            self._not_created(told(problem))
            return
        tty = bool(self.plan.get("tty"))
        self._outputs = Outputs(self._context.loop, self._log, tty=tty, stdin=bool(self.plan.get("stdin")))
        self.event("Normal", "Created", "Container created")
        start = Start(self._outputs.stdio, tty, self._started, self._exited)
        self._context.runtime.start(self.container_id, mounts, start)

    def _mounts(self) -> List[Mount]:
        mounts = self._context.volumes.mounts(self.plan)
        mounts += etc_mounts(self._context.scratch, [mount.path for mount in mounts])
        message_path = self.plan.get("termination_message_path")
        if message_path:
            with open(self._message_file, "wb"):
                os.chmod(self._message_file, 0o666)  # noqa: S103 - for any user of the container; scratch is 0700
            mounts.append(Mount(self._message_file, str(message_path), False))
        return mounts

    @property
    def _message_file(self) -> str:
        return os.path.join(self._run_dir, "termination-log")

    def _not_created(self, error: str, event: str = "Failed", reason: str = CREATE_ERROR) -> None:
        """Nothing ran: there is nothing to report as terminated, as with a kubelet's CreateContainerError."""
        self.busy = False
        self._clean()
        if error:
            self.create_failures += MAX_CREATE_FAILURES if error.startswith(NO_ROOM) else 1
            self.event("Warning", event, f"Error: {error}" if event == "Failed" else error)
            self._waiting(self._creating if reason == "ContainerCreating" else reason, error)
        self._finished_s = time.monotonic()
        self._on_change(self)

    def _started(self, pid: int, master: int, error: str) -> None:
        assert self._outputs is not None
        self.busy = False
        self._outputs.started(master)
        if error:
            self.event("Warning", "Failed", f"Error: {error}")
            self._end_run(128, 0, "StartError", f"failed to start container: {error}", reporter.now())
            return
        self._pid = pid
        self._oom_kills = self._context.oom.count()
        self.create_failures = 0
        self._started_at = reporter.now()
        self.event("Normal", "Started", "Container started")
        if self._stopping:
            self._termination.kill()
        if not self._stopping and (post_start := self.plan["post_start"]) is not None:
            # Until the hook is done the container is not "running", as with a kubelet.
            self._hook = Action(self._context, self, post_start, None, self._post_started)
        else:
            self._now_running()

    def _post_started(self, succeeded: bool, told: str) -> None:
        self._hook = None
        if succeeded:
            self._now_running()
            return
        self.event("Warning", "FailedPostStartHook", f"PostStartHook failed: {told}")
        self.event("Normal", "Killing", "FailedPostStartHook")
        self._termination.begin(float(self._context.plan.get("grace_s") or 0))

    def _now_running(self) -> None:
        self._probes = Probes(self._context, self, self.plan["probes"])
        self.report.update(
            {
                "state": "running",
                "user": self._context.runtime.user(self.container_id),
                "reason": "",
                "message": "",
                "started_at": self._started_at,
                "finished_at": None,
                "exit_code": None,
                "signal": None,
                "container_id": f"{self._context.runtime.name}://{self.container_id}",
                "restart_count": self._run,
                "started": self._probes.initially_started,
                "ready": self.kind not in (INIT, EPHEMERAL) and self._probes.initially_ready,
            }
        )
        if not self._stopping:
            self._probes.begin()
        self._on_change(self)

    # What probes find.

    def probe_started(self) -> None:
        self.report["started"] = True
        self._on_change(self)

    def probe_ready(self, ready: bool) -> None:
        if self.report["ready"] != ready:
            self.report["ready"] = ready
            self._on_change(self)

    def probe_unhealthy(self, kind: str, grace_s: Optional[int]) -> None:
        self.event("Normal", "Killing", f"Container {self.name} failed {kind} probe, will be restarted")
        pod_grace_s = self._context.plan.get("grace_s") or 0
        self._termination.begin(float(pod_grace_s if grace_s is None else grace_s))

    # Ending.

    def _exited(self, code: int, number: int) -> None:
        self._pid = 0
        # Killed, not by us, and the kernel did kill for want of memory: what else should it have been?
        starved = code == 137 and not self._termination.killed and self._context.oom.count() > self._oom_kills
        self._termination.over()
        if self._probes is not None:
            self._probes.close()
        if self._hook is not None:
            self._hook.cancel()
            self._hook = None
        reason = "OOMKilled" if starved else "Completed" if code == 0 else "Error"
        self._end_run(code, number, reason, "", self._started_at)

    def _end_run(self, code: int, number: int, reason: str, message: str, started_at: str) -> None:
        assert self._outputs is not None
        assert self._log is not None
        self._outputs.finish()
        self._finished_s = time.monotonic()
        self.report.update(
            {
                "state": "terminated",
                "reason": reason,
                "message": message or self._termination_message(code),
                "started_at": started_at,
                "finished_at": reporter.now(),
                "exit_code": code,
                "signal": number,
                "container_id": f"{self._context.runtime.name}://{self.container_id}",
                "restart_count": self._run,
                "started": False,
                "ready": self.kind == INIT and code == 0,
            }
        )
        self._clean()
        self._notify_log_listeners()
        self._on_change(self)

    def _termination_message(self, code: int) -> str:
        assert self._log is not None
        return termination_message(self.plan, self._message_file, self._log.path, code)

    def _clean(self) -> None:
        """The writable layer of a run ends with it. In a fork: it may hold very many files."""
        run_dir, self._run_dir = self._run_dir, ""
        if run_dir:
            self._context.runtime.delete(self.container_id)
            self._context.children.call(lambda: remove_tree(run_dir), lambda _value, _error: None)

    # Starting again.

    def redefine(self, plan: ContainerPlan) -> None:
        """Take another image. As with a kubelet, back-off is for what failed, not for what is new."""
        self.plan = self._asked = plan
        self.report["image"] = str(plan["image"])
        self._backoff = Backoff()
        if self._pid and self.kind != INIT and not self._stopping:
            self.redefined = True
            self.event("Normal", "Killing", f"Container {self.name} definition changed, will be restarted")
            self._termination.begin(float(self._context.plan.get("grace_s") or 0))
        elif self._timer is not None:
            self._timer.cancel()
            self.start_again()

    def start_again(self) -> None:
        """As soon as the kubelet's back-off allows."""
        wait_s = self._backoff.wait_s(self._finished_s, time.monotonic())
        if self.terminated:
            reporter.keep_last_run(self.report)
        reason = self.report["reason"] if self.report["state"] == "waiting" else "CrashLoopBackOff"
        if wait_s > 0 and self.create_failures:
            # What went wrong says more than that it will be tried again.
            self._context.reporter.changed()
        elif wait_s > 0:
            where = f"container={self.name} pod={self._context.full_name}"
            self._waiting(reason, f"back-off {spoken(self._backoff.delay_s)} restarting failed {where}")
            message = f"Back-off restarting failed container {self.name} in pod {self._context.full_name}"
            self.event("Warning", "BackOff", message)
        elif self.report["last"] is not None and self.report["last"]["reason"] == "StartError":
            self._waiting("RunContainerError", self.report["last"]["message"])
        else:
            self._waiting(self._creating, "")
        self._timer = self._context.loop.later(wait_s, self._backoff_over)

    def _backoff_over(self) -> None:
        self._timer = None
        self._backoff.restarted(time.monotonic())
        self.start()

    def _waiting(self, reason: str, message: str) -> None:
        reporter.set_waiting(self.report, reason, message)
        self._context.reporter.changed()

    # Stopping.

    def stop(self, grace_s: float) -> None:
        """Ask it to end, and make it end after the grace; a second call may only shorten the time."""
        first, self._stopping = not self._stopping, True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._stay_ended()
        if not self._pid:
            return
        if self._probes is not None:
            self._probes.stopping()
        if first:
            self.event("Normal", "Killing", f"Stopping container {self.name}")
        self._termination.begin(grace_s)

    def interrupt(self) -> None:
        """End the present run at once, or the wait for the next one; it may be started again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pid:
            self._termination.begin(0)

    def _stay_ended(self) -> None:
        """It was to start again and will not: its last run is its state after all."""
        if reporter.restore_last_run(self.report):
            self._context.reporter.changed()

    def event(self, kind: str, reason: str, message: str) -> None:
        self._context.reporter.event(kind, reason, message, self.name)

    def _notify_log_listeners(self) -> None:
        for listener in list(self.log_listeners):
            listener()
