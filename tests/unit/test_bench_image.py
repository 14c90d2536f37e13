"""Whether the measured pods' image is there is known before anything is timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmlet.base.errors import SlurmletError
from slurmlet.bench import bench_image


class FakeStore:
    """With one image, and a registry that has one more."""

    pulled: list[str]

    def __init__(self, _root: Path) -> None: ...

    def lookup(self, reference: str) -> str | None:
        return reference if reference == "here:1" else None

    def pull(self, reference: str) -> None:
        if reference != "there:1":
            raise SlurmletError(f"failed to pull image {reference}")
        self.pulled.append(reference)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> type[FakeStore]:
    FakeStore.pulled = []
    monkeypatch.setattr(bench_image, "Store", FakeStore)
    return FakeStore


def test_what_is_there_is_not_pulled(store: type[FakeStore]) -> None:
    bench_image.have("here:1")
    assert store.pulled == []


def test_what_is_not_there_is_pulled_once(store: type[FakeStore]) -> None:
    bench_image.have("there:1")
    assert store.pulled == ["there:1"]


def test_what_cannot_be_had_is_said_at_once() -> None:
    with pytest.raises(SlurmletError, match="failed to pull image nowhere:1"):
        bench_image.have("nowhere:1")
