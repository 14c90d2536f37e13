"""Which images a bundle holds: OCI layouts and docker archives become the same thing, a config and its layers.

Manifest and config are checked against the digests that name them before anything in them is believed. The config's
diff ids fix the layers; flattening.py checks those while it reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.images.bundles import BadImage, Bundle, read_document
from slurmlet.images.references import is_digest

_AGAIN = "The archive is incomplete or damaged; save or copy it again."
_MAX_LAYERS = 1000
_MAX_IMAGES = 1000
_INDEX_TYPES = {
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
}
# Docker and containerd write the full name here; the OCI specification's own annotation is often a bare tag.
_NAME_ANNOTATIONS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


@dataclass(frozen=True)
class Layer:
    """One layer: where it lies in the bundle, and the digest of its plain tar (whatever it is compressed with)."""

    name: str
    diff_id: str


@dataclass(frozen=True)
class PackedImage:
    digest: str
    from_registry_manifest: bool
    names: tuple[str, ...]
    config: bytes
    layers: tuple[Layer, ...]


def find_images(bundle: Bundle, architecture: str) -> list[PackedImage]:
    """All images in the bundle that fit this machine."""
    if bundle.has("index.json"):
        images = list(_layout_images(bundle, architecture))
    elif bundle.has("manifest.json"):
        images = list(_docker_images(bundle, architecture))
    else:
        raise BadImage(
            f"{bundle.label} holds neither index.json (OCI layout) nor manifest.json (docker archive)",
            hint="Save the image with `docker save`, `podman save`, `skopeo copy … oci-archive:` or `crane pull`.",
        )
    if not images:
        raise BadImage(
            f"{bundle.label} holds no image for linux/{architecture}",
            hint="Save the image for this platform.",
        )
    return images


def _layout_images(bundle: Bundle, architecture: str) -> Iterator[PackedImage]:
    index = _parsed(bundle, "index.json", read_document(bundle, "index.json"))
    for descriptor in _descriptors(bundle, index, "manifests"):
        annotations = descriptor.get("annotations")
        names = _annotated_names(annotations if isinstance(annotations, dict) else {})
        chosen = _choose(bundle, descriptor, architecture, depth=0)
        if chosen is not None:
            yield _layout_image(bundle, chosen, names, architecture)


def _annotated_names(annotations: Mapping[str, Any]) -> tuple[str, ...]:
    for key in _NAME_ANNOTATIONS:
        value = annotations.get(key)
        # A bare tag ("latest") names nothing.
        if isinstance(value, str) and ("/" in value or ":" in value):
            return (value,)
    return ()


def _choose(
    bundle: Bundle, descriptor: Mapping[str, Any], architecture: str, *, depth: int
) -> Mapping[str, Any] | None:
    """Follow an index to the manifest for this machine; attestations and foreign platforms are passed over."""
    platform = descriptor.get("platform")
    if isinstance(platform, dict) and not _fits(platform, architecture):
        return None
    if descriptor.get("mediaType") not in _INDEX_TYPES:
        return descriptor
    if depth > 3:
        raise BadImage(f"{bundle.label}: indexes are nested too deeply", hint=_AGAIN)
    nested = _parsed(bundle, str(descriptor["digest"]), _blob(bundle, descriptor))
    for child in _descriptors(bundle, nested, "manifests"):
        chosen = _choose(bundle, child, architecture, depth=depth + 1)
        if chosen is not None:
            return chosen
    return None


def _fits(platform: Mapping[str, Any], architecture: str) -> bool:
    # `crane append` on an empty base leaves both empty: such an image claims nothing and is taken at its word.
    return platform.get("os") in ("linux", "", None) and platform.get("architecture") in (
        architecture,
        "",
        None,
    )


def _layout_image(
    bundle: Bundle, descriptor: Mapping[str, Any], names: tuple[str, ...], architecture: str
) -> PackedImage:
    manifest = _parsed(bundle, str(descriptor["digest"]), _blob(bundle, descriptor))
    config_descriptor = manifest.get("config")
    if not isinstance(config_descriptor, dict) or not is_digest(str(config_descriptor.get("digest"))):
        raise BadImage(f"{bundle.label}: manifest {descriptor['digest']} names no config", hint=_AGAIN)
    config = _blob(bundle, config_descriptor)
    files = [_blob_path(str(layer["digest"])) for layer in _descriptors(bundle, manifest, "layers")]
    layers = _layers(bundle, config, files, architecture)
    return PackedImage(str(descriptor["digest"]), True, names, config, layers)


def _docker_images(bundle: Bundle, architecture: str) -> Iterator[PackedImage]:
    entries = _json(bundle, "manifest.json", read_document(bundle, "manifest.json"))
    if not isinstance(entries, list) or len(entries) > _MAX_IMAGES:
        raise BadImage(f"{bundle.label}: manifest.json is not a docker archive's", hint=_AGAIN)
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("Config"), str):
            raise BadImage(f"{bundle.label}: manifest.json is not a docker archive's", hint=_AGAIN)
        config = read_document(bundle, entry["Config"])
        files = [str(name) for name in entry.get("Layers") or []]
        tags = tuple(str(tag) for tag in entry.get("RepoTags") or [])
        # A docker archive has no registry manifest; like Docker we know such an image by its config ("image ID"),
        # which through the diff ids fixes every byte of its tree.
        digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
        yield PackedImage(digest, False, tags, config, _layers(bundle, config, files, architecture))


def _layers(bundle: Bundle, config: bytes, files: list[str], architecture: str) -> tuple[Layer, ...]:
    """Pair the layer files with the diff ids of the config, which must agree in number."""
    document = _parsed(bundle, "the image config", config)
    if not _fits(document, architecture):
        raise BadImage(
            f"{bundle.label}: the image is for {document.get('os')}/{document.get('architecture')}, "
            f"this machine is linux/{architecture}",
            hint="Save the image for this platform (`docker pull --platform`, `crane pull --platform`).",
        )
    rootfs = document.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    diff_ids = diff_ids or []
    if not isinstance(diff_ids, list) or len(diff_ids) != len(files) or len(files) > _MAX_LAYERS:
        raise BadImage(f"{bundle.label}: the config and the manifest disagree about the layers", hint=_AGAIN)
    for name, diff_id in zip(files, diff_ids, strict=True):
        if not is_digest(str(diff_id)):
            raise BadImage(f"{bundle.label}: {diff_id!r} is not a sha256 digest", hint=_AGAIN)
        if not bundle.has(name):
            raise BadImage(f"{bundle.label}: layer {name} is missing", hint=_AGAIN)
    return tuple(Layer(name, str(diff_id)) for name, diff_id in zip(files, diff_ids, strict=True))


def _descriptors(bundle: Bundle, document: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    found = document.get(field) or []
    if not isinstance(found, list) or len(found) > _MAX_LAYERS:
        raise BadImage(f"{bundle.label}: {field!r} is not a list of descriptors", hint=_AGAIN)
    for descriptor in found:
        if not isinstance(descriptor, dict) or not is_digest(str(descriptor.get("digest"))):
            raise BadImage(
                f"{bundle.label}: {field!r} holds something that is not a sha256 descriptor", hint=_AGAIN
            )
    return found


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _blob(bundle: Bundle, descriptor: Mapping[str, Any]) -> bytes:
    digest = str(descriptor["digest"])
    raw = read_document(bundle, _blob_path(digest))
    if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
        raise BadImage(f"{bundle.label}: {_blob_path(digest)} does not match its digest", hint=_AGAIN)
    return raw


def _json(bundle: Bundle, name: str, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadImage(f"{bundle.label}: {name} is not JSON: {error}", hint=_AGAIN) from error


def _parsed(bundle: Bundle, name: str, raw: bytes) -> dict[str, Any]:
    document = _json(bundle, name, raw)
    if not isinstance(document, dict):
        raise BadImage(f"{bundle.label}: {name} is not a JSON object", hint=_AGAIN)
    return document
