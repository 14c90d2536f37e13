"""The runner by itself, on a compute host of the testbed, as users without and with subordinate uids.

A stand-in plays the hub (tests/contract/runner_rig.py); crun, namespaces, overlay and TLS are real. Scenarios are in
tests/contract/runner_scenarios.py; to play one by hand, run the command this test prints when it fails.
"""

from __future__ import annotations

import datetime
import io
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from slurmlet.controlplane.runner_archive import pack_runner, runner_sources
from slurmlet.testbed.busybox_images import layer
from slurmlet.testbed.hosts import Testbed
from slurmlet.upstream.binaries import ensure
from tests.contract.runner_names import SCENARIO_NAMES

pytestmark = pytest.mark.e2e
CONTRACT = Path(__file__).parent.parent / "contract"
HOST = "c1"
MAPPINGS = {"user1": "single", "user2": "subuid"}


class Authority:
    """A CA that lives as long as the test run."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder("ca", self.key).add_extension(
            x509.BasicConstraints(True, None), critical=True
        )
        usage = dict.fromkeys(
            (
                "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
                "decipher_only",
            ),
            False,
        )  # fmt: skip
        signs = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **usage)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
        builder = builder.add_extension(signs, critical=True).add_extension(identifier, critical=False)
        self.certificate = builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _builder(self, name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
        )

    def leaf(self, name: str, *, server: bool) -> bytes:
        """Certificate and key as one PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        use = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = self._builder(name, key).add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        builder = builder.add_extension(issuer, critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        plain = serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return certificate.public_bytes(serialization.Encoding.PEM) + private


@pytest.fixture(scope="module")
def kit(testbed: Testbed) -> bytes:
    """Everything a scenario needs, as an archive: the packed runner, the rig, certificates, an image of the store."""
    authority = Authority()
    busybox = testbed.paths.root(testbed.plan) / "usr/bin/busybox"
    files = {
        "runner.pyz": pack_runner(runner_sources()),
        "certs/ca.pem": authority.certificate,
        "certs/hub.pem": authority.leaf("hub.slurmlet", server=True),
        "certs/other.pem": authority.leaf("other.slurmlet", server=True),
        "certs/runner.pem": authority.leaf("slurmlet:pod:x", server=False),
        "sha256-00/rootfs.tar": layer(busybox),
        "runc": (ensure(["runc"]) / "runc").read_bytes(),
        **{path.name: path.read_bytes() for path in CONTRACT.glob("runner_*.py")},
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o700 if name == "runc" else 0o600
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture(scope="module", params=["user1", "user2"])
def place(request: pytest.FixtureRequest, testbed: Testbed, kit: bytes) -> Iterator[tuple[str, str]]:
    """(user, directory with the kit unpacked). user1 has one uid, user2 has subordinate ones."""
    user: str = request.param
    directory = f"/home/{user}/.runner-alone-{uuid.uuid4().hex[:8]}"
    scratch = f"/tmp/{directory.rpartition('/')[2]}"
    testbed.run(["mkdir", "-m", "700", directory, scratch], host=HOST, user=user)
    testbed.run(["tar", "-xf", "-", "-C", directory], host=HOST, user=user, stdin=kit)
    yield user, directory
    # By root: what user2's containers left belongs to other uids.
    testbed.run(["rm", "-rf", directory, scratch], host=HOST, user="root")


def check_scenario(testbed: Testbed, place: tuple[str, str], scenario: str, name: str, **env: str) -> None:
    user, directory = place
    around = {"PYTHONPATH": f"{directory}/runner.pyz", "RIG_MAPPING": MAPPINGS[user], **env}
    around["TMPDIR"] = f"/tmp/{directory.rpartition('/')[2]}"
    argv = [
        "/usr/bin/env", *(f"{key}={value}" for key, value in around.items()),
        "/usr/bin/python3", f"{directory}/runner_scenarios.py", f"{directory}/{name}", f"{directory}/sha256-00",
        f"{directory}/certs", scenario, "--", "/usr/bin/python3", "-I", f"{directory}/runner.pyz",
    ]  # fmt: skip
    done = testbed.run(argv, host=HOST, user=user, timeout_s=90, check=False)
    assert done.ok, f"as {user} on {HOST}: {' '.join(argv)}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("scenario", SCENARIO_NAMES)
def test_runner(testbed: Testbed, place: tuple[str, str], scenario: str) -> None:
    check_scenario(testbed, place, scenario, scenario)


@pytest.mark.parametrize(
    "scenario", ["hello", "identity_of_root", "start_error", "exec_plain", "exec_tty", "stop"]
)
def test_runner_with_our_runc(testbed: Testbed, place: tuple[str, str], scenario: str) -> None:
    """A node without crun: the static runc that slurmlet brings along. (Nor does it have newuidmap: one uid.)"""
    around = {"PATH": "/nowhere", "RIG_MAPPING": "single", "RIG_RUNC": f"{place[1]}/runc"}
    check_scenario(testbed, place, scenario, f"runc-{scenario}", **around)
