"""What engines do with sparse layers: facts with sources, and the verdict for a model on a device. Imports no torch.

The facts were read in sources and public reports, at the versions of ``ENGINES``; none was run on the device it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..layout import FORMATS
from ..models import Model
from .devices import Device

ENGINES = {"vllm": "0.33.0", "sglang": "0.5.23", "vllm-ascend": "0.23.0", "transformers": "5.24.0"}
"""Engines, and the version that the facts are of. Some facts of vllm-ascend are of later files."""

PHASES = ("prefill", "decode")

SPARSE, DENSE, REFUSED, UNKNOWN = "sparse", "dense", "refused", "unknown"

DSA = ("deepseek-v3.2", "glm-5", "glm-5.2")
V4 = ("deepseek-v4-flash", "deepseek-v4-pro")
V41 = ("deepseek-v4.1-flash",)
M3 = ("minimax-m3",)
NVIDIA = ("sm90", "sm100")


@dataclass(frozen=True)
class Fact:
    """A verdict, for what matches; an empty field matches all.

    ``formats`` are those that the engine can keep the plane in, its default first; empty: not known. ``asked``: the
    fact is of these formats alone.
    """

    engine: str
    models: tuple[str, ...]
    families: tuple[str, ...]
    verdict: str
    reason: str
    source: str
    planes: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()

    def matches(self, engine: str, model: str, family: str, plane: str, phase: str, asked: str) -> bool:
        given = ((self.models, model), (self.families, family), (self.planes, plane), (self.phases, phase))
        return self.engine == engine and all(
            not wanted or value in wanted for wanted, value in (*given, (self.asked, asked))
        )


_VLLM, _SGLANG, _HF = (f"{name} {ENGINES[name]}" for name in ("vllm", "sglang", "transformers"))
_ISSUES = "github.com/vllm-project/vllm-ascend"
_CANN = "operator lists of vllm-ascend and CANN"

FACTS: tuple[Fact, ...] = (
    Fact("vllm", DSA, ("cpu",), REFUSED, "the CPU platform refuses sparse attention", f"{_VLLM} platforms/cpu.py"),
    Fact("vllm", V4, ("cpu",), SPARSE, "by kernels that need AMX", f"{_VLLM} models/deepseek_v4/cpu"),
    Fact(
        *("vllm", DSA, NVIDIA, SPARSE),
        "gathers pages into a bf16 workspace first; dense up to 2048 tokens, where all are selected",
        f"{_VLLM} backends/mla/flashmla_sparse.py",
        planes=("main",),
        phases=("prefill",),
        formats=("bf16", "fp8_v32"),
    ),
    Fact(
        *("vllm", DSA, NVIDIA, SPARSE),
        "FlashMLA pads a rank's query heads to 64 or 128",
        f"{_VLLM}, flashinfer/issues/3554",
        planes=("main",),
        formats=("bf16", "fp8_v32"),
    ),
    Fact(
        *("vllm", DSA, NVIDIA, SPARSE),
        "in prefill by chunks of bounded index scores",
        f"{_VLLM} layers/sparse_attn_indexer.py",
        planes=("index",),
        formats=("fp8_index_planar",),
    ),
    Fact(
        *("vllm", V4, NVIDIA, SPARSE),
        "window and entries in one call",
        f"{_VLLM} models/deepseek_v4",
        planes=("main", "window"),
        formats=("fp8_v4_planar",),
    ),
    Fact(
        *("vllm", V4, NVIDIA, SPARSE),
        "scores every visible entry",
        f"{_VLLM} models/deepseek_v4",
        planes=("index",),
        formats=("fp8_index_planar", "fp4_index_planar"),
    ),
    Fact(
        *("vllm", V41, ("sm90",), SPARSE),
        "keeps the record of V4 off SM100",
        f"{_VLLM}, vllm/pull/57523",
        planes=("main", "window"),
        formats=("fp8_v4_planar",),
    ),
    Fact(
        *("vllm", V41, ("sm100",), SPARSE),
        "in FP8 unless the mega kernel is chosen, which alone reads FP4",
        f"{_VLLM} models/deepseek_v41",
        planes=("main",),
        formats=("fp8_v41", "fp4_v41"),
    ),
    Fact(
        *("vllm", V41, ("sm100",), SPARSE),
        "window and entries in one call",
        f"{_VLLM} models/deepseek_v41",
        planes=("window",),
        formats=("fp8_v41",),
    ),
    Fact(
        *("vllm", V41, NVIDIA, SPARSE),
        "scores every visible entry: the two-level form is off by default and SM100 alone",
        f"{_VLLM} indexer_sparse_logits",
        planes=("index",),
        formats=("fp8_index_planar", "fp4_index_planar"),
    ),
    Fact(
        *("sglang", DSA, NVIDIA, SPARSE),
        "dense below 2048 tokens, a constant",
        f"{_SGLANG} SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
        planes=("main",),
        phases=("prefill",),
        formats=("bf16", "fp8_v32"),
    ),
    Fact(
        *("sglang", DSA, NVIDIA, SPARSE),
        "never dense",
        f"{_SGLANG} dsa_backend.py",
        planes=("main",),
        formats=("bf16", "fp8_v32"),
    ),
    Fact(
        *("sglang", DSA, NVIDIA, SPARSE),
        "index keys beside the cache",
        f"{_SGLANG} memory_pool.py",
        planes=("index",),
        formats=("fp8_index_planar",),
    ),
    Fact(
        *("sglang", V4, NVIDIA, SPARSE),
        "pools apart for window, ratio 4 and ratio 128",
        f"{_SGLANG} deepseek_v4_memory_pool.py",
        planes=("main", "window"),
        formats=("fp8_v4_planar",),
    ),
    Fact("sglang", V4, NVIDIA, SPARSE, "an index pool", f"{_SGLANG} deepseek_v4_memory_pool.py", planes=("index",)),
    Fact(
        *("sglang", V41, NVIDIA, SPARSE),
        "keeps the record of V4 unless told otherwise",
        f"{_SGLANG} SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
        planes=("main",),
        formats=("fp8_v4_planar", "fp8_v41", "fp4_v41"),
    ),
    Fact(
        *("sglang", V41, NVIDIA, SPARSE),
        "keeps the record of V4 unless told otherwise",
        f"{_SGLANG} SGLANG_DSV4_KV_LAYOUT",
        planes=("window",),
        formats=("fp8_v4_planar", "fp8_v41"),
    ),
    Fact(
        *("sglang", V41, ("sm90",), SPARSE),
        "scores in fp32 off SM100, where the model's are bf16: near ties are selected otherwise",
        f"{_SGLANG} v41_indexer",
        planes=("index",),
    ),
    Fact("sglang", V41, ("sm100",), SPARSE, "two levels", f"{_SGLANG} v41_indexer", planes=("index",)),
    Fact("vllm-ascend", (), ("310p",), REFUSED, "no sparse operator is built for 310P", f"{_ISSUES}/pull/13705, open"),
    Fact(
        *("vllm-ascend", DSA, ("a2", "a3"), REFUSED),
        "the bf16 operator gets an int8 cache and fails, EZ1009, though prefill works",
        f"{_ISSUES}/issues/17347",
        planes=("main",),
        phases=("decode",),
        asked=("int8_v32",),
    ),
    Fact(
        *("vllm-ascend", DSA, ("a2", "a3"), SPARSE),
        "SparseFlashAttention; int8 is experimental",
        f"{_CANN}, attention/sfa_v1.py",
        planes=("main",),
        formats=("bf16", "int8_v32"),
    ),
    Fact(
        *("vllm-ascend", DSA, ("a2", "a3"), SPARSE),
        "LightningIndexer",
        f"{_CANN}, attention/sfa_v1.py",
        planes=("index",),
        formats=("bf16", "int8_index"),
    ),
    Fact(
        *("vllm-ascend", DSA, ("950",), SPARSE),
        "operators of torch_npu",
        f"{_CANN}, device/device_op.py",
        planes=("main", "index"),
        formats=("bf16",),
    ),
    Fact(
        *("vllm-ascend", V4, ("a2",), UNKNOWN),
        "sources disagree whether SparseAttnSharedkv runs on 910B",
        _CANN,
        planes=("main", "window"),
    ),
    Fact(
        *("vllm-ascend", V4, ("a3",), SPARSE),
        "SparseAttnSharedkv",
        f"{_CANN}, attention/dsa_v1.py",
        planes=("main", "window"),
        formats=("bf16",),
    ),
    Fact(
        *("vllm-ascend", (*V4, *V41), ("a2", "a3"), SPARSE),
        "QuantLightningIndexer",
        f"{_CANN}, attention/dsa_v1.py and dsa_v41.py",
        planes=("index",),
        formats=("int8_index",),
    ),
    Fact(
        *("vllm-ascend", V4, ("950",), SPARSE),
        "KvQuantSparseAttnSharedkv",
        f"{_CANN}, attention/dsa_v1.py",
        planes=("main", "window"),
        formats=("fp8_v4_640",),
    ),
    Fact(
        *("vllm-ascend", V4, ("950",), SPARSE),
        "QuantLightningIndexer",
        f"{_CANN}, attention/dsa_v1.py",
        planes=("index",),
        formats=("fp8_index",),
    ),
    Fact(
        *("vllm-ascend", V41, ("a2", "a3"), UNKNOWN),
        "older SparseFlashMla ignores the indices at ratios 1 and 2, silently: ask the operator a known answer",
        f"{_CANN}, field notes on dsa_v41.py",
        planes=("main",),
        formats=("bf16",),
    ),
    Fact(
        *("vllm-ascend", V41, ("a2", "a3"), SPARSE),
        "SparseFlashMla",
        f"{_CANN}, attention/dsa_v41.py",
        planes=("window",),
        formats=("bf16",),
    ),
    Fact(
        *("vllm-ascend", V41, ("950",), SPARSE),
        "FP4 with bf16 scales: not interchangeable with other caches of V4.1",
        f"{_CANN}, ops/dsv41_a5",
        planes=("main", "window"),
    ),
    Fact(
        *("vllm-ascend", V41, ("950",), SPARSE),
        "MXFP4 keys",
        f"{_CANN}, ops/dsv41_a5",
        planes=("index",),
        formats=("fp4_index",),
    ),
    Fact(
        *("vllm-ascend", M3, ("a2", "a3", "950"), SPARSE),
        "npu_sparse_attention_score",
        f"{_CANN}, models/minimax_m3",
        planes=("main",),
        formats=("bf16",),
    ),
    Fact("transformers", V41, (), REFUSED, "has no such model", _HF),
    Fact(
        *("transformers", (*DSA, *V4, *M3), (), DENSE),
        "eager and sdpa compute every pair and mask those not selected",
        f"{_HF}, transformers/pull/41251",
        planes=("main", "window"),
        formats=("bf16", "fp16", "fp32"),
    ),
    Fact(
        *("transformers", (*DSA, *V4, *M3), (), SPARSE),
        "scores, but its selection is only a mask",
        _HF,
        planes=("index",),
        formats=("bf16", "fp16", "fp32"),
    ),
)


@dataclass(frozen=True)
class Verdict:
    """Of one kind of plane in one phase: how its sparse layers run, in which format (empty: unknown), and why."""

    phase: str
    plane: str
    layers: int
    verdict: str
    format: str
    reason: str
    source: str


def verdicts(model: Model, engine: str, device: Device, formats: Mapping[str, str] | None = None) -> list[Verdict]:
    """A verdict for each phase and each kind of plane that layers with a selection read.

    ``formats`` asks for formats by kind of plane. Raises ValueError for an unknown engine, and for formats that do not
    fit the model.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    model.bytes_per_token(formats)
    asked = formats or {}
    layers = [layer for layer in model.layers if layer.selection is not None]
    found = []
    for phase in PHASES:
        for kind in ("main", "window", "index"):
            reading = sum(kind in layer.reads for layer in layers)
            if reading:
                found.append(_verdict(model, engine, device, phase, kind, reading, asked.get(kind, "")))
    return found


def _verdict(model: Model, engine: str, device: Device, phase: str, kind: str, layers: int, asked: str) -> Verdict:
    fact = next((f for f in FACTS if f.matches(engine, model.name, device.family, kind, phase, asked)), None)
    if fact is None:
        return Verdict(phase, kind, layers, UNKNOWN, "", "no fact on record", "none")
    kept = next((name for name in fact.formats if not asked or _alike(name, asked)), "")
    if asked and fact.formats and not kept:
        reason = f"keeps this plane in {' or '.join(fact.formats)}, not in {asked}"
        return Verdict(phase, kind, layers, REFUSED, "", reason, fact.source)
    return Verdict(phase, kind, layers, fact.verdict, kept, fact.reason, fact.source)


def _alike(one: str, other: str) -> bool:
    """Whether two formats hold the same numbers, in whatever order."""
    return FORMATS[one].codec == FORMATS[other].codec
