"""Stand-ins for the modules of an engine, as far as an integration touches them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# configurations of models that they serve
V32 = dict(
    model_type="deepseek_v32",
    num_hidden_layers=3,
    num_attention_heads=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_topk=16,
    index_n_heads=64,
    index_head_dim=128,
)
LLAMA = dict(model_type="llama", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)


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
