"""What a binary says its version is, remembered: asking a large one takes a tenth of a second."""

from __future__ import annotations

import contextlib
from pathlib import Path

from slurmlet.base.files import private_dir, read_json, write_json
from slurmlet.base.layout import cache_dir
from slurmlet.base.processes import run


def version_of(binary: Path) -> str:
    """The last word of its --version; asked again when the file is another one."""
    seen = binary.stat()
    key = f"{binary} {seen.st_size} {seen.st_mtime_ns}"
    memory = cache_dir() / "binary-versions.json"
    known = read_json(memory)
    known = known if isinstance(known, dict) else {}
    if key not in known:
        known = {key: run([str(binary), "--version"]).stdout.split()[-1]}
        with contextlib.suppress(OSError):
            private_dir(memory.parent)
            write_json(memory, known)
    return str(known[key])
