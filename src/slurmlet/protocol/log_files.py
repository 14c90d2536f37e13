"""Container logs on disk: the format, its writer and its readers, for the runner (live) and the hub (finished pods).

One file per run of a container, `<restart count>.log`, in the CRI format that kubelets and log collectors know:

    2026-01-02T03:04:05.123456789Z stdout F a whole line
    2026-01-02T03:04:05.123456789Z stderr P a piece of a line longer than 16 KiB, or one that never ended

A file that has reached 10 MiB is renamed to `<restart count>.log.<time>` and a new one begun; five are kept, as with a
kubelet. The reader answers what a kubelet answers for each option of `kubectl logs`, except that it reads on from one
file into the next where a kubelet shows the newest alone. Must never load a whole file.
"""

from __future__ import annotations

import os
import sys
import time

from slurmlet.linux.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

    from slurmlet.protocol.messages import OpenLogs


MAX_LINE_BYTES = 16 << 10
# The kubelet's containerLogMaxSize and containerLogMaxFiles.
MAX_FILE_BYTES = 10 << 20
MAX_FILES = 5
_CHUNK_BYTES = 64 << 10
STDOUT, STDERR = b"stdout", b"stderr"
# The last nanosecond of the year 9999.
_LAST_NS = 253_402_300_800_000_000_000 - 1


class NoLog(Exception):
    """There is no such log (yet)."""


class LogOptions(Record):
    """What `kubectl logs` can ask for; the fields of the wire's "open" message."""

    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    since_s: Optional[float] = None
    since_time: Optional[str] = None
    tail_lines: Optional[int] = None
    limit_bytes: Optional[int] = None
    log_stream: str = "All"

    @classmethod
    def from_message(cls, message: OpenLogs) -> LogOptions:
        fields: Mapping[str, Any] = message
        return cls(**{name: fields[name] for name in cls._fields if fields.get(name) is not None})

    def since(self, now_s: Optional[float] = None) -> str:
        """The earliest timestamp wanted, in the file's own spelling (those compare as text), or ""."""
        if self.since_time:
            return canonical_time(self.since_time)
        if self.since_s is not None:
            seconds = (time.time() if now_s is None else now_s) - self.since_s
            return stamp(_bounded(int(seconds * 1e9)))
        return ""


def stamp(time_ns: int) -> str:
    """RFC 3339 with nine digits, in UTC."""
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{nanoseconds:09d}Z"


def canonical_time(text: str) -> str:
    """Any RFC 3339 time in the file's spelling. Raises ValueError."""
    return stamp(_bounded(time_ns(text)))


def _bounded(time_ns: int) -> int:
    """Nothing was logged before 1970; and times compare as text only while years have four digits."""
    return min(max(time_ns, 0), _LAST_NS)


def time_ns(text: str) -> int:
    """An RFC 3339 time in nanoseconds since 1970. Raises ValueError."""
    import calendar
    import re

    form = r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?([Zz]|[+-]\d\d:\d\d)"
    found = re.fullmatch(form, text.strip())
    if found is None:
        raise ValueError(f"not an RFC 3339 time: {text!r}")
    date, clock, fraction, zone = found.groups()
    seconds = calendar.timegm(time.strptime(f"{date}T{clock}", "%Y-%m-%dT%H:%M:%S"))
    if zone not in "Zz":
        shift = int(zone[1:3]) * 3600 + int(zone[4:6]) * 60
        seconds -= shift if zone[0] == "+" else -shift
    return seconds * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))


class LogWriter:
    """Turns what a container writes into the file; one write call for each piece received.

    Where nothing more can be written (a full quota), output is lost and the container goes on, as under a kubelet.
    """

    def __init__(self, directory: str, restart_count: int, on_written: Callable[[], None]) -> None:
        # The mode is that of the last one made; each is to be closed to others.
        for path in (os.path.dirname(directory), directory):
            os.makedirs(path, mode=0o700, exist_ok=True)
        self.path = os.path.join(directory, f"{restart_count}.log")
        self._fd = self._open()
        self._size_bytes = os.fstat(self._fd).st_size
        self._complained = False
        self._pending: Dict[bytes, bytes] = {STDOUT: b"", STDERR: b""}
        self._on_written = on_written
        _forget_runs(directory, restart_count - 1)

    def _open(self) -> int:
        return os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def write(self, stream: bytes, received: bytes) -> None:
        lines = (self._pending[stream] + received).split(b"\n")
        rest = lines.pop()
        prefix = stamp(time.time_ns()).encode() + b" " + stream
        out: List[bytes] = []
        for line in lines:
            while len(line) > MAX_LINE_BYTES:
                out.append(prefix + b" P " + line[:MAX_LINE_BYTES] + b"\n")
                line = line[MAX_LINE_BYTES:]
            out.append(prefix + b" F " + line + b"\n")
        while len(rest) > MAX_LINE_BYTES:
            out.append(prefix + b" P " + rest[:MAX_LINE_BYTES] + b"\n")
            rest = rest[MAX_LINE_BYTES:]
        self._pending[stream] = rest
        self._put(b"".join(out))

    def close(self) -> None:
        """What never saw its newline is written as a partial line."""
        for stream, rest in self._pending.items():
            if rest:
                self._put(stamp(time.time_ns()).encode() + b" " + stream + b" P " + rest + b"\n")
        os.close(self._fd)
        self._on_written()

    def _put(self, out: bytes) -> None:
        if not out:
            return
        view = memoryview(out)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            self._size_bytes += len(out)
            if self._size_bytes >= MAX_FILE_BYTES:
                self._rotate()
        except OSError as error:
            if not self._complained:
                print(f"log {self.path}: {error}; output is being lost", file=sys.stderr, flush=True)
            self._complained = True
        self._on_written()

    def _rotate(self) -> None:
        """A new file under the same name. Only whole lines are written at a time, so none is torn apart."""
        seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))
        aside = f"{self.path}.{moment}.{nanoseconds:09d}"
        os.rename(self.path, aside)
        try:
            fresh = self._open()
        except OSError:
            os.rename(aside, self.path)
            raise
        os.close(self._fd)
        self._fd, self._size_bytes = fresh, 0
        for old in segments(self.path)[:-MAX_FILES]:
            os.unlink(old)


def runs(directory: str) -> List[int]:
    """The restart counts that have a log, oldest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    # With what was rotated away: a crash between two renames leaves nothing else.
    found = {name.partition(".log")[0] for name in names if ".log" in name}
    return sorted(int(number) for number in found if number.isdigit())


def segments(path: str) -> List[str]:
    """The files of one run's log, oldest first; `path` is the one being written."""
    directory, name = os.path.split(path)
    names = [each for each in os.listdir(directory) if each == name or each.startswith(name + ".")]
    # The names of rotated files sort by time; the bare name is the newest.
    return [os.path.join(directory, each) for each in sorted(names, key=lambda each: (each == name, each))]


def _forget_runs(directory: str, oldest_kept: int) -> None:
    """As a kubelet, which keeps one dead container beside the living one: `--previous` needs no more."""
    for run in runs(directory):
        if run < oldest_kept:
            for path in segments(os.path.join(directory, f"{run}.log")):
                os.unlink(path)


def log_path(directory: str, *, previous: bool, restart_count: Optional[int] = None) -> str:
    """The file to read: of the given or newest run, or of the one before. Raises NoLog."""
    present = runs(directory)
    current = restart_count if restart_count is not None else (present[-1] if present else -1)
    wanted = current - 1 if previous else current
    if wanted not in present:
        raise NoLog(
            f"no log of run {wanted} in {os.path.basename(directory)}" if wanted >= 0 else "no log yet"
        )
    return os.path.join(directory, f"{wanted}.log")


class LogReader:
    """Reads the log of one run from where the options say, in bounded steps; at its end it can be asked again."""

    def __init__(self, path: str, options: LogOptions) -> None:
        self._options = options
        self._since = options.since().encode()
        self._left = options.limit_bytes
        self._stream = options.log_stream.lower().encode() if options.log_stream not in ("All", "") else b""
        self._path = path
        self._buffer = b""
        self._at_line_start = True
        self._ready = bytearray()
        self._file = self._first_file()

    def read(self, size: int) -> bytes:
        """At most `size` bytes of output; b"" when there is no more for now."""
        while not self._ready and not self.exhausted:
            chunk = self._file.read(_CHUNK_BYTES)
            if not chunk:
                if self._go_on():
                    continue
                break
            lines = (self._buffer + chunk).split(b"\n")
            self._buffer = lines.pop()
            for line in lines:
                self._take(line)
        out = bytes(self._ready[:size])
        del self._ready[:size]
        return out

    @property
    def exhausted(self) -> bool:
        """The byte limit is reached: nothing will ever come again."""
        return self._left is not None and self._left <= 0

    def close(self) -> None:
        self._file.close()

    def _first_file(self) -> Any:
        """Where the tail begins, or the first file that can hold what is wanted."""
        parts = segments(self._path) or [self._path]
        missing = self._options.tail_lines
        if missing is None:
            return open(next((part for part in parts if self._may_hold(part)), parts[-1]), "rb")
        for part in reversed(parts):
            file = open(part, "rb")  # noqa: SIM115 - lives as long as the reader
            offset, missing = tail_offset(file, missing)
            if not missing or part == parts[0]:
                file.seek(offset)
                return file
            file.close()
        raise AssertionError("a log has at least one file")

    def _may_hold(self, part: str) -> bool:
        """Whether a file can have lines as young as asked for: those of a rotated one are older than its rotation."""
        if not self._since or part == self._path:
            return True
        return os.stat(part).st_mtime_ns >= time_ns(self._since.decode())

    def _go_on(self) -> bool:
        """At the end of a file that was rotated away: on to the next one."""
        if self._file.tell() < MAX_FILE_BYTES:
            return False  # spares followers a look into the directory for each line
        here = os.fstat(self._file.fileno())
        parts = segments(self._path)
        inodes = [os.stat(part).st_ino for part in parts]
        # A follower that was slower than four rotations has lost what is gone.
        place = inodes.index(here.st_ino) + 1 if here.st_ino in inodes else 0
        if place >= len(parts):
            return False
        self._file.close()
        self._file = open(parts[place], "rb")  # noqa: SIM115
        return True

    def _take(self, line: bytes) -> None:
        parsed = parse_line(line)
        if parsed is None:
            return
        when, stream, whole, text = parsed
        if self._since and when < self._since:
            return
        if self._stream and stream != self._stream:
            return
        out = text + b"\n" if whole else text
        if self._options.timestamps and self._at_line_start:
            out = when + b" " + out
        self._at_line_start = whole
        if self._left is not None:
            out = out[: max(0, self._left)]
            self._left -= len(out)
        self._ready += out


def parse_line(line: bytes) -> Optional[Tuple[bytes, bytes, bool, bytes]]:
    """(timestamp, stream, whole, text), or None for what is not a log line (a torn write)."""
    fields = line.split(b" ", 3)
    if len(fields) < 3 or fields[1] not in (STDOUT, STDERR):
        return None
    return fields[0], fields[1], not fields[2].startswith(b"P"), fields[3] if len(fields) > 3 else b""


def tail_offset(file: Any, lines: int) -> Tuple[int, int]:
    """Where the last `lines` lines begin, and how many of them the file is short of."""
    size: int = file.seek(0, os.SEEK_END)
    if lines <= 0:
        return size, 0
    # The newline that ends the last line does not begin another one.
    position, wanted = size, lines + 1
    while position > 0:
        step = min(_CHUNK_BYTES, position)
        position -= step
        file.seek(position)
        chunk = file.read(step)
        count = chunk.count(b"\n")
        if count < wanted:
            wanted -= count
            continue
        found = len(chunk)
        for _ in range(wanted):
            found = chunk.rindex(b"\n", 0, found)
        return position + found + 1, 0
    return 0, wanted - 1


def read_logs(directory: str, options: LogOptions, restart_count: Optional[int] = None) -> Iterator[bytes]:
    """What `kubectl logs` shows of a container whose logs lie in `directory`; finite, ignores follow. Raises NoLog.

    restart_count is that of the container's status, where known: after a restart that has not logged yet, the newest
    file would be the wrong one.
    """
    reader = LogReader(log_path(directory, previous=options.previous, restart_count=restart_count), options)
    try:
        while True:
            piece = reader.read(_CHUNK_BYTES)
            if not piece:
                return
            yield piece
    finally:
        reader.close()


def log_tail(path: str, max_bytes: int = 2048, max_lines: int = 80) -> str:
    """The end of a log, for a termination message of policy FallbackToLogsOnError."""
    try:
        reader = LogReader(path, LogOptions(tail_lines=max_lines))
    except OSError:
        return ""
    text = b""
    while True:
        piece = reader.read(_CHUNK_BYTES)
        if not piece:
            break
        text = (text + piece)[-max_bytes:]
    reader.close()
    return text.decode("utf-8", "replace")
