"""What property tests of several files draw from."""

from __future__ import annotations

from hypothesis import strategies as st


def splits() -> st.SearchStrategy[list[float]]:
    """Where a stream of bytes is cut on its way, as parts of its length."""
    return st.lists(st.floats(0, 1, allow_nan=False), max_size=12)


def cut(data: bytes, at: list[float]) -> list[bytes]:
    """The pieces, in order; some may be empty, as a read may be."""
    places = sorted(int(part * len(data)) for part in at)
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
