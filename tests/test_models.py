"""Layer plans: published byte counts and sharing, the configurations of transformers, and the page in docs."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from selections import lines

import sparse_attn
from sparse_attn import layout
from sparse_attn.models import BF16, METHODS, PRESETS, Layer, Model, Plane, dense, gqa, shard, sparse

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
MIB = 2**20
V32, V4, PRO, V41 = (PRESETS[f"deepseek-{v}"] for v in ("v3.2", "v4-flash", "v4-pro", "v4.1-flash"))
GLM52, M3 = PRESETS["glm-5.2"], PRESETS["minimax-m3"]
FP8_INDEX = {"index": "fp8_index"}


def per_token(model: Model, formats: dict[str, str] | None = None) -> float:
    return sum(model.bytes_per_token(formats).values())


def fixed(model: Model, formats: dict[str, str] | None = None) -> int:
    return sum(model.fixed_bytes(formats).values())


# --- Published figures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "formats", "expected"),
    [
        # DeepSeek-V4.1 paper (2609.19969) and model card: 890 bytes a token
        (V41, {}, 890),
        # vLLM issue 56893: records of 528 bytes for the compressed plane too
        (V41, {"main": "fp8_v41"}, 1490),
        # fastllm, its page on V4.1: BF16 3200, FP8 1650, FP4 890
        (V41, BF16, 3200),
        (V41, {"main": "fp8_v41", "index": "fp8_index"}, 1650),
        # vLLM PR 57523: V4's records of 584 bytes kept outside of SM100; 2.5 * (584 + 68)
        (V41, {"main": "fp8_v4"}, 1630),
        # vllm-ascend on A2 and A3: BF16 rows, INT8 index keys; 2.5 * (1024 + 130)
        (V41, BF16 | {"index": "int8_index"}, 2885),
        # DeepSeek-V4: 584-byte records (FlashMLA), 68 or 132 bytes an index key (DeepGEMM)
        (V4, {}, 3514),
        (V4, FP8_INDEX, 3850),
        (V4, BF16, 6880),
        (V4, BF16 | {"index": "int8_index"}, 6218),
        (PRO, {}, 5031),
        (PRO, FP8_INDEX, 5511),
        (PRO, BF16, 9848),
        # DeepSeek-V3.2: 656-byte records (FlashMLA), 132 bytes an index key
        (V32, {}, 48068),
        (V32, BF16, 85888),
        # (78 * 576 + 21 * 128) * 2, as two ports of GLM-5.2 count it
        (GLM52, BF16, 95232),
        # (2 * 8 * 128 * 2) * 95: DeepSeek 67B, of which V4.1's card says 437 times
        (gqa("deepseek-67b", 95, 64, 8, 128), {}, 389120),
    ],
)
def test_bytes_of_a_token(model: Model, formats: dict[str, str], expected: int) -> None:
    assert round(per_token(model, formats)) == expected


def test_v41_is_437_times_smaller_than_67b() -> None:
    """DeepSeek-V4.1-Flash, model card."""
    assert round(per_token(gqa("deepseek-67b", 95, 64, 8, 128)) / per_token(V41)) == 437


def test_index_planes_of_glm52() -> None:
    """ik_llama.cpp PR 2093: the index cache of 128K tokens in f16, 2.5 GiB in all layers, 672 MiB in the full ones."""
    tokens = 128 * 1024
    assert GLM52.bytes_per_token(BF16)["index"] * tokens == 672 * MIB
    assert PRESETS["glm-5"].bytes_per_token(BF16)["index"] * tokens == pytest.approx(2.5 * 1024 * MIB, rel=0.03)


def test_page_of_minimax_m3() -> None:
    """tokenspeed PR 758: 5,799,936 bytes for 128 tokens on one of 4 ranks; the index keys are not split."""
    size = M3.bytes_per_token()
    assert (size["main"] / 4 + size["index"]) * 128 == 5_799_936


@pytest.mark.parametrize(
    ("model", "formats", "window", "state"),
    [
        # windows in MiB: 40 * 128 * 528 and 43 * 128 * 584 bytes; states in KiB: kv_state and score_state, fp32, of
        # DeepSeek's inference code, [8, 1024] and [8, 256] at ratio 4, [128, 512] at ratio 128; one token of V4.1
        (V41, {}, 2.58, 3 * 4),
        (V4, {}, 3.07, 21 * (64 + 16) + 20 * 512),
        (V4, BF16, 5.38, 21 * (64 + 16) + 20 * 512),
        (PRO, {}, 4.35, 30 * (64 + 16) + 31 * 512),
        (PRO, BF16, 7.63, 30 * (64 + 16) + 31 * 512),
    ],
)
def test_fixed_bytes_of_a_sequence(model: Model, formats: dict[str, str], window: float, state: int) -> None:
    size = model.fixed_bytes(formats)
    assert size.keys() == {"window", "state"}
    assert size["window"] / MIB == pytest.approx(window, abs=0.006)
    assert size["state"] == state * 1024


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5", "glm-5.2", "minimax-m3", "llama-3.1-8b", "qwen3-8b"])
def test_models_without_windows_need_no_fixed_bytes(name: str) -> None:
    assert PRESETS[name].fixed_bytes() == {}


@pytest.mark.parametrize(
    ("tokens", "formats", "of_tokens", "with_windows"),
    [
        # a quarter of V4-Flash, as DeepSeek published: with fp4 and fp8 index keys in V4
        (8 << 10, {}, 3.95, 3.20),
        (128 << 10, {}, 3.95, 3.89),
        (1 << 20, {}, 3.95, 3.94),
        (8 << 10, FP8_INDEX, 4.33, 3.48),
        (128 << 10, FP8_INDEX, 4.33, 4.26),
        (1 << 20, FP8_INDEX, 4.33, 4.32),
    ],
)
def test_v41_needs_a_quarter_of_v4(tokens: int, formats: dict[str, str], of_tokens: float, with_windows: float) -> None:
    old, new = tokens * per_token(V4, formats), tokens * per_token(V41)
    windows_old, windows_new = V4.fixed_bytes()["window"], V41.fixed_bytes()["window"]
    assert old / new == pytest.approx(of_tokens, abs=0.006)
    assert (old + windows_old) / (new + windows_new) == pytest.approx(with_windows, abs=0.006)


@pytest.mark.parametrize(
    ("model", "formats", "mib"),
    [
        # sequences of 8K and 128K tokens, fixed planes included
        (V32, BF16, (671, 10.5 * 1024)),
        (V32, {}, (376, 5.87 * 1024)),
        (V4, BF16, (70.8, 877)),
        (V4, FP8_INDEX, (44.8, 496)),
        (V4, {}, (42.2, 454)),
        (PRO, {}, (61.5, 651)),
        (V41, BF16, (30, 405)),
        (V41, {"main": "fp8_v41"}, (14.2, 189)),
        (V41, {}, (9.5, 114)),
    ],
)
def test_bytes_of_a_sequence(model: Model, formats: dict[str, str], mib: tuple[float, float]) -> None:
    for tokens, expected in zip((8 << 10, 128 << 10), mib, strict=True):
        assert (tokens * per_token(model, formats) + fixed(model, formats)) / MIB == pytest.approx(expected, rel=6e-3)


# --- Who owns and reads what -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-v3.2", (128, 1, 576, 512)),
        ("deepseek-v4-flash", (64, 1, 512, 512)),
        ("deepseek-v4-pro", (128, 1, 512, 512)),
        ("deepseek-v4.1-flash", (64, 1, 512, 512)),
        ("glm-5", (64, 1, 576, 512)),
        ("glm-5.2", (64, 1, 576, 512)),
        ("minimax-m3", (64, 4, 128, 128)),
        ("llama-3.1-8b", (32, 8, 128, 128)),
        ("qwen3-8b", (32, 8, 128, 128)),
    ],
)
def test_heads_and_dims(name: str, expected: tuple[int, ...]) -> None:
    layers = PRESETS[name].layers
    assert {(layer.q_heads, layer.kv_heads, layer.qk_dim, layer.v_dim) for layer in layers} == {expected}
    for layer in layers:
        main = PRESETS[name].plane("main" if "main" in layer.reads else "window", layer.number)
        assert (main.heads, main.rows[0]) == expected[1:3]


def test_plan_of_v41_flash() -> None:
    """DeepSeek-V4.1-Flash, config.json: compress_ratios, kv_source_layer_ids, index_source_layer_ids, candidates."""
    assert V41.by_kind() == {
        "window": (0, 1),
        "full": (2, 8, 14, 20),
        "reuse": (*range(3, 8), *range(9, 14), *range(15, 20), *(n for n in range(21, 40) if n % 4)),
        "reindex": (24, 28, 32, 36),
    }
    assert V41.readers("main", 2) == tuple(range(2, 8))
    assert V41.readers("main", 20) == tuple(range(20, 40))
    assert V41.readers("index", 2) == (2,)
    assert V41.readers("index", 20) == (20, 24, 28, 32, 36)
    assert V41.readers("state", 14) == (14,)
    assert all(V41.readers("window", number) == (number,) for number in range(40))
    assert [V41.plane("main", number).ratio for number in range(2, 40)] == [2] * 18 + [1] * 20
    assert [V41.plane("index", number).ratio for number in (2, 8, 14, 20, 36)] == [2, 2, 2, 1, 1]
    assert {layer.number for layer in V41.layers if layer.candidate_owner == 20} == {20, 24, 28, 32, 36}
    assert [V41.layers[number].selection_owner for number in (2, 7, 19, 23, 25, 39)] == [2, 2, 14, 20, 24, 36]
    assert all(layer.window == 128 and layer.sinks for layer in V41.layers)
    for layer in V41.layers[2:]:
        chosen = layer.selection
        assert chosen and (chosen.k, chosen.heads, chosen.dim, chosen.out_heads, chosen.block) == (512, 32, 128, 1, 1)
        assert (chosen.candidate_k, chosen.candidate_block) == ((2048, 8) if layer.number >= 20 else (0, 0))


def test_plan_of_v4() -> None:
    flash, pro = V4.by_kind(), PRO.by_kind()
    assert flash == {"window": (0, 1), "full": tuple(range(2, 43, 2)), "dense": tuple(range(3, 42, 2))}
    assert pro == {"dense": (0, *range(1, 60, 2)), "full": tuple(range(2, 61, 2))}
    for model, heads, k in ((V4, 64, 512), (PRO, 128, 1024)):
        assert {layer.selection.k for layer in model.layers if layer.selection} == {k}
        assert {(layer.q_heads, layer.window, layer.sinks) for layer in model.layers} == {(heads, 128, True)}
        compressed = [layer for layer in model.layers if "main" in layer.reads]
        ratios = {(layer.kind, model.plane("main", layer.number).ratio) for layer in compressed}
        assert ratios == {("full", 4), ("dense", 128)}


def test_glm52_reuses_lists_but_no_keys() -> None:
    reuse = GLM52.layers[9]
    assert (reuse.kind, reuse.kv_owner, reuse.selection_owner, reuse.index_owner) == ("reuse", 9, 6, None)
    assert GLM52.readers("index", 6) == (6,)


def test_configurations_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24.0")
    glm = transformers.GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)  # zai-org/GLM-5.2, config.json
    kinds = {"full": "full", "reuse": "shared"}
    assert [kinds[layer.kind] for layer in GLM52.layers] == glm.indexer_types
    for name, config in (
        ("deepseek-v3.2", transformers.DeepseekV32Config()),
        ("glm-5", transformers.GlmMoeDsaConfig()),
        ("glm-5.2", glm),
        ("deepseek-v4-flash", transformers.DeepseekV4Config()),
        ("minimax-m3", transformers.MiniMaxM3VLConfig().text_config),
    ):
        layers = PRESETS[name].layers
        last = layers[-1]
        assert len(layers) == config.num_hidden_layers
        assert last.q_heads == config.num_attention_heads
        assert last.selection and last.selection.heads == config.index_n_heads
        assert last.selection.dim == config.index_head_dim
        if name == "minimax-m3":
            assert last.kv_heads == last.selection.out_heads == config.num_key_value_heads
            assert last.qk_dim == last.v_dim == config.head_dim
            chosen = last.selection
            expected = (config.index_topk_blocks, config.index_block_size, config.index_local_blocks)
            assert (chosen.k, chosen.block, chosen.keep_last) == expected
            continue
        assert last.selection.k == config.index_topk
        if name == "deepseek-v4-flash":
            assert last.qk_dim == last.v_dim == config.head_dim
            assert last.window == config.sliding_window
        else:
            assert (last.v_dim, last.qk_dim) == (config.kv_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim)


def test_minimax_m3_selects_from_the_fourth_layer_on() -> None:
    assert M3.by_kind() == {"dense": (0, 1, 2), "full": tuple(range(3, 60))}


# --- Dense models run sparsely -----------------------------------------------------------------------------------

LLAMA = PRESETS["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("method", "layers", "index", "selection", "window"),
    [
        ("tokens", 32, 8 * (128 + 2), (2048, 8, 1, 0, 0), 0),
        ("quest", 30, 8 * 2 * 256 / 16, (256, 32, 16, 0, 1), 0),
        ("moba", 32, 8 * 256 / 2048, (3, 32, 2048, 0, 1), 0),
        ("nsa", 32, 8 * 2 * 256 / 16, (16, 8, 64, 1, 2), 512),
    ],
)
def test_methods(method: str, layers: int, index: float, selection: tuple[int, ...], window: int) -> None:
    """The published settings of each: budgets of 2048 and 4096 tokens, 3 blocks of 2048, 16 blocks of 64."""
    model = sparse(LLAMA, METHODS[method], selection[0])
    assert len(model.by_kind()["full"]) == layers
    assert model.bytes_per_token() == {"main": LLAMA.bytes_per_token()["main"], "index": layers * index}
    last = model.layers[-1]
    assert last.selection and (last.selection.heads, last.selection.dim) == (32, 128)
    chosen = last.selection
    assert (chosen.k, chosen.out_heads, chosen.block, chosen.keep_first, chosen.keep_last) == selection
    assert last.window == window
    assert model.layers[: 32 - layers] == LLAMA.layers[: 32 - layers]
    assert sparse(LLAMA, METHODS[method], 1).bytes_per_token() == model.bytes_per_token()


CALLS = {
    # layers of models, and the line of docs/selections.md that they are
    "DeepSeek V3.2": (V32, 0),
    "DeepSeek V4-Flash, ratio 4": (V4, 2),
    "DeepSeek V4-Pro, ratio 4": (PRO, 2),
    "DeepSeek V4.1 Full, ratio 2": (V41, 2),
    "DeepSeek V4.1 Full, ratio 1, makes candidates": (V41, 20),
    "DeepSeek V4.1 Reindex, ratio 1": (V41, 24),
    "GLM-5, GLM-5.1, GLM-5.2, int8 keys": (GLM52, 0),
    "MiniMax-M3": (M3, 3),
    "NSA, selected branch": (sparse(LLAMA, METHODS["nsa"], 16), 0),
    "MoBA, on stored mean keys": (sparse(LLAMA, METHODS["moba"], 3), 0),
    "Quest": (sparse(LLAMA, METHODS["quest"], 64), 2),
    "Llama, Qwen: attention probabilities": (sparse(LLAMA, METHODS["tokens"], 2048), 0),
}


@pytest.mark.parametrize("selector", CALLS)
def test_the_plan_tells_the_call(selector: str) -> None:
    model, number = CALLS[selector]
    layer, found = model.layers[number], model.select_arguments(number)
    line = next(line for line in lines() if line.selector == selector)
    defaults = {name: p.default for name, p in inspect.signature(sparse_attn.select).parameters.items()}
    apart = ("format", "out_heads", "candidates", "key_scale")  # examples on the page, and tensors
    plan = {name: value for name, value in found.items() if value != defaults[name] and name not in apart}
    assert plan == {name: value for name, value in line.options(small=False).items() if name not in apart}
    assert found["format"] == model.plane("index", number).format
    assert found["out_heads"] == {"all": 1, "KV head": layer.kv_heads, "query head": layer.q_heads}[line.lists]
    assert layer.selection and layer.selection.weighted == line.weighted
    assert (layer.candidate_owner not in (None, number)) == ("candidates" in line.options())
    attend, shown = model.attend_arguments(number), line.attend_options(small=False)
    assert (attend["ratio"], attend["select_block"]) == (shown.get("ratio", 1), shown.get("select_block", 1))


def test_arguments_of_attend() -> None:
    common = dict(v_dim=512, win_format="fp8_v41", window=128)
    assert V41.attend_arguments(0) == common
    assert V41.attend_arguments(3) == common | dict(format="fp4_v41", ratio=2, select_block=1)
    assert V4.attend_arguments(3) == dict(
        v_dim=512, win_format="fp8_v4", window=128, format="fp8_v4", ratio=128
    )  # attends to every entry


def test_excerpt() -> None:
    some = V41.excerpt((0, 14, 16, 20, 28, 30))
    assert [layer.kind for layer in some.layers] == ["window", "full", "reuse", "full", "reindex", "reuse"]
    assert [layer.number for layer in some.layers] == [*range(6)]
    assert [layer.kv_owner for layer in some.layers] == [None, 1, 1, 3, 3, 3]
    assert [layer.selection_owner for layer in some.layers] == [None, 1, 1, 3, 4, 4]
    assert [layer.candidate_owner for layer in some.layers] == [None, None, None, 3, 3, None]
    assert [layer.planes for layer in some.layers] == [V41.layers[n].planes for n in (0, 14, 16, 20, 28, 30)]
    with pytest.raises(ValueError, match="layer 25: expected its selection_owner, layer 24, in the excerpt"):
        V41.excerpt((20, 25))


def test_int8_keys_and_int4_index() -> None:
    model = sparse(gqa("llama", 32, 32, 8, 128, "int8"), replace(METHODS["tokens"], format="int4_index_h"), 2048)
    assert model.bytes_per_token() == {"main": 32 * 8 * 2 * 130, "index": 32 * 8 * 66}


# --- Ranks, and engines that ignore selections ------------------------------------------------------------------


def test_ranks_split_what_has_heads() -> None:
    v32, m3 = shard(V32, 8).layers[0], shard(M3, 8).layers[3]
    assert (v32.q_heads, v32.kv_heads, v32.selection, v32.planes) == (
        16,
        1,
        V32.layers[0].selection,
        V32.layers[0].planes,
    )
    assert (m3.q_heads, m3.kv_heads, m3.selection and m3.selection.heads, m3.selection and m3.selection.out_heads) == (
        8,
        1,
        1,
        1,
    )
    size, four = M3.bytes_per_token(), shard(M3, 4).bytes_per_token()
    assert four == {"main": size["main"] / 4, "index": size["index"]}
    assert shard(M3, 8).bytes_per_token() == four  # two ranks hold the same KV head
    moba = shard(sparse(LLAMA, METHODS["moba"], 3), 4).layers[0].selection
    assert moba and (moba.heads, moba.out_heads) == (8, 8)


def test_an_engine_that_ignores_selections() -> None:
    for model in (V32, V4, V41, M3, sparse(LLAMA, METHODS["nsa"], 16)):
        plan = dense(model)
        assert set(plan.by_kind()) <= {"window", "dense"}
        assert plan.bytes_per_token() == model.bytes_per_token() and plan.fixed_bytes() == model.fixed_bytes()
    assert dense(LLAMA) == LLAMA


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shard(V32, 3), "ranks: expected a divisor of the 128 query heads, got 3"),
        (lambda: shard(V32, 0), "ranks: expected a divisor of the 128 query heads, got 0"),
        (lambda: shard(gqa("a", 1, 24, 8, 64), 12), "a divisor or a multiple of the 8"),
        (lambda: sparse(LLAMA, METHODS["tokens"], 1, Fraction(2)), "share: expected above 0 and at most 1, got 2"),
        (lambda: sparse(LLAMA, METHODS["tokens"], 1.5), "k: expected at least 1 index, got 1.5"),
        (lambda: LLAMA.bytes_per_token("fp8"), "formats: expected names by main or window or index, got 'fp8'"),
        (lambda: LLAMA.bytes_per_token({"kv": "bf16"}), "formats: expected names by main or window or index, got kv"),
        (lambda: sparse(V32, METHODS["tokens"], 2048), "main planes alone"),
        (lambda: sparse(LLAMA, METHODS["tokens"], 0), "k: expected at least 1"),
        (lambda: V32.bytes_per_token({"state": "bf16"}), "names by main or window or index, got state"),
        (lambda: V32.bytes_per_token({"main": "fp8"}), "got 'fp8'"),
        (lambda: V32.bytes_per_token({"main": "fp8_index"}), "format of a main plane"),
        (lambda: V32.bytes_per_token({"main": "fp8_v4"}), "'fp8_v4': expected rows of 512 elements, got 576"),
        (lambda: Model("m", (replace(LLAMA.layers[0], kv_owner=1), LLAMA.layers[1])), "main plane, got 1"),
        (lambda: Model("m", (replace(LLAMA.layers[0], index_owner=0),)), "index plane, got 0"),
        (lambda: Model("m", (replace(LLAMA.layers[0], selection_owner=0),)), "together with its owner"),
        (lambda: Model("m", LLAMA.layers[1:]), "expected this number"),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- Formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "dim", "size"),
    [
        ("fp8_v32", 576, 512 + 4 * 4 + 64 * 2),  # FlashMLA
        ("fp8_v4", 512, 448 + 64 * 2 + 7 + 1),  # FlashMLA
        ("fp8_v41", 512, 512 + 16),  # FlashMLA
        ("fp4_v41", 512, 256 + 32),  # FlashMLA
        ("fp8_index", 128, 128 + 4),  # DeepGEMM
        ("int8_index", 128, 128 + 2),  # vllm-ascend
        ("fp4_index", 128, 64 + 4),  # DeepGEMM
        ("int4_index_h", 64, 32 + 2),
        ("int4_index_h", 63, 32 + 2),
        ("int8", 64, 64 + 2),
        ("bf16", 576, 1152),
    ],
)
def test_bytes_of_an_entry(format: str, dim: int, size: int) -> None:
    assert layout.FORMATS[format].entry_bytes(dim) == size


# --- The module and its page -------------------------------------------------------------------------------------


def test_no_torch_is_needed() -> None:
    code = (
        "import sys, types; sys.modules['torch'] = None;"
        "package = sys.modules['sparse_attn'] = types.ModuleType('sparse_attn');"
        "package.__path__ = ['sparse_attn']; import sparse_attn.models"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_plans_are_values() -> None:
    assert hash(V41) != hash(V4)
    assert gqa("a", 2, 8, 2, 64) == gqa("a", 2, 8, 2, 64)
    assert isinstance(V41.layers[0], Layer) and isinstance(V41.layers[0].planes[0], Plane)


def row(model: Model) -> str:
    """The model's line of the page."""
    kinds = ", ".join(f"{len(numbers)} {kind}" for kind, numbers in model.by_kind().items())
    size = model.bytes_per_token()
    totals = f"{per_token(model):,.0f} | {per_token(model, BF16):,.0f} | {fixed(model) / MIB:.2f}"
    return f"| `{model.name}` | {kinds} | {size['main']:,.0f} | {size.get('index', 0):,.0f} | {totals} |"


def test_the_page_shows_every_preset() -> None:
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert shown == [row(model) for model in PRESETS.values()]


def test_examples_of_the_page() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 5 and result.failed == 0
