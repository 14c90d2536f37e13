"""`kubectl port-forward`: one connection to a port of the pod, its bytes over the link, each half closed on its own."""

from __future__ import annotations

import errno
import socket
from typing import Any, Dict, List, Optional

from slurmlet.linux.event_loop import Loop
from slurmlet.protocol import wire
from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.network.network_view import describe
from slurmlet.runner.streams.link_streams import Refused, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurmlet.protocol.messages import OpenForward
    from slurmlet.runner.network.network_view import Cancel, Network


_READ_BYTES = 64 << 10
# A server may listen in one family only; kubelets look for it in this order.
_LOOPBACKS = (("127.0.0.1", "IPv4"), ("::1", "IPv6"))


def forward(context: Optional[PodContext], message: OpenForward, stream: Stream) -> ForwardSession:
    port = int(message["port"])
    if context is None:
        raise Refused("the pod has not begun", "Conflict")
    if not 0 < port < 1 << 16:
        raise Refused(f"{port} is not a port")
    return ForwardSession(context.loop, context.network, port, stream)


class ForwardSession:
    def __init__(self, loop: Loop, network: Network, port: int, stream: Stream) -> None:
        self._loop, self._network, self._port, self._stream = loop, network, port, stream
        self._untried = list(_LOOPBACKS)
        self._failures: List[str] = []
        self._socket: Optional[socket.socket] = None
        self._dialling: Optional[Cancel] = None
        self._connected = False
        self._buffer = bytearray()
        # The client has said all; nothing more goes to the port; nothing more comes from it.
        self._input_ended = False
        self._sent_all = False
        self._heard_all = False
        self._reading = False
        self._gone = False
        # In a turn of its own: a stream that ends while it is being opened would be news to nobody.
        self._loop.soon(self._try_next)

    # Connecting.

    def _try_next(self) -> None:
        if self._gone:
            return
        if not self._untried:
            where = f"localhost:{self._port} inside the pod's network"
            self._finish(
                {"error": f"failed to connect to {where}, {' '.join(self._failures)}", "reason": "NotFound"}
            )
            return
        address, _ = self._untried[0]
        try:
            self._dialling = self._network.dial(self._loop, address, self._port, self._dialled)
        except OSError as error:
            self._not_connected(error.errno or errno.EIO)

    def _dialled(self, connected: Optional[socket.socket], code: int) -> None:
        self._dialling = None
        if connected is None:
            self._not_connected(code)
            return
        self._socket = connected
        self._connected = True
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._write()
        self.more_credit()

    def _not_connected(self, code: int) -> None:
        address, name = self._untried.pop(0)
        host = f"[{address}]" if ":" in address else address
        self._failures.append(f"{name}: dial tcp {host}:{self._port}: connect: {describe(code)}")
        self._try_next()

    # From the hub.

    def received(self, channel: int, payload: bytes) -> None:
        if channel == wire.STDIN:
            if self._sent_all:
                # Nobody will read it; the sender must not starve for credit all the same.
                self._stream.grant(len(payload))
            else:
                self._buffer += payload
                self._write()
        elif channel == wire.END and payload[:1] == bytes((wire.STDIN,)):
            self._input_ended = True
            self._write()

    def more_credit(self) -> None:
        if self._connected and self._socket is not None and not self._heard_all and not self._reading:
            self._reading = True
            self._loop.reading(self._socket.fileno(), self._readable)

    def abandoned(self) -> None:
        self._gone = True
        if self._dialling is not None:
            self._dialling()
            self._dialling = None
        self._close_socket()

    # The port.

    def _write(self) -> None:
        if not self._connected or self._socket is None or self._sent_all:
            return
        written, fd = 0, self._socket.fileno()
        try:
            while self._buffer:
                count = self._socket.send(self._buffer[:_READ_BYTES])
                del self._buffer[:count]
                written += count
        except BlockingIOError:
            self._loop.writing(fd, self._write)
        except OSError:
            # The server takes no more; what it has still to say may lie in the socket.
            written += len(self._buffer)
            self._buffer.clear()
            self._input_ended = True
        if written:
            self._stream.grant(written)
        if not self._buffer:
            self._loop.writing(fd, None)
            if self._input_ended:
                self._sent_all = True
                _shut_writing(self._socket)
                self._finish_if_over()

    def _readable(self) -> None:
        assert self._socket is not None
        if self._stream.credit <= 0:
            self._reading = False
            self._loop.reading(self._socket.fileno(), None)
            return
        try:
            received = self._socket.recv(min(_READ_BYTES, self._stream.credit))
        except BlockingIOError:
            return
        except OSError:
            # Reset by the server. A kubelet's clients end all their forwarding when they are told of an error, so one
            # connection that a server cuts off counts as one that it closed.
            self._sent_all = True
            received = b""
        if received:
            self._stream.data(wire.STDOUT, received)
            return
        self._heard_all = True
        self._reading = False
        self._loop.reading(self._socket.fileno(), None)
        self._stream.end(wire.STDOUT)
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        if self._sent_all and self._heard_all:
            self._finish(None)

    def _finish(self, status: Optional[Dict[str, Any]]) -> None:
        if not self._gone:
            self.abandoned()
            self._stream.finish(status)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None


def _shut_writing(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        # Gone already: whoever reads from it will see.
        pass
