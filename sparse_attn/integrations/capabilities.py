"""What each integration runs: engine, device, kind of model, phase and formats. Imports no torch and no engine.

Integrations check their models against this table when they load them, and ``docs/engines.md`` prints it: what is not
in it is refused before a token is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import configs
from ..layout import FORMATS
from ..models import Model

PHASES = ("prefill", "decode")

FAMILIES = {
    "gqa": "keys and values, dense or windowed: Llama, Qwen, Mistral",
    "mla": "latent rows, dense: DeepSeek V3",
    "dsa": "latent rows, selected: DeepSeek V3.2, GLM-5",
    "blocks": "keys and values, blocks selected: MiniMax-M3",
    "compressed": "window and compressed entries: DeepSeek V4, V4.1",
}

PLAIN = ("bf16", "fp16", "fp32")
HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class Capability:
    """Layers of a family that an integration runs on a device.

    ``main`` and ``index`` are formats of the plane that attention reads and of the index keys; no index formats: the
    model has no such plane, or the engine's own kernels select. ``level`` is how far it was tried: "native" ran on the
    device inside of the engine; "contract" ran against the engine's classes, or stand-ins with their signatures;
    "documented" was read alone.
    """

    engine: str
    device: str
    family: str
    main: tuple[str, ...]
    index: tuple[str, ...]
    level: str
    how: str
    phases: tuple[str, ...] = PHASES


CAPABILITIES = (
    Capability("transformers", "any", "gqa", (*PLAIN, "int8"), (*PLAIN, "int8_index_h", "int4_index_h"), "native", ""),
    Capability("transformers", "any", "mla", PLAIN, (), "native", "keys expanded"),
    Capability("transformers", "any", "dsa", PLAIN, (), "native", "keys expanded; transformers selects"),
    Capability(
        "transformers",
        "any",
        "dsa",
        (*PLAIN, "fp8_v32", "int8_v32"),
        (*PLAIN, "fp8_index", "int8_index", "fp4_index"),
        "native",
        "`PagedCache`",
    ),
    Capability("transformers", "any", "blocks", PLAIN, (), "native", "transformers selects"),
    Capability("transformers", "any", "compressed", PLAIN, (), "native", "V4; transformers compresses and selects"),
    Capability(
        "transformers",
        "any",
        "compressed",
        (*PLAIN, "fp8_v4", "fp8_v4_640", "fp8_v4_608"),
        (*PLAIN, "fp8_index", "int8_index", "fp4_index"),
        "native",
        "V4; `PagedCache`",
    ),
    Capability("vllm", "cpu", "gqa", PLAIN, (), "native", "--attention-backend CUSTOM"),
    Capability("vllm", "cpu", "dsa", (*PLAIN, "fp8_v32"), (*PLAIN, "fp8_index"), "native", "by itself"),
    Capability("vllm", "cuda", "gqa", HALF, (), "contract", "--attention-backend CUSTOM"),
    Capability("vllm", "cuda", "dsa", (*HALF, "fp8_v32"), (), "contract", "--attention-backend CUSTOM; vLLM selects"),
    *(
        Capability("sglang", device, "gqa", formats, (), "contract", "--attention-backend sparse_attn")
        for device, formats in (("cuda", HALF), ("cpu", PLAIN))
    ),
    Capability("vllm-ascend", "npu", "dsa", ("bf16", "int8_v32"), (), "contract", "if asked for; vllm-ascend selects"),
)


class Unsupported(ValueError):
    """An engine is asked for what its integration does not run."""


def family(model: Model) -> str:
    """The family of a model's layers."""
    planes = [plane for layer in model.layers for plane in layer.planes]
    latent = {plane.kind for plane in planes if len(plane.rows) == 1}
    if "window" in latent:
        return "compressed"
    selects = any(layer.selection is not None for layer in model.layers)
    return ("dsa" if selects else "mla") if "main" in latent else ("blocks" if selects else "gqa")


def check(engine: str, device: str, model: Model, formats: Mapping[str, str]) -> None:
    """Raise ``Unsupported`` if a phase of the model would meet what is not in the table.

    Args:
        formats: of the planes ``"main"`` and, where this package selects, ``"index"``.
    """
    kind = family(model)
    found = [c for c in CAPABILITIES if (c.engine, c.family) == (engine, kind) and c.device in (device, "any")]
    where = engine if device == "any" else f"{engine} on {device}"
    if not found:
        known = [c.family for c in CAPABILITIES if c.engine == engine and c.device in (device, "any")]
        raise Unsupported(
            f"{where}: {model.name}: expected layers of {' or '.join(dict.fromkeys(known)) or 'none'}, got {kind} "
            f"({FAMILIES[kind]}); use the engine's own attention"
        )
    for phase in PHASES:
        for plane, format in formats.items():
            runs = [f for c in found if phase in c.phases for f in getattr(c, plane)]
            if format not in runs:
                raise Unsupported(
                    f"{where}: {model.name}: {phase} with the {plane} plane in {format}: expected "
                    f"{' or '.join(dict.fromkeys(runs)) or 'no plane of this package'}; choose another type of cache"
                )
    for plane, format in formats.items():
        dim, rows = FORMATS[format].dim, {r for x in model.layers for p in x.planes if p.kind == plane for r in p.rows}
        if dim and rows != {dim}:
            raise Unsupported(
                f"{where}: {model.name}: the {plane} plane in {format}: expected rows of {dim} elements, got "
                f"{' and '.join(map(str, sorted(rows)))}; choose another type of cache"
            )


def check_config(engine: str, device: str, config: Mapping[str, object], formats: Mapping[str, str]) -> None:
    """``check`` for a model's Hugging Face configuration."""
    check(engine, device, configs.plan(config)[0], formats)


def markdown() -> str:
    """A table for each engine."""
    lines = []
    head = ("device", "layers", "phase", "main plane", "index keys", "tried", "how")
    for engine in dict.fromkeys(c.engine for c in CAPABILITIES):
        lines += ["", f"## {engine}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for c in CAPABILITIES:
            if c.engine == engine:
                formats = (", ".join(f"`{name}`" for name in names) for names in (c.main, c.index))
                cells = (c.device, FAMILIES[c.family], " and ".join(c.phases), *formats, c.level, c.how)
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines[1:])
