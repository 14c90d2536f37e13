"""Logs over several files: what is kept, and that readers see one log."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from slurmlet.protocol import log_files
from slurmlet.protocol.log_files import STDOUT, LogOptions, LogReader, LogWriter, read_logs, runs, segments

LIMIT = 2000


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_FILE_BYTES", LIMIT)


def say(writer: LogWriter, first: int, last: int) -> None:
    for number in range(first, last + 1):
        writer.write(STDOUT, b"line %d\n" % number)


def read(directory: Path, **options: object) -> bytes:
    return b"".join(read_logs(str(directory), LogOptions(**options)))  # type: ignore[arg-type]


def lines(first: int, last: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(first, last + 1))


def test_a_full_file_is_rotated_and_read_as_one(tmp_path: Path) -> None:
    writer = LogWriter(str(tmp_path), 0, lambda: None)
    say(writer, 1, 100)
    writer.close()
    parts = segments(writer.path)
    assert 2 <= len(parts) <= 5
    assert parts[-1] == writer.path
    assert all(LIMIT <= Path(part).stat().st_size < LIMIT + 100 for part in parts[:-1])
    assert read(tmp_path) == lines(1, 100)
    assert runs(str(tmp_path)) == [0]


def test_five_files_are_kept(tmp_path: Path) -> None:
    writer = LogWriter(str(tmp_path), 0, lambda: None)
    say(writer, 1, 1000)
    writer.close()
    assert len(segments(writer.path)) == 5
    left = read(tmp_path).splitlines()
    assert left[-1] == b"line 1000"
    # What is left has no hole.
    first = int(left[0].split()[1])
    assert first > 1
    assert b"\n".join(left) + b"\n" == lines(first, 1000)


@pytest.mark.parametrize("tail", [0, 1, 3, 45, 99, 100, 101])
def test_a_tail_reaches_back_into_rotated_files(tmp_path: Path, tail: int) -> None:
    writer = LogWriter(str(tmp_path), 0, lambda: None)
    say(writer, 1, 100)
    writer.close()
    assert read(tmp_path, tail_lines=tail) == lines(max(1, 101 - tail), 100)


def test_a_tail_right_after_a_rotation(tmp_path: Path) -> None:
    writer = LogWriter(str(tmp_path), 0, lambda: None)
    number = 0
    while len(segments(writer.path)) < 2:
        number += 1
        say(writer, number, number)
    assert Path(writer.path).stat().st_size == 0
    assert read(tmp_path, tail_lines=2) == lines(number - 1, number)
    writer.close()


def test_a_follower_goes_on_through_rotations(tmp_path: Path) -> None:
    writer = LogWriter(str(tmp_path), 0, lambda: None)
    reader = LogReader(writer.path, LogOptions(follow=True))
    heard = b""
    for number in range(1, 301):
        say(writer, number, number)
        if number % 7 == 0:
            while piece := reader.read(1000):
                heard += piece
    while piece := reader.read(1000):
        heard += piece
    assert heard == lines(1, 300)
    reader.close()
    writer.close()


def test_a_follower_that_sleeps_too_long_goes_on_with_the_oldest(tmp_path: Path) -> None:
    writer = LogWriter(str(tmp_path), 0, lambda: None)
    reader = LogReader(writer.path, LogOptions(follow=True))
    say(writer, 1, 1)
    assert reader.read(1000) == b"line 1\n"
    say(writer, 2, 1000)
    heard = b""
    while piece := reader.read(100_000):
        heard += piece
    assert heard.endswith(b"line 1000\n")
    # The file it had open to its end, then what is kept; the hole is in between.
    assert heard.startswith(b"line 2\n")
    reader.close()


def test_since_skips_files_that_are_too_old(tmp_path: Path) -> None:
    writer = LogWriter(str(tmp_path), 0, lambda: None)
    say(writer, 1, 60)
    old = segments(writer.path)[:-1]
    assert old
    for part in old:
        os.utime(part, (time.time() - 3600, time.time() - 3600))
    reader = LogReader(writer.path, LogOptions(since_s=1800))
    assert os.fstat(reader._file.fileno()).st_ino == Path(writer.path).stat().st_ino
    reader.close()
    writer.close()


def test_previous_has_its_own_rotated_files_and_older_runs_go(tmp_path: Path) -> None:
    for run in range(4):
        writer = LogWriter(str(tmp_path), run, lambda: None)
        say(writer, 1000 * run, 1000 * run + 60)
        writer.close()
    assert runs(str(tmp_path)) == [2, 3]
    assert read(tmp_path) == lines(3000, 3060)
    assert read(tmp_path, previous=True) == lines(2000, 2060)
    assert not list(tmp_path.glob("0.log*"))


def test_a_crash_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    writer = LogWriter(str(tmp_path), 0, lambda: None)
    say(writer, 1, 20)
    writer.close()
    (tmp_path / "0.log").rename(tmp_path / "0.log.20260101-000000.000000000")
    assert read(tmp_path) == lines(1, 20)


def test_a_full_disk_loses_output_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = LogWriter(str(tmp_path), 0, lambda: None)

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        say(writer, 1, 3)
    say(writer, 4, 4)
    writer.close()
    assert read(tmp_path) == lines(4, 4)
    assert capsys.readouterr().err.count("Disk quota exceeded") == 1
