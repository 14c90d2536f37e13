"""The image of the measured pods, in the store before anything is timed."""

from __future__ import annotations

from slurmlet.base.console import Steps
from slurmlet.base.layout import store_dir
from slurmlet.images.image_store import Store


def have(reference: str) -> None:
    """Pull it unless it is there: one that cannot be had is said at once, and not waited for by pods."""
    store = Store(store_dir())
    if store.lookup(reference) is None:
        with Steps().step(f"pulling {reference}"):
            store.pull(reference)
