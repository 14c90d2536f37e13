"""Every child of the sandbox is started, adopted and reaped here, and nowhere else.

The runner is PID 1 of the sandbox, so containers that crun leaves behind become its children: their exit status and
signal are exact. A second waitpid elsewhere would steal statuses, so nobody else may call one.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from slurmlet.linux.event_loop import Loop, pipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

    OnExit = Callable[[int, int], None]
    OnResult = Callable[[Any, str], None]


# Called with the exit code (128 + signal for a signal) and the signal (0 for none).

# Python ignores these; programs expect the default.
_RESET_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT]


class Children:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: Dict[int, OnExit] = {}
        # Statuses of processes nobody knows yet: a container may end before its pid file is read. Kept only while a
        # start is under way, so that a reused pid can never meet an old status.
        self._starting = 0
        self._unclaimed: Dict[int, Tuple[int, int]] = {}
        loop.on_signal(signal.SIGCHLD, self.reap)

    def spawn(
        self,
        argv: Sequence[str],
        on_exit: OnExit,
        *,
        stdio: Tuple[int, int, int],
        env: Optional[Dict[str, str]] = None,
        enter: Optional[Callable[[], None]] = None,
    ) -> int:
        """Start a program with the three given descriptors; raises OSError when it cannot be started.

        `enter` is called in the new process before it becomes the program.
        """
        if enter is not None:
            pid = _fork_program(argv, stdio, dict(os.environ) if env is None else env, enter)
            self._waiting[pid] = on_exit
            return pid
        # Two passes, by numbers above all three, or a dup2 could overwrite one that a later dup2 still needs.
        aside = max(2, *stdio) + 1
        actions: List[Any] = [(os.POSIX_SPAWN_DUP2, fd, aside + number) for number, fd in enumerate(stdio)]
        actions += [(os.POSIX_SPAWN_DUP2, aside + number, number) for number in range(3)]
        actions += [(os.POSIX_SPAWN_CLOSE, aside + number) for number in range(3)]
        pid = os.posix_spawn(
            argv[0],
            list(argv),
            dict(os.environ) if env is None else env,
            file_actions=actions,
            setsigdef=_RESET_SIGNALS,
            setsigmask=[],
        )
        self._waiting[pid] = on_exit
        return pid

    def call(self, work: Callable[[], Any], on_result: OnResult) -> int:
        """Run `work` in a fork; on_result gets its JSON-able value and "", or None and what went wrong.

        A fork and not a thread: what unpacking an image allocates goes away with it, and TLS stays in one thread.
        """
        reader, writer = pipe()
        pid = os.fork()
        if pid == 0:
            _work_in_fork(work, writer)
        os.close(writer)
        received = bytearray()

        def on_exit(code: int, _signal: int) -> None:
            _drain(reader, received)
            os.close(reader)
            on_result(*_parse_result(bytes(received), code))

        # Results are far smaller than a pipe (64 KiB), so reading them at the end is enough.
        self._waiting[pid] = on_exit
        return pid

    def fork(self, work: Callable[[], None], on_exit: OnExit) -> int:
        """Run `work` in a fork that is to live on; it must look after its own signals and descriptors."""
        pid = os.fork()
        if pid == 0:
            try:
                work()
            finally:
                os._exit(1)
        self._waiting[pid] = on_exit
        return pid

    def begin_start(self) -> None:
        """A runtime is about to leave us a process whose pid is not known yet."""
        self._starting += 1

    def end_start(self) -> None:
        self._starting -= 1
        if not self._starting:
            self._unclaimed.clear()

    def adopt(self, pid: int, on_exit: OnExit) -> None:
        """Watch a process that a runtime left to us. Between begin_start and end_start."""
        if pid in self._unclaimed:
            status = self._unclaimed.pop(pid)
            self._loop.soon(lambda: on_exit(*status))
        else:
            self._waiting[pid] = on_exit

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = _decode(status)
            on_exit = self._waiting.pop(pid, None)
            if on_exit is not None:
                on_exit(*ended)
            elif self._starting:
                self._unclaimed[pid] = ended


def _fork_program(
    argv: Sequence[str], stdio: Tuple[int, int, int], env: Dict[str, str], enter: Callable[[], None]
) -> int:
    """fork and exec by hand: posix_spawn has no place for `enter`. Waits for the exec, as posix_spawn does."""
    failed, failing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            for number in _RESET_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            enter()
            _take_stdio(stdio)
            os.execve(argv[0], list(argv), env)  # noqa: S606 - no shell is what is wanted
        except OSError as error:
            os.write(failing, json.dumps([error.errno or 0, str(error)]).encode())
        finally:
            os._exit(127)
    os.close(failing)
    with os.fdopen(failed, "rb") as answer:
        said = answer.read()
    if said:
        os.waitpid(pid, 0)
        code, message = json.loads(said)
        raise OSError(code, message)
    return pid


def _take_stdio(stdio: Tuple[int, int, int]) -> None:
    # By numbers above all three, or a dup2 could overwrite one that a later dup2 still needs.
    aside = max(2, *stdio) + 1
    for number, fd in enumerate(stdio):
        os.dup2(fd, aside + number, inheritable=False)
    for number in range(3):
        os.dup2(aside + number, number, inheritable=True)


def _decode(status: int) -> Tuple[int, int]:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return 128 + number, number
    return os.WEXITSTATUS(status), 0


def _work_in_fork(work: Callable[[], Any], writer: int) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        try:
            answer = {"value": work()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}" if not str(error) else str(error)}
        os.write(writer, json.dumps(answer).encode()[:60000])
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _drain(fd: int, into: bytearray) -> None:
    while True:
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not chunk:
            return
        into += chunk


def _parse_result(received: bytes, code: int) -> Tuple[Any, str]:
    try:
        answer = json.loads(received)
    except ValueError:
        return None, f"the worker process ended with {code}"
    return answer.get("value"), answer.get("error", "")
