"""A program at a pseudo-terminal of its own, and what a person types and sees there."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import time

from slurmlet.testbed.hosts import Testbed


class Terminal:
    """A program of the testbed with a pseudo-terminal for all three streams, as a person's terminal emulator gives it."""

    def __init__(self, testbed: Testbed, *argv: str) -> None:
        self._testbed = testbed
        self.master, slave = os.openpty()
        self.resize(24, 80)
        # Only with a controlling terminal does a resize raise SIGWINCH.
        words = ["setsid", "--ctty", "--wait", *argv]
        self.process: subprocess.Popen[bytes] = self._testbed.popen(
            words, stdin=slave, stdout=slave, stderr=slave, env={"TERM": "xterm"}
        )
        os.close(slave)
        self._seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, wanted: str, timeout_s: float = 15) -> str:
        """What came up to and with `wanted`; it is taken away."""
        deadline_s = time.monotonic() + timeout_s
        while wanted.encode() not in self._seen:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {wanted!r} within {timeout_s} s, only {self._seen!r}"
            if select.select([self.master], [], [], left_s)[0]:
                try:
                    self._seen += os.read(self.master, 65536)
                except OSError:
                    raise AssertionError(f"the terminal closed before {wanted!r}: {self._seen!r}") from None
        before, _, self._seen = self._seen.partition(wanted.encode())
        return (before + wanted.encode()).decode(errors="replace")

    def close(self) -> None:
        self._testbed.stop(self.process)
        os.close(self.master)
