"""Image references as Docker and the kubelet read them. Pure: never asks a registry, never touches the disk.

The grammar is that of github.com/distribution/reference; the normalised form is what containerd's ParseDockerRef
gives: a full name with a tag or a digest, never both (the digest wins).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from slurmlet.base.errors import SlurmletError

DEFAULT_DOMAIN = "docker.io"
_LEGACY_DEFAULT_DOMAIN = "index.docker.io"
_MAX_NAME_LENGTH = 255

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_HOST_PART = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_DOMAIN = re.compile(rf"(?:{_HOST_PART}(?:\.{_HOST_PART})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX_64 = re.compile(r"[a-f0-9]{64}")


class InvalidImageName(SlurmletError):
    """A reference no registry could ever serve; the kubelet gives up on it with the same reason."""

    reason = "InvalidImageName"


@dataclass(frozen=True)
class Reference:
    """A parsed, normalised reference. Exactly one of `tag` and `digest` is set."""

    domain: str
    path: str
    tag: str
    digest: str

    @property
    def repository(self) -> str:
        return f"{self.domain}/{self.path}"

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"


def parse(reference: str) -> Reference:
    try:
        return _parse(reference)
    except ValueError as error:
        raise InvalidImageName(
            f'Failed to apply default image tag "{reference}": couldn\'t parse image name "{reference}": {error}',
            hint="An image is written [registry[:port]/]name[:tag] or name@sha256:<64 hex digits>, in lower case.",
        ) from None


def normalise(reference: str) -> str:
    """`busybox` → `docker.io/library/busybox:latest`; raises InvalidImageName."""
    return str(parse(reference))


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def default_pull_policy(reference: str) -> Literal["Always", "IfNotPresent"]:
    """What the API server fills in: Always for `:latest` (written or implied), else IfNotPresent."""
    try:
        return "Always" if parse(reference).tag == "latest" else "IfNotPresent"
    except InvalidImageName:
        # The API server defaults unparsable names this way too; the name itself is refused later.
        return "IfNotPresent"


def _parse(reference: str) -> Reference:
    if not reference:
        raise ValueError("invalid reference format")
    if _HEX_64.fullmatch(reference):
        raise ValueError(f"invalid repository name ({reference}), cannot specify 64-byte hexadecimal strings")
    name, at, digest = reference.partition("@")
    if at and not is_digest(digest):
        raise ValueError("invalid reference format")
    tag = ""
    # A colon before the last slash belongs to the registry's port.
    if ":" in name.rpartition("/")[2]:
        name, _, tag = name.rpartition(":")
        if not _TAG.fullmatch(tag):
            raise ValueError("invalid reference format")
    domain, path = _split_domain(name)
    _check_name(domain, path)
    if digest:
        return Reference(domain, path, "", digest)
    return Reference(domain, path, tag or "latest", "")


def _split_domain(name: str) -> tuple[str, str]:
    first, slash, rest = name.partition("/")
    is_domain = slash and (any(c in first for c in ".:[") or first == "localhost" or first != first.lower())
    domain, path = (first, rest) if is_domain else (DEFAULT_DOMAIN, name)
    if domain == _LEGACY_DEFAULT_DOMAIN:
        domain = DEFAULT_DOMAIN
    if domain == DEFAULT_DOMAIN and "/" not in path:
        path = f"library/{path}"
    return domain, path


def _check_name(domain: str, path: str) -> None:
    if path != path.lower():
        raise ValueError(f"invalid reference format: repository name ({path}) must be lowercase")
    if not _DOMAIN.fullmatch(domain) or not _PATH.fullmatch(path):
        raise ValueError("invalid reference format")
    if len(path) > _MAX_NAME_LENGTH:
        raise ValueError(f"repository name must not be more than {_MAX_NAME_LENGTH} characters")
