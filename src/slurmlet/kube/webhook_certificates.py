"""Certificates of a webhook server, made and replaced by itself; nobody has to install cert-manager for one process.

An authority signs one certificate and its key is forgotten at once, so that a stolen file cannot make another. Replacing
goes in three steps, of which none lets a handshake fail: the API server is told to trust the old and the new authority, then
the server shows the new certificate, then the old authority is taken back.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import ipaddress
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from slurmlet.kube.client import STRATEGIC, ApiClient, ApiError
from slurmlet.kube.credentials import load_pair

log = logging.getLogger(__name__)
_CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1"
VALIDATING, MUTATING = "validatingwebhookconfigurations", "mutatingwebhookconfigurations"
_CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Issued:
    """One authority (its certificate only) and the pair that it signed, as PEM."""

    authority: bytes
    certificate: bytes
    key: bytes


def issue(names: Sequence[str], lifetime_s: float) -> Issued:
    """For the DNS names and addresses under which the API server calls the webhook."""
    lifetime = datetime.timedelta(seconds=lifetime_s)
    signer, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    # Two authorities of one name, both trusted while they change, would be taken for each other.
    issuer = _name(f"slurmlet webhook {x509.random_serial_number():x}"[:64])
    authority = (
        _builder(issuer, issuer, signer, lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(signer, hashes.SHA256())
    )
    certificate = (
        _builder(_name("slurmlet webhook"), issuer, key, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, form, serialization.NoEncryption())
    return Issued(authority.public_bytes(pem), certificate.public_bytes(pem), private)


class WebhookCertificates:
    """The server's TLS context, and the configurations whose caBundle follows it.

    `configurations`: (VALIDATING or MUTATING, name). `settle_s`: how long the API server may take to hear of a new bundle.
    """

    def __init__(
        self,
        client: ApiClient,
        names: Sequence[str],
        configurations: Sequence[tuple[str, str]],
        *,
        lifetime_s: float = 30 * 24 * 3600.0,
        settle_s: float = 10.0,
        retry_s: float = 5.0,
    ) -> None:
        self._client, self._names, self._configurations = client, tuple(names), tuple(configurations)
        self._lifetime_s, self._settle_s, self._retry_s = lifetime_s, settle_s, retry_s
        self._issued = issue(names, lifetime_s)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._show(self._issued)

    @property
    def bundle(self) -> str:
        """caBundle of the authority in use, for a configuration that is yet to be made."""
        return base64.b64encode(self._issued.authority).decode()

    async def run(self) -> None:
        """Trust first, then a new certificate each time two thirds of the last one's life are over."""
        await self._until_trusted(self._issued)
        while True:
            await asyncio.sleep(self._lifetime_s * 2 / 3)
            await self.rotate()

    async def rotate(self) -> None:
        old, new = self._issued, await asyncio.to_thread(issue, self._names, self._lifetime_s)
        await self._until_trusted(old, new)
        await asyncio.sleep(self._settle_s)
        self._show(new)
        # Handshakes that began before have shown the old one.
        await asyncio.sleep(self._settle_s)
        await self._until_trusted(new)
        log.info("webhook certificate replaced, valid for %.0f s", self._lifetime_s)

    def _show(self, issued: Issued) -> None:
        """Connections that stand keep what they have; each new handshake copies the context as it is then."""
        load_pair(self.context, issued.certificate, issued.key)
        self._issued = issued

    async def _until_trusted(self, *issued: Issued) -> None:
        bundle = base64.b64encode(b"".join(one.authority for one in issued)).decode()
        for kind, name in self._configurations:
            while True:
                try:
                    await trust(self._client, kind, name, bundle)
                    break
                except ApiError as error:
                    # Not made yet, or the server is away: the old certificate serves meanwhile.
                    log.warning("%s %s: caBundle not written: %s", kind, name, error.message)
                    await asyncio.sleep(self._retry_s)


async def trust(client: ApiClient, kind: str, name: str, bundle: str = "", path: str = "") -> None:
    """Write caBundle (base64 of PEM) and path of every webhook of a configuration where they say something else.

    Both at once: the API server never calls a new path with an old trust. Empty: it is left as it is.
    """
    url = f"{_CONFIGURATIONS}/{kind}/{name}"
    webhooks: list[dict[str, Any]] = (await client.get(url)).get("webhooks") or []
    changes = [(one["name"], _changes(one["clientConfig"], bundle, path)) for one in webhooks]
    # Merged by name: rules and webhooks that somebody else changes meanwhile stay theirs.
    change = [{"name": hook, "clientConfig": config} for hook, config in changes if config]
    if change:
        await client.patch(url, {"webhooks": change}, STRATEGIC)


def _changes(config: dict[str, Any], bundle: str, path: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if bundle and config.get("caBundle") != bundle:
        changes["caBundle"] = bundle
    if path and config.get("url"):
        url = urlsplit(config["url"])._replace(path=path).geturl()
        changes |= {"url": url} if url != config["url"] else {}
    elif path and config["service"].get("path") != path:
        changes["service"] = {"path": path}
    return changes


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
