"""Logs by properties: what a container wrote is what is read, whatever it wrote and however the files were cut."""

from __future__ import annotations

import tempfile
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurmlet.protocol import log_files
from slurmlet.protocol.log_files import (
    STDERR,
    STDOUT,
    LogOptions,
    LogReader,
    LogWriter,
    read_logs,
    tail_offset,
)
from slurmlet.runner.containers import restart_backoff
from slurmlet.runner.containers.restart_backoff import Backoff

TEXT = st.lists(st.sampled_from((b"a", b"bb", b"\n", b"\n\n", b" ", b"\xff", b"x" * 9)), max_size=12).map(
    b"".join
)
WRITES = st.lists(st.tuples(st.sampled_from((STDOUT, STDERR)), TEXT), max_size=12)


def written(directory: str, writes: list[tuple[bytes, bytes]]) -> None:
    writer = LogWriter(directory, 0, lambda: None)
    for stream, text in writes:
        writer.write(stream, text)
    writer.close()


def shown(directory: str, options: LogOptions) -> bytes:
    return b"".join(read_logs(directory, options))


@given(WRITES, st.sampled_from((4, 1 << 14)), st.sampled_from((120, 1 << 20)))
def test_each_stream_is_read_as_it_was_written(
    writes: list[tuple[bytes, bytes]], line_bytes: int, file_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "MAX_LINE_BYTES", line_bytes)
        patch.setattr(log_files, "MAX_FILE_BYTES", file_bytes)
        patch.setattr(log_files, "MAX_FILES", 1000)
        directory = str(Path(made, "pod", "container"))
        written(directory, writes)
        everything = b"".join(text for _, text in writes)
        assert len(shown(directory, LogOptions())) == len(everything)
        for name, stream in (("Stdout", STDOUT), ("Stderr", STDERR)):
            expected = b"".join(text for each, text in writes if each == stream)
            assert shown(directory, LogOptions(log_stream=name)) == expected


@given(WRITES, st.integers(0, 12), st.integers(1, 40), st.sampled_from((120, 1 << 20)))
def test_the_tail_is_the_end_and_a_limit_the_beginning(
    writes: list[tuple[bytes, bytes]], lines: int, limit: int, file_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "MAX_FILE_BYTES", file_bytes)
        patch.setattr(log_files, "MAX_FILES", 1000)
        directory = str(Path(made, "pod", "container"))
        written(directory, writes)
        everything = shown(directory, LogOptions())
        tail = shown(directory, LogOptions(tail_lines=lines))
        assert everything.endswith(tail)
        records = sum(
            Path(part).read_bytes().count(b"\n") for part in log_files.segments(f"{directory}/0.log")
        )
        stamped = shown(directory, LogOptions(tail_lines=lines, timestamps=True))
        assert len(stamped) >= len(tail)
        if lines >= records:
            assert tail == everything
        assert shown(directory, LogOptions(limit_bytes=limit)) == everything[:limit]


@given(
    st.binary(max_size=200).map(lambda raw: raw.replace(b"a", b"\n")), st.integers(-1, 30), st.integers(1, 9)
)
def test_the_tail_begins_after_as_many_newlines_as_asked_for(raw: bytes, lines: int, chunk: int) -> None:
    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "_CHUNK_BYTES", chunk)
        if raw and not raw.endswith(b"\n"):
            raw += b"\n"
        file.write(raw)
        offset, missing = tail_offset(file, lines)
        whole = [line + b"\n" for line in raw.split(b"\n")[:-1]]
        wanted = max(lines, 0)
        assert raw[offset:] == b"".join(whole[max(0, len(whole) - wanted) :] if wanted else [])
        assert missing == max(0, wanted - len(whole))


@given(st.lists(st.binary(max_size=60), max_size=10), st.integers(1, 50))
def test_a_file_of_any_bytes_is_read_to_its_end(lines: list[bytes], size: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made, "0.log")
        path.write_bytes(b"\n".join(lines))
        reader = LogReader(str(path), LogOptions(timestamps=True))
        while reader.read(size):
            pass
        reader.close()


@given(st.integers(1, 2**63 - 1) | st.floats(0, 1e18), st.floats(0, 4e9))
@example(2**63 - 1, 1.8e9)
@example(40e9, 1.8e9)
def test_any_age_is_a_time_that_compares_as_text(since_s: float, now_s: float) -> None:
    earliest = LogOptions(since_s=since_s).since(now_s)
    stamp = log_files.stamp(int(now_s * 1e9))
    assert len(earliest) == len(stamp)
    assert earliest <= stamp


@given(st.datetimes(), st.integers(0, 999_999_999), st.sampled_from(("Z", "+00:00", "-11:30", "+14:00")))
@example(datetime(1, 1, 1), 0, "Z")
@example(datetime(999, 1, 1), 0, "Z")
@example(datetime(9999, 12, 31, 23), 0, "-11:30")
def test_any_time_is_one_that_compares_as_text(when: datetime, nanoseconds: int, zone: str) -> None:
    text = f"{when.replace(microsecond=0).isoformat()}.{nanoseconds:09d}{zone}"
    earliest = LogOptions(since_time=text).since()
    assert len(earliest) == len("2026-01-02T03:04:05.123456789Z")


@given(
    st.text(max_size=30)
    | st.from_regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9:]{8}(Z|\+[0-9]{2}:[0-9]{2})", fullmatch=True)
)
def test_any_other_text_is_a_value_error(text: str) -> None:
    try:
        log_files.canonical_time(text)
    except ValueError:
        pass


@given(st.lists(st.tuples(st.floats(0, 2000), st.floats(0, 2000)), max_size=12))
def test_restarts_wait_longer_each_time_up_to_five_minutes(runs: list[tuple[float, float]]) -> None:
    """Each run ends after some time, and is started again when the wait allows, or later."""
    backoff, now_s, expected = Backoff(), 1000.0, 0.0
    updated_s = None
    for ran_s, slack_s in runs:
        finished_s = now_s = now_s + ran_s
        if updated_s is None or finished_s - updated_s > restart_backoff.FORGET_AFTER_S:
            assert backoff.wait_s(finished_s, now_s) == 0
        else:
            assert backoff.wait_s(finished_s, now_s) == pytest.approx(expected)
        now_s += backoff.wait_s(finished_s, now_s) + slack_s
        assert backoff.wait_s(finished_s, now_s) == pytest.approx(0, abs=1e-6)
        forgotten = updated_s is None or now_s - updated_s > restart_backoff.FORGET_AFTER_S
        backoff.restarted(now_s)
        updated_s, expected = now_s, 10.0 if forgotten else min(300.0, expected * 2)
        assert backoff.delay_s == expected
