"""Stand-ins for the modules of an engine, as far as an integration touches them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def engine(modules: dict[str, dict[str, Any]], forget: str) -> Iterator[None]:
    """These modules, and their parents, in the place of what is installed. What the package has imported of itself
    under ``forget`` is imported anew in between, and forgotten after."""

    def ours() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.split(forget)[0] == "" or name == forget}

    parents = {name.rsplit(".", n)[0] for name in modules for n in range(1, name.count(".") + 1)}
    names = sorted({*modules, *parents})
    saved = {name: sys.modules.get(name) for name in names} | ours()
    try:
        for name in ours():
            del sys.modules[name]
        for name in names:
            module = ModuleType(name)
            vars(module).update(modules.get(name, {}))
            sys.modules[name] = module
        yield
    finally:
        for name in ours():
            del sys.modules[name]
        for name, module in saved.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
