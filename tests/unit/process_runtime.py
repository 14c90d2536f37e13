"""A second ContainerRuntime: plain processes of this machine, without images or namespaces. Its processes are real."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from slurmlet.protocol.pod_plan import ContainerPlan
from slurmlet.protocol.pod_report import RunningUser
from slurmlet.runner.containers.container_runtime import CREATE_ERROR, TERMINAL, USERS, Start
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.volumes.pod_volumes import Mount

if TYPE_CHECKING:
    from slurmlet.runner.containers.container_runtime import OnCreated

MISSING_IMAGE = "/nowhere"


class ProcessRuntime:
    name = "process"

    def __init__(self, children: Children) -> None:
        self._children = children
        self.lacks = {USERS: "processes run as you; remove it", TERMINAL: "there are none; remove it"}
        self.plans: dict[str, ContainerPlan] = {}
        self.mounts: dict[str, list[Mount]] = {}
        self.pids: dict[str, int] = {}
        self.deleted: list[str] = []

    def create(self, container_id: str, plan: ContainerPlan, run_dir: str, on_created: OnCreated) -> None:
        if plan["image_dir"] == MISSING_IMAGE:
            on_created("no such image", CREATE_ERROR)
            return
        Path(run_dir, "upper").mkdir(parents=True)
        self.plans[container_id] = plan
        on_created("", "")

    def start(self, container_id: str, mounts: list[Mount], start: Start) -> None:
        self.mounts[container_id] = mounts

        def exited(code: int, number: int) -> None:
            del self.pids[container_id]
            start.on_exit(code, number)

        pid = self._spawn(container_id, self.plans[container_id]["argv"], start._replace(on_exit=exited))
        if pid:
            self.pids[container_id] = pid

    def exec(self, container_id: str, argv: list[str], start: Start) -> None:
        self._spawn(container_id, argv, start)

    def _spawn(self, container_id: str, argv: list[str], start: Start) -> int:
        env = dict(self.plans[container_id]["env"])
        try:
            pid = self._children.spawn(argv, start.on_exit, stdio=start.stdio, env=env)
        except OSError as error:
            start.on_started(0, -1, str(error))
            return 0
        start.on_started(pid, -1, "")
        return pid

    def signal(self, container_id: str, number: int) -> None:
        if container_id in self.pids:
            os.kill(self.pids[container_id], number)

    def delete(self, container_id: str) -> None:
        self.plans.pop(container_id, None)
        self.deleted.append(container_id)

    def user(self, container_id: str) -> RunningUser:
        return {"uid": os.getuid(), "gid": os.getgid(), "groups": []}
