"""Four certificate authorities and what they sign, so that each listener accepts its own clients only.

`ca` (API server and its clients), `etcd-ca` (etcd and its one client), `hub-ca` (the hub, the API server as its caller,
runners), `front-proxy-ca` (the API server where it speaks for others to an aggregated API); and a fifth, `overlay-ca`, in a
cluster that encrypts pod traffic between hosts. A key never leaves `pki/`, but for that of the overlay's one certificate;
authorities and the service-account key outlive `down`, leaves are made again when the host's names change or their end
is near.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from slurmlet.base.files import private_dir, write_json, write_private
from slurmlet.controlplane.components import FRONT_PROXY

AUTHORITIES = ("ca", "etcd-ca", "hub-ca", "front-proxy-ca")
OVERLAY_CA = "overlay-ca"
ENCRYPTION = "encryption.json"
OVERLAY = "overlay.key"
HUB_DNS_NAME = "hub.slurmlet"
# Where the API server's aggregator finds the metrics API: a Service whose one endpoint is the hub.
METRICS_DNS_NAME = "slurmlet-metrics.kube-system.svc"
# What CoreDNS proves to be towards the gateway, its only client.
COREDNS_NAME = "dns.slurmlet"
_CA_DAYS = 3650
_LEAF_DAYS = 365
_RENEW_BEFORE_DAYS = 60
# Compute nodes whose clocks run late must still accept a certificate made a second ago.
_CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Leaf:
    name: str
    ca: str
    common_name: str
    organization: str = ""
    server: bool = False
    client: bool = False
    dns: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    def subject(self) -> x509.Name:
        names = [x509.NameAttribute(NameOID.COMMON_NAME, self.common_name)]
        if self.organization:
            names.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, self.organization))
        return x509.Name(names)

    def alternative_names(self) -> list[x509.GeneralName]:
        dns: list[x509.GeneralName] = [x509.DNSName(name) for name in sorted(set(self.dns))]
        ips = sorted({ipaddress.ip_address(a) for a in self.addresses}, key=lambda ip: (ip.version, int(ip)))
        return dns + [x509.IPAddress(ip) for ip in ips]


def leaves(host: str, addresses: Sequence[str], service_range: str, *, encrypt: bool = False) -> list[Leaf]:
    """Every certificate of a cluster, as ARCHITECTURE.md names them."""
    here = ("127.0.0.1", *addresses)
    first_service = str(next(ipaddress.ip_network(service_range).hosts()))
    in_cluster = (
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    )
    masters = "system:masters"
    return [
        Leaf("apiserver", "ca", "kube-apiserver", server=True,
             dns=(*in_cluster, "localhost", host), addresses=(*here, first_service)),
        Leaf("admin", "ca", "slurmlet:admin", masters, client=True),
        Leaf("hub", "ca", "slurmlet:hub", masters, client=True),
        Leaf("controller-manager", "ca", "system:kube-controller-manager", client=True),
        Leaf("scheduler", "ca", "system:kube-scheduler", client=True),
        # Both uses: etcd is its own peer.
        Leaf("etcd-server", "etcd-ca", "etcd", server=True, client=True,
             dns=("localhost",), addresses=("127.0.0.1",)),
        Leaf("etcd-client", "etcd-ca", "kube-apiserver", client=True),
        Leaf("hub-server", "hub-ca", HUB_DNS_NAME, server=True,
             dns=(HUB_DNS_NAME, METRICS_DNS_NAME, "localhost", host), addresses=here),
        Leaf("kubelet-client", "hub-ca", "slurmlet:kubelet-client", client=True),
        Leaf("gateway", "hub-ca", "slurmlet:gateway", client=True),
        Leaf("coredns", "hub-ca", COREDNS_NAME, server=True, dns=(COREDNS_NAME,)),
        Leaf("dns", "ca", "slurmlet:dns", client=True),
        Leaf("front-proxy-client", "front-proxy-ca", FRONT_PROXY, client=True),
        # Of an authority that signs nothing else: a netd trusts whoever has a certificate of it.
        *[Leaf("netd", OVERLAY_CA, "slurmlet:netd", server=True, client=True)] * encrypt,
    ]  # fmt: skip


def ensure(pki: Path, wanted: Sequence[Leaf]) -> list[str]:
    """Make what is missing, outdated or near its end in `pki`; returns the names that were made."""
    private_dir(pki)
    made: list[str] = []
    signers: dict[str, tuple[x509.Certificate, ec.EllipticCurvePrivateKey]] = {}
    for name in dict.fromkeys((*AUTHORITIES, *(leaf.ca for leaf in wanted))):
        pair = _load(pki, name)
        if pair is None or not _lasts(pair[0], _LEAF_DAYS):
            pair = _make_authority(pki, name)
            made.append(name)
        signers[name] = pair
    for leaf in wanted:
        if not _is_current(pki, leaf, signers[leaf.ca][0]):
            _make_leaf(pki, leaf, *signers[leaf.ca])
            made.append(leaf.name)
    if not (pki / "service-accounts.key").exists() or not (pki / "service-accounts.pub").exists():
        _make_service_account_key(pki)
        made.append("service-accounts")
    if not (pki / ENCRYPTION).exists():
        _make_encryption(pki)
        made.append(ENCRYPTION)
    if not (pki / OVERLAY).exists():
        # Proves to a pod's network that a datagram is of this cluster (docs/network.md).
        write_private(pki / OVERLAY, secrets.token_hex(32))
        made.append(OVERLAY)
    return made


def _is_current(pki: Path, leaf: Leaf, authority: x509.Certificate) -> bool:
    pair = _load(pki, leaf.name)
    if pair is None:
        return False
    certificate = pair[0]
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    try:
        names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        names = []
    return (
        names == leaf.alternative_names()
        and certificate.subject == leaf.subject()
        and _lasts(certificate, _RENEW_BEFORE_DAYS)
    )


def _lasts(certificate: x509.Certificate, days: int) -> bool:
    return certificate.not_valid_after_utc > _now() + datetime.timedelta(days=days)


def _load(pki: Path, name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None:
    """The pair, or None where a file is missing, broken, or the two do not belong together (a crash between writes)."""
    try:
        certificate = x509.load_pem_x509_certificate((pki / f"{name}.crt").read_bytes())
        key = serialization.load_pem_private_key((pki / f"{name}.key").read_bytes(), None)
    except (OSError, ValueError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        return None
    return certificate, key


def _make_authority(pki: Path, name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"slurmlet {name}")])
    certificate = (
        _builder(subject, subject, key.public_key(), _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _store(pki, name, certificate, key)
    return certificate, key


def _make_leaf(
    pki: Path, leaf: Leaf, authority: x509.Certificate, signer: ec.EllipticCurvePrivateKey
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.SERVER_AUTH] * leaf.server + [ExtendedKeyUsageOID.CLIENT_AUTH] * leaf.client
    builder = (
        _builder(leaf.subject(), authority.subject, key.public_key(), _LEAF_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if names := leaf.alternative_names():
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    _store(pki, leaf.name, builder.sign(signer, hashes.SHA256()), key)


def _make_service_account_key(pki: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    write_private(pki / "service-accounts.key", _private_pem(key))
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    write_private(pki / "service-accounts.pub", public)


def _make_encryption(pki: Path) -> None:
    """The key under which the API server stores Secrets, so that etcd's files, and copies of them, hold none."""
    key = {"name": "1", "secret": base64.b64encode(secrets.token_bytes(32)).decode()}
    # identity is for reading what was stored before there was a key.
    providers = [{"secretbox": {"keys": [key]}}, {"identity": {}}]
    document = {
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "EncryptionConfiguration",
        "resources": [{"resources": ["secrets"], "providers": providers}],
    }
    write_json(pki / ENCRYPTION, document)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _CLOCK_SKEW)
        .not_valid_after(_now() + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _store(pki: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    write_private(pki / f"{name}.key", _private_pem(key))
    write_private(pki / f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM))


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
