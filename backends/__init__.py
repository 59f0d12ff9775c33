"""Finds the backends: the folders here and the entry points of group ``sparse_attn.backends``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import entry_points
from types import ModuleType

if __name__ != "sparse_attn.backends":
    # From the root of a checkout `import backends` would make a second copy of every backend.
    raise ImportError("import sparse_attn.backends, not the checkout's backends/ folder")

from sparse_attn.registry import Impl

ENTRY_POINT_GROUP = "sparse_attn.backends"


def discover() -> tuple[list[Impl], dict[str, str]]:
    """Import every backend and collect its ``IMPLS``.

    Returns the kernels, highest priority first and then by backend name; and for each backend that
    cannot be used its name and one sentence that says why. A broken backend never raises here, and
    never disappears silently.
    """
    impls: list[Impl] = []
    broken: dict[str, str] = {}
    origins: dict[str, str] = {}
    for name, origin, load in _candidates():
        if name in origins:
            broken[f"{name} ({origin})"] = f"the name {name} is already taken by {origins[name]}"
            continue
        origins[name] = origin
        try:
            impls += _impls(name, load())
        except Exception as error:  # whatever the import ran into is the reason
            broken[name] = f"{origin} could not be loaded: {type(error).__name__}: {error}"
    return sorted(impls, key=lambda impl: (-impl.priority, impl.backend)), broken


def _candidates() -> Iterator[tuple[str, str, Callable[[], ModuleType]]]:
    for folder in pkgutil.iter_modules(__path__):
        if folder.ispkg:
            module = f"{__name__}.{folder.name}"
            yield folder.name, module, partial(importlib.import_module, module)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        yield entry.name, f"entry point {entry.value}", entry.load


def _impls(name: str, module: ModuleType) -> list[Impl]:
    impls = module.IMPLS
    for impl in impls:
        if not isinstance(impl, Impl):
            raise TypeError(f"IMPLS: expected sparse_attn.registry.Impl, got {type(impl).__name__}")
        if impl.backend != name:
            raise ValueError(
                f"IMPLS: expected backend {name!r}, the name of its folder or entry point, got {impl.backend!r}"
            )
    return list(impls)
