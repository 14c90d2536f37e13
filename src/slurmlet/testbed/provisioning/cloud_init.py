"""What cloud-init does at a machine's first boot, as far as worker machines need it: metadata, files, users, commands.

Pure up to `Boot`; `act` runs it on a machine. What is not understood is refused by name: a test must not pass because half
of a configuration was ignored.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slurmlet.base.errors import SlurmletError
from slurmlet.base.processes import Completed

_JINJA = "## template: jinja"
_HEADER = "#cloud-config"
# {{ ds.meta_data.name }}, {{ ds.meta_data['name'] }} and a text of its own, {{ '{#' }}: all that templates of ours have.
_EXPRESSION = re.compile(
    r"{{\s*(?:ds\.meta_data(?:\.([A-Za-z_]\w*)|\[\s*['\"]([^'\"]+)['\"]\s*\])|'([^']*)')\s*}}"
)
_TEMPLATE = re.compile(r"{{.*?}}|{%.*?%}|{#.*?#}", re.DOTALL)
# Known to cloud-init and of no consequence on a machine of the testbed.
_WITHOUT_EFFECT = frozenset(
    {"ssh_pwauth", "package_update", "package_upgrade", "ntp", "timezone", "output", "preserve_hostname"}
)
_KNOWN = frozenset(
    {"write_files", "runcmd", "bootcmd", "users", "hostname", "fqdn", "packages", "manage_etc_hosts"}
)


class CloudInitError(SlurmletError):
    reason = "CloudInitFailed"


@dataclass(frozen=True)
class File:
    path: str
    content: bytes
    mode: int = 0o644
    owner: str = "root:root"
    append: bool = False


@dataclass(frozen=True)
class Boot:
    """A machine's first boot, decided."""

    hostname: str
    files: tuple[File, ...]
    late_files: tuple[File, ...]
    users: tuple[str, ...]
    early_commands: tuple[tuple[str, ...], ...]
    commands: tuple[tuple[str, ...], ...]


def read(user_data: str, meta_data: Mapping[str, str]) -> Boot:
    """User data in the cloud-config format, with the metadata put in."""
    text = user_data
    if text.startswith(_JINJA):
        text = render(text.partition("\n")[2], meta_data)
    if not text.lstrip().startswith(_HEADER):
        raise CloudInitError(f"user data begins with {text[:30]!r}, expected {_HEADER}")
    config = yaml.safe_load(text) or {}
    if not isinstance(config, dict):
        raise CloudInitError("user data is not a mapping")
    unknown = set(config) - _KNOWN - _WITHOUT_EFFECT
    if unknown:
        raise CloudInitError(
            f"user data has modules this machine does not have: {', '.join(sorted(unknown))}"
        )
    named = config.get("hostname") or meta_data.get("local-hostname") or meta_data.get("local_hostname")
    files = [_file(entry) for entry in config.get("write_files") or ()]
    late = [bool(entry.get("defer")) for entry in config.get("write_files") or ()]
    return Boot(
        str(named or meta_data.get("name") or "machine"),
        tuple(file for file, deferred in zip(files, late, strict=True) if not deferred),
        tuple(file for file, deferred in zip(files, late, strict=True) if deferred),
        tuple(_user(entry) for entry in config.get("users") or () if entry != "default"),
        tuple(_command(entry) for entry in config.get("bootcmd") or ()),
        tuple(_command(entry) for entry in config.get("runcmd") or ()),
    )


def meta_data(text: str) -> dict[str, str]:
    """The metaData of Metal3's Secret: YAML of a map of strings."""
    loaded = yaml.safe_load(text) or {}
    if not isinstance(loaded, dict):
        raise CloudInitError("metaData is not a mapping")
    return {str(key): str(value) for key, value in loaded.items()}


def render(text: str, metadata: Mapping[str, str]) -> str:
    """cloud-init gives names with a hyphen to templates with an underscore too."""
    values = {key.replace("-", "_"): value for key, value in metadata.items()} | dict(metadata)

    def value(found: re.Match[str]) -> str:
        known = _EXPRESSION.fullmatch(found[0])
        if known is None:
            raise CloudInitError(f"jinja that this machine does not understand: {found[0]}")
        if known[3] is not None:
            return known[3]
        name = known[1] or known[2]
        if name not in values:
            raise CloudInitError(
                f"the template wants ds.meta_data.{name}, which metaData does not have",
                hint=f"It has: {', '.join(sorted(metadata)) or 'nothing'}.",
            )
        return values[name]

    return _TEMPLATE.sub(value, text)


def _file(entry: Mapping[str, Any]) -> File:
    content = entry.get("content") or ""
    data = content if isinstance(content, bytes) else str(content).encode()
    encoding = str(entry.get("encoding") or "text/plain").lower()
    try:
        if encoding in ("b64", "base64", "gz+b64", "gzip+base64", "gz+base64", "gzip+b64"):
            data = base64.b64decode(data, validate=False)
        if encoding.startswith("gz"):
            data = gzip.decompress(data)
    except (binascii.Error, OSError) as error:
        raise CloudInitError(f"content of {entry['path']} is not {encoding}: {error}") from error
    return File(
        str(entry["path"]),
        data,
        int(str(entry.get("permissions") or "0644"), 8),
        str(entry.get("owner") or "root:root"),
        bool(entry.get("append")),
    )


def _user(entry: Any) -> str:
    return str(entry["name"]) if isinstance(entry, dict) else str(entry)


def _command(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, list):
        return tuple(str(word) for word in entry)
    return ("sh", "-c", str(entry))


def act(boot: Boot, root: Path, run: Callable[[Sequence[str]], Completed], log: Path) -> None:
    """Do it on a machine: `root` is its file system from outside, `run` runs a command there. Stops at the first failure.

    cloud-init itself would go on after one: a test wants to know which it was.
    """
    with log.open("a") as said:
        for command in boot.early_commands:
            _said(run(command), said)
        for file in boot.files:
            _write(file, root, run)
        for name in boot.users:
            _said(run(["sh", "-c", 'id -u "$0" || useradd --no-create-home "$0"', name]), said)
        for file in boot.late_files:
            _write(file, root, run)
        for command in boot.commands:
            _said(run(command), said)


def _write(file: File, root: Path, run: Callable[[Sequence[str]], Completed]) -> None:
    target = root / file.path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not file.append:
        target.unlink(missing_ok=True)
        target.touch(mode=file.mode & 0o600)
    with target.open("ab") as handle:
        handle.write(file.content)
    target.chmod(file.mode)
    if file.owner != "root:root":
        done = run(["chown", file.owner, file.path])
        if not done.ok:
            raise CloudInitError(f"{file.path} cannot be given to {file.owner}: {done.stderr.strip()}")


def _said(done: Completed, log: Any) -> None:
    log.write(f"$ {json.dumps(done.argv[-3:])}\n{done.stdout}{done.stderr}")
    log.flush()
    if not done.ok:
        raise CloudInitError(
            f"command of the user data failed ({done.code}): {done.argv[-1]!r}: {done.stderr.strip()[-300:]}"
        )
