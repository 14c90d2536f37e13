"""slurmlet as a wheel: built from the checkout, or packed again from an installation where there is none."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import slurmlet
from slurmlet.base.errors import SiteError
from slurmlet.base.processes import run

_BUILD_LIMIT_S = 300
_SOURCES = ("src/slurmlet", "upstream", "pyproject.toml", "README.md", "LICENSE")
# Written by whoever installed the wheel, and no part of it.
_NOT_PACKED = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}


def checkout() -> Path | None:
    """The source tree this slurmlet runs from, or None for an installed one."""
    top = Path(slurmlet.__file__).resolve().parents[2]
    return top if (top / "pyproject.toml").exists() and (top / "src" / "slurmlet").is_dir() else None


def _source_files(top: Path) -> Iterator[Path]:
    for name in _SOURCES:
        place = top / name
        found = [place] if place.is_file() else sorted(place.rglob("*"))
        yield from (path for path in found if path.is_file() and "__pycache__" not in path.parts)


def fingerprint() -> str:
    """Changes whenever the wheel would."""
    top = checkout()
    total = hashlib.sha256()
    for path in _source_files(top) if top else (file for file, _ in _installed_files()):
        total.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def requirements() -> list[str]:
    top = checkout()
    if top is None:
        return sorted(importlib.metadata.requires("slurmlet") or [])
    # An editable installation may be older than what pyproject.toml says now.
    return sorted(tomllib.loads((top / "pyproject.toml").read_text())["project"]["dependencies"])


def build_wheel(folder: Path, sources: Path | None = None) -> Path:
    """A wheel of this very slurmlet, or of another source tree, alone in `folder`."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    top = sources or checkout()
    if top is None:
        return _repack(folder)
    direct = importlib.util.find_spec("hatchling") is not None
    tool = ["hatchling", "build", "-t", "wheel", "-d"] if direct else ["pip", "wheel", "--no-deps", "-w"]
    run(
        [sys.executable, "-m", *tool, str(folder), *([] if direct else [str(top)])],
        cwd=top,
        timeout_s=_BUILD_LIMIT_S,
    )
    return next(folder.glob("slurmlet-*.whl"))


def _installed_files() -> list[tuple[Path, str]]:
    """(file, name in the wheel) of the installed distribution."""
    found = []
    for entry in importlib.metadata.files("slurmlet") or []:
        inside = not entry.parts[0].startswith(("..", "/")) and "__pycache__" not in entry.parts
        if inside and entry.name not in _NOT_PACKED:
            found.append((Path(str(entry.locate())), entry.as_posix()))
    return sorted(found)


def _repack(folder: Path) -> Path:
    files = _installed_files()
    if not files:
        raise SiteError(
            "this slurmlet was not installed by pip", hint="Install it with pip, or run it from a checkout."
        )
    wheel = folder / f"slurmlet-{slurmlet.__version__}-py3-none-any.whl"
    records = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, name in files:
            data = path.read_bytes()
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            records.append(f"{name},sha256={digest},{len(data)}")
        record = f"slurmlet-{slurmlet.__version__}.dist-info/RECORD"
        archive.writestr(record, "\n".join([*records, f"{record},,"]) + "\n")
    return wheel
