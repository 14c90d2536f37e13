"""A client's end of TLS on a socket of ours: what Python's `ssl` does there, by its own half in C."""

from __future__ import annotations

import _ssl

from slurmlet.linux.lean import socket
from slurmlet.linux.lean.typing import Any, Optional

# Of a handshake, a read or a write: again when the socket is readable, or writable.
WantRead, WantWrite = _ssl.SSLWantReadError, _ssl.SSLWantWriteError


class Client:
    """Raises OSError for everything that goes wrong. The socket is its own from now on, and does not block."""

    def __init__(
        self, plain: socket.socket, name: str, authority: str, chain: str, key: Optional[str]
    ) -> None:
        """`authority`, `chain` and `key` are files; without `key` it is in `chain`."""
        # Made for clients: asks for a certificate, and for one with the name.
        context = _ssl._SSLContext(_ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = _ssl.PROTO_TLSv1_3
        context.load_verify_locations(authority)
        context.load_cert_chain(chain, key)
        self._socket = plain
        self._tls: Any = context._wrap_socket(plain, False, name)  # type: ignore[attr-defined]

    def fileno(self) -> int:
        return self._socket.fileno()

    def own_address(self) -> str:
        return str(self._socket.getsockname()[0])

    def shake_hands(self) -> None:
        self._tls.do_handshake()

    def read(self, size: int) -> bytes:
        """Nothing when the other end is done, also where it just went away."""
        try:
            return bytes(self._tls.read(size))
        except (_ssl.SSLZeroReturnError, _ssl.SSLEOFError):
            return b""

    def write(self, piece: bytes) -> int:
        return int(self._tls.write(piece))

    def pending(self) -> int:
        """Bytes that are here already: the socket says nothing of them."""
        return int(self._tls.pending())

    def close(self) -> None:
        self._tls = None
        self._socket.close()
