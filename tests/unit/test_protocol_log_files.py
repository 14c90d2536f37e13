"""The log format: what is written is what `kubectl logs` shows, for every option."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmlet.protocol.log_files import (
    MAX_LINE_BYTES,
    STDERR,
    STDOUT,
    LogOptions,
    LogReader,
    LogWriter,
    NoLog,
    canonical_time,
    log_tail,
    read_logs,
    runs,
    stamp,
)


def write(directory: Path, text: bytes, run: int = 0, stream: bytes = STDOUT) -> None:
    writer = LogWriter(str(directory), run, lambda: None)
    writer.write(stream, text)
    writer.close()


def lines_at(directory: Path, *entries: tuple[int, str, str]) -> None:
    """(seconds since the epoch, stream, text) each."""
    directory.mkdir(exist_ok=True)
    text = "".join(f"{stamp(when * 10**9)} {stream} F {text}\n" for when, stream, text in entries)
    (directory / "0.log").write_text(text)


def read(directory: Path, **options: object) -> bytes:
    return b"".join(read_logs(str(directory), LogOptions(**options)))  # type: ignore[arg-type]


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    text = b"one\n\ntwo \xff bytes\nno newline at the end"
    write(tmp_path, text)
    assert read(tmp_path) == text


def test_lines_arrive_in_pieces(tmp_path: Path) -> None:
    writer = LogWriter(str(tmp_path), 0, lambda: None)
    for piece in (b"he", b"llo\nwor", b"ld\n"):
        writer.write(STDOUT, piece)
    writer.close()
    stored = (tmp_path / "0.log").read_bytes().splitlines()
    assert [line.split(b" ", 2)[2] for line in stored] == [b"F hello", b"F world"]


@pytest.mark.parametrize(
    "size", [MAX_LINE_BYTES - 1, MAX_LINE_BYTES, MAX_LINE_BYTES + 1, 5 * MAX_LINE_BYTES + 7]
)
def test_long_lines_are_split_on_disk_and_whole_again_when_read(tmp_path: Path, size: int) -> None:
    text = b"x" * size + b"\nshort\n"
    write(tmp_path, text)
    stored = (tmp_path / "0.log").read_bytes().splitlines()
    assert max(len(line.split(b" ", 3)[3]) for line in stored) <= MAX_LINE_BYTES
    assert read(tmp_path) == text


def test_a_timestamp_comes_once_per_line_not_per_piece(tmp_path: Path) -> None:
    write(tmp_path, b"x" * (2 * MAX_LINE_BYTES) + b"\nnext\n")
    shown = read(tmp_path, timestamps=True).decode().splitlines()
    assert len(shown) == 2
    assert shown[0].count("Z ") == 1
    assert len(shown[1]) == len("2026-01-02T03:04:05.123456789Z next")


@pytest.mark.parametrize(
    ("tail", "expected"), [(0, b""), (1, b"5\n"), (3, b"3\n4\n5\n"), (99, b"1\n2\n3\n4\n5\n")]
)
def test_tail(tmp_path: Path, tail: int, expected: bytes) -> None:
    write(tmp_path, b"1\n2\n3\n4\n5\n")
    assert read(tmp_path, tail_lines=tail) == expected


def test_tail_reaches_back_over_many_blocks(tmp_path: Path) -> None:
    lines = [b"%06d " % number + b"y" * 90 for number in range(5000)]
    write(tmp_path, b"\n".join(lines) + b"\n")
    assert read(tmp_path, tail_lines=3000) == b"\n".join(lines[-3000:]) + b"\n"


def test_limit_counts_bytes_of_output(tmp_path: Path) -> None:
    write(tmp_path, b"12345\n67890\n")
    assert read(tmp_path, limit_bytes=8) == b"12345\n67"
    assert read(tmp_path, limit_bytes=0) == b""
    assert len(read(tmp_path, limit_bytes=10, timestamps=True)) == 10


def test_since(tmp_path: Path) -> None:
    lines_at(tmp_path, (1000, "stdout", "old"), (2000, "stdout", "new"))
    assert read(tmp_path, since_time="1970-01-01T00:20:00Z") == b"new\n"
    assert read(tmp_path, since_time="1970-01-01T02:20:00+02:00") == b"new\n"
    assert read(tmp_path, since_time="1970-01-01T00:33:20Z") == b"new\n"
    assert read(tmp_path, since_s=10) == b""
    assert LogOptions(since_s=60).since(now_s=2030) == stamp(1970 * 10**9)


def test_one_stream(tmp_path: Path) -> None:
    lines_at(tmp_path, (1, "stdout", "out"), (2, "stderr", "err"))
    assert read(tmp_path, log_stream="Stderr") == b"err\n"
    assert read(tmp_path, log_stream="Stdout") == b"out\n"
    assert read(tmp_path, log_stream="All") == b"out\nerr\n"


def test_runs_and_the_previous_one(tmp_path: Path) -> None:
    # The newest first: a run that starts takes those before its predecessor away.
    for run in (10, 0, 1):
        write(tmp_path, b"run %d\n" % run, run)
    assert runs(str(tmp_path)) == [0, 1, 10]
    assert read(tmp_path) == b"run 10\n"
    with pytest.raises(NoLog):
        read(tmp_path, previous=True)
    assert b"".join(read_logs(str(tmp_path), LogOptions(previous=True), restart_count=1)) == b"run 0\n"
    with pytest.raises(NoLog):
        read(tmp_path / "nobody")


def test_a_torn_line_is_not_shown_and_does_no_harm(tmp_path: Path) -> None:
    lines_at(tmp_path, (1, "stdout", "good"))
    with (tmp_path / "0.log").open("ab") as file:
        file.write(b"garbage\n2026-01-01T00:00:00.000000000Z stdout F after\n2026-01-01T00:00:00Z std")
    assert read(tmp_path) == b"good\nafter\n"


def test_a_reader_at_the_end_sees_what_is_written_later(tmp_path: Path) -> None:
    written: list[int] = []
    writer = LogWriter(str(tmp_path), 0, lambda: written.append(1))
    writer.write(STDOUT, b"first\n")
    reader = LogReader(writer.path, LogOptions(follow=True))
    assert reader.read(3) == b"fir"
    assert reader.read(100) == b"st\n"
    assert reader.read(100) == b""
    writer.write(STDERR, b"second\n")
    assert reader.read(100) == b"second\n"
    writer.close()
    reader.close()
    assert written


def test_logs_are_private(tmp_path: Path) -> None:
    write(tmp_path / "c", b"secret\n")
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "c" / "0.log").stat().st_mode & 0o777 == 0o600


def test_last_words_are_bounded(tmp_path: Path) -> None:
    write(tmp_path, b"".join(b"line %d\n" % number for number in range(200)))
    assert log_tail(str(tmp_path / "0.log")).splitlines()[0] == "line 120"
    write(tmp_path, b"z" * 10000, run=1)
    assert log_tail(str(tmp_path / "1.log")) == "z" * 2048
    assert log_tail(str(tmp_path / "9.log")) == ""


def test_times_are_spelled_one_way() -> None:
    assert canonical_time("2026-01-02T03:04:05Z") == "2026-01-02T03:04:05.000000000Z"
    assert canonical_time("2026-01-02T03:04:05.5-01:30") == "2026-01-02T04:34:05.500000000Z"
    with pytest.raises(ValueError, match="RFC 3339"):
        canonical_time("yesterday")
