"""Where the kinds of `slurmlet provision` and its manifests are: with the package, or at the top of a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Obj = dict[str, Any]
_HERE = Path(__file__).parent
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP, VERSION = "slurmlet.io", "v1alpha1"
BOOTSTRAP_GROUP = "bootstrap.cluster.x-k8s.io"


def packaging_dir() -> Path:
    packaged = _HERE / "packaging"
    return packaged if packaged.is_dir() else _HERE.parents[3] / "packaging" / "provision"


def custom_resource_definitions() -> list[Obj]:
    """In the order of their names."""
    import yaml  # only who installs them needs it

    files = sorted((packaging_dir() / "crds").glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]
