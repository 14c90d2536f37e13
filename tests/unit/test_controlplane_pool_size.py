"""pool.json as `slurmlet pool size` and `slurmlet up` write it."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from slurmlet.base.errors import UserError
from slurmlet.cli.main import app
from slurmlet.controlplane.pool_size import check_range


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["pool", "size", "--min", "3", "--max", "2"], "--min (3) exceeds --max (2)"),
        (["up", "--pool-min", "3", "--pool-max", "2"], "--pool-min (3) exceeds --pool-max (2)"),
        (["up", "--pool", "4", "--pool-max", "1"], "--pool (4) exceeds --pool-max (1)"),
    ],
)
def test_a_minimum_above_the_maximum_is_refused_before_anything_is_done(
    argv: list[str], message: str
) -> None:
    done = CliRunner().invoke(app, [*argv, "-c", "nowhere"])
    assert isinstance(done.exception, UserError)
    assert done.exception.message == message


def test_an_end_of_the_range_that_is_not_given_is_not_compared() -> None:
    check_range("--min", None, "--max", 2)
    check_range("--min", 3, "--max", None)
    check_range("--min", 2, "--max", 2)
