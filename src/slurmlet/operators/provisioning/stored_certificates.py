"""Certificates of the operator's webhooks, and the token in their path: shared by all replicas through a Secret.

A pair of its own per replica (kube/webhook_certificates) is not enough here: the API server calls any replica and trusts
one authority. All replicas show what the Secret holds; the one that leads replaces it. As there, an authority signs one
certificate and its key is forgotten, and replacing lets no handshake fail: trust both, show the new one, trust the new one.

Answers of the Injection Webhook carry Slurm's key, and an API server does not say who it is. So the path ends in a random
token that only the Secret and the webhook configurations hold. It is replaced with the certificate, in the same steps:
accept both, call the new one, accept the new one. Where certificates are cert-manager's the Secret still holds the token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime
import logging
import secrets
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from slurmlet.base.errors import SiteError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Informer
from slurmlet.kube.credentials import load_pair
from slurmlet.kube.webhook_certificates import Issued, issue, trust

log = logging.getLogger(__name__)
Obj = dict[str, Any]
SECRET = "slurmlet-provision-webhook"  # noqa: S105 - a name
_AUTHORITY, _CERTIFICATE, _KEY, _TOKENS = "ca.crt", "tls.crt", "tls.key", "path-tokens"
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class Called:
    """A webhook configuration, VALIDATING or MUTATING, and the path of its webhooks without the token."""

    kind: str
    name: str
    path: str


@dataclass(frozen=True)
class Stored:
    """What the Secret holds. `tokens`: the first is the one that the configurations name; all are accepted."""

    issued: Issued
    tokens: tuple[str, ...]


class StoredCertificates:
    """`configurations`: those whose caBundle and path follow; without `bundles` only the path.

    `context` and `tokens` may be used once `prepare` has returned; `follow` keeps them right until it is cancelled.
    `settle_s`: how long the API server and the other replicas may take to hear of a change; `look_s`: how often
    configurations are looked at, which somebody's `kubectl apply` may have emptied.
    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        names: Sequence[str],
        configurations: Sequence[Called],
        *,
        bundles: bool = True,
        lifetime_s: float = 90 * 24 * 3600.0,
        settle_s: float = 15.0,
        look_s: float = 30.0,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._client, self._names, self._configurations = client, tuple(names), tuple(configurations)
        self._bundles = bundles
        self._secrets = f"/api/v1/namespaces/{namespace}/secrets"
        self._lifetime_s, self._settle_s, self._look_s, self._now = lifetime_s, settle_s, look_s, now
        self._secret = Informer(client, self._secrets, fieldSelector=f"metadata.name={SECRET}")
        self._secret.on_change(self._changed)
        # Who looks in the middle of a replacement would take it for one that was cut short.
        self._turn = asyncio.Lock()
        self.shown: Stored | None = None
        self.context = _server_context()

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.shown.tokens if self.shown is not None else ()

    async def prepare(self) -> None:
        """A pair to show and a token to ask for, the first replica's for all."""
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
        """For the replica that leads: configurations are right, and all is replaced when two thirds of its life are over."""
        while True:
            try:
                async with self._turn:
                    await self._keep_once()
            except ApiError as error:
                log.warning("webhook certificate: %s", error.message)
            await asyncio.sleep(self._look_s)

    async def _keep_once(self) -> None:
        stored = await self._stored()
        if stored is None:
            stored = await self._made()
        elif self._is_due(stored.issued):
            stored = await self._replaced(stored)
        await self._tell(stored.tokens[0], stored.issued)
        if len(stored.tokens) > 1:
            await self._ended(stored)  # whoever led before did not come to it

    async def rotate(self, old: Stored) -> Stored:
        async with self._turn:
            return await self._replaced(old)

    async def _replaced(self, old: Stored) -> Stored:
        issued = await asyncio.to_thread(issue, self._names, self._lifetime_s)
        token, new = old.tokens[0], _token()
        await self._write(Stored(old.issued, (token, new)))
        await self._tell(token, old.issued, issued)
        await asyncio.sleep(self._settle_s)
        both = Stored(issued, (new, token))
        await self._write(both)
        await self._tell(new, old.issued, issued)
        ended = await self._ended(both)
        log.info("webhook certificate replaced, valid for %.0f s", self._lifetime_s)
        return ended

    async def _ended(self, both: Stored) -> Stored:
        """Only the new ones, once replicas have heard of them by their watch and calls with the old ones are over."""
        await asyncio.sleep(self._settle_s)
        ended = Stored(both.issued, both.tokens[:1])
        await self._tell(ended.tokens[0], ended.issued)
        await self._write(ended)
        return ended

    def _is_due(self, issued: Issued) -> bool:
        certificate = x509.load_pem_x509_certificate(issued.certificate)
        left_s = (certificate.not_valid_after_utc - self._now()).total_seconds()
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        known = {str(one.value) for one in alternatives}
        return left_s < self._lifetime_s / 3 or not set(self._names) <= known

    async def _tell(self, token: str, *trusted: Issued) -> None:
        bundle = base64.b64encode(b"".join(one.authority for one in trusted)).decode()
        for one in self._configurations:
            try:
                path = f"{one.path}/{token}"
                await trust(self._client, one.kind, one.name, bundle if self._bundles else "", path)
            except ApiError as error:
                if error.status != 404:
                    raise
                # Switched off, or not made yet.
                log.debug("%s %s is not there", one.kind, one.name)

    async def _stored(self) -> Stored | None:
        try:
            return _read(await self._client.get(f"{self._secrets}/{SECRET}"))
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def _made(self) -> Stored:
        """Of replicas that start together one writes first, and the others take what it wrote."""
        made = Stored(await asyncio.to_thread(issue, self._names, self._lifetime_s), (_token(),))
        try:
            await self._create(made)
        except ApiError as error:
            if error.status != 409:
                raise
            stored = await self._stored()
            if stored is not None:
                return stored
            await self._write(made)  # what is there cannot be used
        return made

    async def _create(self, made: Stored) -> None:
        body = {"metadata": {"name": SECRET}, "type": "kubernetes.io/tls", "data": _data(made)}
        await self._client.create(self._secrets, body)

    async def _write(self, stored: Stored) -> None:
        try:
            await self._client.patch(f"{self._secrets}/{SECRET}", {"data": _data(stored)})
        except ApiError as error:
            if error.status != 404:
                raise
            await self._create(stored)

    def _changed(self, secret: Obj) -> None:
        stored = _read(secret)
        if stored is not None and stored != self.shown:
            self._show(stored)

    def _show(self, stored: Stored) -> None:
        """Connections that stand keep what they have; each new handshake copies the context as it is then."""
        load_pair(self.context, stored.issued.certificate, stored.issued.key)
        self.shown = stored


class MountedCertificates:
    """Of a directory, as cert-manager's Secret is mounted; caBundles are cert-manager's affair (its CA injector).

    `context` may be used once `prepare` has returned; `follow` keeps it right until it is cancelled.
    """

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


def _token() -> str:
    """In hex: of a Service's path the API server takes only what could be a name in DNS."""
    return secrets.token_hex(_TOKEN_BYTES)


def _data(stored: Stored) -> dict[str, str]:
    issued = stored.issued
    named = {_AUTHORITY: issued.authority, _CERTIFICATE: issued.certificate, _KEY: issued.key}
    named[_TOKENS] = "\n".join(stored.tokens).encode()
    return {name: base64.b64encode(value).decode() for name, value in named.items()}


def _read(secret: Obj) -> Stored | None:
    """None where it holds no pair that can be used, or a token that could be guessed: it is made anew then."""
    data = secret.get("data") or {}
    try:
        parts = [base64.b64decode(data[name], validate=True) for name in (_AUTHORITY, _CERTIFICATE, _KEY)]
        issued = Issued(*parts)
        load_pair(_server_context(), issued.certificate, issued.key)
        x509.load_pem_x509_certificate(issued.authority)
        tokens = tuple(base64.b64decode(data[_TOKENS], validate=True).decode("ascii").split())
    except (KeyError, binascii.Error, ValueError, ssl.SSLError):
        return None
    good = bool(tokens) and all(len(one) >= 2 * _TOKEN_BYTES for one in tokens)
    return Stored(issued, tokens) if good else None
