from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from slurmlet.controlplane import pki

RANGE = "10.96.0.0/16"


def make(root: Path, addresses: tuple[str, ...] = ("192.0.2.7",), host: str = "login1") -> list[str]:
    return pki.ensure(root, pki.leaves(host, addresses, RANGE))


def certificate(root: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((root / f"{name}.crt").read_bytes())


def names_of(root: Path, name: str) -> set[str]:
    found = certificate(root, name).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(entry.value) for entry in found}


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> list[str | None]:
    """A real TLS handshake without a socket: the version each end agreed to; raises ssl.SSLError where one refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
                # With TLS 1.3 the server's refusal of a client certificate comes with the first read.
                end.read(1)
            except ssl.SSLWantReadError:
                pass
    return [end.version() for end in ends]


def contexts(root: Path, server: str, client: str, ca: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(root / f"{server}.crt", root / f"{server}.key")
    listening.load_verify_locations(root / f"{ca}.crt")
    listening.verify_mode = ssl.CERT_REQUIRED
    calling = ssl.create_default_context(cafile=str(root / f"{ca}.crt"))
    # What Python 3.13 asks of a certificate by default.
    calling.verify_flags |= ssl.VERIFY_X509_STRICT
    calling.load_cert_chain(root / f"{client}.crt", root / f"{client}.key")
    return listening, calling


def test_makes_every_file_of_the_contract_and_all_private(tmp_path: Path) -> None:
    make(tmp_path / "pki")
    expected = {
        *("ca", "etcd-ca", "hub-ca", "apiserver", "admin", "hub", "controller-manager", "scheduler"),
        *(
            "etcd-server",
            "etcd-client",
            "hub-server",
            "kubelet-client",
            "front-proxy-ca",
            "front-proxy-client",
            "gateway",
            "coredns",
            "dns",
        ),
    }
    found = {path.name for path in (tmp_path / "pki").iterdir()}
    pairs = {f"{name}{end}" for name in expected for end in (".crt", ".key")}
    assert found == pairs | {
        "service-accounts.key",
        "service-accounts.pub",
        "encryption.json",
        "overlay.key",
    }
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "pki").iterdir()} == {0o600}
    assert (tmp_path / "pki").stat().st_mode & 0o777 == 0o700


def test_servers_answer_to_the_names_they_are_called_by(tmp_path: Path) -> None:
    make(tmp_path, addresses=("192.0.2.7", "2001:db8::7"))
    in_cluster = {
        f"kubernetes{end}" for end in ("", ".default", ".default.svc", ".default.svc.cluster.local")
    }
    here = {"localhost", "login1", "127.0.0.1", "192.0.2.7", "2001:db8::7"}
    assert names_of(tmp_path, "apiserver") == in_cluster | here | {"10.96.0.1"}
    assert names_of(tmp_path, "hub-server") == here | {"hub.slurmlet", "slurmlet-metrics.kube-system.svc"}
    assert names_of(tmp_path, "etcd-server") == {"localhost", "127.0.0.1"}


@pytest.mark.parametrize(
    ("server", "client", "ca", "name"),
    [
        ("apiserver", "admin", "ca", "kubernetes.default.svc"),
        ("apiserver", "hub", "ca", "192.0.2.7"),
        ("etcd-server", "etcd-client", "etcd-ca", "127.0.0.1"),
        ("etcd-server", "etcd-server", "etcd-ca", "127.0.0.1"),
        ("hub-server", "kubelet-client", "hub-ca", "192.0.2.7"),
        ("hub-server", "kubelet-client", "hub-ca", "hub.slurmlet"),
    ],
)
def test_each_pair_that_must_talk_can(tmp_path: Path, server: str, client: str, ca: str, name: str) -> None:
    make(tmp_path)
    assert handshake(*contexts(tmp_path, server, client, ca), name) == ["TLSv1.3", "TLSv1.3"]


@pytest.mark.parametrize(
    ("server", "client", "ca", "name"),
    [
        ("etcd-server", "admin", "etcd-ca", "127.0.0.1"),  # another authority's client
        (
            "hub-server",
            "hub-server",
            "hub-ca",
            "hub.slurmlet",
        ),  # a server certificate is no client certificate
        ("hub-server", "kubelet-client", "hub-ca", "198.51.100.1"),  # not an address of this host
        ("kubelet-client", "kubelet-client", "hub-ca", "hub.slurmlet"),  # a client cannot pose as the hub
    ],
)
def test_each_pair_that_must_not_talk_cannot(
    tmp_path: Path, server: str, client: str, ca: str, name: str
) -> None:
    make(tmp_path)
    with pytest.raises(ssl.SSLError):
        handshake(*contexts(tmp_path, server, client, ca), name)


def test_second_run_changes_nothing(tmp_path: Path) -> None:
    assert len(make(tmp_path)) == 20
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert make(tmp_path) == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_new_address_renews_only_the_leaves_that_name_it(tmp_path: Path) -> None:
    make(tmp_path)
    kept = {name: (tmp_path / f"{name}.crt").read_bytes() for name in pki.AUTHORITIES}
    assert make(tmp_path, addresses=("192.0.2.8",)) == ["apiserver", "hub-server"]
    assert {name: (tmp_path / f"{name}.crt").read_bytes() for name in pki.AUTHORITIES} == kept
    assert "192.0.2.8" in names_of(tmp_path, "apiserver")


def test_leaf_near_its_end_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=320)
    monkeypatch.setattr(pki, "_now", lambda: later)
    made = make(tmp_path)
    assert "apiserver" in made
    assert not set(pki.AUTHORITIES) & set(made)


def test_pair_torn_by_a_crash_is_made_again(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "admin.key").write_bytes((tmp_path / "scheduler.key").read_bytes())
    (tmp_path / "hub.crt").write_text("half a certif")
    assert make(tmp_path) == ["admin", "hub"]


def test_new_authority_renews_what_it_signs(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "etcd-ca.key").unlink()
    assert make(tmp_path) == ["etcd-ca", "etcd-server", "etcd-client"]
    handshake(*contexts(tmp_path, "etcd-server", "etcd-client", "etcd-ca"), "127.0.0.1")


def test_only_an_encrypted_cluster_has_an_overlay_certificate_and_it_opens_no_other_door(
    tmp_path: Path,
) -> None:
    made = pki.ensure(tmp_path, pki.leaves("login1", ("192.0.2.7",), RANGE, encrypt=True))
    assert {"overlay-ca", "netd"} <= set(made)
    assert not {"overlay-ca", "netd"} & set(make(tmp_path / "plain"))
    server, client = contexts(tmp_path, "netd", "netd", "overlay-ca")
    client.check_hostname = False
    assert handshake(server, client, "anybody") == ["TLSv1.3", "TLSv1.3"]
    with pytest.raises(ssl.SSLError):
        handshake(*contexts(tmp_path, "hub-server", "netd", "hub-ca"), "hub.slurmlet")
