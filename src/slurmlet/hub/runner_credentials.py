"""A certificate for every runner: proves to the hub which pod it runs, and to nobody else anything.

The key exists in the pod's directory (0600 in a 0700 tree) and in the runner's memory; it ends with the pod object.
"""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from slurmlet.base.files import private_dir, write_private
from slurmlet.base.layout import PodFiles
from slurmlet.hub.hub_settings import Settings

POD_NAME_PREFIX = "slurmlet:pod:"
NODE_NAME_PREFIX = "slurmlet:node:"
# Longer than any sane time limit; a pod's directory, and the key with it, goes when the pod goes.
_VALID_FOR = datetime.timedelta(days=365)
_CLOCK_SKEW = datetime.timedelta(hours=1)


class RunnerAuthority:
    def __init__(self, settings: Settings) -> None:
        self._ca_pem = settings.pki("hub-ca.crt").read_bytes()
        self._ca = x509.load_pem_x509_certificate(self._ca_pem)
        key = serialization.load_pem_private_key(settings.pki("hub-ca.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key

    def issue(self, uid: str, prefix: str = POD_NAME_PREFIX) -> bytes:
        """PEM: certificate, then key."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, prefix + uid)]))
            .issuer_name(self._ca.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _VALID_FOR)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def equip(self, pod: PodFiles, uid: str, prefix: str = POD_NAME_PREFIX) -> None:
        """Put into the pod's (or node's) directory what its runner needs to dial in. Safe to repeat."""
        private_dir(pod.root)
        if not pod.credential.exists():
            write_private(pod.hub_ca, self._ca_pem)
            write_private(pod.credential, self.issue(uid, prefix))
