"""The suite is tested itself: each fault below is put into a copy of `compress`, and its entries must differ from those
computed one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressions import REWIND, Sequences, lines
from mutants import each, mutant

from sparse_attn import reference
from sparse_attn.ops.compress import Compress

# (fault, text in the file, what stands there instead)
FAULTS = [
    ("an entry early", "entries = torch.arange(first, done", "entries = torch.arange(first, done + 1"),
    ("an entry late", "max(length, 0)\n", "max(length, 0) - 1\n"),
    ("first entry of a step lost", "first, done = before // a.stride,", "first, done = -(-before // a.stride),"),
    ("rope at the last token", "* a.rope_step", "* a.rope_step + a.stride - 1"),
    ("rope_stride ignored", "a.rope_step", "a.stride"),
    (
        "rope turned back",
        "even * cos - odd * sin, odd * cos + even * sin",
        "even * cos + odd * sin, odd * cos - even * sin",
    ),
    ("rope of halves", "turned[..., 0::2], turned[..., 1::2]", "turned.chunk(2, -1)"),
    (
        "rope on the first elements",
        "x.split([x.shape[-1] - rotated, rotated], -1)",
        "x.split([rotated, x.shape[-1] - rotated], -1)[::-1]",
    ),
    ("norm dropped", "if a.norm is None:", "if True:"),
    ("weight of the norm dropped", " * a.norm.double()", ""),
    ("eps dropped", "+ a.eps", ""),
    ("norm after the rotation", "rotate(a, entries, normed)", "norm(a, rotate(a, entries, pooled))"),
    ("latent is rotated", "latent[packed:needed] = normed", "latent[packed:needed] = rotate(a, entries, normed)"),
    ("latents overwrite each other", "packed += len(entries)", "pass"),
    ("gates ignored", "if a.gates is None:\n        weights", "if True:\n        weights"),
    ("bias dropped", "if a.bias is not None:", "if False:"),
    ("bias one off", "a.bias[positions % a.stride]", "a.bias[(positions + 1) % a.stride]"),
    ("sets of channels swapped", "// a.stride\n    return sets", "// a.stride\n    own = own.flip(0)\n    return sets"),
    (
        "one set of channels",
        "own = torch.arange(a.covered, device=x.device) // a.stride",
        "own = torch.zeros(a.covered, dtype=torch.long)",
    ),
    ("tokens before 0 count", "exists = (positions >= 0)", "exists = (positions >= -99)"),
    ("mean over the whole span", "exists / exists.sum(1, keepdim=True)", "exists / a.covered"),
    ("window one token late", "end[:, None] - a.covered +", "end[:, None] - a.covered + 1 +"),
    ("state not written", "if a.state is not None:\n", "if False:\n"),
    ("state one row short", "len(new) - a.kept, 0", "len(new) - a.kept + 1 + a.max_rewind, 0"),
    ("no room for a rewind", "len(new) - a.kept, 0", "len(new) - a.kept + a.max_rewind, 0"),
    ("rounded once", "normed = round_to(a.dtype, norm(a, pooled))", "normed = norm(a, pooled)"),
    ("pooled not rounded", "pooled = round_to(a.dtype, pool(", "pooled = (pool("),
    ("quantised before the rotation", "rotate(a, entries, normed)).float()", "normed).float()"),
]


def differs(compress: Any) -> bool:
    """Whether the entries of any line, brought in by steps with drafts, are not those computed one by one."""
    for line in lines():
        stride = line.stride if line.stride < 64 else 8
        s = Sequences(line, [5 * stride + 1, 3 * stride], format="fp32")
        s.norm = None if s.norm is None else s.norm * 2
        s.eps = max(s.eps, 0.1)
        if s.bias is not None:
            s.bias += torch.linspace(0, 4, s.stride)[:, None]
        done = [0, 0]
        try:
            while done != s.lengths:
                counts = [min(stride + 2, n - d) for d, n in zip(done, s.lengths, strict=True)]
                ends = [d + count for d, count in zip(done, counts, strict=True)]
                args, kwargs = s.step(ends, counts)
                latents = torch.empty(12, s.heads, s.dim, dtype=s.dtype)
                compress(Compress(*args, **kwargs, entries=12), latents)
                made = [(b, j) for b in (0, 1) for j in range(done[b] // s.stride, ends[b] // s.stride)]
                for latent, (b, j) in zip(latents, made, strict=False):
                    if not s.close(latent, s.expected(b, j)[0]):
                        return True
                if latents[len(made) :].any():
                    return True
                drafts = [
                    count if s.span > 1 and end != n else 0
                    for end, n, count in zip(ends, s.lengths, counts, strict=True)
                ]
                done = [end - min(draft, REWIND) for end, draft in zip(ends, drafts, strict=True)]
        except (RuntimeError, ValueError, IndexError, TypeError):
            return True
        for b, entries in enumerate(s.entries()):
            if not all(s.close(entry, s.expected(b, j)[1]) for j, entry in enumerate(entries)):
                return True
    return False


def test_compress_itself_passes() -> None:
    assert not differs(reference.compress)


@each(compress=FAULTS)
def test_fault_is_noticed(file: str, old: str, new: str) -> None:
    assert differs(mutant(file, old, new).compress)


@pytest.mark.parametrize("what", ["plane", "state"])
def test_latent_may_not_be_what_is_written(what: str) -> None:
    s = Sequences(lines()[0], [9], format="fp32")
    args, kwargs = s.step([9], [9])
    memory = getattr(s, what).flatten()[: 2 * s.dim].view(2, 1, s.dim)
    with pytest.raises(ValueError, match="memory that no other argument uses"):
        torch.ops.sparse_attn.compress.out(*args, **dict(kwargs, dtype="fp32"), entries=2, latent=memory)
