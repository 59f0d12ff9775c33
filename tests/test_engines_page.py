"""The table of what integrations run: the page has it, and what is not in it is refused with the pair named."""

from __future__ import annotations

from pathlib import Path

import pytest
from stubs import LLAMA, V32

from sparse_attn.integrations import capabilities
from sparse_attn.layout import FORMATS
from sparse_attn.models import PRESETS

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"


def test_the_page_has_the_tables() -> None:
    assert capabilities.markdown() in PAGE.read_text(), "print them with `python -m sparse_attn support --engines`"


def test_every_row_is_a_family_with_formats_of_its_planes() -> None:
    for c in capabilities.CAPABILITIES:
        assert c.family in capabilities.FAMILIES
        assert {FORMATS[name].use for name in c.main} == {"kv"}
        assert set(c.index) <= {*FORMATS}
        assert c.level in ("native", "contract", "documented")


FAMILIES = {
    "deepseek-v3.2": "dsa",
    "glm-5.2": "dsa",
    "deepseek-v4-flash": "compressed",
    "deepseek-v4.1-flash": "compressed",
    "minimax-m3": "blocks",
    "llama-3.1-8b": "gqa",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_presets(name: str) -> None:
    assert capabilities.family(PRESETS[name]) == FAMILIES[name]


def test_a_window_over_keys_and_values_is_no_family_of_its_own() -> None:
    mistral = LLAMA | dict(model_type="mistral", sliding_window=24)
    capabilities.check_config("vllm", "cpu", mistral, {"main": "bf16"})
    deepseek_v3 = {name: value for name, value in V32.items() if "index" not in name} | dict(model_type="deepseek_v3")
    with pytest.raises(capabilities.Unsupported, match=r"got mla \(latent rows, dense: DeepSeek V3\)"):
        capabilities.check_config("vllm", "cpu", deepseek_v3, {"main": "bf16"})


@pytest.mark.parametrize(
    ("device", "model", "formats", "said"),
    [
        (
            "cpu",
            "deepseek-v4-flash",
            {"main": "fp8_v4"},
            "deepseek-v4-flash: expected layers of gqa or dsa, got compressed",
        ),
        (
            "cpu",
            "llama-3.1-8b",
            {"main": "int8"},
            "prefill with the main plane in int8: expected bf16 or fp16 or fp32;",
        ),
        ("cpu", "deepseek-v3.2", {"main": "bf16", "index": "fp4_index"}, "the index plane in fp4_index: expected bf16"),
        ("cuda", "deepseek-v3.2", {"main": "bf16", "index": "bf16"}, "expected no plane of this package"),
        ("tpu", "llama-3.1-8b", {"main": "bf16"}, "expected layers of none"),
    ],
)
def test_what_is_not_in_the_table_is_refused(device: str, model: str, formats: dict[str, str], said: str) -> None:
    with pytest.raises(capabilities.Unsupported, match=said):
        capabilities.check("vllm", device, PRESETS[model], formats)


def test_what_is_in_the_table_passes() -> None:
    capabilities.check("vllm", "cpu", PRESETS["deepseek-v3.2"], {"main": "fp8_v32", "index": "fp8_index"})
    capabilities.check("vllm", "cuda", PRESETS["qwen3-8b"], {"main": "fp16"})
