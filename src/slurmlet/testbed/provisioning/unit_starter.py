#!/usr/bin/python3
"""`systemctl` on a machine of the testbed, which has no systemd: enough of it for units that a cloud-init writes.

A program of its own (standard library only) that is copied to the machine. start, restart and `enable --now` start what
ExecStart of the unit says, in the background; stop ends it; is-active tells; daemon-reload and enable do nothing.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

UNIT_FOLDERS = ("/etc/systemd/system", "/usr/lib/systemd/system")
RUN = Path("/run/units")


def main(arguments: list[str]) -> int:
    words = [word for word in arguments if not word.startswith("-")]
    now = "--now" in arguments
    verb, units = (words[0] if words else ""), [_whole(name) for name in words[1:]]
    if verb in ("daemon-reload", "unmask", "reset-failed") or (verb in ("enable", "disable") and not now):
        return 0
    if verb in ("start", "restart", "reload-or-restart", "enable"):
        for unit in units:
            _stop(unit)
            _start(unit)
        return 0
    if verb in ("stop", "disable", "mask"):
        for unit in units:
            _stop(unit)
        return 0
    if verb == "is-active":
        return 0 if all(_running(unit) for unit in units) else 3
    print(f"systemctl of the testbed has no {verb!r}", file=sys.stderr)
    return 1


def _whole(name: str) -> str:
    return name if "." in name else f"{name}.service"


def settings(texts: list[str]) -> dict[str, list[str]]:
    """What a unit and its drop-ins say, key by key; an empty assignment clears what came before."""
    found: dict[str, list[str]] = {}
    for text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            key, separator, value = line.strip().partition("=")
            if not separator or key.startswith(("#", ";")):
                continue
            if value.strip():
                found.setdefault(key.strip(), []).append(value.strip())
            else:
                found[key.strip()] = []
    return found


def _texts(unit: str) -> list[str]:
    for folder in UNIT_FOLDERS:
        path = Path(folder, unit)
        if path.exists():
            drops = sorted(Path("/etc/systemd/system", f"{unit}.d").glob("*.conf"))
            return [path.read_text(), *(drop.read_text() for drop in drops)]
    raise SystemExit(f"Unit {unit} not found.")


def environment(said: dict[str, list[str]], base: dict[str, str]) -> dict[str, str]:
    env = dict(base)
    for value in said.get("Environment", []):
        env.update(pair.partition("=")[::2] for pair in shlex.split(value))
    for value in said.get("EnvironmentFile", []):
        path = Path(value.lstrip("-"))
        if path.exists():
            for line in path.read_text().splitlines():
                if "=" in line and not line.startswith("#"):
                    key, _, word = line.partition("=")
                    env[key.strip()] = " ".join(shlex.split(word))
    return env


def command(line: str, env: dict[str, str]) -> list[str]:
    """As systemd: $NAME alone becomes its words, ${NAME} one word."""
    argv: list[str] = []
    for word in shlex.split(line.lstrip("-@+!:")):
        if word.startswith("$") and not word.startswith("${"):
            argv += env.get(word[1:], "").split()
        else:
            for key, value in env.items():
                word = word.replace("${" + key + "}", value)
            argv.append(word)
    return argv


def _start(unit: str) -> None:
    said = settings(_texts(unit))
    env = environment(said, dict(os.environ))
    for folder in said.get("RuntimeDirectory", []):
        Path("/run", folder).mkdir(parents=True, exist_ok=True)
    for line in said.get("ExecStartPre", []):
        if subprocess.call(command(line, env), env=env) and not line.startswith("-"):
            raise SystemExit(f"ExecStartPre of {unit} failed: {line}")
    RUN.mkdir(exist_ok=True)
    with Path(f"/var/log/{unit}.log").open("ab") as log:
        process = subprocess.Popen(
            command(said["ExecStart"][-1], env),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (RUN / unit).write_text(str(process.pid))


def _running(unit: str) -> bool:
    try:
        os.kill(int((RUN / unit).read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def _stop(unit: str) -> None:
    try:
        os.kill(int((RUN / unit).read_text()), signal.SIGTERM)
    except (OSError, ValueError):
        pass
    (RUN / unit).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
