"""The protocol between runner and hub: frames, message types, flow control. Written once, used by both ends.

A runner dials the hub over TLS, both sides prove themselves by certificate, then frames go both ways:

    length u32 | kind u8 | stream u32 | payload (length bytes, at most MAX_PAYLOAD)

- CONTROL (stream 0): a JSON object with a "type", see the tables below.
- DATA (stream > 0): first payload byte is the channel, the rest are its bytes. Channels are Kubernetes' own.
- WINDOW (stream > 0): u32, how many more DATA bytes (channel byte not counted) the sender of this frame will take on
  that stream. Both ends start with INITIAL_WINDOW. Only STDIN, STDOUT and STDERR bytes consume credit.
- CLOSE (stream > 0): the sender is done with the stream; the receiver frees it and answers nothing.

Streams are opened by the hub (type "open") with numbers it never reuses on one connection.

runner → hub
    hello    protocol, pod_uid, job_id, host, host_ip, version, has_pod (bool), report (PodReport or null)
    report   seq (int, rising), report: PodReport; always the whole report, so a lost one costs nothing
    event    kind Normal|Warning, reason, message, container (name or "")
    bye      seq, report: the last report; the runner leaves when the hub acks it (or after a few seconds)
    answer   id, usage: null before the pod has begun, or {at (unix seconds), containers: {name: {started_at, cpu_s,
             memory_bytes, rss_bytes, processes, rootfs, logs}} (those that run), volumes: {name: Space}} where rootfs,
             logs and Space are null or {used_bytes, inodes_used, capacity_bytes, available_bytes, inodes, inodes_free}
    attached, listeners, network-counts, ports-taken: the pod's network, docs/network.md
agent of an allocation node → hub (its certificate names the node)
    hello      protocol, node, version, host, host_ip, job_id, partition, cpus, memory_mb, host_memory_mb, gpus,
               pods [uids that run], ended {uid: exit code}
    pod-ended  uid, exit_code: its runner is gone
hub → agent
    start-pod  uid: start the runner of pods/<uid>; one that runs or ran is left alone
    kill-pod   uid: SIGKILL to its runner
    end        grace_s: end all pods, then leave
hub → runner
    pod      pod: PodPlan; the answer to a hello without a pod
    volumes  volumes: {name: Volume of kind "files"}; newer contents for a running pod (a file with keep: true stays)
    ephemeral  container: ContainerPlan and its target (a container's name or ""); one that is known already is left alone
    stop     grace_s, reason: end the pod as the kubelet would; problem {reason, message} when that makes it Failed
    network  what pods' networks know of each other, docs/network.md
    ack      seq: this report is written down
    ask      id, what "usage", disk (bool: file systems too); answered by "answer" with the same id
    open     stream, what "exec"|"attach"|"forward"|"logs", and
             for exec: container, command [..], stdin, stdout, stderr, tty (bools);
             for attach: container, stdin, stdout, stderr, tty (bools);
             for forward: port; STDIN goes to it, STDOUT comes from it, END closes either half, STATUS says why it failed;
             for logs: container, follow, previous, timestamps, since_s (float or null), since_time (RFC 3339 or null),
             tail_lines (int or null), limit_bytes (int or null), log_stream "All"|"Stdout"|"Stderr"
"""

from __future__ import annotations

import json
import struct

from slurmlet.linux.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator


PROTOCOL = 1
MAX_PAYLOAD = 1 << 20
INITIAL_WINDOW = 256 << 10

CONTROL, DATA, WINDOW, CLOSE = 0, 1, 2, 3
# DATA channels; the numbers are those of Kubernetes' v5.channel.k8s.io.
STDIN, STDOUT, STDERR, STATUS, RESIZE, END = 0, 1, 2, 3, 4, 255
# STATUS carries JSON {"exit_code": int} or {"error": str, "reason": str}; RESIZE carries {"Width": int, "Height": int};
# END carries one byte: the channel that is finished (STDIN: end of input).

_HEADER = struct.Struct("!IBI")
HEADER_BYTES = _HEADER.size
# Messages are made here and hold no rings; tables of many pods make looking for them felt.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class ProtocolError(Exception):
    """The peer broke the framing; the connection cannot go on."""


class Frame(Record):
    kind: int
    stream: int
    payload: bytes


def pack(kind: int, stream: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(len(payload), kind, stream) + payload


def control(type_: str, **fields: Any) -> bytes:
    return pack(CONTROL, 0, _encode({"type": type_, **fields}).encode())


def data(stream: int, channel: int, payload: bytes) -> bytes:
    return pack(DATA, stream, bytes((channel,)) + payload)


def window(stream: int, credit: int) -> bytes:
    return pack(WINDOW, stream, struct.pack("!I", credit))


def parse_header(header: bytes) -> tuple[int, int, int]:
    """(length, kind, stream) of a header of HEADER_BYTES."""
    length, kind, stream = _HEADER.unpack(header)
    if kind > CLOSE or (length > MAX_PAYLOAD and kind != CONTROL) or length > 64 * MAX_PAYLOAD:
        raise ProtocolError(f"bad frame: kind {kind}, {length} bytes")
    return length, kind, stream


class Decoder:
    """Turns bytes as they arrive into frames; keeps what is incomplete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[Frame]:
        self._buffer += received
        while len(self._buffer) >= HEADER_BYTES:
            length, kind, stream = parse_header(bytes(self._buffer[:HEADER_BYTES]))
            if len(self._buffer) < HEADER_BYTES + length:
                return
            payload = bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + length])
            del self._buffer[: HEADER_BYTES + length]
            yield Frame(kind, stream, payload)
