"""One control plane for all tests of a session that want a real API server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.control_plane import ControlPlane, control_plane


@pytest.fixture(scope="session")
def api_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as made:
        yield made
