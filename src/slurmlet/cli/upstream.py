"""`slurmlet upstream`: provide the pinned upstream binaries, and print where they are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from slurmlet.base import console
from slurmlet.cli.options import output_option
from slurmlet.upstream.binaries import inventory


@click.command("upstream")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, resolve_path=True),
    show_default="$SLURMLET_UPSTREAM_DIR",
    help="Directory to search first.",
)
@click.option(
    "--only",
    "names",
    multiple=True,
    metavar="NAME",
    show_default="all",
    help="Binary to provide; repeatable.",
)
@click.option("--no-download", is_flag=True, help="Skip the download of official releases.")
@click.option("--no-build", is_flag=True, help="Skip the build from source.")
@output_option
def command(
    directory: Path | None, names: tuple[str, ...], no_download: bool, no_build: bool, output: str
) -> None:
    """Download or build the pinned upstream binaries.

    Searches the given directory, then the cache (verified by sha256), then the projects' official releases, and builds from
    source through the Go module proxy as a last resort.
    """
    found = inventory(
        names or None, directory=directory, download=not no_download, build=not no_build, verify=True
    )
    if output == "json":
        console.emit_json([asdict(item) for item in found])
        return
    console.emit_table(
        ("NAME", "VERSION", "SOURCE", "SIZE", "PATH"),
        [(f.name, f.version, f.source, f"{f.size_bytes / 1e6:.1f} MB", str(f.path)) for f in found],
    )
