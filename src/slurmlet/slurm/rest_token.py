"""The JSON Web Token that slurmrestd wants over TCP: read again for each request, renewed at half of its life.

A token file is the user's own, closed to others, and never written here. Where there is none, or what it holds is refused,
`scontrol token` makes one for this process, if the site lets users do so.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from slurmlet.base.errors import SlurmError
from slurmlet.base.processes import CommandError, run
from slurmlet.slurm.connection import closing_hint, problem_of_token_file
from slurmlet.slurm.environment import command_environment

_LIFE_S = 1800
_TIMEOUT_S = 15.0


class Token:
    def __init__(self, file: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = file, clock
        self._own = ""
        self._made_s = 0.0
        self._turn = asyncio.Lock()

    async def current(self) -> str:
        """Raises SlurmError where there is none, or where its file is open to others."""
        if self._own and self._clock() < self._made_s + _LIFE_S / 2:
            return self._own
        found = await asyncio.to_thread(self._read)
        if found and not _is_stale(found, self._clock()):
            return found
        return await self.renewed(self._own or found)

    async def renewed(self, refused: str) -> str:
        """Another one than `refused`, which slurmrestd did not take or which is about to end."""
        async with self._turn:
            found = await asyncio.to_thread(self._read)
            if found and found != refused and not _is_stale(found, self._clock()):
                self._own = ""
                return found
            if self._own and self._own != refused:
                return self._own  # somebody else had it renewed meanwhile
            self._own = await asyncio.to_thread(_made) or found
            self._made_s = self._clock()
            if not self._own:
                raise SlurmError(
                    "slurmrestd needs a token and there is none",
                    reason="SlurmUnauthorized", transient=True,
                    hint="Name a file that holds one (token_file), or let `scontrol token` work for this user.",
                )  # fmt: skip
            return self._own

    def _read(self) -> str:
        if self._file is None:
            return command_environment().get("SLURM_JWT", "")
        try:
            with self._file.open() as file:
                # Of what was opened: the name may lead to another file by now.
                problem = problem_of_token_file(os.fstat(file.fileno()))
                text = file.read()
        except OSError:
            return ""
        if problem:
            raise SlurmError(
                f"the token of slurmrestd is not used: {self._file} {problem}",
                reason="SlurmUnauthorized", transient=True, hint=closing_hint(self._file),
            )  # fmt: skip
        # As `scontrol token` prints it, or alone.
        return text.strip().removeprefix("SLURM_JWT=")


def _is_stale(token: str, now_s: float) -> bool:
    """Past half of its life; one that does not tell is taken as it is."""
    try:
        part = token.split(".")[1]
        told = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        end_s = float(told["exp"])
        begin_s = float(told.get("iat", end_s - _LIFE_S))
    except (ValueError, KeyError, IndexError, TypeError):
        return False
    return now_s > begin_s + (end_s - begin_s) / 2


def _made() -> str:
    """ "" where the site does not let users make tokens."""
    if shutil.which("scontrol") is None:
        return ""
    try:
        argv = ["scontrol", "token", f"lifespan={_LIFE_S}"]
        said = run(argv, timeout_s=_TIMEOUT_S, env=command_environment()).stdout
    except CommandError:
        return ""
    return said.strip().rpartition("SLURM_JWT=")[2]
