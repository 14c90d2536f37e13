"""The only caller of crane: digests and layouts from registries, and what its errors mean.

Never sees a secret other than through a private DOCKER_CONFIG directory (credentials.py).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from slurmlet.base.errors import SiteError, SlurmletError
from slurmlet.base.processes import CommandError, run
from slurmlet.images import registry_credentials
from slurmlet.images.references import Reference, is_digest
from slurmlet.images.registry_credentials import Auths
from slurmlet.upstream import binaries

RESOLVE_TIMEOUT_S = 60.0
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
    "riscv64": "riscv64",
}
_GO_LOG_STAMP = re.compile(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d ")
_DENIED = ("unauthorized", "denied", "forbidden", "401", "403")
_NEVER_HERE = ("manifest_unknown", "name_unknown", "not found", "404", "no child with platform")


def architecture() -> str:
    """This machine's, in the words of image configs."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def digest(reference: Reference, auths: Auths | None, *, timeout_s: float = RESOLVE_TIMEOUT_S) -> str:
    """The digest of the manifest for this machine's platform, as the registry has it now."""
    answer = _call(["digest", *_platform(), str(reference)], reference, auths, timeout_s=timeout_s).strip()
    if not is_digest(answer):
        raise _pull_error(reference, f"the registry's answer is not a sha256 digest: {answer[:100]!r}")
    return answer


def pull_layout(reference: Reference, target: Path, auths: Auths | None, *, timeout_s: float) -> None:
    """Write the image as an OCI layout directory. `reference` carries the digest, so nothing moves under us."""
    _call(
        ["pull", "--format=oci", *_platform(), str(reference), str(target)],
        reference,
        auths,
        timeout_s=timeout_s,
    )


def _platform() -> list[str]:
    return ["--platform", f"linux/{architecture()}"]


def _call(arguments: Sequence[str], reference: Reference, auths: Auths | None, *, timeout_s: float) -> str:
    """Run crane with each credential that fits until one is let in."""
    program = _program()
    flags = ["--insecure"] if reference.domain in _insecure_registries() else []
    failure: CommandError | None = None
    for config in registry_credentials.attempts(reference, auths, registry_credentials.user_config()):
        with registry_credentials.docker_config(config) as directory:
            env = {**os.environ, "DOCKER_CONFIG": str(directory)}
            try:
                return run([program, *flags, *arguments], env=env, timeout_s=timeout_s).stdout
            except CommandError as error:
                failure = error
        if not _was_denied(failure):
            break
    assert failure is not None
    raise _pull_error(reference, _useful_line(failure)) from failure


def _program() -> str:
    found = binaries.find("crane") or shutil.which("crane")
    if found is None:
        raise SiteError(
            "crane, the registry client, is not installed",
            hint="Run: slurmlet upstream",
            reason="ErrImagePull",
        )
    return str(found)


def _insecure_registries() -> set[str]:
    return {
        host.strip() for host in os.environ.get("SLURMLET_INSECURE_REGISTRIES", "").split(",") if host.strip()
    }


def _was_denied(failure: CommandError) -> bool:
    said = failure.stderr.lower()
    return any(word in said for word in _DENIED)


def _useful_line(failure: CommandError) -> str:
    lines = [_GO_LOG_STAMP.sub("", line).strip() for line in failure.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if "rror" in line]
    return (errors or lines or [failure.message])[-1][:1000]


def _pull_error(reference: Reference, detail: str) -> SlurmletError:
    said = detail.lower()
    if any(word in said for word in _NEVER_HERE):
        hint = "Check the name and the tag, and that the image exists for this platform."
    elif any(word in said for word in _DENIED):
        hint = "Log in with `docker login` or `crane auth login`, or give the pod an imagePullSecret."
    elif "http: server gave http response" in said:
        hint = f"For a registry without TLS set SLURMLET_INSECURE_REGISTRIES={reference.domain}."
    else:
        hint = "Check that this host reaches the registry (proxy settings?); `slurmlet image load` needs no network."
    return SlurmletError(
        f'failed to pull image "{reference}": {detail}', hint=hint, reason="ErrImagePull", transient=True
    )
