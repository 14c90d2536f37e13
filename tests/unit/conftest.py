"""Fixtures of more than one file. Each of these stands on the file's own `loop`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet.netd_setup import Tls
from tests.unit.sealed import TrackedSealer, make_tls


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def sealer(loop: Loop, tls: Tls) -> Iterator[TrackedSealer]:
    made = TrackedSealer(loop, tls)
    yield made
    made.close()
