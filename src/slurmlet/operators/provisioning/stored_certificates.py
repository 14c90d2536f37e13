"""Certificates of the operator's webhooks: made by itself and shared by its replicas through a Secret, or cert-manager's.

A pair of its own per replica (kube/webhook_certificates) is not enough here: the API server calls any replica and trusts
one authority. All replicas show what the Secret holds; the one that leads replaces it. As there, an authority signs one
certificate and its key is forgotten, and replacing lets no handshake fail: trust both, show the new one, trust the new one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from cryptography import x509

from slurmlet.base.errors import SiteError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Informer
from slurmlet.kube.credentials import load_pair
from slurmlet.kube.webhook_certificates import Issued, issue, trust

log = logging.getLogger(__name__)
Obj = dict[str, Any]
SECRET = "slurmlet-provision-webhook"  # noqa: S105 - a name
_AUTHORITY, _CERTIFICATE, _KEY = "ca.crt", "tls.crt", "tls.key"


class ServerCertificates(Protocol):
    """`context` may be used once `prepare` has returned; `follow` keeps it right until it is cancelled."""

    context: ssl.SSLContext

    async def prepare(self) -> None: ...

    async def follow(self) -> None: ...


class StoredCertificates:
    """`configurations`: (VALIDATING or MUTATING, name), those whose caBundle follows.

    `settle_s`: how long the API server and the other replicas may take to hear of a change; `look_s`: how often caBundles
    are looked at, which somebody's `kubectl apply` may have emptied.
    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        names: Sequence[str],
        configurations: Sequence[tuple[str, str]],
        *,
        lifetime_s: float = 90 * 24 * 3600.0,
        settle_s: float = 15.0,
        look_s: float = 30.0,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._client, self._names, self._configurations = client, tuple(names), tuple(configurations)
        self._secrets = f"/api/v1/namespaces/{namespace}/secrets"
        self._lifetime_s, self._settle_s, self._look_s, self._now = lifetime_s, settle_s, look_s, now
        self._secret = Informer(client, self._secrets, fieldSelector=f"metadata.name={SECRET}")
        self._secret.on_change(self._changed)
        self.shown: Issued | None = None
        self.context = _server_context()

    async def prepare(self) -> None:
        """A pair to show, the first replica's for all."""
        while self.shown is None:
            try:
                stored = await self._stored()
                if stored is None:
                    stored = await self._made()
                self._show(stored)
            except ApiError as error:
                if not error.transient:
                    raise
                log.warning("webhook certificate: %s", error.message)
                await asyncio.sleep(1.0)

    async def follow(self) -> None:
        await self._secret.run()

    async def keep(self) -> None:
        """For the replica that leads: caBundles are right, and the pair is replaced when two thirds of its life are over."""
        while True:
            try:
                await self._keep_once()
            except ApiError as error:
                log.warning("webhook certificate: %s", error.message)
            await asyncio.sleep(self._look_s)

    async def _keep_once(self) -> None:
        issued = await self._stored()
        if issued is None:
            issued = await self._made()
        elif self._is_due(issued):
            issued = await self.rotate(issued)
        await self._trust(issued)

    async def rotate(self, old: Issued) -> Issued:
        new = await asyncio.to_thread(issue, self._names, self._lifetime_s)
        await self._trust(old, new)
        await asyncio.sleep(self._settle_s)
        await self._write(new)
        # Replicas hear of it by their watch, and handshakes that began before have shown the old one.
        await asyncio.sleep(self._settle_s)
        await self._trust(new)
        log.info("webhook certificate replaced, valid for %.0f s", self._lifetime_s)
        return new

    def _is_due(self, issued: Issued) -> bool:
        certificate = x509.load_pem_x509_certificate(issued.certificate)
        left_s = (certificate.not_valid_after_utc - self._now()).total_seconds()
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        known = {str(one.value) for one in alternatives}
        return left_s < self._lifetime_s / 3 or not set(self._names) <= known

    async def _trust(self, *issued: Issued) -> None:
        bundle = base64.b64encode(b"".join(one.authority for one in issued)).decode()
        for kind, name in self._configurations:
            try:
                await trust(self._client, kind, name, bundle)
            except ApiError as error:
                if error.status != 404:
                    raise
                # Switched off, or not made yet.
                log.debug("%s %s is not there", kind, name)

    async def _stored(self) -> Issued | None:
        try:
            return _issued(await self._client.get(f"{self._secrets}/{SECRET}"))
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def _made(self) -> Issued:
        """Of replicas that start together one writes first, and the others take what it wrote."""
        issued = await asyncio.to_thread(issue, self._names, self._lifetime_s)
        try:
            await self._create(issued)
        except ApiError as error:
            if error.status != 409:
                raise
            stored = await self._stored()
            if stored is not None:
                return stored
            await self._write(issued)  # what is there cannot be used
        return issued

    async def _create(self, issued: Issued) -> None:
        body = {"metadata": {"name": SECRET}, "type": "kubernetes.io/tls", "data": _data(issued)}
        await self._client.create(self._secrets, body)

    async def _write(self, issued: Issued) -> None:
        try:
            await self._client.patch(f"{self._secrets}/{SECRET}", {"data": _data(issued)})
        except ApiError as error:
            if error.status != 404:
                raise
            await self._create(issued)

    def _changed(self, secret: Obj) -> None:
        issued = _issued(secret)
        if issued is not None and issued != self.shown:
            self._show(issued)

    def _show(self, issued: Issued) -> None:
        """Connections that stand keep what they have; each new handshake copies the context as it is then."""
        load_pair(self.context, issued.certificate, issued.key)
        self.shown = issued


class MountedCertificates:
    """Of a directory, as cert-manager's Secret is mounted; caBundles are cert-manager's affair (its CA injector)."""

    def __init__(self, directory: Path, look_s: float = 10.0) -> None:
        self._directory, self._look_s = directory, look_s
        self._shown = b""
        self.context = _server_context()

    async def prepare(self) -> None:
        if not await self._look():
            raise SiteError(
                f"{self._directory} has no {_CERTIFICATE} and {_KEY} that fit each other",
                hint="Mount the Secret of a Certificate of cert-manager there.",
            )

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            if not await self._look():
                log.warning("the certificate in %s cannot be used; the last one stays", self._directory)

    async def _look(self) -> bool:
        """Whether what is shown is what is there. Read whole: mounted files are replaced one by one."""
        try:
            pair = [
                await asyncio.to_thread((self._directory / name).read_bytes) for name in (_CERTIFICATE, _KEY)
            ]
            if b"".join(pair) != self._shown:
                # A pair that does not fit must not reach the context that is in use.
                load_pair(_server_context(), *pair)
                load_pair(self.context, *pair)
                self._shown = b"".join(pair)
                log.info("webhook certificate read from %s", self._directory)
        except (OSError, ssl.SSLError, ValueError) as error:
            log.debug("certificate in %s: %s", self._directory, error)
            return False
        return True


def _server_context() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _data(issued: Issued) -> dict[str, str]:
    named = {_AUTHORITY: issued.authority, _CERTIFICATE: issued.certificate, _KEY: issued.key}
    return {name: base64.b64encode(value).decode() for name, value in named.items()}


def _issued(secret: Obj) -> Issued | None:
    """None where it holds no pair that can be used: it is made anew then."""
    data = secret.get("data") or {}
    try:
        parts = [base64.b64decode(data[name], validate=True) for name in (_AUTHORITY, _CERTIFICATE, _KEY)]
        issued = Issued(*parts)
        load_pair(_server_context(), issued.certificate, issued.key)
        x509.load_pem_x509_certificate(issued.authority)
    except (KeyError, binascii.Error, ValueError, ssl.SSLError):
        return None
    return issued
