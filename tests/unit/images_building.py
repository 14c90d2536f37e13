"""Small images made by hand for the image tests: layers from lists, archives and layouts from layers."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurmlet.images.crane import architecture

Entry = tuple[str, str, Any]  # path, kind (d f l s c p), content or link target


def header(path: str, kind: str, value: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    types = {
        "d": tarfile.DIRTYPE,
        "l": tarfile.LNKTYPE,
        "s": tarfile.SYMTYPE,
        "c": tarfile.CHRTYPE,
        "p": tarfile.FIFOTYPE,
    }
    info.type = types.get(kind, tarfile.REGTYPE)
    info.mode = 0o755 if kind == "d" else 0o644
    if kind in "ls":
        info.linkname = value
    return info


def layer(*entries: Entry) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, kind, value in entries:
            info = header(path, kind, value)
            data = value if kind == "f" else b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def digest(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def config(layers: Sequence[bytes], **more: Any) -> dict[str, Any]:
    return {
        "architecture": architecture(),
        "os": "linux",
        "config": {"Entrypoint": ["/bin/sh"], "User": "1000"},
        "rootfs": {"type": "layers", "diff_ids": [digest(raw) for raw in layers]},
        **more,
    }


def tar_of(files: dict[str, bytes], path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, raw in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return path


def docker_files(layers: Sequence[bytes], tags: Sequence[str] = ("t/a:1",), **more: Any) -> dict[str, bytes]:
    raw_config = json.dumps(config(layers, **more)).encode()
    names = [f"layer{number}.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": list(tags), "Layers": names}]
    return {
        "manifest.json": json.dumps(manifest).encode(),
        "config.json": raw_config,
        **dict(zip(names, layers, strict=True)),
    }


def layout_files(
    layers: Sequence[bytes],
    name: str | None = "t/oci:1",
    *,
    compress: Callable[[bytes], bytes] = lambda raw: gzip.compress(raw, mtime=0),
    nested: bool = False,
    **more: Any,
) -> dict[str, bytes]:
    """An OCI layout as {path: bytes}; `nested` puts the manifest into an index with a foreign platform beside it."""
    blobs: dict[str, bytes] = {}

    def blob(raw: bytes, media_type: str, **extra: Any) -> dict[str, Any]:
        blobs[f"blobs/sha256/{digest(raw)[7:]}"] = raw
        return {"mediaType": media_type, "digest": digest(raw), "size": len(raw), **extra}

    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(
            json.dumps(config(layers, **more)).encode(), "application/vnd.oci.image.config.v1+json"
        ),
        "layers": [blob(compress(raw), "application/vnd.oci.image.layer.v1.tar+gzip") for raw in layers],
    }
    annotations = {"annotations": {"org.opencontainers.image.ref.name": name}} if name else {}
    top = blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json", **annotations)
    if nested:
        here = {**top, "platform": {"os": "linux", "architecture": architecture()}}
        foreign = {**top, "digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "mips"}}
        index = {"schemaVersion": 2, "manifests": [foreign, here]}
        top = blob(json.dumps(index).encode(), "application/vnd.oci.image.index.v1+json", **annotations)
    return {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [top]}).encode(),
        **blobs,
    }


def directory_of(files: dict[str, bytes], root: Path) -> Path:
    for name, raw in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(raw)
    return root


def contents(rootfs: Path) -> dict[str, Any]:
    """{path: bytes of a file | None for a directory | "-> target" | "= target" for a hard link}."""
    found: dict[str, Any] = {}
    with tarfile.open(rootfs) as archive:
        for info in archive:
            if info.isdir():
                found[info.name] = None
            elif info.issym():
                found[info.name] = f"-> {info.linkname}"
            elif info.islnk():
                found[info.name] = f"= {info.linkname}"
            elif info.isfifo():
                found[info.name] = "fifo"
            else:
                opened = archive.extractfile(info)
                assert opened is not None
                found[info.name] = opened.read()
    return found
