"""The TLS settings of an encrypted cluster: one certificate for all its netds, and nobody without it is spoken to."""

from __future__ import annotations

import os
import ssl
import tempfile
from typing import NamedTuple

from slurmlet.podnet.netd_setup import Tls


class Contexts(NamedTuple):
    client: ssl.SSLContext
    server: ssl.SSLContext


def make(tls: Tls, directory: str) -> Contexts:
    """`directory` is private and holds the key for a moment: OpenSSL reads it from a file only."""
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Whoever was signed by this authority is a netd or the gateway of this cluster; names say nothing more.
    client.check_hostname = False
    # Nobody resumes: a ticket would only be one more thing to send.
    server.num_tickets = 0
    handle, path = tempfile.mkstemp(dir=directory)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(tls.cert + tls.key)
        for context in (client, server):
            context.load_cert_chain(path)
    finally:
        os.unlink(path)
    for context in (client, server):
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=tls.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if ssl.HAS_TLSv1_3 else ssl.TLSVersion.TLSv1_2
    return Contexts(client, server)
