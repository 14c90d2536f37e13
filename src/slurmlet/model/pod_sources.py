"""What a pod draws on besides its own spec: config maps, secrets, tokens, claims. Which it needs, and their contents."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmlet.base.errors import SlurmletError

Obj = Mapping[str, Any]
DEFAULT_TOKEN_EXPIRY_S = 3600
# The kubelet's rule: a token is replaced at 80 % of its life and never gets older than a day.
_TOKEN_LIFE = 0.8
_LONGEST_TOKEN_S = 24 * 3600.0


class MissingSource(SlurmletError):
    """A config map, secret or key that is not there yet: the pod waits for it.

    `volume` names the volume that lacks it ("": a container's environment does); `event` is what the kubelet would say
    about that volume where it is not "MountVolume.SetUp failed".
    """

    reason = "CreateContainerConfigError"
    transient = True

    def __init__(self, message: str, *, volume: str = "", event: str = "") -> None:
        super().__init__(message)
        self.volume = volume
        self._event = event

    @property
    def event(self) -> str:
        return self._event or f'MountVolume.SetUp failed for volume "{self.volume}" : {self.message}'


@dataclass(frozen=True)
class Token:
    """A service account token a projected volume asks for."""

    audience: str
    expiry_s: int


@dataclass(frozen=True)
class Needs:
    config_maps: frozenset[str] = frozenset()
    secrets: frozenset[str] = frozenset()
    tokens: frozenset[Token] = frozenset()
    trust_bundles: bool = False

    @property
    def objects(self) -> frozenset[tuple[str, str]]:
        """(resource, name) of all config maps and secrets."""
        maps = (("configmaps", name) for name in self.config_maps if name)
        return frozenset((*maps, *(("secrets", name) for name in self.secrets if name)))


@dataclass(frozen=True)
class Sources:
    """Contents, by name; an object that does not exist is simply absent."""

    config_maps: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    secrets: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    tokens: Mapping[Token, str] = field(default_factory=dict)
    # volume → (claim, persistent volume), each None where it does not exist
    claims: Mapping[str, tuple[Obj | None, Obj | None]] = field(default_factory=dict)
    trust_bundles: Sequence[Obj] = ()
    # (resource, name) → resourceVersion of what was read
    versions: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def contents(self, kind: str, name: str, optional: bool) -> Mapping[str, bytes] | None:
        """The object's data; None when it is missing and may be."""
        found = (self.config_maps if kind == "configmap" else self.secrets).get(name)
        if found is None and not optional:
            raise MissingSource(f'{kind} "{name}" not found')
        return found

    def value(self, kind: str, name: str, key: str, optional: bool) -> bytes | None:
        contents = self.contents(kind, name, optional)
        if contents is None:
            return None
        if key not in contents and not optional:
            told = "ConfigMap" if kind == "configmap" else "Secret"
            raise MissingSource(f"couldn't find key {key} in {told} {name}")
        return contents.get(key)


def needs(pod: Mapping[str, Any]) -> Needs:
    """All that the pod needs to start."""
    of_volumes = volume_needs(pod)
    config_maps, secrets = set(of_volumes.config_maps), set(of_volumes.secrets)
    spec = pod["spec"]
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        for kind, name in _environment_references(container):
            (config_maps if kind == "configmap" else secrets).add(name)
    return replace(of_volumes, config_maps=frozenset(config_maps), secrets=frozenset(secrets))


def volume_needs(pod: Mapping[str, Any]) -> Needs:
    """What the pod's volumes show, and go on showing as it changes."""
    config_maps: set[str] = set()
    secrets: set[str] = set()
    tokens: set[Token] = set()
    trust_bundles = False
    for volume in _flat_volumes(pod["spec"]):
        if "configMap" in volume:
            config_maps.add(volume["configMap"].get("name", ""))
        if "secret" in volume:
            source = volume["secret"]
            secrets.add(source.get("secretName") or source.get("name", ""))
        if "serviceAccountToken" in volume:
            tokens.add(token_of(volume["serviceAccountToken"]))
        trust_bundles = trust_bundles or "clusterTrustBundle" in volume
    return Needs(frozenset(config_maps), frozenset(secrets), frozenset(tokens), trust_bundles)


def token_lifetime_s(expiry_s: float, jitter: float) -> float:
    """How long after its issue a token is replaced; `jitter` in 0…1 keeps pods from asking all at once."""
    return min(expiry_s * _TOKEN_LIFE, _LONGEST_TOKEN_S) - 10.0 * jitter


def token_of(source: Mapping[str, Any]) -> Token:
    return Token(source.get("audience") or "", int(source.get("expirationSeconds") or DEFAULT_TOKEN_EXPIRY_S))


def _environment_references(container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            yield "configmap", source["configMapRef"].get("name", "")
        if "secretRef" in source:
            yield "secret", source["secretRef"].get("name", "")
    for variable in container.get("env", ()):
        value_from = variable.get("valueFrom") or {}
        if "configMapKeyRef" in value_from:
            yield "configmap", value_from["configMapKeyRef"].get("name", "")
        if "secretKeyRef" in value_from:
            yield "secret", value_from["secretKeyRef"].get("name", "")


def _flat_volumes(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for volume in spec.get("volumes", ()):
        yield volume
        yield from (volume.get("projected") or {}).get("sources") or ()


def config_map_data(obj: Mapping[str, Any]) -> dict[str, bytes]:
    text = {key: value.encode() for key, value in (obj.get("data") or {}).items()}
    return {**text, **{key: base64.b64decode(value) for key, value in (obj.get("binaryData") or {}).items()}}


def secret_data(obj: Mapping[str, Any]) -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in (obj.get("data") or {}).items()}
