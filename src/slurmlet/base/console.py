"""Output of the commands: data on stdout, messages on stderr; colours and spinners only on a terminal.

`rich` is imported inside the functions: `slurmlet kubectl` must not pay for it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def say(text: str) -> None:
    """A message for the user, on stderr: stdout may be a pipe."""
    print(text, file=sys.stderr, flush=True)


def emit_json(value: Any) -> None:
    # Whoever reads from a pipe must get it now: some commands go on for hours afterwards.
    print(json.dumps(value, indent=2, default=str), flush=True)


def emit_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, styles: Sequence[str] | None = None
) -> None:
    """A table: drawn with colours on a terminal, plain aligned columns in a pipe (as kubectl does)."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, header_style="bold", pad_edge=False)
        for number, header in enumerate(headers):
            table.add_column(header, style=styles[number] if styles else "")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in (headers, *rows)) for i in range(len(headers))]
    for line in (headers, *rows):
        print("   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


class Steps:
    """Progress of a longer task: a spinner on a terminal, one line per finished step elsewhere."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._began_s = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        began_s = time.monotonic()
        if self._quiet:
            yield
        elif sys.stderr.isatty():
            from rich.console import Console

            with Console(stderr=True).status(title):
                yield
        else:
            yield
        if not self._quiet:
            say(f"  {title} ({time.monotonic() - began_s:.1f} s)")

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
