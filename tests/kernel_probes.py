"""A process that forks for each line of its input, ``module probe...``, and answers with the exit status.

A fork has what takes long to import, and nothing of ours: the module takes the place of the built one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys


def serve() -> tuple[str, list[str]]:
    """In a fork, the module and the probes of its line."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            module, *probes = line.split()
            return module, probes
        print(os.waitpid(child, 0)[1], flush=True)
    raise SystemExit


def take_place(path: str) -> None:
    loader = importlib.machinery.ExtensionFileLoader("sparse_attn._cpu_native", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    loader.exec_module(sys.modules[loader.name])


if __name__ == "__main__":
    module, probes = serve()
    take_place(module)
    from test_kernel_mutations import PROBES

    for name in probes:
        PROBES[name]()
