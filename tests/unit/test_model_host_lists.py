"""Slurm's way to write many hosts in few words."""

from __future__ import annotations

import pytest

from slurmlet.model.host_lists import expand


@pytest.mark.parametrize(
    ("written", "hosts"),
    [
        ("", []),
        ("c1", ["c1"]),
        ("c1,d7", ["c1", "d7"]),
        ("c[1-3]", ["c1", "c2", "c3"]),
        ("c[1-2,5],login", ["c1", "c2", "c5", "login"]),
        ("c[08-11]", ["c08", "c09", "c10", "c11"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[1-2]-ib,b.example.org", ["a1-ib", "a2-ib", "b.example.org"]),
    ],
)
def test_lists_are_written_out(written: str, hosts: list[str]) -> None:
    assert expand(written) == hosts


@pytest.mark.parametrize("written", ["c[1-3", "c1]", "c[a-b]", "c[3-1]", "c[1-999999999]", "c[]"])
def test_what_is_no_list_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        expand(written)
