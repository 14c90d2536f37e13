"""The image store on the shared file system: `_store/` as ARCHITECTURE.md lays it down; runners read it.

An image directory is complete or absent: it is made in `work/` and renamed. A lock for each digest lets one of
several pulls do the work; what a killed process left in `work/` is swept by the next one. Never runs a container.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.base import files
from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.images import archives, crane, references
from slurmlet.images.bundles import Bundle, DirectoryBundle, open_bundle
from slurmlet.images.references import Reference
from slurmlet.images.registry_credentials import Auths
from slurmlet.images.rootfs_tar import flatten

PULL_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Image:
    """One image of the store. `repo_digest` is what a kubelet shows as imageID."""

    digest: str
    reference: str
    repo_digest: str
    size_bytes: int
    directory: Path
    added_at: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """The OCI image config; its "config" holds Env, Entrypoint, Cmd, User, WorkingDir, StopSignal."""
        document = files.read_json(self.directory / "config.json")
        if not isinstance(document, dict):
            raise SlurmletError(
                f"the stored image {self.digest} has no readable config",
                hint=f"Remove it with `slurmlet image rm {self.digest}` and load or pull it again.",
                reason="ErrImageInspect",
            )
        return document


class Store:
    def __init__(self, root: Path) -> None:
        self._root = root

    def lookup(self, reference: str) -> Image | None:
        """By reference (normalised here) or digest; None when it is not in the store."""
        if references.is_digest(reference):
            return self._by_digest(reference)
        parsed = references.parse(reference)
        digest = self._references().get(str(parsed)) or parsed.digest
        image = self._by_digest(digest) if digest else None
        return _named(image, parsed) if image is not None else None

    def resolve(self, reference: str, auths: Auths | None = None) -> str:
        """The digest the registry has for it now, for this machine's platform."""
        return crane.digest(references.parse(reference), auths)

    def pull(self, reference: str, *, auths: Auths | None = None, timeout_s: float = PULL_TIMEOUT_S) -> Image:
        """Resolve, transfer unless the digest is here, remember the name. Blocks."""
        parsed = references.parse(reference)
        digest = crane.digest(parsed, auths)
        exact = dataclasses.replace(parsed, tag="", digest=digest)
        with self._digest_lock(digest):
            if self._by_digest(digest) is None:
                with self._workspace() as work:
                    crane.pull_layout(exact, work / "layout", auths, timeout_s=timeout_s)
                    bundle = DirectoryBundle(work / "layout")
                    packed = _only_one(bundle, digest)
                    self._build(bundle, packed, work, str(parsed), repo_digest=str(exact))
            self._remember(str(parsed), digest)
        return self._certain(str(parsed))

    def load(self, path: Path, name: str | None = None) -> list[Image]:
        """Every image of a layout or archive; `name` names the only one, or replaces the archive's name for it."""
        wanted = references.normalise(name) if name else None
        loaded: list[Image] = []
        with self._workspace() as work, open_bundle(path, work) as bundle:
            found = archives.find_images(bundle, crane.architecture())
            for packed, names in [(packed, _names_for(packed, wanted, found, path)) for packed in found]:
                loaded += self._load_one(bundle, packed, names, work)
        return loaded

    def list(self) -> list[Image]:
        """Every name with its image, then images without a name (`reference` is empty)."""
        named: list[Image] = []
        for reference, digest in sorted(self._references().items()):
            image = self._by_digest(digest)
            if image is not None:
                named.append(_named(image, references.parse(reference)))
        seen = {image.digest for image in named}
        every = [self._read(directory) for directory in sorted((self._root / "images").glob("sha256-*"))]
        nameless = [
            dataclasses.replace(image, reference="") for image in every if image and image.digest not in seen
        ]
        return named + nameless

    def remove(self, reference_or_digest: str) -> None:
        """A name goes, and its image with the last name; a digest takes all its names with it."""
        image = self.lookup(reference_or_digest)
        if image is None:
            raise UserError(
                f"no image {reference_or_digest} in the store",
                hint="List the images: slurmlet image ls",
            )
        with self._digest_lock(image.digest):
            known = self._references()
            names = {name for name, digest in known.items() if digest == image.digest}
            if not references.is_digest(reference_or_digest):
                names &= {references.normalise(reference_or_digest)}
            left = self._forget(names)
            if image.digest not in left.values():
                self._discard(image.directory)

    def _load_one(
        self, bundle: Bundle, packed: archives.PackedImage, names: tuple[str, ...], work: Path
    ) -> tuple[Image, ...]:
        repository = references.parse(names[0]).repository
        repo_digest = f"{repository}@{packed.digest}" if packed.from_registry_manifest else packed.digest
        with self._digest_lock(packed.digest):
            if self._by_digest(packed.digest) is None:
                self._build(bundle, packed, work, names[0], repo_digest=repo_digest)
            for name in names:
                self._remember(name, packed.digest)
        return tuple(self._certain(name) for name in names)

    def _build(
        self, bundle: Bundle, packed: archives.PackedImage, work: Path, reference: str, *, repo_digest: str
    ) -> None:
        making = files.private_dir(work / f"image-{secrets.token_hex(4)}")
        size_bytes = flatten(bundle, packed.layers, making / "rootfs.tar", scratch=work)
        (making / "rootfs.tar").chmod(0o600)
        files.write_private(making / "config.json", packed.config)
        now = datetime.datetime.now(datetime.UTC)
        about = {
            "digest": packed.digest,
            "reference": reference,
            "repo_digest": repo_digest,
            "size_bytes": size_bytes,
            "added_at": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        files.write_json(making / "about.json", about)
        making.rename(files.private_dir(self._root / "images") / _directory_name(packed.digest))

    def _certain(self, reference: str) -> Image:
        image = self.lookup(reference)
        if image is None:
            raise SlurmletError(f"{reference} was removed from the store in the meantime", transient=True)
        return image

    def _by_digest(self, digest: str) -> Image | None:
        return self._read(self._root / "images" / _directory_name(digest))

    def _read(self, directory: Path) -> Image | None:
        about = files.read_json(directory / "about.json")
        if not isinstance(about, dict):
            return None
        return Image(
            digest=str(about["digest"]),
            reference=str(about["reference"]),
            repo_digest=str(about["repo_digest"]),
            size_bytes=int(about["size_bytes"]),
            directory=directory,
            added_at=str(about.get("added_at", "")),
        )

    def _references(self) -> dict[str, str]:
        known = files.read_json(self._root / "references.json")
        if not isinstance(known, dict):
            return {}
        return {str(name): digest for name, digest in known.items() if references.is_digest(str(digest))}

    def _remember(self, reference: str, digest: str) -> None:
        with files.locked(files.private_dir(self._root) / "references.lock"):
            known = self._references()
            if known.get(reference) != digest:
                files.write_json(self._root / "references.json", {**known, reference: digest})

    def _forget(self, names: set[str]) -> dict[str, str]:
        with files.locked(self._root / "references.lock"):
            left = {name: digest for name, digest in self._references().items() if name not in names}
            files.write_json(self._root / "references.json", left)
        return left

    def _discard(self, directory: Path) -> None:
        # Renamed first: a reader must never find half an image under its name.
        with self._workspace() as work:
            with contextlib.suppress(FileNotFoundError):
                directory.rename(work / "removed")

    @contextlib.contextmanager
    def _digest_lock(self, digest: str) -> Iterator[None]:
        with files.locked(files.private_dir(self._root / "locks") / _directory_name(digest)):
            yield

    @contextlib.contextmanager
    def _workspace(self) -> Iterator[Path]:
        """A private directory beside the images, so that a rename moves between them; removed at the end."""
        parent = files.private_dir(files.private_dir(self._root) / "work")
        _sweep(parent)
        name = secrets.token_hex(8)
        lock = parent / f"{name}.lock"
        with files.locked(lock):
            work = files.private_dir(parent / name)
            try:
                yield work
            except OSError as error:
                raise SlurmletError(
                    f"cannot write to the image store: {error}",
                    hint=f"Check quota, free space and permissions of {self._root}.",
                    reason="ErrImagePull",
                    transient=True,
                ) from error
            finally:
                shutil.rmtree(work, ignore_errors=True)
                lock.unlink(missing_ok=True)


def _sweep(parent: Path) -> None:
    """Remove what killed processes left: its lock is free. A lock just made and not yet taken guards nothing yet."""
    for lock in parent.glob("*.lock"):
        with files.locked(lock, wait=False) as mine:
            if mine:
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink(missing_ok=True)


def _directory_name(digest: str) -> str:
    return digest.replace(":", "-")


def _named(image: Image, reference: Reference) -> Image:
    """The image as known by this name: with the digest of a registry's manifest goes the name's own repository."""
    from_registry = "@" in image.repo_digest
    repo_digest = f"{reference.repository}@{image.digest}" if from_registry else image.repo_digest
    return dataclasses.replace(image, reference=str(reference), repo_digest=repo_digest)


def _only_one(bundle: Bundle, digest: str) -> archives.PackedImage:
    for packed in archives.find_images(bundle, crane.architecture()):
        if packed.digest == digest:
            return packed
    raise SlurmletError(f"crane returned another image than {digest}", reason="ErrImagePull", transient=True)


def _names_for(
    packed: archives.PackedImage, wanted: str | None, found: list[archives.PackedImage], path: Path
) -> tuple[str, ...]:
    if wanted is not None:
        if len(found) > 1:
            raise UserError(
                f"{path} holds {len(found)} images; --name can name only one",
                hint="Leave out --name, or save each image to a file of its own.",
            )
        return (wanted,)
    if not packed.names:
        raise UserError(
            f"{path} gives no name for image {packed.digest}",
            hint="Set its name: --name NAME[:TAG]",
        )
    return tuple(references.normalise(name) for name in packed.names)
