"""The one seam of encryption: whoever dials or accepts for a pod has a Sealer, or None where the cluster asked for none.

A client's connection is open when the server says so (`opened`), in the first frame: until then the pod behind it may still
refuse, and the client's program must see a refusal, not a connection that breaks at once.
"""

from __future__ import annotations

import errno
import socket
import weakref
from typing import Callable, Optional

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet.encryption.tls_connection import ROOM_BYTES, Sealed
from slurmlet.podnet.encryption.tls_contexts import Contexts
from slurmlet.podnet.encryption.tls_pipe import HEAD, Pipe, pair

# Gets a connected, non-blocking socket and 0, or None and an errno.
OnSealed = Callable[[Optional[socket.socket], int], None]
_OPENED = HEAD.pack(0xFFFFFFFF)
# As long as a pod may take to answer: slow/minitcp.py.
_OPEN_TIMEOUT_S = 10.0


class Sealer:
    def __init__(self, loop: Loop, contexts: Contexts) -> None:
        self._loop, self._contexts = loop, contexts
        self._room, self._pipe_room = bytearray(ROOM_BYTES), bytearray(ROOM_BYTES)
        # By what their users hold: connections whose clients wait to hear that they are open.
        self._unopened: weakref.WeakKeyDictionary[socket.socket, Sealed] = weakref.WeakKeyDictionary()

    def client(self, raw: socket.socket, done: OnSealed) -> None:
        """Shake hands on `raw`, which is ours from now on; `done` gets a plain socket in its place."""

        def shaken(good: bool) -> None:
            if good:
                _Opening(self._loop, sealed, opened)
            else:
                done(None, errno.ECONNRESET)

        def opened(code: int, rest: bytes) -> None:
            if code:
                done(None, code)
            else:
                self._pipe(sealed, rest, done)

        sealed = self.bare(raw, False, shaken)

    def server(self, raw: socket.socket, done: OnSealed) -> None:
        """The same for who accepts; `opened` must be called with that socket once whoever is behind it has accepted too."""

        def shaken(good: bool) -> None:
            if good:
                self._pipe(sealed, b"", ready)
            else:
                done(None, errno.ECONNRESET)

        def ready(plain: Optional[socket.socket], code: int) -> None:
            if plain is not None:
                self._unopened[plain] = sealed
            done(plain, code)

        sealed = self.bare(raw, True, shaken)

    def opened(self, plain: socket.socket) -> None:
        sealed = self._unopened.pop(plain, None)
        if sealed is not None:
            sealed.send(_OPENED)

    def bare(self, raw: socket.socket, server: bool, done: Callable[[bool], None]) -> Sealed:
        """The connection itself, for whoever has frames of his own."""
        context = self._contexts.server if server else self._contexts.client
        return Sealed(self._loop, raw, context, server, self._room, done)

    def _pipe(self, sealed: Sealed, rest: bytes, done: OnSealed) -> None:
        try:
            inner, outer = pair()
        except OSError as error:
            sealed.close(broken=True)
            done(None, error.errno or errno.EMFILE)
            return
        Pipe(self._loop, sealed, inner, self._pipe_room, rest)
        done(outer, 0)


class _Opening:
    """A client that waits for the word; `done` gets an errno, or 0 and what came behind the word."""

    def __init__(self, loop: Loop, sealed: Sealed, done: Callable[[int, bytes], None]) -> None:
        self._sealed, self._done = sealed, done
        self._heard = b""
        self._timer = loop.later(_OPEN_TIMEOUT_S, lambda: self._fail(errno.ETIMEDOUT))
        sealed.on_bytes, sealed.on_end = self._take, lambda: self._fail(errno.ECONNREFUSED)
        sealed.read(True)

    def _take(self, view: memoryview) -> None:
        self._heard += view
        if len(self._heard) < len(_OPENED):
            return
        if not self._heard.startswith(_OPENED):
            self._fail(errno.ECONNRESET)
            return
        self._timer.cancel()
        self._sealed.read(False)
        self._done(0, self._heard[len(_OPENED) :])

    def _fail(self, code: int) -> None:
        self._timer.cancel()
        self._sealed.close(broken=True)
        self._done(code, b"")
