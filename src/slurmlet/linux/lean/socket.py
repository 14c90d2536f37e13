"""Python's `socket`: without names to resolve, without files made of sockets, families and kinds as plain numbers."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import *  # noqa: F403
    from socket import recv_fds, send_fds
else:
    import _socket
    from _socket import *  # noqa: F403
    from struct import pack, unpack

    _FD_BYTES = 4

    class socket(_socket.socket):
        __slots__ = ("__weakref__",)

        def __enter__(self):
            return self

        def __exit__(self, *_problem):
            self.close()

        def accept(self):
            fd, name = self._accept()
            return socket(self.family, self.type, self.proto, fileno=fd), name

    def socketpair(family=_socket.AF_UNIX, kind=_socket.SOCK_STREAM, protocol=0):
        one, other = _socket.socketpair(family, kind, protocol)
        return tuple(socket(family, kind, protocol, fileno=end.detach()) for end in (one, other))

    def create_connection(address, timeout):
        from socket import create_connection as connect

        return connect(address, timeout)

    def send_fds(sock, buffers, fds):
        rights = pack(f"{len(fds)}i", *fds)
        return sock.sendmsg(buffers, [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])

    def recv_fds(sock, size, most):
        """(bytes, descriptors, flags, address)"""
        said, ancillary, flags, name = sock.recvmsg(size, _socket.CMSG_LEN(most * _FD_BYTES))
        fds = []
        for level, kind, rights in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                # A list that was cut may end in the middle of a number.
                count = len(rights) // _FD_BYTES
                fds += unpack(f"{count}i", rights[: count * _FD_BYTES])
        return said, fds, flags, name


__all__ = ["recv_fds", "send_fds"]
