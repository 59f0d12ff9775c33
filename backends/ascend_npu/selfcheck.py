"""Known answers, asked of each operator once before it is used: older ones silently ignore what they do not know.

Every key has the same score for head 0, so that its output is the mean of the values that the operator attended; one
key stands out for head 1. What must not be attended holds a value that no mean hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparse_attn.layout import FORMATS

from . import codecs, move

PAGE, DIM = 16, 512
LENGTH, QUERIES = 40, 2  # the rows stand at the positions 38 and 39
WINDOW = 128
OUTLIER = 5  # the entry that head 1 attends alone
WRONG = 100  # value of an entry that no row may attend
CLOSE = 0.06  # half a bf16 step of the answers below, which are less than 32


class Asked(SimpleNamespace):
    """The arguments of a call of ``attend`` or ``select``, as the op's own tuple has them."""

    @property
    def with_float_queries(self) -> Asked:
        return self

    def _replace(self, **changes: Any) -> Asked:
        return Asked(**vars(self) | changes)


PLANES = ("kv", "kv_rope", "kv_scale", "v", "v_scale", "page_table", "kv_range", "indices", "index_counts")
WINDOWS = ("win", "win_page_table", "win_range", "win_indices", "sinks", "planned")
OPTIONS: dict[str, Any] = {
    **dict.fromkeys((*PLANES, *WINDOWS)),
    **{"format": "bf16", "v_format": "", "page_size": 0, "ratio": 1, "select_block": 1},
    **{"win_format": "bf16", "win_page_size": 0, "window": 0, "v_dim": DIM, "max_seqlen_q": QUERIES},
}
"""The rest of a call's arguments."""


def _plane(values: Sequence[int], marks: int = 0) -> tuple[Tensor, Tensor]:
    """bf16 rows of constant values in pages out of order, with ``marks`` elements at the end of each that score for
    head 1, and the page table."""
    pages = max(-(-len(values) // PAGE), 1)
    plane = torch.full((pages + 2, PAGE, 1, DIM + marks), float(WRONG), dtype=torch.bfloat16)
    table = torch.arange(pages, 0, -1, dtype=torch.int32)[None]
    for e, value in enumerate(values):
        row = plane[int(table[0, e // PAGE]), e % PAGE, 0]
        row[:DIM] = value
        row[DIM:] = 0
        if marks and e == OUTLIER:
            row[DIM] = 8
    return plane, table


def _ask(run: Callable[..., None], arguments: dict[str, Any], expected: Sequence[Sequence[float]]) -> str | None:
    """Run one call on the device; one sentence if the rows are not what they must be."""
    given = OPTIONS | {"max_seq_len": int(arguments["seq_lens"].max())} | arguments
    call = Asked(**{k: v.to("npu") if isinstance(v, Tensor) else v for k, v in given.items()})
    out = torch.full((len(expected), 2, DIM), float("nan"), dtype=torch.bfloat16, device="npu")
    run(call, out, None)
    got = out.float().cpu()
    want = torch.tensor(expected)[..., None].expand_as(got)
    if bool(((got - want).abs() <= CLOSE).all()):
        return None
    return (
        f"its self check failed: expected {[*map(list, expected)]} for two rows and heads, got {got[..., 0].tolist()}"
    )


def _queries(dim: int = DIM) -> dict[str, Any]:
    q = torch.zeros(QUERIES, 2, dim, dtype=torch.bfloat16)
    if dim > DIM:
        q[:, 1, DIM] = 8
    starts = torch.tensor([0, QUERIES], dtype=torch.int32)
    lengths = torch.tensor([LENGTH], dtype=torch.int32)
    return {"q": q, "cu_seqlens_q": starts, "seq_lens": lengths, "scale": 1.0, "causal": True}


def _selected() -> tuple[dict[str, Any], Tensor, Tensor, list[list[float]]]:
    """Two rows of one selection, the newest token of which only the second may attend."""
    chosen = [3, OUTLIER, 17, LENGTH - 1]
    values = [e % 32 if e in chosen else WRONG for e in range(LENGTH)]
    plane, table = _plane(values, 64)
    indices = torch.full((QUERIES, 1, 2048), -1, dtype=torch.int32)
    indices[:, 0, : len(chosen)] = torch.tensor(chosen)
    call = _queries(DIM + 64) | {"page_table": table, "indices": indices, "index_counts": None, "select_block": 1}
    means = [sum(values[e] for e in some) / len(some) for some in (chosen[:-1], chosen)]
    return call, plane[..., :DIM], plane[..., DIM:], [[mean, float(OUTLIER)] for mean in means]


def sparse_flash(run: Callable[..., None]) -> str | None:
    """bf16 latent rows, the rope part apart."""
    call, rows, rope, expected = _selected()
    return _ask(run, call | {"kv": rows.contiguous(), "kv_rope": rope.contiguous()}, expected)


def kv_quant_sparse_flash(run: Callable[..., None]) -> str | None:
    """int8 latent rows of 656 bytes with scales of 1."""
    call, rows, rope, expected = _selected()
    ones = torch.ones(*rows.shape[:3], 4)
    parts = [rows.to(torch.int8).view(torch.uint8), rope.contiguous().view(torch.uint8), ones.view(torch.uint8)]
    return _ask(run, call | {"kv": torch.cat(parts, -1)}, expected)


def _means(parts: Sequence[Sequence[Sequence[int]]]) -> list[list[float]]:
    """For each row the mean of the values that it attends in all planes, for both heads; a sink of 0 counts as one
    value of 0 with head 1."""
    attended = [[value for part in row for value in part] for row in parts]
    return [[sum(row) / len(row), sum(row) / (len(row) + 1)] for row in attended]


def _window(length: int) -> tuple[dict[str, Any], list[list[int]]]:
    """A call on a window plane whose last row must not count what came before, and the values that each row attends."""
    values = [e % 32 for e in range(length)]
    plane, table = _plane(values)
    sinks = torch.tensor([float("-inf"), 0.0])
    call = _queries() | {"win": plane, "win_page_table": table, "window": WINDOW, "sinks": sinks, "kv": None}
    call |= {"indices": None, "page_table": None, "max_seqlen_q": QUERIES, "max_seq_len": length, "ratio": 1}
    call["seq_lens"] = torch.tensor([length], dtype=torch.int32)
    return call, [values[max(end - WINDOW, 0) : end] for end in (length - 1, length)]


def window(run: Callable[..., None]) -> str | None:
    """A window that begins inside the sequence."""
    call, attended = _window(WINDOW + 20)
    return _ask(run, call, _means([[row] for row in attended]))


def selected(ratio: int, run: Callable[..., None]) -> str | None:
    """A window, and fewer compressed rows than are visible."""
    call, attended = _window(LENGTH)
    visible = LENGTH // ratio
    chosen = [1, visible - 1]
    plane, table = _plane([31 if e in chosen else WRONG for e in range(visible)])
    indices = torch.full((QUERIES, 1, 512), -1, dtype=torch.int32)
    indices[:, 0, :2] = torch.tensor(chosen)
    call |= {"kv": plane, "page_table": table, "indices": indices, "index_counts": None, "ratio": ratio}
    seen = [[31] * sum(e < end // ratio for e in chosen) for end in (LENGTH - 1, LENGTH)]
    return _ask(run, call, _means([list(row) for row in zip(attended, seen, strict=True)]))


def all_compressed(run: Callable[..., None]) -> str | None:
    """A window, and both compressed rows that its last row sees; the row before sees one."""
    ratio, length = 128, 256
    call, attended = _window(length)
    plane, table = _plane([31, 29])
    call |= {"kv": plane, "page_table": table, "ratio": ratio}
    return _ask(run, call, _means([[attended[0], [31]], [attended[1], [31, 29]]]))


SELECTION: dict[str, Any] = {
    **dict.fromkeys(("q_scale", "key_scale", "kv_range", "row_k", "candidates")),
    **{"format": "bf16", "page_size": 0, "ratio": 1, "score": "relu_sum", "score_dtype": "fp32", "out_heads": 1},
    **{"keep_first": 0, "keep_last": 0, "tail": "none", "candidate_k": 0, "order": "any", "return_values": False},
}
"""The rest of a call's arguments."""


DECOY = 4
"""An entry whose key is large, and its scale small."""


def lightning_indexer(run: Callable[..., None]) -> str | None:
    """One key of eight stands out; the newest, which only the second row may select, stands out more."""
    return _select(run, {})


def quant_lightning_indexer(run: Callable[..., None]) -> str | None:
    """The same of int8 queries and keys, one of which must not be selected for its scale."""
    scales = torch.ones(4, PAGE, 1, dtype=torch.float16)
    scales[TABLE[0][DECOY // PAGE], DECOY % PAGE] = 2.0**-10
    return _select(run, {"key_scale": scales, "q_scale": torch.ones(QUERIES, 2), "format": "int8_index_h"})


TABLE = [[3, 1, 2]]


def _select(run: Callable[..., None], quantised: dict[str, Any]) -> str | None:
    k, dim, best = 8, 128, [2, 7, 11, 13, 18, 21, 30, 35]
    plane = torch.zeros(4, PAGE, 1, dim, dtype=torch.int8 if quantised else torch.bfloat16)
    for e, key in [*zip(best, range(8, 16), strict=True), (LENGTH - 1, 64), (DECOY, 100 if quantised else 0)]:
        plane[TABLE[0][e // PAGE], e % PAGE, 0, 0] = key
    q = torch.zeros(QUERIES, 2, dim, dtype=plane.dtype)
    q[:, 0, 0] = 1
    q[:, 1, 0] = -1  # its scores are not positive, and count as 0
    call = _queries() | {"q": q, "weights": torch.ones(QUERIES, 2, dtype=torch.bfloat16), "keys": plane}
    table = torch.tensor(TABLE, dtype=torch.int32)
    call |= {"page_table": table, "k": k, "max_seq_len": LENGTH, **SELECTION, **quantised}
    device = {name: v.to("npu") if isinstance(v, Tensor) else v for name, v in call.items()}
    indices = torch.empty(QUERIES, 1, k, dtype=torch.int32, device="npu")
    counts = torch.empty(QUERIES, 1, dtype=torch.int32, device="npu")
    run(Asked(**device), indices, counts, None, None)
    got = indices[:, 0].sort().values.tolist()
    want = [best, [*best[1:], LENGTH - 1]]
    return None if got == want else f"its self check failed: expected the entries {want} for two rows, got {got}"


E2M1_ROW = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -6]).repeat(32)
"""Every tie of the 4-bit floats in each group, at a scale of 1."""
E2M1_BYTES = (0x00, 0x21, 0x22, 0x43, 0x44, 0x65, 0x66, 0xF7) * 32 + (0x38,) * 32
E4M3_ROW = torch.tensor([448, 1, 1.0625, 1.1875, -(2.0**-9), 2.0**-10, -3 * 2.0**-10, 0.0] * 4).repeat(16)
"""Ties of the 8-bit floats, below the normal ones too, in each group, at a scale of 1."""
E4M3_BYTES = (0x7E, 0x38, 0x38, 0x3A, 0x81, 0x00, 0x82, 0x00) * 64 + (127,) * 16


def known_bytes(run: Callable[..., None]) -> str | None:
    """Rows of ties are quantised to the bytes that their formats say, and read back; others are not touched."""
    for format, row, stored in (("fp4_v41", E2M1_ROW, E2M1_BYTES), ("fp8_v41", E4M3_ROW, E4M3_BYTES)):
        width = len(stored)
        plane = torch.full((2, 16, 1, width + 16), 7, dtype=torch.uint8).to("npu")[..., :width]
        slots = torch.tensor([-1, 20, 40]).to("npu")
        rows = torch.stack([row - 1, row, row + 1])[:, None].to("npu")
        call: Any = SimpleNamespace(rows=rows, plane=plane, slots=slots, scale=None, format=format, page_size=0)
        move.store(call)
        got = plane.cpu().flatten(0, 2)
        if got[20].tolist() != [*stored] or not bool((got[torch.arange(32) != 20] == 7).all()):
            return f"its self check failed: rows of {format} are not stored with the bytes of the format"
        back = torch.empty(3, 1, len(row), device="npu")
        move.load(call, back)
        want = codecs.decode(FORMATS[format].codec, _halves(format, torch.tensor(stored, dtype=torch.uint8)))
        if not torch.equal(back[1, 0].cpu(), want) or bool((back[0] != 0).any()):
            return f"its self check failed: rows of {format} are not read as the numbers that they hold"
    return None


def _halves(format: str, row: Tensor) -> dict[str, Tensor]:
    """The parts of one row of a packed format, on the host."""
    sizes = dict(FORMATS[format].sections[0])
    return dict(zip(sizes, row.split([*sizes.values()]), strict=True))


def entries(run: Callable[..., None]) -> str | None:
    """Three tokens, then one: entries of two, whose gates count one token three times, and what the state keeps."""
    plane = torch.zeros(2, 2, 1, 2, dtype=torch.bfloat16).to("npu")
    state = torch.full((2, 2, 1, 4), float("nan")).to("npu")
    values = torch.tensor([[1.0, 2], [5, 6], [7, 8], [3, 4]])
    gates = torch.tensor([0.0, math.log(3.0)]).repeat(2)[:, None].expand(4, 2)
    fixed: dict[str, Any] = dict.fromkeys(("bias", "norm", "cos_sin", "scale"))
    fixed |= {"plane": plane, "state": state, "stride": 2, "covered": 2, "kept": 1, "dim": 2, "rope_step": 2}
    fixed |= {"eps": 0.0, "dtype": "fp32", "format": "bf16", "page_size": 0}
    for part, length in ((slice(0, 3), 3), (slice(3, 4), 4)):
        given = {"rows": values[part, None], "gates": gates[part, None].contiguous()}
        given |= {"cu_seqlens_q": torch.tensor([0, len(given["rows"])]), "seq_lens": torch.tensor([length])}
        given |= {"page_table": torch.tensor([[1]]), "state_page_table": torch.tensor([[1, 0]])}
        device = {n: (t if t.is_floating_point() else t.int()).to("npu") for n, t in given.items()}
        run(SimpleNamespace(**device, **fixed), None)
    got = plane.float().cpu()[:, :, 0].tolist()
    want = [[[0, 0], [0, 0]], [[4, 5], [4, 5]]]
    return None if got == want else f"its self check failed: expected the entries {want} of two pages, got {got}"


def any_call(run: Callable[..., None]) -> str | None:
    """What the operators are asked."""
    for check in (known_bytes, sparse_flash, window, all_compressed, lambda run: selected(2, run)):
        complaint = check(run)
        if complaint:
            return complaint
    return None
