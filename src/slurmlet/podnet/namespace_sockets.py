"""Sockets inside a pod's network namespace, made for netd, which stays outside."""

from __future__ import annotations

import queue
import signal
import socket
import threading
from typing import Any, Optional, Tuple

from slurmlet.linux import syscalls


class PodSockets:
    """Makes sockets in the pod's namespace for a process that stays outside: descriptors belong to all threads.

    One thread enters the namespace for good, since it could not come back. It does nothing but this.
    """

    def __init__(self, netns_fd: int) -> None:
        self._wanted: queue.SimpleQueue[Optional[Tuple[int, int]]] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(netns_fd,), name="pod-sockets", daemon=True).start()
        self._take()

    def tcp(self, family: int = socket.AF_INET) -> socket.socket:
        return self._make(family, socket.SOCK_STREAM)

    def udp(self, family: int = socket.AF_INET) -> socket.socket:
        return self._make(family, socket.SOCK_DGRAM)

    def close(self) -> None:
        self._wanted.put(None)

    def _make(self, family: int, kind: int) -> socket.socket:
        self._wanted.put((family, kind))
        made = self._take()
        assert isinstance(made, socket.socket)
        return made

    def _take(self) -> Any:
        made = self._made.get()
        if isinstance(made, OSError):
            raise made
        return made

    def _serve(self, netns_fd: int) -> None:
        # Signals are the main thread's; here they would only interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            syscalls.setns(netns_fd, syscalls.CLONE_NEWNET)
        except OSError as error:
            self._made.put(error)
            return
        self._made.put(None)
        while True:
            wanted = self._wanted.get()
            if wanted is None:
                return
            try:
                self._made.put(socket.socket(*wanted))
            except OSError as error:
                self._made.put(error)
