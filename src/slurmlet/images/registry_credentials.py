"""Registry credentials: the user's own docker config and imagePullSecrets, matched as the kubelet matches them.

Secrets live in memory and, for the time of one crane call, in a private directory (0700/0600) that DOCKER_CONFIG
points to. They never go into an argv, an environment value or an error message.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slurmlet.base import files
from slurmlet.base.errors import SlurmletError
from slurmlet.images.references import DEFAULT_DOMAIN, Reference

Auths = Mapping[str, Mapping[str, str]]

# go-containerregistry looks Docker Hub's credentials up under this key and no other.
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"
_DOCKER_HUB_NAMES = {DEFAULT_DOMAIN, "index.docker.io", "registry-1.docker.io"}
_FIELDS = ("auth", "username", "password", "identitytoken", "registrytoken")


def auths_from_secrets(secrets: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """The `auths` of Secret objects of the two docker types; where two name the same registry the earlier one wins."""
    found: dict[str, dict[str, str]] = {}
    for secret in secrets:
        for key, entry in _auths_of(secret).items():
            found.setdefault(key, entry)
    return found


def _auths_of(secret: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    data = secret.get("data") or {}
    if secret.get("type") == "kubernetes.io/dockerconfigjson":
        document = _decoded(secret, data.get(".dockerconfigjson"))
        return _clean(document.get("auths"))
    if secret.get("type") == "kubernetes.io/dockercfg":
        return _clean(_decoded(secret, data.get(".dockercfg")))
    return {}


def _decoded(secret: Mapping[str, Any], encoded: object) -> dict[str, Any]:
    name = (secret.get("metadata") or {}).get("name", "?")
    try:
        document = json.loads(base64.b64decode(str(encoded or ""), validate=True))
    except (binascii.Error, ValueError):
        # Neither the data nor the parser's words (which quote it) may show up anywhere.
        document = None
    if not isinstance(document, dict):
        raise SlurmletError(
            f"imagePullSecret {name!r} holds no Docker config in JSON",
            hint="Create it with: kubectl create secret docker-registry",
            reason="ErrImagePull",
        )
    return document


def _clean(auths: object) -> dict[str, dict[str, str]]:
    if not isinstance(auths, dict):
        return {}
    return {
        str(key): {field: entry[field] for field in _FIELDS if isinstance(entry.get(field), str)}
        for key, entry in auths.items()
        if isinstance(entry, dict)
    }


def user_config() -> dict[str, Any]:
    """The docker config of the user who runs slurmlet (podman's, where docker has none); {} without one."""
    directory = os.environ.get("DOCKER_CONFIG")
    places = [(Path(directory) if directory else Path.home() / ".docker") / "config.json"]
    if os.environ.get("REGISTRY_AUTH_FILE"):
        places.append(Path(os.environ["REGISTRY_AUTH_FILE"]))
    if os.environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(os.environ["XDG_RUNTIME_DIR"]) / "containers" / "auth.json")
    for place in places:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            document = files.read_json(place)
            if isinstance(document, dict):
                return document
    return {}


def attempts(reference: Reference, auths: Auths | None, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Docker configs to try in turn, best match first, each with at most one credential of the registry.

    The kubelet tries every credential that matches until one pulls; without any it pulls anonymously.
    """
    key = _DOCKER_HUB_KEY if reference.domain in _DOCKER_HUB_NAMES else reference.domain
    tried = [{"auths": {key: dict(entry)}} for entry in matching(reference, auths or {})]
    tried += [{"auths": {key: dict(entry)}} for entry in matching(reference, _clean(config.get("auths")))]
    helpers = {name: config[name] for name in ("credHelpers", "credsStore") if config.get(name)}
    if helpers:
        tried.append({"auths": {}, **helpers})
    return tried or [{"auths": {}}]


def matching(reference: Reference, auths: Auths) -> list[Mapping[str, str]]:
    """The usable entries whose key covers the reference; the longer key, being more exact, first."""
    keys = sorted((key for key in auths if covers(key, reference)), reverse=True)
    return [auths[key] for key in keys if any(auths[key].values())]


def covers(key: str, reference: Reference) -> bool:
    """Does a docker config's key (host glob, optional port, optional path prefix) cover this reference?"""
    parts = urlsplit(key if "://" in key else f"https://{key}")
    host, _, port = parts.netloc.rpartition("@")[2].partition(":")
    path = parts.path.strip("/")
    if path in ("v1", "v2"):
        path = ""
    host = DEFAULT_DOMAIN if host in _DOCKER_HUB_NAMES else host
    wanted_host, _, wanted_port = reference.domain.partition(":")
    if port != wanted_port or not _host_matches(host, wanted_host):
        return False
    return not path or reference.path == path or reference.path.startswith(f"{path}/")


def _host_matches(pattern: str, host: str) -> bool:
    # As in the kubelet a `*` stands for (a part of) one label, never for several.
    globs, labels = pattern.split("."), host.split(".")
    return len(globs) == len(labels) and all(
        fnmatch.fnmatchcase(label, glob) for glob, label in zip(globs, labels, strict=True)
    )


@contextlib.contextmanager
def docker_config(document: Mapping[str, Any]) -> Iterator[Path]:
    """A private directory with `config.json` for one crane call; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="slurmlet-registry-") as name:
        files.write_private(Path(name) / "config.json", json.dumps(dict(document)))
        yield Path(name)
