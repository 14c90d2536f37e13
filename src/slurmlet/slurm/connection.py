"""How this cluster reaches Slurm: through its commands, or through slurmrestd. Kept in cluster.json under `slurm`."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slurmlet.base.errors import SlurmError, UserError

COMMANDS, REST = "commands", "rest"
_INSECURE = "insecure"


@dataclass(frozen=True)
class Connection:
    """`commands`, or `rest` with a URL or a Unix socket."""

    kind: str = COMMANDS
    url: str = ""
    socket: Path | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    user: str = ""  # as Slurm knows them; the login name where it is empty
    # slurmrestd of 23.02 to 24.11 does not tell which one it is.
    default_partition: str = ""
    # The token may cross a network without TLS: somebody said so.
    insecure: bool = False

    @property
    def exposes_token(self) -> bool:
        """Whether a token would cross a network in clear text, and nobody agreed to that."""
        if self.socket or self.insecure:
            return False
        parts = urlsplit(self.url)
        return parts.scheme != "https" and not _is_loopback(parts.hostname or "")

    def check_transport(self) -> None:
        """Raises SlurmError where the token must not be sent."""
        if self.exposes_token:
            raise SlurmError(
                _exposed(self.url), reason="SlurmUnauthorized", transient=True, hint=_EXPOSED_HINT
            )

    @property
    def place(self) -> str:
        return str(self.socket) if self.socket else self.url

    @property
    def base_url(self) -> str:
        return "http://localhost" if self.socket else self.url.rstrip("/")

    def as_json(self) -> dict[str, str]:
        texts = {
            "kind": self.kind, "url": self.url, "socket": self.socket, "token_file": self.token_file,
            "ca_file": self.ca_file, "user": self.user, "default_partition": self.default_partition,
            _INSECURE: "true" if self.insecure else "",
        }  # fmt: skip
        return {name: str(value) for name, value in texts.items() if value}


def from_json(raw: Mapping[str, Any]) -> Connection:
    def path(name: str) -> Path | None:
        return Path(raw[name]) if raw.get(name) else None

    return Connection(
        kind=str(raw.get("kind", COMMANDS)), url=str(raw.get("url", "")), socket=path("socket"),
        token_file=path("token_file"), ca_file=path("ca_file"), user=str(raw.get("user", "")),
        default_partition=str(raw.get("default_partition", "")), insecure=raw.get(_INSECURE) == "true",
    )  # fmt: skip


def parse(text: str) -> Connection:
    """`commands`, `rest:https://host:6820`, `rest:unix:/path/to/socket`; further settings behind commas: `,token_file=…`.

    `,insecure` lets a token cross a network over http. Raises UserError.
    """
    found = _parsed(text)
    if found.kind == REST and found.exposes_token:
        raise UserError(f"--slurm {text!r}: {_exposed(found.url)}", hint=_EXPOSED_HINT)
    if found.token_file is not None:
        # One that is not there yet is looked at when it is read.
        with contextlib.suppress(OSError):
            problem = problem_of_token_file(found.token_file.stat())
            if problem:
                raise UserError(
                    f"--slurm: token_file {found.token_file} {problem}", hint=closing_hint(found.token_file)
                )
    return found


def problem_of_token_file(found: os.stat_result) -> str:
    """Whoever reads the file is this user to Slurm; whoever writes it chooses as whom we speak. "" where all is well."""
    if found.st_uid != os.getuid():
        return f"belongs to another user (uid {found.st_uid})"
    mode = stat.S_IMODE(found.st_mode)
    return f"is open to others (mode {mode:04o})" if mode & 0o077 else ""


def closing_hint(path: Path) -> str:
    return f"Run as its owner: chmod 600 {path}. If others could read it, get another token."


def _exposed(url: str) -> str:
    return f"{url} is not encrypted, and whoever sees the token on the way can act as this user"


_EXPOSED_HINT = "Use https://, a loopback address or unix:/; or append ,insecure if that network is trusted."


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return False


def _parsed(text: str) -> Connection:
    words = text.split(",")
    kind, _, place = words[0].partition(":")
    if kind == COMMANDS and not place and len(words) == 1:
        return Connection()
    known = {"token_file", "ca_file", "user", "default_partition"}
    more = dict(word.partition("=")[::2] for word in words[1:] if word != _INSECURE)
    if kind != REST or set(more) - known:
        names = ", ".join([*sorted(f"{name}=…" for name in known), _INSECURE])
        raise UserError(
            f"--slurm {text!r}: expected 'commands' or 'rest:URL' with settings {names}",
            hint="For example rest:https://slurm.example.org:6820,token_file=/home/me/.slurm-token",
        )
    if _INSECURE in words:
        more[_INSECURE] = "true"
    if place.startswith("unix:/"):
        return from_json({"kind": REST, "socket": place.removeprefix("unix:"), **more})
    if not place.startswith(("https://", "http://")):
        raise UserError(
            f"--slurm {text!r}: {place!r} is no URL", hint="It begins with https://, http:// or unix:/."
        )
    return from_json({"kind": REST, "url": place, **more})
