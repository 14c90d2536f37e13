"""`slurmlet upstream`: have the pinned upstream binaries, and say where they are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from slurmlet.base import console
from slurmlet.upstream.binaries import inventory


@click.command("upstream")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, resolve_path=True),
    help="Look here first (default: $SLURMLET_UPSTREAM_DIR).",
)
@click.option("--only", "names", multiple=True, metavar="NAME", help="Only this binary; may be repeated.")
@click.option("--no-download", is_flag=True, help="Do not try the official releases.")
@click.option("--no-build", is_flag=True, help="Do not build from source.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(
    directory: Path | None, names: tuple[str, ...], no_download: bool, no_build: bool, output: str
) -> None:
    """Fetch or build the pinned upstream binaries.

    Looks in a directory of yours, then in the cache (every byte is checked against its sha256), then at the
    projects' own releases, and builds from source through the Go module proxy as the last resort.
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
