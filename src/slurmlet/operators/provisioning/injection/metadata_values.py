"""The metaData of a machine (YAML, a map of strings) with the values that a Slurm worker needs. Pure.

What is there stays, to the letter: Metal3 keeps a Secret so that a host can be provisioned again in the same state, and a
name that a person set is a person's wish. Only missing names are added.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from slurmlet.operators.provisioning.controller_lookup import BrokenLink, ControllerFacts, Link
from slurmlet.operators.provisioning.controller_spec import MetaDataNames


@dataclass(frozen=True)
class Injected:
    """`text` is the given one where nothing was missing. `differing`: names that are there with another value."""

    text: str
    added: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()


def values(facts: ControllerFacts, names: MetaDataNames, cluster: str) -> dict[str, str]:
    """A key is any bytes; cloud-init's metadata are text, so it goes as base64 (write_files takes that: encoding b64)."""
    found = {
        names.address: facts.address,
        names.conf_server: facts.conf_server,
        names.key: base64.b64encode(facts.key).decode(),
    }
    return {**found, names.cluster: cluster} if cluster else found


def injected(text: str, wanted: Mapping[str, str]) -> Injected:
    present = parsed(text)
    missing = {name: value for name, value in wanted.items() if name not in present}
    differing = tuple(name for name, value in wanted.items() if present.get(name, value) != value)
    if not missing:
        return Injected(text, (), differing)
    whole = text if not text or text.endswith("\n") else f"{text}\n"
    whole += _dumped(missing)
    if _strings(whole) != {**present, **missing}:
        # The text is not a block mapping that can be continued (JSON, or a document that ends with `...`).
        whole = _dumped({**(yaml.safe_load(text) or {}), **missing})
    return Injected(whole, tuple(missing), differing)


def parsed(text: str) -> dict[str, str]:
    """Raises BrokenLink where it is not a map of plain values; its content is not told, for it may be secret."""
    found = _strings(text)
    if found is None:
        raise BrokenLink(Link.SECRET, "data.metaData is not a YAML map of names to plain values")
    return found


def _dumped(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(document), default_flow_style=False, sort_keys=False, width=1 << 20)


def _strings(text: str) -> dict[str, str] | None:
    """Every value as it is written: nothing here may depend on whether YAML takes `1e3` for a number."""
    try:
        document = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - it makes nothing but strings
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    if document in (None, ""):
        return {}
    # Nothing nested: besides that Metal3 writes none, to compare YAML's aliases of aliases takes for ever.
    if not isinstance(document, dict) or not all(
        isinstance(one, str) for pair in document.items() for one in pair
    ):
        return None
    return document
