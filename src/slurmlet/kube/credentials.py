"""How a client proves itself to an API server: a certificate, a token file, a kubeconfig, or what a pod is given.

Exec plugins, auth providers, basic authentication and impersonation of a kubeconfig are refused by name: to ignore one would
be to come as somebody else. Nothing is sent over plain HTTP, and no server is trusted unseen.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SiteError, UserError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# A projected token is replaced long before its end; whoever reads it once a minute never has an old one.
_TOKEN_FRESH_S = 60.0
_REFUSED = ("exec", "auth-provider", "username", "password", "as", "as-uid", "as-groups", "as-user-extra")


@dataclass(frozen=True)
class Credentials:
    """One server and one user of it. PEM data wins over a file of the same thing."""

    server: str
    ca_file: Path | None = None
    ca_data: bytes = b""
    certificate_file: Path | None = None
    key_file: Path | None = None
    certificate_data: bytes = b""
    key_data: bytes = b""
    token: str = ""
    token_file: Path | None = None
    server_name: str = ""  # what the server's certificate says, where that is not the host of the URL
    namespace: str = "default"

    @property
    def has_token(self) -> bool:
        return bool(self.token or self.token_file)

    def ssl_context(self) -> ssl.SSLContext:
        """Without an authority: those of this host."""
        context = ssl.create_default_context(
            cafile=str(self.ca_file) if self.ca_file and not self.ca_data else None,
            cadata=self.ca_data.decode("ascii") if self.ca_data else None,
        )
        if self.certificate_data:
            load_pair(context, self.certificate_data, self.key_data)
        elif self.certificate_file is not None:
            context.load_cert_chain(str(self.certificate_file), str(self.key_file))
        return context


def by_certificate(server: str, ca: Path, certificate: Path, key: Path) -> Credentials:
    return Credentials(server, ca_file=ca, certificate_file=certificate, key_file=key)


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """OpenSSL takes pairs from files only: one that nobody else may read, for a moment."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name)


class Token:
    """A bearer token, read again now and then, and when the server has refused it."""

    def __init__(self, credentials: Credentials) -> None:
        self._token, self._file = credentials.token, credentials.token_file
        self._read_s = float("-inf")

    @property
    def can_change(self) -> bool:
        return self._file is not None

    async def value(self) -> str:
        if self._file is not None and time.monotonic() - self._read_s > _TOKEN_FRESH_S:
            try:
                self._token = (await asyncio.to_thread(self._file.read_text)).strip()
            except OSError as error:
                if not self._token:
                    raise SiteError(
                        f"token file {self._file} cannot be read: {error}", transient=True
                    ) from error
            self._read_s = time.monotonic()
        return self._token

    def refused(self) -> None:
        self._read_s = float("-inf")


def in_cluster(
    environment: Mapping[str, str] | None = None, directory: Path = SERVICE_ACCOUNT
) -> Credentials:
    """What every container of a pod is given."""
    environment = os.environ if environment is None else environment
    host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host or not port or not (directory / "token").exists():
        raise SiteError(
            f"not in a pod: KUBERNETES_SERVICE_HOST or {directory}/token is missing",
            hint="Run it in a pod with a service account token, or name a kubeconfig.",
        )
    namespace = directory / "namespace"
    return Credentials(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_file=directory / "ca.crt",
        token_file=directory / "token",
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
    )


def from_kubeconfig(path: Path, context: str = "") -> Credentials:
    """Of one file and one context of it (default: its current one). Relative paths are relative to the file."""
    try:
        found = _credentials(path, path.read_text(), context)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"kubeconfig {path} cannot be read: {error}") from error
    if not found.certificate_data and not found.key_data:
        return found
    # Certificate and key may come in two ways; a context wants them in one.
    return replace(
        found,
        certificate_data=found.certificate_data or _bytes(found.certificate_file),
        key_data=found.key_data or _bytes(found.key_file),
    )


def from_kubeconfig_data(data: bytes, origin: str) -> Credentials:
    """Of the bytes of one, as a Secret holds them. It may not name files: those would be ours, not its author's."""
    try:
        found = _credentials(Path(origin), data.decode(), "")
    except UnicodeDecodeError as error:
        raise UserError(f"kubeconfig {origin} is not text: {error}") from error
    files = (found.ca_file, found.certificate_file, found.key_file, found.token_file)
    if any(files):
        raise UserError(f"kubeconfig {origin} names files; the data themselves are expected")
    return found


def _credentials(path: Path, text: str, context: str) -> Credentials:
    import yaml  # only kubeconfigs need it

    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        # Without the lines it stands in: they may be a key's.
        problem = getattr(error, "problem", None) or type(error).__name__
        raise UserError(f"kubeconfig {path} cannot be read: {problem}") from None
    if not isinstance(document, dict):
        raise UserError(f"kubeconfig {path} is not a kubeconfig file")
    name = context or document.get("current-context") or ""
    chosen = _named(path, document, "context", name)
    cluster = _named(path, document, "cluster", chosen.get("cluster") or "")
    user = _named(path, document, "user", chosen["user"]) if chosen.get("user") else {}
    _refuse(path, chosen.get("user") or "", cluster, user)
    found = Credentials(
        server=str(cluster["server"]).rstrip("/"), namespace=chosen.get("namespace") or "default"
    )
    ca_file, ca_data = _either(path, cluster, "certificate-authority")
    certificate_file, certificate_data = _either(path, user, "client-certificate")
    key_file, key_data = _either(path, user, "client-key")
    if bool(certificate_file or certificate_data) != bool(key_file or key_data):
        raise UserError(
            f"kubeconfig {path}: user {chosen.get('user')!r} has a certificate without a key, or a key without a certificate"
        )
    token_file = user.get("tokenFile")
    return replace(
        found, ca_file=ca_file, ca_data=ca_data, certificate_file=certificate_file, key_file=key_file,
        certificate_data=certificate_data, key_data=key_data, server_name=cluster.get("tls-server-name") or "",
        token="" if token_file else user.get("token") or "",
        token_file=path.parent / token_file if token_file else None,
    )  # fmt: skip


def _refuse(path: Path, name: str, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> None:
    if not str(cluster.get("server") or "").startswith("https://"):
        raise UserError(f"kubeconfig {path}: server {cluster.get('server')!r}, an https:// URL expected")
    if cluster.get("insecure-skip-tls-verify") or cluster.get("proxy-url"):
        raise UserError(
            f"kubeconfig {path}: insecure-skip-tls-verify and proxy-url are not supported",
            hint="Set certificate-authority and a server that is reachable without a proxy.",
        )
    unsupported = [key for key in _REFUSED if user.get(key)]
    if unsupported:
        raise UserError(
            f"kubeconfig {path}: user {name!r} uses {', '.join(unsupported)}, which is not supported",
            hint="Use a client certificate, a token or a tokenFile (`kubectl create token` makes one).",
        )


def _named(path: Path, document: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    for entry in document.get(f"{kind}s") or ():
        if entry.get("name") == name and isinstance(entry.get(kind), dict):
            found: dict[str, Any] = entry[kind]
            return found
    raise UserError(
        f"kubeconfig {path} has no {kind} {name!r}", hint="List the contexts: kubectl config get-contexts"
    )


def _either(path: Path, entry: Mapping[str, Any], name: str) -> tuple[Path | None, bytes]:
    data = entry.get(f"{name}-data")
    if data:
        try:
            return None, base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UserError(f"kubeconfig {path}: {name}-data is not base64") from error
    return (path.parent / entry[name] if entry.get(name) else None), b""


def _bytes(path: Path | None) -> bytes:
    assert path is not None
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
