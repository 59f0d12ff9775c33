"""What each operator takes, as data: its limits with the source of each. Nothing here has run on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from sparse_attn import layout
from sparse_attn.registry import Between, Impl, Limit, OneOf

from . import (
    attend,
    compress,
    indexer,
    merge,
    move,
    operators,
    select,
    selfcheck,
    soc,
    sparse_flash,
    sparse_mla,
    workspace,
)

ARCH22, ARCH35 = ("A2", "A3"), ("950",)
INT32 = (1 << 31) - 1

DOCS = "op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-{}.md"
SFA_DOC = DOCS.format(operators.SFA)
KV_QUANT_DOC = DOCS.format(operators.KV_QUANT_SFA)
OURS = "this package: {}"

Sourced = Mapping[str, tuple[Limit, str]]
"""Fact to its limit, and where the limit comes from."""

TOLERANCE = {
    "attend": {"float32": (2e-5, 2e-5), "bfloat16": (1e-2, 1e-2), "float16": (1e-3, 1e-3)},
    # with int8 queries: the product of weight and scale is rounded to float16
    "select": {**dict.fromkeys(("float32", "bfloat16", "float16"), (4e-6, 4e-6)), "int8": (1e-3, 1e-3)},
    "merge": {"float32": (4e-6, 4e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)},
    "compress": {"float32": (4e-6, 4e-6), "bfloat16": (8e-3, 8e-3), "float16": (1e-3, 1e-3)},
}


PLANS: dict[Callable[..., None], Callable[..., None]] = {
    sparse_mla.window_ratio_0: sparse_mla.plan_window_ratio_0,
    sparse_mla.window_ratio_1: sparse_mla.plan_window_ratio_1,
    sparse_mla.compressed: sparse_mla.plan_compressed,
}
"""What makes the plan of a step, for the operators that want one."""


@dataclass(frozen=True)
class Kernel:
    """One operator of CANN behind one op, on some families of chips."""

    op: str
    operators: tuple[str, ...]
    families: tuple[str, ...]
    form: str
    """Which calls it is for, in words."""
    limits: Sourced
    run: Callable[..., None]
    check: Callable[[Callable[..., None]], str | None] | None = None
    priority: int = 20

    @property
    def variant(self) -> str:
        return f"{self.form}, {'/'.join(self.families)}"

    def available(self) -> str | None:
        """Why this machine cannot run it: the chip, the operator, or a wrong answer to what is known."""
        missing = soc.refusal(self.families) or operators.refusal(*self.operators)
        return missing or (self.check(self.run) if self.check else None)

    def impl(self) -> Impl:
        limits = {"device": OneOf(("npu",))} | {fact: limit for fact, (limit, _) in self.limits.items()}
        dtypes, _ = self.limits.get("dtype", (None, ""))
        errors = TOLERANCE.get(self.op, {})
        tolerance = {name: error for name, error in errors.items() if dtypes is None or dtypes.admits(name)}
        return Impl(
            self.op,
            "ascend_npu",
            limits,
            self.run,
            tolerance,
            self.priority,
            partial(Kernel.available, self),
            self.variant,
            PLANS.get(self.run),
        )


PAGING: Sourced = {
    "page_size": (Between(16, 1024, 16), SFA_DOC),
    "kv_reach": (
        Between(0, INT32),
        "vllm-ascend pull request 16824: an A3 operator multiplied page and stride in 32 bits; this one may too",
    ),
}

LATENT: Sourced = {
    "dtype": (OneOf(("bfloat16",)), f"{SFA_DOC}: queries and rows have one type"),
    "planes": (OneOf(("main",)), SFA_DOC),
    "v_format": (OneOf(("",)), f"{SFA_DOC}: values are the keys' first part"),
    "q_heads": (Between(1, 128), f"{SFA_DOC}: powers of two, to which heads are padded"),
    "kv_heads": (OneOf((1,)), SFA_DOC),
    "qk_dim": (OneOf((576,)), SFA_DOC),
    "v_dim": (OneOf((512,)), SFA_DOC),
    "ratio": (OneOf((1,)), SFA_DOC),
    "index_heads": (OneOf((1,)), f"{SFA_DOC}: one list a row; it needs a list"),
    "selected": (Between(0, 2048), "vllm-ascend sfa_v1.py: the only width in use"),
    "select_block": (OneOf((1,)), f"{SFA_DOC}: on 950; blocks elsewhere are unused by engines, and not checked"),
    "kv_range": (OneOf((False,)), SFA_DOC),
    "sinks": (OneOf((False,)), f"{SFA_DOC}: no such argument, and no LSE to apply one afterwards"),
    "lse": (OneOf((False,)), f"{SFA_DOC}: not with pages"),
    "batch_invariant": (OneOf((False,)), OURS.format("nothing says that it is")),
    **PAGING,
}

BF16_ROWS: Sourced = {
    "format": (OneOf(("bf16",)), SFA_DOC),
    "rope_dim": (OneOf((64,)), f"{SFA_DOC}: apart from the row"),
    "kv_strides": (OneOf(("contiguous",)), f"{SFA_DOC}: torch_npu would copy any other plane whole"),
}

INT8_ROWS: Sourced = {
    "format": (OneOf(("int8_v32",)), KV_QUANT_DOC),
    "rope_dim": (OneOf((0,)), f"{KV_QUANT_DOC}: in the row"),
}

SMLA_DOC = "CANN ops-transformer, attention/sparse_flash_mla, aclnnSparseFlashMla.md"
RATIO_DOC = "CANN ops-transformer, attention/sparse_flash_mla, note on compression ratios 1 and 2 for A2 and A3"
SMLA = (operators.SMLA, operators.SMLA_METADATA)
STRIDES = (
    OneOf(("contiguous", "pages")),
    "vllm-ascend dsa_v41.py passes pages of a larger pool; the operator takes the page stride from the tensor",
)

WINDOWED: Sourced = {
    "dtype": (OneOf(("bfloat16",)), f"{SMLA_DOC}: queries and rows have one type"),
    "win_format": (OneOf(("bf16",)), SMLA_DOC),
    "v_format": (OneOf(("",)), f"{SMLA_DOC}: keys are values"),
    "q_heads": (Between(1, 128), f"{SMLA_DOC}: powers of two (950: from 2), to which heads are padded"),
    "kv_heads": (OneOf((1,)), SMLA_DOC),
    "qk_dim": (OneOf((512,)), SMLA_DOC),
    "v_dim": (OneOf((512,)), SMLA_DOC),
    "select_block": (OneOf((1,)), SMLA_DOC),
    "win_strides": STRIDES,
    "win_reach": PAGING["kv_reach"],
    "win_range": (OneOf((False,)), SMLA_DOC),
    "win_indices": (OneOf((0,)), f"{SMLA_DOC}: reserved"),
    "lse": (OneOf((False,)), f"{SMLA_DOC} writes it without the sink, the sum begins with it: not verified"),
    "causal": (OneOf((True,)), SMLA_DOC),
    "batch_invariant": (OneOf((False,)), OURS.format("nothing says that it is")),
}
WINDOWED22: Sourced = {
    **WINDOWED,
    "window": (OneOf((128,)), f"{SMLA_DOC}: oriWinLeft is 127"),
    "win_page_size": (Between(16, 1024, 16), SMLA_DOC),
}
WINDOWED35: Sourced = {
    **WINDOWED,
    "window": (Between(1, INT32), SMLA_DOC),
    "win_page_size": (Between(1, 1024), SMLA_DOC),
}
ALONE: Sourced = {"planes": (OneOf(("window",)), SMLA_DOC)}
COMPRESSED: Sourced = {
    "planes": (OneOf(("main+window",)), SMLA_DOC),
    "format": (OneOf(("bf16",)), SMLA_DOC),
    "rope_dim": (OneOf((0,)), f"{SMLA_DOC}: in the row"),
    "kv_strides": STRIDES,
    "kv_reach": PAGING["kv_reach"],
    "kv_range": (OneOf((False,)), SMLA_DOC),
}
PAGES22: Sourced = {"page_size": (Between(16, 1024, 16), SMLA_DOC)}
PAGES35: Sourced = {"page_size": (Between(1, 1024), SMLA_DOC)}
ALL: Sourced = {"index_heads": (OneOf((0,)), f"{SMLA_DOC}: HCA")}
SOME: Sourced = {
    "index_heads": (OneOf((1,)), f"{SMLA_DOC}: CSA"),
    "selected": (Between(0, 1024), f"{SMLA_DOC}: 512 or 1024, to which lists are padded"),
}


def _ratios(ratios: OneOf | Between, source: str) -> Sourced:
    return {"ratio": (ratios, source)}


def _both(*checks: Callable[[Callable[..., None]], str | None]) -> Callable[[Callable[..., None]], str | None]:
    """The first complaint of several checks."""
    return lambda run: next((complaint for check in checks if (complaint := check(run))), None)


def _selected(*ratios: int) -> Callable[[Callable[..., None]], str | None]:
    return _both(*(partial(selfcheck.selected, ratio) for ratio in ratios))


INDEXER_DOC = DOCS.format(operators.INDEXER)
NO = OneOf((False,))
ONE = OneOf((1,))

INDEXED: Sourced = {
    "dtype": (OneOf(("bfloat16",)), f"{INDEXER_DOC}: queries and keys have one type"),
    "format": (OneOf(("bf16",)), INDEXER_DOC),
    "q_heads": (Between(1, 64), f"{INDEXER_DOC}: 8, 16, 24, 32 or 64, to which heads of weight 0 are added"),
    "key_heads": (ONE, INDEXER_DOC),
    "out_heads": (ONE, INDEXER_DOC),
    "dim": (OneOf((128,)), INDEXER_DOC),
    "page_size": (Between(16, 1024, 16), INDEXER_DOC),
    "key_strides": (OneOf(("contiguous",)), f"{INDEXER_DOC}: torch_npu would copy any other plane whole"),
    "key_reach": PAGING["kv_reach"],
    "kv_range": (NO, INDEXER_DOC),
    "ratio": (ONE, INDEXER_DOC),
    "strides": (ONE, INDEXER_DOC),
    "bounds": (NO, INDEXER_DOC),
    "score": (OneOf(("relu_sum",)), INDEXER_DOC),
    "score_dtype": (OneOf(("fp32",)), OURS.format("nothing says how the operator rounds")),
    "block": (ONE, INDEXER_DOC),
    "k": (Between(0, 2048), f"{INDEXER_DOC}: and multiples of 1024 to 8192"),
    "row_k": (NO, INDEXER_DOC),
    "kept": (OneOf((0,)), INDEXER_DOC),
    "tail": (OneOf(("none",)), INDEXER_DOC),
    "candidates": (OneOf(("none",)), INDEXER_DOC),
    "ties": (OneOf(("any",)), OURS.format("nothing says which of equal scores the operator takes")),
    "order": (OneOf(("any",)), OURS.format("nothing says in which order equal scores come")),
    "values": (NO, f"{INDEXER_DOC}: not with pages"),
}

QUANT_INDEXER_DOC = DOCS.format(operators.QUANT_INDEXER)
QUANT_INDEXED: Sourced = {
    fact: (limit, source.replace(INDEXER_DOC, QUANT_INDEXER_DOC)) for fact, (limit, source) in INDEXED.items()
} | {
    "dtype": (OneOf(("int8",)), f"{QUANT_INDEXER_DOC}: of queries, with scales; 8-bit floats on 950 alone: not tried"),
    "format": (OneOf(("int8_index_h",)), f"{QUANT_INDEXER_DOC}: scales of keys apart"),
    "key_strides": (
        OneOf(("contiguous",)),
        OURS.format("whether torch_npu would copy another plane whole is not known"),
    ),
    "k": (Between(0, 2048), QUANT_INDEXER_DOC),
    "values": (NO, QUANT_INDEXER_DOC),
}

INVARIANT = {"batch_invariant": (NO, OURS.format("nothing says how the device multiplies batches of matrices"))}


def _of_dim(*dims: int) -> tuple[str, ...]:
    """Formats of KV rows that may have one of these numbers of elements, but for floats that bf16 would round."""
    fine = (f for f in layout.names("kv") if f not in ("fp32", "fp16"))
    return tuple(f for f in fine if layout.FORMATS[f].dim in (0, *dims))


def _gathered(kernel: Kernel, run: Callable[..., None], limits: Sourced) -> Kernel:
    """The kernel of the same operator on rows that were gathered first: wherever they lie, and in any format."""
    lie = ("page_size", "strides", "reach", "format", "rope_dim")
    kept = {fact: limit for fact, limit in kernel.limits.items() if not fact.endswith(lie)}
    form = f"{kernel.form}, rows gathered first"
    check = kernel.check
    checks = (selfcheck.known_bytes, check) if check else (selfcheck.known_bytes,)
    return replace(
        kernel, form=form, limits={**kept, **limits}, run=run, check=_both(*checks), priority=kernel.priority - 10
    )


READ = OURS.format("read into a workspace of bf16 rows")
GATHERED_LATENT: Sourced = {
    "format": (OneOf(_of_dim(576)), READ),
    "rope_dim": (OneOf((0, 64)), READ),
    "kv_range": (OneOf((False, True)), OURS.format("what is outside is not gathered")),
}
GATHERED_WINDOW: Sourced = {
    "format": (OneOf(("", *_of_dim(512))), READ),
    "win_format": (OneOf(tuple(f for f in _of_dim(512) if not layout.FORMATS[f].scale_dtype)), READ),
    "rope_dim": (OneOf((0,)), READ),
    "window": (Between(1, 1024), OURS.format("it is gathered for each query row")),
}

OPERATORS = (
    Kernel(
        "attend",
        (operators.SFA,),
        ARCH22 + ARCH35,
        "bf16 latent rows",
        {**LATENT, **BF16_ROWS},
        sparse_flash.sparse_flash_attention,
        selfcheck.sparse_flash,
    ),
    Kernel(
        "attend",
        (operators.KV_QUANT_SFA,),
        ARCH22,
        "int8 latent rows",
        {
            **LATENT,
            **INT8_ROWS,
            "kv_strides": (OneOf(("contiguous",)), f"{KV_QUANT_DOC}: torch_npu would copy any other plane whole"),
        },
        sparse_flash.kv_quant_sparse_flash_attention,
        selfcheck.kv_quant_sparse_flash,
    ),
    Kernel(
        "attend",
        (operators.KV_QUANT_SFA,),
        ARCH35,
        "int8 latent rows",
        {
            **LATENT,
            **INT8_ROWS,
            "kv_strides": (OneOf(("contiguous", "pages")), f"{KV_QUANT_DOC}: pages may lie apart"),
        },
        sparse_flash.kv_quant_sparse_flash_attention,
        selfcheck.kv_quant_sparse_flash,
    ),
    Kernel(
        "attend",
        SMLA,
        ARCH22,
        "window",
        {**WINDOWED22, **ALONE},
        sparse_mla.window_ratio_0,
        selfcheck.window,
    ),
    Kernel(
        "attend",
        SMLA,
        ARCH22,
        "window, operator before V4.1",
        {**WINDOWED22, **ALONE},
        sparse_mla.window_ratio_1,
        selfcheck.window,
        priority=19,
    ),
    Kernel(
        "attend",
        SMLA,
        ARCH22,
        "window and a selection",
        {**WINDOWED22, **COMPRESSED, **PAGES22, **SOME, **_ratios(OneOf((4,)), SMLA_DOC)},
        sparse_mla.compressed,
        _selected(4),
    ),
    Kernel(
        "attend",
        SMLA,
        ARCH22,
        "window and a selection, V4.1",
        {**WINDOWED22, **COMPRESSED, **PAGES22, **SOME, **_ratios(OneOf((1, 2)), RATIO_DOC)},
        sparse_mla.compressed,
        _selected(1, 2),
    ),
    Kernel(
        "attend",
        SMLA,
        ARCH22,
        "window and all compressed",
        {**WINDOWED22, **COMPRESSED, **PAGES22, **ALL, **_ratios(OneOf((128,)), SMLA_DOC)},
        sparse_mla.compressed,
        selfcheck.all_compressed,
    ),
    Kernel(
        "attend",
        SMLA,
        ARCH35,
        "window",
        {**WINDOWED35, **ALONE},
        sparse_mla.window_ratio_1,
        selfcheck.window,
    ),
    Kernel(
        "attend",
        SMLA,
        ARCH35,
        "window and a selection",
        {**WINDOWED35, **COMPRESSED, **PAGES35, **SOME, **_ratios(Between(1, 128), SMLA_DOC)},
        sparse_mla.compressed,
        _selected(1, 2, 4),
    ),
    Kernel(
        "attend",
        SMLA,
        ARCH35,
        "window and all compressed",
        {**WINDOWED35, **COMPRESSED, **PAGES35, **ALL, **_ratios(Between(1, 128), SMLA_DOC)},
        sparse_mla.compressed,
        selfcheck.all_compressed,
    ),
    Kernel(
        "select",
        (operators.QUANT_INDEXER,),
        ARCH22 + ARCH35,
        "lightning indexer, int8 queries and keys",
        QUANT_INDEXED,
        indexer.quant_lightning_indexer,
        selfcheck.quant_lightning_indexer,
    ),
    Kernel(
        "select",
        (operators.INDEXER,),
        ARCH22,
        "lightning indexer",
        {**INDEXED, "weights": (OneOf(("bfloat16", "float32")), INDEXER_DOC)},
        indexer.lightning_indexer,
        selfcheck.lightning_indexer,
    ),
    Kernel(
        "select",
        (operators.INDEXER,),
        ARCH35,
        "lightning indexer",
        {**INDEXED, "weights": (OneOf(("bfloat16",)), INDEXER_DOC)},
        indexer.lightning_indexer,
        selfcheck.lightning_indexer,
    ),
)

GATHERED = tuple(
    _gathered(kernel, partial(workspace.windowed, kernel.run), GATHERED_WINDOW)
    if kernel.operators == SMLA
    else _gathered(kernel, workspace.latent, GATHERED_LATENT)
    for kernel in OPERATORS
    if kernel.operators == SMLA and kernel.form != "window and all compressed" or kernel.operators == (operators.SFA,)
)

ENTRIES: Sourced = {
    "strides": (ONE, OURS.format("no pooled units here")),
    "bounds": (NO, OURS.format("no bounds of keys here")),
    "block": (ONE, OURS.format("no pooled units here")),
    "score": (OneOf(("relu_sum", "dot", "max")), OURS.format("no probabilities here")),
}
ANY_CALL = "any call"
OWN = (
    Kernel("attend", (), ARCH22 + ARCH35, ANY_CALL, INVARIANT, attend.attend, selfcheck.any_call, priority=1),
    Kernel("select", (), ARCH22 + ARCH35, "entries", ENTRIES, select.select, selfcheck.lightning_indexer, priority=1),
    Kernel("store", (), ARCH22 + ARCH35, ANY_CALL, {}, move.store, selfcheck.known_bytes, priority=1),
    Kernel("load", (), ARCH22 + ARCH35, ANY_CALL, {}, move.load, selfcheck.known_bytes, priority=1),
    Kernel("convert", (), ARCH22 + ARCH35, ANY_CALL, {}, move.convert, selfcheck.known_bytes, priority=1),
    Kernel("compress", (), ARCH22 + ARCH35, ANY_CALL, {}, compress.compress, selfcheck.entries, priority=1),
    Kernel("merge", (), ARCH22 + ARCH35, ANY_CALL, {}, merge.merge, priority=1),
    Kernel("select_merge", (), ARCH22 + ARCH35, ANY_CALL, {}, merge.select_merge, priority=1),
)
"""By torch's own operations; those of other backends for the same device come first."""

KERNELS = (*OPERATORS, *GATHERED, *OWN)

REFUSED = (
    (
        "`attend`",
        "batch invariance",
        "nothing says that an operator, or a product of matrices, has it; `ascend_triton` takes such calls",
    ),
    ("`select`", "pooled units, bounds of keys, probabilities", "no kernel here; `ascend_triton` takes such calls"),
)
"""Op, calls, and why no kernel here takes them on any chip."""

UNUSED = (
    (
        "`npu_sparse_attn_sharedkv`",
        "by its source it attends to columns that it never wrote where a row selects fewer than it might",
    ),
    (
        "`npu_fused_infer_attention_score`",
        "takes lengths as lists of the host: making them would wait for the device",
    ),
    (
        "`npu_block_sparse_attention`, NSA's operators",
        "the first has no pages, the others take lists of the host",
    ),
    (
        "`npu_sparse_attention_score`, generic block-sparse attention",
        "what they do with a block that is visible in part is not documented",
    ),
    (
        "`npu_quant_lightning_indexer_v2`, `_v3`, `npu_vllm_quant_lightning_indexer`",
        "for compressed keys and candidates: their documents were not at hand; what is known of them from callers says "
        "neither which block is kept of the newest entries, nor how scores are rounded before blocks are compared",
    ),
    (
        "`npu_kv_quant_sparse_attn_sharedkv`, `mixed_quant_sparse_flash_mla` (950)",
        "read fp8 rows of V4 in orders that `fp8_v4_640`, `fp8_v4_608` and `fp8_v4` have; their schemas are known from "
        "notes in part only. For V4.1 their writer keeps bf16 scales, which are not the bytes of `fp4_v41`",
    ),
    (
        "FlashMLA and DeepSelect for 950",
        "want physical slots, 64 heads, and 640 selected; they trap on NaN. Not tried",
    ),
    (
        "`compressor`",
        "projects the hidden states itself, by weights that `compress` is not given, and returns bf16 rows with their "
        "rotation done: those before it, of which V4.1's index keys are made, are lost",
    ),
    (
        "`npu_scatter_pa_kv_cache`, `kv_compress_epilog`",
        "write other bytes than the formats here say",
    ),
)
"""Operators of CANN that no kernel here calls, and why."""
