"""The supervisor's sign of life in the cluster's directory, for the other hosts that share it.

A lock says nothing there: flock is local to a host on many shared file systems. Nor does a pid. So the supervisor rewrites
`run/heartbeat.json` every 10 s, and another host takes the cluster for dead only when the file is old and stays as it is.
Whoever takes a cluster over writes its own name into the file: a supervisor that lives after all (its host was suspended,
or cut off from the home) reads that at its next beat and ends. A beat may hang with the home: it is made in a thread of its
own (home_thread.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import read_json, write_json

INTERVAL_S = 10.0
# Two beats may be late: a login host is busy at times.
FRESH_S = 35.0
_WATCH_S = INTERVAL_S + 2.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Sign:
    host: str
    pid: int
    token: str
    number: int


class TakenError(SlurmletError):
    """A supervisor on another host has the cluster, or took it over."""

    reason = "RunsElsewhere"


def read(path: Path) -> Sign | None:
    """Who gave the last sign; None where nobody did, or where the cluster was given up."""
    raw = read_json(path)
    try:
        return Sign(str(raw["host"]), int(raw["pid"]), str(raw["token"]), int(raw["number"]))
    except (KeyError, TypeError, ValueError):
        return None


def age_s(path: Path) -> float:
    """Since the last sign, by the clock of the file system: hosts' clocks may differ."""
    written_s = path.stat().st_mtime
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".now.") as probe:
            probe.write(b"x")
            probe.flush()
            return os.fstat(probe.fileno()).st_mtime - written_s
    except OSError:
        return time.time() - written_s


def is_fresh(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return read(path) is not None and age_s(path) < FRESH_S
    return False


def is_alive(path: Path, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Whether a supervisor beats. An old sign is watched for longer than a beat takes: a clock may be wrong."""
    first = read(path)
    if first is None:
        return False
    if is_fresh(path):
        return True
    for _ in range(round(_WATCH_S / _POLL_S)):
        sleep(_POLL_S)
        if (now := read(path)) != first:
            return now is not None
    return False


def give_up(path: Path, host: str) -> None:
    """Say that `host` ended the cluster; a supervisor that still lives elsewhere will end when it reads this."""
    write_json(path, {"ended_by": host})


class Heartbeat:
    """The supervisor's side."""

    def __init__(self, path: Path, host: str, pid: int) -> None:
        self._path = path
        self._host, self._pid = host, pid
        self._token = secrets.token_hex(8)
        self._number = 0
        self._due_s = 0.0
        self.lost = False  # another supervisor has the cluster

    def claim(self) -> None:
        """Become the cluster's one supervisor; raises TakenError. The caller holds the lock of this host, so a sign of
        this host is of a dead one."""
        other = read(self._path)
        if other is not None and other.host != self._host and is_alive(self._path):
            raise self._taken(other.host)
        self._path.unlink(missing_ok=True)
        try:
            # Of two hosts that start at the same time one gets it.
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            quicker = read(self._path)
            raise self._taken(quicker.host if quicker else "another host") from error
        with os.fdopen(handle, "w") as file:
            json.dump(self._sign(), file)
        self._due_s = time.monotonic() + INTERVAL_S

    def pause_s(self) -> float:
        return max(0.0, self._due_s - time.monotonic())

    def beat(self) -> None:
        """Renew the sign when it is time; raises TakenError when somebody took the cluster over."""
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + INTERVAL_S
        # A home that is full or away must not take the cluster down; the next beat may get through.
        with contextlib.suppress(OSError):
            self._check()
            self._number += 1
            write_json(self._path, self._sign())

    def release(self) -> bool:
        """Take the sign away at the end; whether it was still ours."""
        with contextlib.suppress(OSError, TakenError):
            self._check()
            self._path.unlink(missing_ok=True)
            return True
        return False

    def _check(self) -> None:
        raw: Any = read_json(self._path)
        if isinstance(raw, dict) and raw.get("token") != self._token:
            self.lost = True
            raise self._taken(str(raw.get("host") or raw.get("ended_by") or "another host"))

    def _sign(self) -> dict[str, Any]:
        return {"host": self._host, "pid": self._pid, "token": self._token, "number": self._number}

    def _taken(self, host: str) -> TakenError:
        return TakenError(
            f"this cluster is running on {host}, not on this host ({self._host})",
            hint=f"Run slurmlet on {host}.",
        )
