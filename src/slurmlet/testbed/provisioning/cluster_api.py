"""The unmodified Cluster API core controller and the CRDs it needs, built once into the cache from pinned recipes.

Nothing but `make provision-e2e` and `make provision-demo` asks for it: a user's setup never builds it. What kustomize and
cert-manager would do to upstream's manifests in a cluster is done here: webhooks are called at an address of this host.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slurmlet.base.console import Steps
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import locked, private_dir
from slurmlet.base.layout import cache_dir
from slurmlet.base.processes import run
from slurmlet.upstream import pins as pinning
from slurmlet.upstream.go_build import Builder, build_environment, wanted_go
from slurmlet.upstream.pins import Program

Obj = dict[str, Any]
PROGRAM = "cluster-api"
_RECIPES = {"clusterapi": "sigs.k8s.io/cluster-api", "slinky": "github.com/SlinkyProject/slurm-operator"}
_CONVERTED = "cluster.x-k8s.io"


@dataclass(frozen=True)
class ClusterApi:
    """A directory with the controller, upstream's CRDs (crds/*.yaml) and webhook configurations (webhooks.yaml)."""

    root: Path

    @property
    def controller(self) -> Path:
        return self.root / PROGRAM

    def crds(self, webhook_url: str, authority: bytes) -> list[Obj]:
        """With conversion between versions by the controller's own webhook, as upstream's kustomize patches have it."""
        bundle = base64.b64encode(authority).decode()
        found = [one for path in sorted((self.root / "crds").glob("*.yaml")) for one in _documents(path)]
        return [_converted(crd, f"{webhook_url}/convert", bundle) for crd in found]

    def webhooks(self, webhook_url: str, authority: bytes) -> list[Obj]:
        bundle = base64.b64encode(authority).decode()
        return [_called(one, webhook_url, bundle) for one in _documents(self.root / "webhooks.yaml")]


def ensure() -> ClusterApi:
    """Built where it is not there yet: about four minutes on two cores."""
    recipes = pinning.recipes_dir()
    text = "".join((recipes / name / "go.sum").read_text() for name in _RECIPES)
    root = private_dir(cache_dir() / "provisioning" / hashlib.sha256(text.encode()).hexdigest()[:12])
    with locked(root / ".lock"):
        if not (root / "complete").exists():
            builder = Builder(recipes, cache_dir() / "upstream", root, pinning.load().go, Steps())
            work = private_dir(root / "work")
            program = _program("clusterapi", {PROGRAM: _RECIPES["clusterapi"]})
            builder.build(program, [PROGRAM], work)[PROGRAM].replace(root / PROGRAM)
            _copy_manifests(builder, root)
            shutil.rmtree(work)
            (root / "complete").touch()
    return ClusterApi(root)


def version(recipe: str) -> str:
    """The version that a recipe pins: its go.mod is the one place."""
    text = (pinning.recipes_dir() / recipe / "go.mod").read_text()
    found = re.search(rf"^\t?(?:require )?{re.escape(_RECIPES[recipe])} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise SlurmletError(f"upstream/{recipe}/go.mod names no version of {_RECIPES[recipe]}")
    return found[1]


def _program(recipe: str, binaries: Mapping[str, str]) -> Program:
    return Program(recipe, version(recipe), _RECIPES[recipe], binaries, "", "", expected_build_s=240)


def _copy_manifests(builder: Builder, root: Path) -> None:
    crds = private_dir(root / "crds")
    for recipe, module in _RECIPES.items():
        folder = builder.recipes / recipe
        env = build_environment(os.environ, builder.cache, cgo=False)
        argv = [str(builder._go(wanted_go(folder))), "mod", "download", "-json", module]
        source = Path(json.loads(run(argv, cwd=folder, env=env, timeout_s=600).stdout)["Dir"])
        for path in (source / "config" / "crd" / "bases").glob("*.yaml"):
            (crds / path.name).write_bytes(path.read_bytes())
        if recipe == "clusterapi":
            (root / "webhooks.yaml").write_bytes((source / "config/webhook/manifests.yaml").read_bytes())


def _documents(path: Path) -> Iterator[Obj]:
    for document in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader):
        if document:
            yield document


def _converted(crd: Obj, url: str, bundle: str) -> Obj:
    if not crd["spec"]["group"].endswith(_CONVERTED) or len(crd["spec"]["versions"]) < 2:
        return crd
    webhook = {"conversionReviewVersions": ["v1"], "clientConfig": {"url": url, "caBundle": bundle}}
    return {**crd, "spec": {**crd["spec"], "conversion": {"strategy": "Webhook", "webhook": webhook}}}


def _called(configuration: Obj, webhook_url: str, bundle: str) -> Obj:
    webhooks = [
        {
            **one,
            "clientConfig": {
                "url": webhook_url + one["clientConfig"]["service"]["path"],
                "caBundle": bundle,
            },
        }
        for one in configuration["webhooks"]
    ]
    name = f"capi-{configuration['metadata']['name']}"
    return {**configuration, "metadata": {"name": name}, "webhooks": webhooks}
