"""Equal short texts of many objects kept once: thousands of pods say the same words, and half of their size is that."""

from __future__ import annotations

from typing import Any

_LONGEST = 64
_MOST = 50_000


class Sharer:
    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def shared(self, value: Any) -> Any:
        """The same value, made of shared texts. Unique ones (names, uids) pass through the table and go with it."""
        if len(self._words) > _MOST:
            self._words.clear()
        return self._shared(value)

    def _shared(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._word(key): self._shared(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._shared(inner) for inner in value]
        return self._word(value) if isinstance(value, str) else value

    def _word(self, text: str) -> str:
        return self._words.setdefault(text, text) if len(text) <= _LONGEST else text
