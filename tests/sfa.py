"""What the backend for vllm-ascend touches of it: classes with the signatures of its sources, and its caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparse_attn import load, store

HEADS, PAGE, PAGES, TOPK = 4, 128, 6, 40
LENGTHS, NEW = (150, 40, 260), (3, 1, 2)
LAYOUTS = ("bf16", "int8")


class SFAImpl:
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **kwargs: Any,
    ) -> None:
        self.scale, self.kv_lora_rank = float(scale), kwargs["kv_lora_rank"]
        self.enable_sparse_sfa_c8 = kwargs["layout"] != "bf16"
        if self.enable_sparse_sfa_c8:
            self.c8_k_cache_dtype = torch.int8 if kwargs["layout"] == "int8" else torch.float8_e4m3fn
        text = SimpleNamespace(to_dict=lambda: kwargs["model"])
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))

    def _execute_sparse_flash_attention_process(
        self,
        ql_nope: Any,
        q_pe: Any,
        kv_cache: Any,
        topk_indices: Any,
        attn_metadata: Any,
        actual_seq_lengths_query: Any,
        actual_seq_lengths_key: Any,
        block_table: Any = None,
    ) -> Any:
        raise NotImplementedError


class SFABackend:
    impl: Any = SFAImpl

    @staticmethod
    def get_name() -> str:
        return "ASCEND_SFA"

    @staticmethod
    def get_impl_cls() -> Any:
        return SFABackend.impl


def layer_of(cls: Any, layout: str, model: dict[str, Any]) -> Any:
    """A layer, made as vLLM makes it."""
    plain = (HEADS, 576, 0.07, 1, None, None, "auto", None, "decoder", None)
    return cls(*plain, kv_lora_rank=512, layout=layout, model=model)


def caches(layout: str, overlaid: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    """Planes with random rows, and the table of blocks. ``overlaid``: other planes' bytes lie between them."""

    def plane(row: int, dtype: torch.dtype) -> Tensor:
        stride = PAGE * row + (PAGE * 24 if overlaid else 0)
        return torch.zeros(PAGES * stride, dtype=dtype).as_strided((PAGES, PAGE, 1, row), (stride, row, row, 1))

    rows = torch.randn(PAGES * PAGE, 1, 576).bfloat16()
    slots = torch.arange(PAGES * PAGE)
    if layout == "int8":
        packed = plane(656, torch.int8)
        store(rows, packed.view(torch.uint8), slots, format="int8_v32")
        found: tuple[Tensor, ...] = (packed,)
    else:
        found = plane(512, torch.bfloat16), plane(64, torch.bfloat16)
        for part, elements in zip(found, rows.split([512, 64], -1), strict=True):
            store(elements.contiguous(), part, slots)
    index = plane(128, torch.bfloat16)
    return (*found, index), torch.tensor([[5, 2, 0], [1, 0, 0], [3, 0, 4]], dtype=torch.int32)


def queries(table: Tensor) -> dict[str, Any]:
    """The other arguments of the step that is replaced."""
    tokens = sum(NEW)
    topk = torch.full((tokens, 1, TOPK), -1, dtype=torch.int32)
    for row, position in enumerate(positions()):
        chosen = torch.randperm(position + 1)[:TOPK]
        topk[row, 0, : len(chosen)] = chosen.int()
    return dict(
        ql_nope=torch.randn(tokens, HEADS, 512).bfloat16(),
        q_pe=torch.randn(tokens, HEADS, 64).bfloat16(),
        topk_indices=topk,
        attn_metadata=SimpleNamespace(block_table=table),
        actual_seq_lengths_query=torch.tensor(NEW).cumsum(0).int(),
        actual_seq_lengths_key=torch.tensor(LENGTHS, dtype=torch.int32),
    )


def positions() -> list[int]:
    return [p for length, new in zip(LENGTHS, NEW, strict=True) for p in range(length - new, length)]


def expected(layout: str, cache: tuple[Tensor, ...], **q: Any) -> Tensor:
    """Attention row by row, in float32."""
    if layout == "int8":
        rows = load(cache[0].view(torch.uint8), torch.arange(PAGES * PAGE), format="int8_v32", dtype=torch.float32)
    else:
        rows = torch.cat([part.flatten(0, 1) for part in cache[:2]], -1).float()
    rows = rows.view(PAGES, PAGE, 576)
    table, queries = q["attn_metadata"].block_table, torch.cat([q["ql_nope"], q["q_pe"]], -1).float()
    sequence = [b for b, new in enumerate(NEW) for _ in range(new)]
    out = torch.zeros(len(queries), HEADS, 512)
    for row, b in enumerate(sequence):
        seen = [i for i in q["topk_indices"][row, 0].tolist() if i >= 0]
        keys = torch.stack([rows[int(table[b, i // PAGE]), i % PAGE] for i in seen])
        out[row] = (0.07 * queries[row] @ keys.T).softmax(-1) @ keys[:, :512]
    return out
