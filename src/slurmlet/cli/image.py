"""`slurmlet image`: the store on the shared file system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmlet.base import console, layout

if TYPE_CHECKING:
    from slurmlet.images.image_store import Image, Store


@click.group()
def command() -> None:
    """The image store: load, pull, ls, rm."""


def _store() -> Store:
    from slurmlet.images.image_store import Store

    return Store(layout.store_dir())


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--name", metavar="REF", help="The image's name, where the file gives none or another is wanted."
)
def load(file: Path, name: str | None) -> None:
    """Load FILE: an OCI layout (directory or tar) or a docker archive, gzipped or not."""
    with console.Steps().step(f"loading {file}"):
        images = _store().load(file, name)
    for image in images:
        click.echo(image.reference)


@command.command()
@click.argument("reference", metavar="REF")
def pull(reference: str) -> None:
    """Pull REF from its registry; nothing is transferred if the store has its digest."""
    with console.Steps().step(f"pulling {reference}"):
        image = _store().pull(reference)
    click.echo(image.repo_digest)


@command.command()
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def ls(output: str) -> None:
    """What the store holds."""
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
            "The store is empty. `slurmlet image pull` and `slurmlet image load` fill it; so do pods."
        )


@command.command()
@click.argument("references", metavar="REF…", nargs=-1, required=True)
def rm(references: tuple[str, ...]) -> None:
    """Remove images by name or by digest (sha256:…). Nodes that have unpacked one keep their copy."""
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
