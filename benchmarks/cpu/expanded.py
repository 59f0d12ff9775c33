"""Cases of prompts of latent attention with keys and values expanded: what engines do where few keys are seen.

A latent gives each head a key of its own, ``[W_UK latent, rotated part]``, and a value ``W_UV latent``. Absorbed, the
weights are multiplied into queries and outputs instead, and a product has 576 and 512 elements for 192 and 128. Weights
are multiplied head by head, which torch does faster than all heads in one call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from sparse_attn import layout, resolve
from sparse_attn.ops.attend import Attend

from . import attend
from .machine import pool
from .timing import OURS, Case

LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128
K, PAGE = 2048, 64
ABSORBED = f"absorbed, K {K}"
EXPAND = "expansion of keys and values"
ABSORB = "absorption of queries and outputs"


def make(heads: int, context: int, rows: int) -> Case:
    """The last `rows` of a prompt. SDPA is a peer of all of it: of a part, torch has the mask as a tensor only."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).bfloat16()

    pages = layout.pages_for(context, PAGE)
    latents = pool(pages, PAGE, 1, LATENT + ROPE, dtype=torch.bfloat16)
    keys = pool(1, heads, context, NOPE + ROPE, dtype=torch.bfloat16)
    values = pool(1, heads, context, VALUE, dtype=torch.bfloat16)
    to_keys, to_values = (random(heads, n, LATENT) / LATENT**0.5 for n in (NOPE, VALUE))
    flat = latents.view(-1, LATENT + ROPE)[:context]

    def expand(_: int) -> Tensor:
        for head in range(heads):
            torch.mm(flat[:, :LATENT], to_keys[head].T, out=keys[0, head, :, :NOPE])
            torch.mm(flat[:, :LATENT], to_values[head].T, out=values[0, head])
        keys[0, ..., NOPE:] = flat[:, LATENT:]
        return values

    expand(0)
    q = random(rows, heads, NOPE + ROPE)
    common = (torch.tensor([0, rows]).int(), torch.tensor([context]).int(), (NOPE + ROPE) ** -0.5)
    table = torch.arange(pages).int()[None]
    dense = Attend(q, *common, VALUE, rows, context, kv=keys.transpose(1, 2), v=values.transpose(1, 2))
    dense = dense._replace(page_table=table[:, :1], page_size=context)
    impl = resolve("attend", **dict(dense._asdict()))

    seen = torch.arange(context - rows + 1, context + 1)
    indices = torch.full((rows, 1, K), -1, dtype=torch.int32)
    for row, count in zip(indices, seen.tolist(), strict=True):
        row[0, : min(count, K)] = torch.randperm(count, generator=g)[:K]
    absorbed = torch.empty(rows, heads, LATENT + ROPE, dtype=torch.bfloat16)
    sparse = Attend(absorbed, *common, LATENT, rows, context, kv=latents, page_table=table, page_size=PAGE)
    sparse = sparse._replace(indices=indices)
    sparse_impl = resolve("attend", **dict(sparse._asdict()))
    joined = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16)
    out = torch.empty(rows, heads, VALUE, dtype=torch.bfloat16)

    def into_latents(_: int) -> Tensor:
        for head in range(heads):
            torch.mm(q[:, head, :NOPE], to_keys[head], out=absorbed[:, head, :LATENT])
            torch.mm(joined[:, head], to_values[head].T, out=out[:, head])
        absorbed[..., LATENT:] = q[..., NOPE:]
        return out

    def attend_latents(_: int) -> Tensor:
        sparse_impl.run(sparse, joined, None)
        return joined

    into_latents(0)
    functions: dict[str, Callable[[int], Tensor]] = {OURS: lambda i: attend.run(impl, dense)}
    if rows == context:
        wide = pad(values, (0, ROPE))  # its quick kernel wants rows of one length
        by_head = q.transpose(0, 1)[None].contiguous()

        def sdpa(_: int) -> Tensor:
            found = scaled_dot_product_attention(by_head, keys, wide, is_causal=True, scale=dense.scale)
            return found[0, ..., :VALUE].transpose(0, 1)

        functions[attend.DENSE] = sdpa
    functions |= {ABSORBED: attend_latents, EXPAND: expand, ABSORB: into_latents}
    part = "" if rows == context else f", last {rows} rows"
    case = Case(f"MLA expanded, {heads} heads, {context // 1024}K{part}, bf16", functions, 1)
    case.flops, case.limit = 2.0 * int(seen.sum()) * heads * (NOPE + ROPE + VALUE), "bf16"

    def check() -> None:
        ours = functions[OURS](0).float()
        others = {name: functions[name](0) for name in (attend.DENSE,) if name in functions}
        if context <= K:  # else the latents' call attends less
            attend_latents(0)
            others[ABSORBED] = into_latents(0)
        for name, other in others.items():
            error = (other.float() - ours).abs().max()
            assert error < 0.05, f"{case.name}: {name} differs by {error:.3f}"

    case.check = check
    return case
