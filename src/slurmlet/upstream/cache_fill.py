"""Fills the cache with what is missing: from a sibling set, then an official download, then a build.

Works program by program, so that what was made stays made when a later one fails. The caller holds the
cache's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.console import Steps, say
from slurmlet.base.errors import SiteError, SlurmletError
from slurmlet.upstream.binary_cache import BinaryCache
from slurmlet.upstream.downloads import Downloader, DownloadFailed
from slurmlet.upstream.go_build import ELSEWHERE, Builder
from slurmlet.upstream.pins import Pins, Program


@dataclass(frozen=True)
class Ways:
    """How binaries may be obtained in this run; None switches a way off."""

    downloader: Downloader | None
    builder: Builder | None


def obtain(
    pins: Pins, missing: Sequence[str], cache: BinaryCache, ways: Ways, steps: Steps
) -> dict[str, SlurmletError]:
    """Install what can be had of `missing`; returns, per program that could not be had, why."""
    problems: dict[str, SlurmletError] = {}
    wanted = [(program, [name for name in program.binaries if name in missing]) for program in pins.programs]
    wanted = [(program, _not_adopted(program, names, cache)) for program, names in wanted]
    wanted = [(program, names) for program, names in wanted if names]
    if ways.downloader and wanted:
        ways.downloader.probe(program.expand(program.url, names[0]) for program, names in wanted)
    for program, names in wanted:
        try:
            _obtain(program, names, cache, ways, steps)
        except SlurmletError as error:
            problems[program.name] = error
    return problems


def _not_adopted(program: Program, names: Sequence[str], cache: BinaryCache) -> list[str]:
    return [name for name in names if not cache.adopt(name, program.digest())]


def _obtain(program: Program, names: Sequence[str], cache: BinaryCache, ways: Ways, steps: Steps) -> None:
    with cache.staging() as staging:
        left = list(names)
        if ways.downloader:
            left = _download(program, names, cache, ways.downloader, steps, staging)
        if not left:
            return
        if ways.builder is None:
            raise SiteError(f"{', '.join(left)} {program.version} is not available", hint=ELSEWHERE)
        for name, path in ways.builder.build(program, left, staging).items():
            _install(cache, program, name, path, "build")


def _download(
    program: Program,
    names: Sequence[str],
    cache: BinaryCache,
    downloader: Downloader,
    steps: Steps,
    staging: Path,
) -> list[str]:
    """What is still missing afterwards. A host that is not there is normal; anything else is worth a line."""
    left = []
    for name in names:
        if not downloader.reachable(program.expand(program.url, name)):
            left.append(name)
            continue
        try:
            with steps.step(f"{name} {program.version}: download"):
                path = downloader.fetch(program, name, staging)
            _install(cache, program, name, path, "download")
        except DownloadFailed as error:
            say(f"  {error.message}")
            left.append(name)
    return left


def _install(cache: BinaryCache, program: Program, name: str, path: Path, source: str) -> None:
    cache.install(name, path, version=program.version, pin=program.digest(), source=source)
