"""Where the upstream binaries are, and having them there: the face of this room.

Search order: the directory the user names, the cache, an official download, a build. `find` only looks, fast
enough for `slurmlet kubectl`; what fetches or builds is imported only when something is missing.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.console import Steps, say
from slurmlet.base.errors import SiteError, SlurmletError, UserError
from slurmlet.base.files import private_dir
from slurmlet.base.layout import cache_dir
from slurmlet.upstream import pins as pinning
from slurmlet.upstream.binary_cache import BinaryCache
from slurmlet.upstream.pins import Pins

DIRECTORY_VARIABLE = "SLURMLET_UPSTREAM_DIR"


@dataclass(frozen=True)
class Found:
    name: str
    version: str
    source: str
    path: Path
    size_bytes: int


@dataclass(frozen=True)
class Place:
    """Where to look: what is pinned, the user's own directory (if any), the cache."""

    pins: Pins
    directory: Path | None
    cache: BinaryCache

    @classmethod
    def here(cls, directory: Path | None = None, pins: Pins | None = None) -> Place:
        pins = pins or pinning.load()
        named = os.environ.get(DIRECTORY_VARIABLE)
        if directory is None and named:
            directory = Path(named).expanduser().absolute()
        if directory is not None and not directory.is_dir():
            raise UserError(
                f"{directory} is not a directory",
                hint=f"Correct --dir, or the variable {DIRECTORY_VARIABLE}.",
            )
        return cls(pins, directory, BinaryCache(cache_dir() / "upstream", pins.label()))

    def look(self, name: str, *, verify: bool = False) -> Found | None:
        program = self.pins.program_of(name)
        if self.directory and _is_program(self.directory / name):
            path = self.directory / name
            return Found(name, "as found", "directory", path, path.stat().st_size)
        entry = self.cache.lookup(name, program.digest())
        if entry is None or (verify and not self.cache.intact(name, entry)):
            return None
        return Found(name, entry.version, entry.source, self.cache.bin / name, entry.size_bytes)


def find(name: str) -> Path | None:
    """The binary if it is at hand; never fetches."""
    found = Place.here().look(name)
    return found.path if found else None


def ensure(
    names: Sequence[str] | None = None,
    *,
    directory: Path | None = None,
    download: bool = True,
    build: bool = True,
) -> Path:
    """A directory that holds the named binaries (all of them for None), fetched or built where necessary."""
    found = inventory(names, directory=directory, download=download, build=build)
    folders = {item.path.parent for item in found}
    return folders.pop() if len(folders) == 1 else _joined(found)


def inventory(
    names: Sequence[str] | None = None,
    *,
    directory: Path | None = None,
    download: bool = True,
    build: bool = True,
    verify: bool = False,
    pins: Pins | None = None,
) -> list[Found]:
    """The named binaries, obtained where necessary. `verify` reads every byte and replaces what changed.

    Raises when one of them cannot be had; an optional one only when it was asked for by name.
    """
    place = Place.here(directory, pins)
    wanted = place.pins.check(names)
    found = {name: place.look(name, verify=verify) for name in wanted}
    if None in found.values():
        with place.cache.exclusive():
            # Somebody else may have finished the work while this one waited.
            found = {name: place.look(name, verify=verify) for name in wanted}
            missing = [name for name, item in found.items() if item is None]
            problems = _obtain(place, missing, download=download, build=build)
            found = {name: place.look(name, verify=verify) for name in wanted}
        _report(place.pins, problems, asked_by_name=names is not None)
    return [item for item in found.values() if item is not None]


def _obtain(place: Place, missing: Sequence[str], *, download: bool, build: bool) -> dict[str, SlurmletError]:
    if not missing:
        return {}
    from slurmlet.upstream.cache_fill import Ways, obtain
    from slurmlet.upstream.downloads import Downloader
    from slurmlet.upstream.go_build import Builder

    steps = Steps()
    cache = place.cache
    builder = Builder(pinning.recipes_dir(), cache.root, cache.logs, place.pins.go, steps)
    ways = Ways(Downloader() if download else None, builder if build else None)
    return obtain(place.pins, missing, cache, ways, steps)


def _report(pins: Pins, problems: dict[str, SlurmletError], *, asked_by_name: bool) -> None:
    fatal = []
    for program in pins.programs:
        problem = problems.get(program.name)
        if problem is None:
            continue
        if program.optional and not asked_by_name:
            say(f"  warning: continuing without {program.name}: {problem.message}")
        else:
            fatal.append(problem)
    if fatal:
        raise SiteError(
            "\n".join(problem.message for problem in fatal), hint=fatal[0].hint, reason="UpstreamMissing"
        )


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _joined(found: Sequence[Found]) -> Path:
    """One directory of links, for binaries that lie in several; named by what it links, so never changed."""
    key = hashlib.sha256("\n".join(f"{item.name}={item.path}" for item in found).encode()).hexdigest()[:12]
    views = private_dir(cache_dir() / "upstream") / "views"
    target = private_dir(views) / key
    if target.is_dir():
        return target
    staging = Path(tempfile.mkdtemp(dir=views, prefix="."))
    for item in found:
        (staging / item.name).symlink_to(item.path)
    try:
        staging.rename(target)
    except OSError:
        # Another process made the same view first; both are alike.
        if not target.is_dir():
            raise
    return target
