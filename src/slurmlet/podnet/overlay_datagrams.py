"""The socket of the overlay and the frame of its datagrams: all that a runner needs to know of it. Cheap to load."""

from __future__ import annotations

import socket
import struct

from slurmlet.podnet import addresses

# Kind, and when it was sent (ms); a tag follows the body.
HEAD = struct.Struct(">BQ")
TAG_BYTES = 16
# What fits into one datagram: UDP carries 65507 bytes. The MTU of pods.
MAX_PACKET_BYTES = 65507 - HEAD.size - TAG_BYTES
# The kernel gives at most rmem_max of it; bursts of announcements and packets wait there.
_BUFFER_BYTES = 4 << 20


def open_socket(host_ip: int, port: int = 0) -> socket.socket:
    """Made by the runner and kept by it, so that a new netd has the same port. `port`: the one to prefer."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    # Datagrams larger than the path's MTU are fragmented by the kernel; a pod's MTU is not the wire's.
    made.setsockopt(socket.IPPROTO_IP, 10, 0)  # IP_MTU_DISCOVER, IP_PMTUDISC_DONT
    try:
        made.bind((addresses.text(host_ip), port))
    except OSError:
        made.bind((addresses.text(host_ip), 0))
    return made
