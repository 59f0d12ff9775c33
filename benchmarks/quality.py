"""What selection and formats cost a real model: perplexity and retrieval of SmolLM2-135M-Instruct at 8K tokens.

Every layer selects, for every token and KV head. `decode`: a prompt of 7,680 tokens is read densely, then 512 tokens,
each of which selects as if it were decoded by itself. `decode N`: the same tokens, N with those of the prompt that are
nearest. `steps`: the first 64 of them one at a time. `prefill`: all 8,192 tokens select; those from 4,096 on are
scored. `needle`: sentences hidden in a prompt, asked for after it, as `decode`.
Planes hold the values that a format gives back (`store`, then `load`), in float32: what reading the format gives.
Each cell appends a line to RESULTS, and is skipped if its line is there.
Run: python benchmarks/quality.py RESULTS [--work FOLDER] [--minutes N] [--only TEXT] [--table [--against SETTING]]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparse_attn import attend, layout, load, select, store
from sparse_attn.demo import model
from sparse_attn.demo.selection import Budget
from sparse_attn.quality.tasks import encode, needles

CONTEXT, PROMPT, SCORED = 8192, 7680, 4096
PAGE = 64
CHUNKS = {"prefill": 512, "decode": 128, "steps": 1, "needle": 64}
AS_INT4 = {8192: 3356, 4096: 1678, 2048: 839}
"""Tokens in int8 with an int4 index that take the bytes of so many tokens in int4: 68 of 166 bytes a row and head."""
STEPS = 64
WINDOWS = 16
"""Losses are reported as means of so many windows of equal length: their spread gives the standard error."""


@dataclass(frozen=True)
class Scorer:
    """What is scored, and which arguments `select` gets. All keep the first 4 tokens and the last 32, or more."""

    summary: str = "keys"
    span: int = 1
    ratio: int = 1
    block: int = 1
    first: int = 1
    last: int = 3  # blocks of 16 that the last 32 tokens can lie in
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> int:
        """Tokens that an index stands for."""
        return self.ratio * self.block


SCORERS = {
    "tokens": Scorer(first=4, last=32),
    "block max": Scorer(block=16, arguments=dict(pool="max")),
    "block mean": Scorer("mean", span=16, ratio=16, arguments=dict(tail="counted")),
    "quest": Scorer("bounds", span=16, ratio=16, arguments=dict(bounds=True, tail="counted")),
    "nsa": Scorer("mean", span=32, ratio=16, block=4, last=2, arguments=dict(pool="sum", tail="counted")),
}


@dataclass(frozen=True)
class Setting:
    """One way to attend. `share` is of the visible tokens; "" attends densely."""

    share: str = ""
    scorer: str = ""
    score: str = ""
    index: str = ""
    """Format of the keys that are scored, made of full-precision keys; "kv": the keys that are attended."""
    kv: str = "fp32"
    """Format of the keys and values that are attended."""

    @property
    def name(self) -> str:
        chosen = f"{self.share} {self.scorer} {self.score} {self.index}" if self.share else "dense"
        return f"{chosen} kv {self.kv}"


def rounded(rows: Tensor, format: str) -> Tensor:
    """float32 `rows [T, H, D]` as reading them from a plane in `format` gives them."""
    spec, (count, heads, dim) = layout.FORMATS[format], rows.shape
    width = dim // 2 if format == "int4_index_h" else dim
    plane = torch.empty(1, count, heads, width, dtype=getattr(torch, spec.dtype))
    scale = None if format in layout.PLAIN_FORMATS else torch.empty(1, count, heads, dtype=torch.float16)
    slots = torch.arange(count)
    store(rows, plane, slots, scale=scale, format=format)
    return load(plane, slots, scale=scale, format=format)


class Cache:
    """Planes of one sequence. Those of fp32 hold what was rounded by the setting's formats."""

    def __init__(self, config: Any, setting: Setting, entries: int) -> None:
        self.setting, self.heads, self.dim = setting, config.num_key_value_heads, config.head_dim
        self.scorer = SCORERS.get(setting.scorer, Scorer())
        self.length = 0
        shape = (config.num_hidden_layers, layout.pages_for(entries, PAGE) * PAGE, self.heads)
        self.raw = torch.zeros(*shape, self.dim)
        self.keys, self.values = (torch.zeros_like(self.raw) for _ in range(2))
        index = (shape[0], layout.pages_for(entries // self.scorer.ratio + 1, PAGE) * PAGE, self.heads)
        width = 2 * self.dim if self.scorer.summary == "bounds" else self.dim
        self.index = torch.zeros(*index, width if setting.share else 0)
        self.pairs = self.dense_pairs = 0

    def write(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store `k, v [T, H, D]`, the tokens from `start` on."""
        end = start + len(k)
        self.raw[layer, start:end] = k
        self.keys[layer, start:end] = rounded(k, self.setting.kv)
        self.values[layer, start:end] = rounded(v, self.setting.kv)
        if not self.setting.share:
            return
        if self.scorer.summary == "keys":
            own = rounded(k, self.setting.index) if self.setting.index != "kv" else self.keys[layer, start:end]
            self.index[layer, start:end] = own
            return
        span, ratio = self.scorer.span, self.scorer.ratio
        begin, stop = (max(0, (n - span) // ratio + 1) for n in (start, end))  # summaries that are complete now
        if stop > begin:
            keys = self.raw[layer, begin * ratio : (stop - 1) * ratio + span].unfold(0, span, ratio)
            found = keys.mean(-1) if self.scorer.summary == "mean" else torch.cat([keys.amin(-1), keys.amax(-1)], -1)
            self.index[layer, begin:stop] = found

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of `q [T, Hq, D]`, the newest tokens."""
        tokens, length = len(q), self.length
        lengths = dict(
            cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            scale=scale,
            max_seqlen_q=tokens,
            max_seq_len=length,
        )
        visible = torch.arange(length - tokens, length) + 1
        self.dense_pairs += int(visible.sum()) * self.heads
        indices = None
        if self.setting.share:
            indices = self._select(layer, q, visible, lengths)
        else:
            self.pairs += int(visible.sum()) * self.heads
        out = attend(
            q,
            v_dim=self.dim,
            kv=_paged(self.keys[layer]),
            v=_paged(self.values[layer]),
            page_table=_table(self.keys),
            format="fp32",
            indices=indices,
            select_block=self.scorer.unit,
            **lengths,
        )
        assert isinstance(out, Tensor)
        return out

    def _select(self, layer: int, q: Tensor, visible: Tensor, lengths: dict[str, Any]) -> Tensor:
        scorer = self.scorer
        total = -(-visible // scorer.unit)
        wanted = -(-Budget(Fraction(self.setting.share), floor=0).entries(visible) // scorer.unit)
        wanted = torch.minimum(wanted.clamp(min=scorer.first + scorer.last), total)
        selected = select(
            q,
            None,
            keys=_paged(self.index[layer]),
            page_table=_table(self.index),
            k=max(int(wanted.max()), scorer.first + scorer.last),
            format="fp32",
            row_k=wanted.int(),
            score=self.setting.score,
            out_heads=self.heads,
            ratio=scorer.ratio,
            span=scorer.span if scorer.span > 1 else 0,
            block=scorer.block,
            keep_first=scorer.first,
            keep_last=scorer.last,
            order="index",
            **scorer.arguments,
            **lengths,
        )
        clipped = total * scorer.unit - visible  # of the newest unit, which is always kept
        self.pairs += int(selected.counts.sum()) * scorer.unit - int(clipped.sum()) * self.heads
        return selected.indices


def _paged(plane: Tensor) -> Tensor:
    return plane.unflatten(0, (-1, PAGE))


def _table(planes: Tensor) -> Tensor:
    return torch.arange(planes.shape[1] // PAGE, dtype=torch.int32)[None]


def register() -> None:
    """Make the attention known to transformers as `quality`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(module, query, key, value, mask, *, scaling, planes, **_):  # type: ignore[no-untyped-def]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        planes.write(module.layer_idx, k, v, planes.length - len(k))
        return planes.attend(module.layer_idx, q, scaling)[None], None

    AttentionInterface.register("quality", attention)
    AttentionMaskInterface.register("quality", lambda **_: None)  # causality follows from lengths


def forward(llama: Any, cache: Cache, tokens: Tensor, logits: int) -> Tensor:
    """Run `tokens` as the next ones. Returns the logits after the last `logits` of them."""
    place = torch.arange(cache.length, cache.length + len(tokens))
    cache.length += len(tokens)
    with torch.inference_mode():
        out = llama(tokens[None], position_ids=place[None], use_cache=False, logits_to_keep=logits, planes=cache)
    result: Tensor = out.logits[0]
    return result


def losses(llama: Any, cache: Cache, tokens: Tensor, scored: int, chunk: int) -> Tensor:
    """Nats of `tokens[scored + 1:]`, each after all before it; the cache may hold a prompt before `tokens`."""
    found = []
    for at in range(0, len(tokens) - 1, chunk):
        part, targets = tokens[:-1][at : at + chunk], tokens[1:][at : at + chunk]
        rows = forward(llama, cache, part, len(part) if at >= scored else 1)
        if at >= scored:
            found.append(cross_entropy(rows, targets, reduction="none"))
    return torch.cat(found)


def texts(name: str) -> str:
    """A long text that comes with Python or with Debian."""
    if name == "topics":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[topic] for topic in sorted(topics))
    if name == "licences":
        folder = Path("/usr/share/common-licenses")
        files = ("GPL-3", "GFDL-1.3", "MPL-2.0", "LGPL-2.1", "Apache-2.0")
        return "\n\n".join((folder / file).read_text(encoding="utf-8") for file in files)
    return Path(argparse.__file__).read_text(encoding="utf-8")


SKIP = {"topics": 20_000, "licences": 3_000, "argparse": 2_000}
"""Tokens to leave out at the beginning of each text."""


@dataclass
class Material:
    """A prompt, read densely, and what follows it."""

    keys: Tensor
    values: Tensor
    rest: list[Tensor]
    """Token sequences that follow the prompt, each by itself."""
    answers: list[int]
    """How many tokens at the end of each of them are the answer (needles)."""
    losses: Tensor
    """Nats of the dense prefill."""


def material(llama: Any, tokenizer: Any, phase: str, text: str, work: Path) -> Material:
    """What a cell reads. Kept in `work`, as the dense prefill takes minutes."""
    kind = "needle" if phase == "needle" else f"text-{phase[7:]}" if phase.startswith("decode ") else "text"
    path = work / f"{kind}-{text}.pt"
    if path.is_file():
        return Material(**torch.load(path))
    tokens = torch.tensor(encode(tokenizer, texts(text))[SKIP[text] :])
    if kind == "needle":
        task = needles(tokenizer, tokens.tolist(), PROMPT)
        prompt = torch.tensor(task.prompt)
        rest = [torch.tensor(question.tokens) for question in task.questions]
        answers = [question.answer for question in task.questions]
    else:
        first = CONTEXT - int(phase[7:]) if phase.startswith("decode ") else 0
        prompt, rest, answers = tokens[first : CONTEXT + 1], [tokens[PROMPT : CONTEXT + 1]], [0]
    cache = Cache(llama.config, Setting(), CONTEXT)
    found = losses(llama, cache, prompt, min(SCORED, len(prompt) - 513), CHUNKS["prefill"])
    if kind == "needle":
        forward(llama, cache, prompt[-1:], 1)
    length = len(prompt) - len(rest[0]) if kind != "needle" else PROMPT
    made = Material(cache.raw[:, :length].clone(), cache.values[:, :length].clone(), rest, answers, found)
    torch.save(vars(made), path)
    return made


def measure(llama: Any, tokenizer: Any, phase: str, text: str, setting: Setting, work: Path) -> dict[str, Any]:
    """The results of one cell."""
    made = material(llama, tokenizer, phase, text, work)
    if phase == "prefill":
        if setting == Setting():
            return windows(made.losses) | {"pairs": 1.0}
        cache = Cache(llama.config, setting, CONTEXT)
        tokens = torch.tensor(encode(tokenizer, texts(text))[SKIP[text] :][: CONTEXT + 1])
        found = losses(llama, cache, tokens, SCORED, CHUNKS[phase])
        return windows(found) | {"pairs": cache.pairs / cache.dense_pairs}
    cache = Cache(llama.config, setting, CONTEXT)
    for layer, (k, v) in enumerate(zip(made.keys, made.values, strict=True)):
        cache.write(layer, k, v, 0)
    found, passed = [], []
    for tokens, answer in zip(made.rest, made.answers, strict=True):
        cache.length = made.keys.shape[1]
        if phase == "needle":
            rows = forward(llama, cache, tokens[:-1], answer)
            passed.append(bool((rows.argmax(-1) == tokens[-answer:]).all()))
        else:
            part = tokens[: STEPS + 1] if phase == "steps" else tokens
            found.append(losses(llama, cache, part, 0, CHUNKS[phase.split()[0]]))
    pairs = {"pairs": cache.pairs / cache.dense_pairs}
    return pairs | ({"passed": passed} if phase == "needle" else windows(torch.cat(found)))


def windows(found: Tensor) -> dict[str, Any]:
    return {"tokens": len(found), "nats": [round(float(part.mean()), 6) for part in found.view(WINDOWS, -1)]}


TEXTS = tuple(SKIP)
DENSE = Setting()
BEST = Setting("1/4", "tokens", "softmax_sum", "int4_index_h", "int8")
BLOCKS = ("block mean", "block max", "quest", "nsa")


def cells() -> Iterator[tuple[str, str, Setting]]:
    """(phase, text, setting) of every cell, the most important ones first."""

    def each(phase: str, *settings: Setting) -> Iterator[tuple[str, str, Setting]]:
        for setting in settings:
            for text in TEXTS:
                yield phase, text, setting

    def tokens(share: str, index: str = "fp32", kv: str = "fp32", score: str = "softmax_sum") -> Setting:
        return Setting(share, "tokens", score, index, kv)

    def blocks(share: str) -> list[Setting]:
        return [Setting(share, scorer, "softmax_sum", "fp32") for scorer in BLOCKS]

    yield from each("decode", DENSE, BEST, *blocks("1/4"))
    yield from each("decode", *(tokens(share, "int4_index_h", "int8") for share in ("1/8", "1/16")))
    yield from each("needle", DENSE, BEST)
    yield from each("decode", tokens("1/4"), tokens("1/4", "int8_index_h"), tokens("1/4", "int4_index_h"))
    yield from each("decode", Setting(kv="int8"), tokens("1/4", kv="int8"), tokens("1/4", "kv", "int8"))
    yield from each("decode", *(tokens("1/4", "int8_index_h", score=score) for score in ("max", "dot", "relu_sum")))
    cheap = [tokens(share, "int4_index_h", "int8", "dot") for share in ("1/4", "1/8", "1/16")]
    yield from each("needle", cheap[0])
    yield from each("decode", *cheap[1:])
    yield from each("prefill", DENSE, BEST)
    kv4 = Setting(kv="int4_index_h"), tokens("1/4", kv="int4_index_h"), tokens("1/4", "kv", "int4_index_h")
    yield from each("decode", *kv4)
    yield from (("steps", "topics", setting) for setting in (DENSE, BEST, tokens("1/4")))
    yield from each("needle", *blocks("1/4"))
    yield from each("prefill", cheap[0], *blocks("1/4"))
    yield from each("decode", cheap[0], *blocks("1/8"), *blocks("1/16"), *blocks("1/2"))
    yield from each("decode", tokens("1/2", "int4_index_h", "int8"))
    for context, less in AS_INT4.items():
        if context < CONTEXT:
            yield from each(f"decode {context}", DENSE, BEST, kv4[0])
        yield from each(f"decode {less}", BEST)
    for share in ("1/8", "1/16"):
        yield from each("needle", tokens(share, "int4_index_h", "int8"))
        yield from each("prefill", tokens(share, "int4_index_h", "int8"))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of JSON lines, added to")
    parser.add_argument("--work", type=Path, default=Path("build/quality"), help="where prompts are kept, 2 GB")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no cell after so long")
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--table", action="store_true", help="print what RESULTS holds, measure nothing")
    parser.add_argument(
        "--against",
        default=DENSE.name,
        metavar="SETTING",
        help="or `PHASE, SETTING`, of the table's differences (dense)",
    )
    options = parser.parse_args()
    if options.table:
        print(table(read(options.results), options.against))
        return
    begin = time.perf_counter()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    llama, tokenizer = model.load(lambda text: print(text, file=sys.stderr))
    register()
    llama.set_attn_implementation("quality")
    done = {line["cell"] for line in read(options.results)}
    for phase, text, setting in cells():
        cell = f"{phase}, {text}, {setting.name}"
        if cell in done or options.only not in cell:
            continue
        if time.perf_counter() - begin > 60 * options.minutes:
            break
        done.add(cell)
        start = time.process_time()
        found = measure(llama, tokenizer, phase, text, setting, options.work)
        line = {"cell": cell, "phase": phase, "text": text, **asdict(setting), **found}
        line |= {"cpu_s": round(time.process_time() - start, 1), "date": time.strftime("%Y-%m-%d")}
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{time.perf_counter() - begin:6.0f} s  {cell}", file=sys.stderr, flush=True)


def table(lines: list[dict[str, Any]], against: str) -> str:
    """Change of perplexity from the setting `against`, by phase, setting and text, as Markdown; and needles found."""
    rows = ["| phase | setting | pairs | " + " | ".join(TEXTS) + " | all texts |", "|---" * (4 + len(TEXTS)) + "|"]
    by_cell = {line["cell"]: line for line in lines}
    for phase, name in dict.fromkeys((line["phase"], Setting(**_setting(line)).name) for line in lines):
        found = [by_cell.get(f"{phase}, {text}, {name}") for text in TEXTS]
        base_phase, _, base_name = against.rpartition(", ")
        start = [by_cell.get(f"{base_phase or phase}, {text}, {base_name}") for text in TEXTS]
        there = [line for line in found if line]
        pairs = f"{sum(line['pairs'] for line in there) / len(there):.3f}"
        if phase == "needle":
            shown = ["".join("-+"[hit] for hit in line["passed"]) if line else "" for line in found]
            hits = [hit for line in there for hit in line["passed"]]
            total = f"{sum(hits)} of {len(hits)}"
        else:
            nats = [torch.tensor(line["nats"]) if line else None for line in found]
            base = [torch.tensor(line["nats"]) if line else None for line in start]
            shown = [cell_text(n, d, name == against) for n, d in zip(nats, base, strict=True)]
            both = [(n, d) for n, d in zip(nats, base, strict=True) if n is not None and d is not None]
            joined = [torch.cat(part) for part in zip(*both, strict=True)] if both else [None, None]
            total = cell_text(*joined, name == against)
        rows.append(f"| {phase} | {name} | {pairs} | {' | '.join(shown)} | {total} |")
    return "\n".join(rows)


def _setting(line: dict[str, Any]) -> dict[str, str]:
    return {name: line[name] for name in Setting.__dataclass_fields__}


def cell_text(nats: Tensor | None, base: Tensor | None, absolute: bool) -> str:
    """Perplexity, or its change from `base` with the standard error of the paired difference over the windows."""
    if nats is None or base is None:
        return ""
    if absolute:
        return f"{float(nats.mean().exp()):.3f}"
    more = nats - base
    return f"{float(more.mean().expm1()):+.2%} ± {float(more.std() / len(more) ** 0.5):.2%}"


if __name__ == "__main__":
    main()
