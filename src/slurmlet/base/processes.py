"""The one way to run a process: an argv list, no shell, capped output, SIGTERM → grace → SIGKILL.

Blocking on purpose: the CLI and the testbed call it directly, the hub through `asyncio.to_thread`, so there is no
async twin to keep in step.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmlet.base.errors import SlurmletError

OUTPUT_CAP_BYTES = 64 << 20
TERM_GRACE_S = 2.0


@dataclass(frozen=True)
class Completed:
    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.code == 0


class CommandError(SlurmletError):
    """An external command failed. `code` is its exit status, negative for a signal, None when it never ran."""

    reason = "CommandFailed"

    def __init__(
        self, argv: Sequence[str], code: int | None, stderr: str, *, transient: bool = False, hint: str = ""
    ) -> None:
        self.argv = tuple(argv)
        self.code = code
        self.stderr = stderr.strip()
        said = self.stderr.splitlines()[-1] if self.stderr else "it said nothing"
        super().__init__(f"{argv[0]} failed ({code}): {said}", transient=transient, hint=hint)


def run(
    argv: Sequence[str],
    *,
    stdin: str | bytes | None = None,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = True,
) -> Completed:
    """Run argv to its end and return what it said. Raises CommandError when `check` and it failed, or on timeout."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL if data is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise CommandError(argv, None, f"{error.filename}: not found") from error
    except OSError as error:
        raise CommandError(argv, None, str(error)) from error
    try:
        out, err = process.communicate(data, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        stop_group(process)
        raise CommandError(argv, None, f"timed out after {timeout_s:g} s", transient=True) from error
    except BaseException:
        stop_group(process)
        raise
    done = Completed(
        tuple(argv),
        process.returncode,
        out[:OUTPUT_CAP_BYTES].decode(errors="replace"),
        err[:OUTPUT_CAP_BYTES].decode(errors="replace"),
    )
    if check and not done.ok:
        raise CommandError(argv, done.code, done.stderr or done.stdout)
    return done


def stop_group(process: subprocess.Popen[bytes], grace_s: float = TERM_GRACE_S) -> None:
    """End a process started in its own session, and what it started, by SIGTERM, then by SIGKILL."""
    for sign, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            pass
        try:
            process.communicate(timeout=wait_s)
            return
        except subprocess.TimeoutExpired:
            continue
