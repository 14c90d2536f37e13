"""Builds the suite and the programs of its images from the recipe upstream/conformance, once per pinned version.

Gentle on purpose: it compiles half of Kubernetes while somebody works on the same machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.console import Steps, say
from slurmlet.base.errors import SiteError
from slurmlet.base.files import locked, private_dir, write_private
from slurmlet.base.layout import cache_dir
from slurmlet.base.processes import run
from slurmlet.upstream import pins
from slurmlet.upstream.go_build import BUILD_TIMEOUT_S, build_environment, ldflags

RECIPE = "conformance"
SUITE = "e2e.test"
# What is built: the file it becomes, and the package it is made of.
PROGRAMS = {
    "agnhost": "k8s.io/kubernetes/test/images/agnhost",
    "nnp": "k8s.io/kubernetes/test/images/nonewprivs",
    SUITE: "k8s.io/kubernetes/test/e2e",
}
# Files of the suite's sources that its images hold.
FILES = {
    "localhost.crt": "test/images/agnhost/porter/localhost.crt",
    "localhost.key": "test/images/agnhost/porter/localhost.key",
}
_THREADS = "2"


@dataclass(frozen=True)
class Built:
    """A directory with everything of PROGRAMS and FILES."""

    root: Path

    @property
    def suite(self) -> Path:
        return self.root / SUITE

    def program(self, name: str) -> bytes:
        return (self.root / name).read_bytes()


def build() -> Built:
    """The programs of the pinned version; what is there already is not made again."""
    kubernetes = pins.load().program_of("kubectl")
    root = private_dir(cache_dir() / RECIPE / kubernetes.version)
    with locked(root / ".lock"):
        for name, package in PROGRAMS.items():
            if not (root / name).exists():
                say(f"  {name}: building (the suite takes about five minutes on two idle cores)")
                with Steps().step(f"{name}: build"):
                    _go(root, name, go_arguments(name, package, ldflags(kubernetes), root / f".{name}"))
                (root / f".{name}").replace(root / name)
        if not all((root / name).exists() for name in FILES):
            source = Path(_go(root, "files", ["list", "-m", "-f", "{{.Dir}}", kubernetes.module]).strip())
            for name, path in FILES.items():
                (root / name).write_bytes((source / path).read_bytes())
    return Built(root)


def go_arguments(name: str, package: str, flags: str, target: Path) -> list[str]:
    """`go test -c` makes the suite (it is a test binary), `go build` the rest."""
    # Without -vet=off, go would look through all of Kubernetes once more: that takes longer than the build.
    verb = ["test", "-c", "-vet=off"] if name == SUITE else ["build"]
    return [*verb, "-o", str(target), "-ldflags", flags, package]


def _go(root: Path, name: str, arguments: Sequence[str]) -> str:
    """What go said; its log stays in `root`."""
    go = shutil.which("go")
    if go is None:
        raise SiteError("building the conformance suite needs Go", hint="Install Go and put it on the PATH.")
    done = run(
        ["nice", "-n", "19", go, *arguments],
        cwd=pins.recipes_dir() / RECIPE,
        env={**build_environment(os.environ, root, cgo=False), "GOMAXPROCS": _THREADS},
        timeout_s=BUILD_TIMEOUT_S,
        check=False,
    )
    write_private(root / f"build-{name}.log", f"$ {' '.join(done.argv)}\n{done.stdout}{done.stderr}")
    if not done.ok:
        tail = "\n".join(f"    {line}" for line in done.stderr.splitlines()[-15:])
        raise SiteError(f"building {name} failed:\n{tail}", hint=f"See the full log: {root}/build-{name}.log")
    return done.stdout
