"""How modules of a packed runner are found: compiled for this Python, or from their sources."""

from __future__ import annotations

import importlib
import linecache
import marshal
import sys
import traceback
from collections.abc import Iterator
from importlib.util import MAGIC_NUMBER
from typing import Any

import pytest

from slurmlet.entrypoint import archive

SOURCES = {
    "packed_pod": (True, "packed_pod/__init__.py", b"NAME = 'pod'\n"),
    "packed_pod.part": (
        False,
        "packed_pod/part.py",
        b"from packed_pod import NAME\n\ndef fail():\n    raise ValueError(NAME)\n",
    ),
}


class Zip:
    """As zipimport reads an archive."""

    def __init__(self, compiled: bool) -> None:
        self.files = {path: text for _, path, text in SOURCES.values()}
        modules = {
            name: (package, marshal.dumps(compile(text, path, "exec")))
            for name, (package, path, text) in SOURCES.items()
        }
        number = MAGIC_NUMBER.hex() if compiled else "00000d0a"
        self.files[f"compiled-{number}"] = marshal.dumps(modules)
        self.files["modules"] = marshal.dumps(
            [(name, package) for name, (package, _, _) in SOURCES.items()], 2
        )

    def get_data(self, name: str) -> bytes:
        try:
            return self.files[name]
        except KeyError:
            raise OSError(0, "", name) from None


@pytest.fixture(params=[True, False], ids=["compiled", "sources"])
def packed(request: pytest.FixtureRequest) -> Iterator[Any]:
    before = list(sys.meta_path)
    made = Zip(request.param)
    archive.begin(made)  # type: ignore[arg-type]
    yield made
    sys.meta_path[:] = before
    for name in SOURCES:
        sys.modules.pop(name, None)
    linecache.clearcache()


def test_modules_are_found_whichever_python_packed_them(packed: Zip) -> None:
    part = importlib.import_module("packed_pod.part")
    assert sys.modules["packed_pod"].__path__ is not None, "a package"
    with pytest.raises(ValueError, match="pod") as raised:
        part.fail()
    shown = "".join(traceback.format_exception(raised.value))
    assert "packed_pod/part.py" in shown
    assert "raise ValueError(NAME)" in shown
    assert importlib.util.find_spec("packed_pod.nothing") is None


def test_a_replaced_archive_costs_a_traceback_its_lines_and_no_more(packed: Zip) -> None:
    compiled = f"compiled-{MAGIC_NUMBER.hex()}" in packed.files
    packed.files.clear()
    finder: Any = sys.meta_path[0]
    assert importlib.import_module("packed_pod.part").NAME == "pod", "read at the beginning"
    assert bool(finder.get_source("packed_pod.part")) is not compiled
