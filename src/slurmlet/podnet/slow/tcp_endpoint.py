"""One end of a TCP connection whose other end is the pod's kernel, a few microseconds away through the TUN device.

Short and safe rather than complete: no congestion to control, no SACK, no timestamps; what comes out of order is dropped
and sent again by the kernel. Packets are lost only where a queue overflows; everything is sent again until acknowledged.
It knows no sockets: minitcp.py connects it to the world.
"""

from __future__ import annotations

import os
import time
from typing import Callable, Optional

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet.slow import tcp_segments
from slurmlet.podnet.slow.packets import Bytes
from slurmlet.podnet.slow.tcp_segments import ACK, FIN, PSH, RST, SYN, Place, Segment

_MASK = 0xFFFFFFFF
_HALF = 1 << 31
# What may be on its way in either direction. The kernel's own backlog for a device takes a thousand packets.
BUFFER_BYTES = 1 << 20
_SCALE = 6
_FIRST_RETRY_S, _MAX_RETRY_S = 0.25, 5.0
_MAX_RETRIES, _PATIENT_RETRIES = 14, 4
_DUPLICATES = 3
_SMALL_BYTES, _MAX_DATA_BYTES = 1400, 65000

# Where the connection is. DIALLING: the pod's SYN waits until the other side has answered.
DIALLING, SYN_RECEIVED, SYN_SENT, OPEN, OVER = "dialling", "syn-received", "syn-sent", "open", "over"


def _after(a: int, b: int) -> int:
    """How far sequence number a is after b; negative: before."""
    return ((a - b + _HALF) & _MASK) - _HALF


class Events:
    """What happens to a connection; set by whoever owns it."""

    def opened(self) -> None:
        """The handshake is done."""

    def data(self, _data: bytes) -> None:
        """Bytes from the pod; `consumed` says when there is room for more."""

    def finished(self) -> None:
        """The pod sends no more."""

    def room(self) -> None:
        """The pod has taken what it was sent: more may be written."""

    def over(self, _refused: bool) -> None:
        """Reset by the pod, or given up. Not called after an orderly end."""

    def closed(self) -> None:
        """Both directions ended in order."""


class TcpEnd:
    """`here` is the address we play, `pod` the pod's."""

    def __init__(
        self, loop: Loop, emit: Callable[[bytes], None], here: Place, pod: Place, mss: int, events: Events
    ) -> None:
        self._loop, self._emit, self.here, self.pod, self._events = loop, emit, here, pod, events
        self._our_mss = self._mss = mss
        self.state = DIALLING
        # Sending. Numbers grow without bound and are cut to 32 bits on the wire.
        self._una = self._next = self._most = (time.time_ns() // 4000 & _MASK) + os.urandom(1)[0]
        self._buffer = bytearray()
        self._window, self._their_scale = 0, 0
        self._duplicates = 0
        self._fin_wanted = self._fin_acknowledged = False
        # Receiving.
        self._expected = 0
        self._scale: Optional[int] = _SCALE
        self._unconsumed = 0
        self._told_window = 0
        self._fin_received = False
        self._ack_due = False
        # Again.
        self.sent_again = self._retries = 0
        self._deadline_s: Optional[float] = None
        self._timer_set = False

    # The handshake.

    def connect(self) -> None:
        self.state = SYN_SENT
        self._send_syn()

    def take_syn(self, segment: Segment) -> None:
        """The pod's SYN; `accept` answers it."""
        self._expected = (segment.sequence + 1) & _MASK
        self._learn_options(segment)

    def accept(self) -> None:
        self.state = SYN_RECEIVED
        self._send_syn()

    def refuse(self) -> None:
        """The answer to a SYN that cannot be accepted."""
        self._out(RST | ACK, 0)
        self._end()

    def _learn_options(self, segment: Segment) -> None:
        self._mss = min(self._our_mss, segment.mss, _MAX_DATA_BYTES)
        self._window = segment.window
        if segment.scale is None:
            self._scale = None
        else:
            self._their_scale = segment.scale

    def _send_syn(self) -> None:
        flags = SYN if self.state == SYN_SENT else SYN | ACK
        self._next = self._most = self._una + 1
        window = min(0xFFFF, BUFFER_BYTES)
        options = tcp_segments.syn_options(self._our_mss, self._scale)
        self._told_window = window
        self._emit(tcp_segments.build(self.here, self.pod, self._una, self._expected, flags, window, options))
        self._arm()

    # From the owner.

    @property
    def free_bytes(self) -> int:
        return 0 if self._fin_wanted else BUFFER_BYTES - len(self._buffer)

    def write(self, data: Bytes) -> None:
        self._buffer += data
        self._transmit()

    def finish(self) -> None:
        """No more will be written."""
        self._fin_wanted = True
        self._transmit()

    def consumed(self, count: int) -> None:
        self._unconsumed -= count
        if self._unconsumed <= BUFFER_BYTES // 2 and self._told_window <= BUFFER_BYTES // 4:
            self._acknowledge_soon()

    def abort(self) -> None:
        if self.state not in (OVER, DIALLING):
            self._out(RST | ACK, self._next)
        self._end()

    # From the pod.

    def segment(self, segment: Segment) -> None:
        if self.state == SYN_SENT:
            self._answered(segment)
        elif self.state == SYN_RECEIVED and segment.flags & SYN:
            self._send_syn()
        elif self.state != DIALLING:
            self._segment(segment)
        elif segment.flags & RST:
            self._lost()

    def _answered(self, segment: Segment) -> None:
        """To our SYN."""
        if not segment.flags & ACK or _after(segment.acknowledged, self._next) != 0:
            return
        if segment.flags & RST:
            self._lost()
        elif segment.flags & SYN:
            self.take_syn(segment)
            self._una = self._next
            self._opened()
            self._acknowledge_soon()

    def _opened(self) -> None:
        self.state = OPEN
        self._retries, self._deadline_s = 0, None
        self._events.opened()
        self._transmit()

    def _segment(self, segment: Segment) -> None:
        early = _after(segment.sequence, self._expected)
        if segment.flags & RST:
            if 0 <= early <= BUFFER_BYTES:
                self._lost()
            return
        if segment.flags & SYN:
            # A SYN-ACK whose acknowledgement was lost; anything else is old.
            self._acknowledge_soon()
            return
        if not segment.flags & ACK or not self._acknowledged(segment):
            return
        if segment.data or segment.flags & FIN:
            self._take(segment, early)
        elif early < 0:
            # The kernel asks whether we live, or how large our window is.
            self._acknowledge_soon()

    def _acknowledged(self, segment: Segment) -> bool:
        """False when the segment ended the connection or is not about it."""
        count = _after(segment.acknowledged, self._una & _MASK)
        if count > self._most - self._una:
            self._acknowledge_soon()
            return False
        if self.state == SYN_RECEIVED:
            if count != 1:
                return False
            self._una += 1
            count = 0
            self._window = segment.window << self._shift
            self._opened()
        if count >= 0:
            self._heard(segment, count)
        return self.state != OVER

    def _heard(self, segment: Segment, count: int) -> None:
        before, self._window = self._window, segment.window << self._shift
        if count > 0:
            self._advance(count)
        elif before == self._window == 0:
            # The pod lives and has no room: patience, not despair.
            self._retries = min(self._retries, _PATIENT_RETRIES)
        elif self._most > self._una and not segment.data and before == self._window:
            self._duplicates += 1
            if self._duplicates == _DUPLICATES:
                self._send_again()
        self._transmit()

    @property
    def _shift(self) -> int:
        return 0 if self._scale is None else self._their_scale

    def _advance(self, count: int) -> None:
        self._una += count
        self._next = max(self._next, self._una)
        data = min(count, len(self._buffer))
        del self._buffer[:data]
        if count > data and self._fin_wanted:
            self._fin_acknowledged = True
        self._duplicates = self._retries = 0
        self._deadline_s = None
        if self._most > self._una:
            self._arm()
        if data and not self._fin_wanted:
            self._events.room()
        self._maybe_closed()

    def _take(self, segment: Segment, early: int) -> None:
        data = segment.data
        if early > 0 or self._fin_received:
            self._acknowledge_now()
            return
        if early < 0:
            data = data[-early:]
        fits = data[: max(0, BUFFER_BYTES - self._unconsumed)]
        self._expected = (self._expected + len(fits)) & _MASK
        self._unconsumed += len(fits)
        fin = segment.flags & FIN and len(fits) == len(data)
        if fin and _after(segment.sequence + len(segment.data), self._expected) == 0:
            self._expected = (self._expected + 1) & _MASK
            self._fin_received = True
        self._acknowledge_soon()
        if fits:
            self._events.data(fits)
        if self._fin_received and self.state != OVER:
            self._events.finished()
            self._maybe_closed()

    # Out.

    def _transmit(self) -> None:
        if self.state != OPEN:
            return
        end = self._una + len(self._buffer)
        limit = min(end, self._una + self._window)
        # Several segments to a window: a kernel that got but one waits 40 ms before it acknowledges.
        largest = min(self._mss, max(_SMALL_BYTES, self._window // 4))
        view = memoryview(self._buffer)
        while self._next < limit:
            at = self._next - self._una
            size = min(largest, limit - self._next)
            push = PSH if self._next + size == end else 0
            self._out(ACK | push, self._next, view[at : at + size])
            self._next += size
        # The buffer must be free to grow again.
        view.release()
        if self._fin_wanted and self._next == end:
            self._out(ACK | FIN, self._next)
            self._next += 1
        self._most = max(self._most, self._next)
        if self._most > self._una or end > self._next:
            self._arm()

    def _out(self, flags: int, sequence: int, data: Bytes = b"") -> None:
        window = max(0, BUFFER_BYTES - self._unconsumed)
        scaled = min(0xFFFF, window if self._scale is None else window >> self._scale)
        self._told_window = scaled if self._scale is None else scaled << self._scale
        self._ack_due = False
        self._emit(
            tcp_segments.build(self.here, self.pod, sequence, self._expected, flags, scaled, b"", data)
        )

    def _acknowledge_soon(self) -> None:
        """Once for all segments of a turn of the loop, and not at all where data carries it."""
        if not self._ack_due:
            self._ack_due = True
            self._loop.soon(self._acknowledge_if_due)

    def _acknowledge_if_due(self) -> None:
        if self._ack_due and self.state != OVER:
            self._acknowledge_now()

    def _acknowledge_now(self) -> None:
        self._out(ACK, self._next)

    # Again.

    def _arm(self) -> None:
        if self._deadline_s is None:
            delay_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2**self._retries)
            self._deadline_s = time.monotonic() + delay_s
        if not self._timer_set:
            self._timer_set = True
            self._loop.later(self._deadline_s - time.monotonic(), self._fire)

    def _fire(self) -> None:
        """One timer for the connection, whatever the deadline has become meanwhile: most segments need none."""
        self._timer_set = False
        if self.state == OVER or self._deadline_s is None:
            return
        if time.monotonic() < self._deadline_s:
            self._arm()
            return
        self._deadline_s = None
        self._retries += 1
        if self._retries > _MAX_RETRIES:
            self.abort_with_event()
        else:
            self._send_again()

    def _send_again(self) -> None:
        self.sent_again += 1
        if self.state in (SYN_SENT, SYN_RECEIVED):
            self._send_syn()
        elif self._most == self._una or self._window == 0:
            # Only a window that opened unheard can help: an old number makes the kernel tell its window.
            self._out(ACK, self._una - 1)
            self._arm()
        else:
            self._next = self._una
            self._transmit()

    # The end.

    def abort_with_event(self) -> None:
        self.abort()
        self._events.over(False)

    def _lost(self) -> None:
        refused = self.state == SYN_SENT
        self._end()
        self._events.over(refused)

    def _maybe_closed(self) -> None:
        if self._fin_received and self._fin_acknowledged and self.state != OVER:
            if self._ack_due:
                self._acknowledge_now()
            self._end()
            self._events.closed()

    def _end(self) -> None:
        self.state = OVER
        self._buffer = bytearray()
        self._deadline_s = None
