"""vLLM has classes of its own for configurations: the plan that is found from them is the preset."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: `make test-engines` makes an environment with it", allow_module_level=True)

from test_configs import RELEASED

from sparse_attn.configs import plan
from sparse_attn.models import PRESETS

WRAPPED = {"minimax_m3_vl_text": "minimax_m3_vl"}
"""Types of released configurations that have the text model's inside."""


def released(fields: dict[str, Any]) -> dict[str, Any]:
    kind = fields["model_type"]
    if kind in WRAPPED:
        return {"model_type": WRAPPED[kind], "text_config": fields}
    return fields | {"model_type": kind.removesuffix("_text")}


@pytest.mark.parametrize("name", RELEASED)
def test_the_configuration_of_vllm_gives_the_preset(name: str, tmp_path: Path) -> None:
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    (tmp_path / "config.json").write_text(json.dumps(released(RELEASED[name])))
    config = get_hf_text_config(get_config(str(tmp_path), trust_remote_code=False))
    assert plan(config.to_dict()) == (PRESETS[name], "")
