"""The interfaces of the vLLM that is installed are those that the integration is written to. Starts no engine, so that
it also runs on vLLM's build without a device (``VLLM_TARGET_DEVICE=empty``)."""

from __future__ import annotations

import importlib.util
import inspect
from importlib import import_module
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: `make test-engines` makes an environment with it", allow_module_level=True)

PACKAGE = "sparse_attn.integrations.vllm"
CLASSES = ("attention.SparseAttnBackend", "attention.SparseAttnImpl", "attention.StepBuilder")
CLASSES += ("latent.SparseLatentBackend", "latent.SparseLatentImpl", "indexer.IndexCache", "indexer.LatentAttention")
CLASSES += ("platform.Choice", "scheduler.SparseAttnScheduler")


def found(path: str) -> Any:
    module, name = path.split(".")
    return getattr(import_module(f"{PACKAGE}.{module}"), name)


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@pytest.mark.parametrize("path", CLASSES)
def test_what_a_class_overrides_takes_what_vllm_passes(path: str) -> None:
    cls = found(path)
    theirs = next(base for base in cls.__mro__ if base.__module__.startswith("vllm."))
    compared = 0
    for name, ours in vars(cls).items():
        overridden = getattr(theirs, name, None)
        if name.startswith("__") and name != "__init__" or not callable(overridden) or isinstance(ours, type):
            continue
        mine, wanted = parameters(getattr(cls, name)), parameters(overridden)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in mine.values())
        missing = [p for p in wanted if p not in mine and p not in ("args", "kwargs")]
        assert open_ended or not missing, f"{path}.{name} lacks {missing}"
        compared += 1
    assert compared


def test_what_else_is_used_is_there() -> None:
    from vllm.config.attention import AttentionConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

    assert "CUSTOM" in AttentionBackendEnum.__members__
    fields = {"use_mla", "use_sparse", "kv_cache_dtype", "dtype"}
    assert fields <= set(AttentionSelectorConfig._fields)
    assert "indexer_kv_dtype" in AttentionConfig.__dataclass_fields__
    step = {
        "query_start_loc",
        "seq_lens",
        "block_table_tensor",
        "slot_mapping",
        "max_query_len",
        "max_seq_len",
        "causal",
    }
    assert step <= set(CommonAttentionMetadata.__dataclass_fields__)
    assert "num_new_computed_tokens" in parameters(KVCacheManager.allocate_slots)
    assert {"finished_req_ids", "num_scheduled_tokens"} <= set(SchedulerOutput.__dataclass_fields__)
    validated = set(parameters(found("attention.SparseAttnBackend").validate_configuration))
    assert set(AttentionSelectorConfig._fields) <= validated
