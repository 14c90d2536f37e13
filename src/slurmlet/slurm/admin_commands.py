"""An administrator's view of Slurm through its commands: squeue and scontrol, in the environment of environment.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from slurmlet.base.errors import SlurmError
from slurmlet.base.processes import CommandError, Completed, run
from slurmlet.model.slurm_admin_values import QueuedJob, WorkerNode
from slurmlet.slurm import admin_output
from slurmlet.slurm.environment import command_environment, query_environment
from slurmlet.slurm.refusals import slurm_error

_T = TypeVar("_T")
_TIMEOUT_S = 30.0
_THREADS = 4
_NOT_KNOWN = ("invalid node name", "no nodes found", "not found")
_BUSY = ("requested nodes are busy",)


class CommandAdmin:
    """Runs as a user who is an operator or administrator in Slurm (or as SlurmUser)."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = command_environment(environment)
        self._asking = query_environment(self._environment)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="slurm-admin")

    async def queue(self) -> list[QueuedJob]:
        return await self._do(self._queue)

    async def workers(self) -> list[WorkerNode]:
        return await self._do(self._workers)

    async def partition_limits(self) -> dict[str, int]:
        return await self._do(self._partition_limits)

    async def drain(self, name: str, reason: str) -> None:
        await self._update(name, "state=drain", f"reason={reason}")

    async def resume(self, name: str) -> None:
        # Not "resume", which would also declare a node fit that is down. The reason would stay for the next drain.
        await self._update(name, "state=undrain", "reason=")

    async def delete(self, name: str) -> None:
        await self._do(self._delete, name)

    async def set_address(self, name: str, address: str) -> None:
        await self._update(name, f"nodeaddr={address}")

    async def power_up(self, name: str) -> None:
        await self._update(name, "state=power_up")

    async def power_down(self, name: str) -> None:
        await self._update(name, "state=power_down")

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _do(self, work: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args))

    def _queue(self) -> list[QueuedJob]:
        argv = ["squeue", "--noheader", "--all", "-O", admin_output.QUEUE_FORMAT]
        return admin_output.parse_queue(_good(self._run(argv, self._asking)).stdout)

    def _workers(self) -> list[WorkerNode]:
        done = self._run(["scontrol", "--oneliner", "--all", "show", "node"], self._asking)
        # A controller with dynamic nodes only has none at first, and says so.
        if not done.ok and "no nodes in the system" in f"{done.stdout}{done.stderr}".lower():
            return []
        return admin_output.parse_workers(_good(done).stdout)

    def _partition_limits(self) -> dict[str, int]:
        argv = ["scontrol", "--oneliner", "--all", "show", "partition"]
        return admin_output.parse_partition_limits(_good(self._run(argv, self._asking)).stdout)

    async def _update(self, name: str, *words: str) -> None:
        argv = ["scontrol", "update", f"nodename={name}", *words]
        _good(await self._do(self._run, argv, self._environment))

    def _delete(self, name: str) -> None:
        shown = self._run(["scontrol", "--oneliner", "show", "node", name], self._asking)
        if not shown.ok and any(words in f"{shown.stdout}{shown.stderr}".lower() for words in _NOT_KNOWN):
            return
        check_deletable(admin_output.parse_workers(_good(shown).stdout))
        done = self._run(["scontrol", "delete", f"nodename={name}"], self._environment)
        said = f"{done.stdout}{done.stderr}".lower()
        if not done.ok and not any(words in said for words in _NOT_KNOWN):
            raise _as_busy(slurm_error(done))

    def _run(self, argv: Sequence[str], env: Mapping[str, str]) -> Completed:
        try:
            return run(argv, timeout_s=_TIMEOUT_S, env=env, check=False)
        except CommandError as error:
            raise SlurmError(
                error.message, said=error.stderr, reason="SlurmUnavailable", transient=True
            ) from error


def check_deletable(found: Sequence[WorkerNode]) -> None:
    """Raises SlurmError for a node of slurm.conf. Slurm itself refuses from 23.11 on; before, it deleted them too."""
    for one in found:
        if not one.dynamic:
            said = f"node {one.name} is not dynamic: it is in slurm.conf"
            raise SlurmError(said, said=said)


def _good(done: Completed) -> Completed:
    if not done.ok:
        raise slurm_error(done)
    return done


def _as_busy(error: SlurmError) -> SlurmError:
    """A node that is in use can be deleted later."""
    if any(words in error.said.lower() for words in _BUSY):
        return SlurmError(error.message, said=error.said, reason="NodeBusy", transient=True)
    return error
