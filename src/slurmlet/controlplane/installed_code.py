"""Which slurmlet is installed, so that `up` sees that a running cluster is of another one.

A version number is not enough: two builds may have the same. pip's record of an installation names every file with its hash.
"""

from __future__ import annotations

import hashlib


def installed_code() -> str:
    """The version and a digest of all installed files; the version alone for a checkout, which changes all the time."""
    import importlib.metadata  # not small, and only `up` and the supervisor ask

    try:
        found = importlib.metadata.distribution("slurmlet")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
    record = found.read_text("RECORD") or ""
    # What an editable installation lists are pointers to the checkout. Compiled files come and go.
    files = [
        line for line in record.splitlines() if line.startswith("slurmlet/") and "__pycache__" not in line
    ]
    if not files:
        return found.version
    return f"{found.version} {hashlib.sha256(chr(10).join(sorted(files)).encode()).hexdigest()[:16]}"
