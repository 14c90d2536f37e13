"""Which tests go to the same worker of `make unit` (docs/decisions/0022): those that share what is costly to make."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # One API server for all who use it: what one file installs there, the next one finds.
        shared = "api_plane" if "api_plane" in getattr(item, "fixturenames", ()) else item.path.stem
        item.add_marker(pytest.mark.xdist_group(shared))
