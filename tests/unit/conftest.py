"""Fixtures of more than one file. Each of these stands on the file's own `loop`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from coverage import Coverage
from hypothesis import HealthCheck, settings

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet.netd_setup import Tls
from tests.unit.sealed import TrackedSealer, make_tls

# The same examples in every run, and no deadline: a failure that comes and goes would be blamed on the machine.
# HYPOTHESIS_MAX_EXAMPLES=5000 searches further, with another seed each time.
settings.register_profile(
    "slurmlet",
    derandomize="HYPOTHESIS_MAX_EXAMPLES" not in os.environ,
    max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "60")),
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("slurmlet")


def _write_down() -> None:
    """A fork writes at its end what it holds; before it begins, that is little."""
    measured = Coverage.current()
    if measured is not None:
        measured.save()


os.register_at_fork(before=_write_down)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def sealer(loop: Loop, tls: Tls) -> Iterator[TrackedSealer]:
    made = TrackedSealer(loop, tls)
    yield made
    made.close()
