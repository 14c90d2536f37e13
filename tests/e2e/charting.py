"""A chart that nobody here wrote: podinfo's, with its program as an image, and Helm; built once, from their recipes.

Only tests want these, so they are no pinned programs of the product's; the recipes (upstream/podinfo, upstream/helm) pin
every byte of them all the same. The first build takes some minutes on two cores.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.console import Steps
from slurmlet.base.files import locked, private_dir
from slurmlet.base.layout import cache_dir
from slurmlet.base.processes import run
from slurmlet.upstream import pins as pinning
from slurmlet.upstream.go_build import Builder, build_environment, wanted_go
from slurmlet.upstream.pins import Program, architecture

_PODINFO, _HELM = "github.com/stefanprodan/podinfo", "helm.sh/helm/v3"
_PASSWD = "root:x:0:0:root:/root:/bin/sh\napp:x:100:101:app:/home/app:/bin/sh\n"


@dataclass(frozen=True)
class Charts:
    """A directory with helm, the chart as its authors wrote it, and its image as a docker archive."""

    root: Path

    @property
    def image(self) -> str:
        """The reference that the chart names."""
        values = (self.root / "chart" / "values.yaml").read_text()
        found = re.search(r"^image:\n  repository: (\S+)\n  tag: (\S+)$", values, re.MULTILINE)
        assert found is not None, "the chart names its image in another way now"
        return f"{found[1]}:{found[2]}"


def build() -> Charts:
    """What is there already is not made again."""
    recipes = pinning.recipes_dir()
    pins = "".join((recipes / name / "go.sum").read_text() for name in ("podinfo", "helm"))
    root = private_dir(cache_dir() / "charts" / hashlib.sha256(pins.encode()).hexdigest()[:12])
    with locked(root / ".lock"):
        if not (root / "complete").exists():
            builder = Builder(recipes, cache_dir() / "upstream", root, pinning.load().go, Steps())
            work = private_dir(root / "work")
            helm = _program("helm", _HELM, {"helm": f"{_HELM}/cmd/helm"}, 150)
            builder.build(helm, ["helm"], work)["helm"].replace(root / "helm")
            commands = {name: f"{_PODINFO}/cmd/{name}" for name in ("podinfo", "podcli")}
            podinfo = _program("podinfo", _PODINFO, commands, 60)
            made = builder.build(podinfo, list(commands), work)
            source = _source(builder, podinfo)
            shutil.rmtree(root / "chart", ignore_errors=True)
            shutil.copytree(source / "charts" / "podinfo", root / "chart")
            (root / "image.tar").write_bytes(_archive(made, source / "ui"))
            shutil.rmtree(work)
            (root / "complete").touch()
    return Charts(root)


def _program(name: str, module: str, binaries: dict[str, str], expected_build_s: int) -> Program:
    recipe = (pinning.recipes_dir() / name / "go.mod").read_text()
    found = re.search(rf"^\t?(?:require )?{re.escape(module)} (v\S+)", recipe, re.MULTILINE)
    assert found is not None, f"the recipe of {name} names no version"
    return Program(name, found[1], module, binaries, "", "", expected_build_s=expected_build_s)


def _source(builder: Builder, program: Program) -> Path:
    recipe = builder.recipes / program.name
    go = builder._go(wanted_go(recipe))
    env = build_environment(os.environ, builder.cache, cgo=False)
    return Path(
        run([str(go), "list", "-m", "-f", "{{.Dir}}", program.module], cwd=recipe, env=env).stdout.strip()
    )


def _archive(programs: dict[str, Path], pages: Path) -> bytes:
    """The image as the project's own Dockerfile makes it, without the distribution around it."""
    files = {
        "home/app/podinfo": (programs["podinfo"].read_bytes(), 0o755),
        "usr/local/bin/podcli": (programs["podcli"].read_bytes(), 0o755),
        "etc/passwd": (_PASSWD.encode(), 0o644),
        **{
            f"home/app/ui/{page.relative_to(pages)}": (page.read_bytes(), 0o644)
            for page in pages.rglob("*.*")
        },
    }
    layer = _tar(files)
    config = json.dumps(
        {
            "architecture": architecture()[0],
            "os": "linux",
            "config": {
                "User": "app",
                "WorkingDir": "/home/app",
                "Cmd": ["./podinfo"],
                "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [], "Layers": ["layer.tar"]}]
    parts = {name: config, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    return _tar({path: (data, 0o644) for path, data in parts.items()})


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, (data, mode) in sorted(files.items()):
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
