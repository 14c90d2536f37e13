"""`slurmlet image`: the store on the shared file system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmlet.base import console, layout
from slurmlet.cli.options import output_option

if TYPE_CHECKING:
    from slurmlet.images.image_store import Image, Store


@click.group()
def command() -> None:
    """Manage the image store."""


def _store() -> Store:
    from slurmlet.images.image_store import Store

    return Store(layout.store_dir())


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", metavar="REF", show_default="the name in the file", help="Name of the image.")
def load(file: Path, name: str | None) -> None:
    """Load an image from FILE.

    FILE is an OCI layout (directory or tar) or a Docker archive, compressed with gzip or not.
    """
    with console.Steps().step(f"loading {file}"):
        images = _store().load(file, name)
    for image in images:
        click.echo(image.reference)


@command.command()
@click.argument("reference", metavar="REF")
def pull(reference: str) -> None:
    """Pull the image REF from its registry.

    Nothing is transferred if the store already has its digest.
    """
    with console.Steps().step(f"pulling {reference}"):
        image = _store().pull(reference)
    click.echo(image.repo_digest)


@command.command()
@output_option
def ls(output: str) -> None:
    """List the images in the store."""
    images = _store().list()
    if output == "json":
        console.emit_json([_as_json(image) for image in images])
        return
    rows = [
        [image.reference or "<none>", image.digest[7:19], human_size(image.size_bytes), image.added_at]
        for image in images
    ]
    console.emit_table(["IMAGE", "DIGEST", "SIZE", "ADDED"], rows)
    if not images:
        console.say(
            "The store is empty. Add an image with: slurmlet image pull REF, or slurmlet image load FILE"
        )


@command.command()
@click.argument("references", metavar="REF…", nargs=-1, required=True)
def rm(references: tuple[str, ...]) -> None:
    """Remove images by name or by digest (sha256:…).

    Compute nodes that have unpacked an image keep their copy.
    """
    store = _store()
    for reference in references:
        store.remove(reference)
        console.say(f"removed {reference}")


def _as_json(image: Image) -> dict[str, object]:
    return {
        "reference": image.reference,
        "digest": image.digest,
        "repoDigest": image.repo_digest,
        "sizeBytes": image.size_bytes,
        "addedAt": image.added_at,
        "directory": str(image.directory),
    }


def human_size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
