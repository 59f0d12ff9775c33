"""Where CANN's operators are found: engines and toolkits ship them under several namespaces of ``torch.ops``."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

PLUGINS = ("cann_ops_transformer", "custom_ops", "vllm_ascend.vllm_ascend_C")
"""Modules that register operators beside torch_npu's own, if they are installed."""

SFA = "npu_sparse_flash_attention"
KV_QUANT_SFA = "npu_kv_quant_sparse_flash_attention"
SMLA = "npu_sparse_flash_mla"
SMLA_METADATA = "npu_sparse_flash_mla_metadata"
INDEXER = "npu_lightning_indexer"
QUANT_INDEXER = "npu_quant_lightning_indexer"

PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    SFA: (("npu", SFA), ("_C_ascend", SFA)),
    KV_QUANT_SFA: (("npu", KV_QUANT_SFA), ("_C_ascend", KV_QUANT_SFA)),
    SMLA: (("_C_ascend", SMLA), ("cann_ops_transformer", "sparse_flash_mla"), ("custom", SMLA)),
    SMLA_METADATA: (
        ("_C_ascend", SMLA_METADATA),
        ("cann_ops_transformer", "sparse_flash_mla_metadata"),
        ("custom", SMLA_METADATA),
    ),
    INDEXER: (("npu", INDEXER), ("_C_ascend", INDEXER)),
    QUANT_INDEXER: (("npu", QUANT_INDEXER),),
}
"""Operator to (namespace, name), the first that exists is taken."""


@cache
def _load_plugins() -> None:
    for module in PLUGINS:
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module(module)


@cache
def find(operator: str) -> Callable[..., Any] | None:
    """The operator, from the first of its places that has it."""
    _load_plugins()
    for namespace, name in PLACES[operator]:
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:
            return packet
    return None


def get(operator: str) -> Callable[..., Any]:
    """The operator, which must exist."""
    found = find(operator)
    assert found is not None
    return found


def refusal(*operators: str) -> str | None:
    """Why one of ``operators`` cannot be called here, or None."""
    for operator in operators:
        if find(operator) is None:
            places = ", ".join(f"torch.ops.{namespace}.{name}" for namespace, name in PLACES[operator])
            return f"there is no operator {places}; install a torch_npu, CANN or engine plug-in that has it"
    return None
