"""How runner.pyz begins: the modules that the packing Python compiled are read at once, and found without a search.

Becomes the archive's __main__. A Python that cannot use them finds the sources, by the interpreter's own means.
"""

from __future__ import annotations

import sys
from importlib.util import MAGIC_NUMBER, spec_from_loader
from marshal import loads

# Of typing's own, as type checkers know it: loading that takes as long as all of this.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Dict, Optional, Tuple
    from zipimport import zipimporter


class Compiled:
    """Finds and loads modules by name → (is a package, marshalled code)."""

    def __init__(self, modules: Dict[str, Tuple[bool, bytes]], archive: zipimporter) -> None:
        self._modules, self._archive = modules, archive

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Optional[ModuleSpec]:
        if name not in self._modules:
            return None
        return spec_from_loader(name, self, is_package=self._modules[name][0])  # type: ignore[arg-type]

    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(loads(self._modules[module.__name__][1]), module.__dict__)  # noqa: S102, S302 - as every import does

    def get_source(self, name: str) -> str:
        """For tracebacks."""
        path = name.replace(".", "/") + ("/__init__.py" if self._modules[name][0] else ".py")
        return self._archive.get_data(path).decode()


def begin(archive: zipimporter) -> None:
    try:
        modules = loads(archive.get_data(f"compiled-{MAGIC_NUMBER.hex()}"))  # noqa: S302 - of the file that we are
    except OSError:
        return
    sys.meta_path.insert(0, Compiled(modules, archive))


if __name__ == "__main__":
    begin(__loader__)  # type: ignore[name-defined]
    from slurmlet.entrypoint.main import main

    sys.exit(main())
