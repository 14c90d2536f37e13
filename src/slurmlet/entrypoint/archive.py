"""How runner.pyz begins: all modules are read at once, and found without a search.

Becomes the archive's __main__. Another Python than the one that packed it takes the sources instead of what was compiled.
Nothing is left to be read later: `slurmlet up` of a newer version replaces the file while runners of the old one go on, and
a module that is imported late must be of the same version as its neighbours.
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


class Modules:
    """Finds and loads modules by name → (is a package, marshalled code, or source where nothing was compiled for us)."""

    def __init__(
        self, modules: Dict[str, Tuple[bool, bytes]], archive: zipimporter, *, compiled: bool
    ) -> None:
        self._modules, self._archive, self._compiled = modules, archive, compiled

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Optional[ModuleSpec]:
        if name not in self._modules:
            return None
        return spec_from_loader(name, self, is_package=self._modules[name][0])  # type: ignore[arg-type]

    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        is_package, content = self._modules[module.__name__]
        if self._compiled:
            code = loads(content)  # noqa: S302 - of the file that we are
        else:
            code = compile(content, _path(module.__name__, is_package), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102 - as every import does

    def get_source(self, name: str) -> str:
        """For tracebacks."""
        is_package, content = self._modules[name]
        try:
            return (self._archive.get_data(_path(name, is_package)) if self._compiled else content).decode()
        except (OSError, ImportError, ValueError):
            # The file was replaced meanwhile.
            return ""


def _path(name: str, is_package: bool) -> str:
    return name.replace(".", "/") + ("/__init__.py" if is_package else ".py")


def begin(archive: zipimporter) -> None:
    try:
        modules = loads(archive.get_data(f"compiled-{MAGIC_NUMBER.hex()}"))  # noqa: S302 - of the file that we are
        compiled = True
    except OSError:
        names = loads(archive.get_data("modules"))  # noqa: S302
        modules = {
            name: (is_package, archive.get_data(_path(name, is_package))) for name, is_package in names
        }
        compiled = False
    sys.meta_path.insert(0, Modules(modules, archive, compiled=compiled))


if __name__ == "__main__":
    begin(__loader__)  # type: ignore[name-defined]
    from slurmlet.entrypoint.main import main

    sys.exit(main())
