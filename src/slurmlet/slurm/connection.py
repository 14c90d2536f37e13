"""How this cluster reaches Slurm: through its commands, or through slurmrestd. Kept in cluster.json under `slurm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.errors import UserError

COMMANDS, REST = "commands", "rest"


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
        }  # fmt: skip
        return {name: str(value) for name, value in texts.items() if value}


def from_json(raw: Mapping[str, Any]) -> Connection:
    def path(name: str) -> Path | None:
        return Path(raw[name]) if raw.get(name) else None

    return Connection(
        kind=str(raw.get("kind", COMMANDS)), url=str(raw.get("url", "")), socket=path("socket"),
        token_file=path("token_file"), ca_file=path("ca_file"), user=str(raw.get("user", "")),
        default_partition=str(raw.get("default_partition", "")),
    )  # fmt: skip


def parse(text: str) -> Connection:
    """`commands`, `rest:https://host:6820`, `rest:unix:/path/to/socket`; further settings behind commas: `,token_file=…`.

    Raises UserError.
    """
    words = text.split(",")
    kind, _, place = words[0].partition(":")
    if kind == COMMANDS and not place and len(words) == 1:
        return Connection()
    known = {"token_file", "ca_file", "user", "default_partition"}
    more = dict(word.partition("=")[::2] for word in words[1:])
    if kind != REST or set(more) - known:
        raise UserError(
            f"--slurm {text!r}: expected 'commands' or 'rest:URL' with settings {', '.join(sorted(known))}",
            hint="For example rest:https://slurm.example.org:6820,token_file=/home/me/.slurm-token",
        )
    if place.startswith("unix:/"):
        return from_json({"kind": REST, "socket": place.removeprefix("unix:"), **more})
    if not place.startswith(("https://", "http://")):
        raise UserError(
            f"--slurm {text!r}: {place!r} is no URL", hint="It begins with https://, http:// or unix:/."
        )
    return from_json({"kind": REST, "url": place, **more})
