"""The results as text and as one self-contained HTML page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from html import escape
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from .measure import ABSOLUTE, RELATIVE, Results

MIB, GIB = 1 << 20, 1 << 30
DENSE = Fraction(1)
GREY, BLUE, ORANGE, GREEN = "#6b7280", "#1f6fb4", "#d9730d", "#2e8b57"

Table = tuple[list[str], list[list[str]]]


def loss_table(r: Results) -> Table:
    head = ["pairs", "perplexity", "change", "KV bytes resident", "KV bytes read", "pairs attended"]
    dense = r.tails[0]
    rows = [["dense", f"{dense.perplexity:.3f}", "", "1.000", "1.000", "1.000"]]
    for tail in r.tails[1:]:
        assert tail.keep is not None
        ratio = r.ratios[tail.keep]
        change, error = tail.change(dense)
        rows.append(
            [
                str(tail.keep),
                f"{tail.perplexity:.3f}",
                f"{change:+.2%} ± {error:.2%}",
                f"{ratio.resident:.3f}",
                f"{ratio.read:.3f}",
                f"{ratio.attended:.3f}",
            ]
        )
    return head, rows


def time_table(r: Results) -> Table:
    timing = r.timings[-1]
    sdpa = median(timing.sdpa)
    head = ["ms", "select", "attend", "together", "attend / SDPA", "together / SDPA"]

    def row(name: str, select: float, attend: float) -> list[str]:
        both = select + attend
        return [
            name,
            f"{select:.2f}",
            f"{attend:.2f}",
            f"{both:.2f}",
            f"{attend / sdpa:.2f}",
            f"{both / sdpa:.2f}",
        ]

    rows = [row("PyTorch SDPA, dense", 0.0, sdpa), row("dense", 0.0, median(timing.dense))]
    rows += [row(str(keep), *timing.sparse_ms(keep)) for keep in timing.sparse]
    return head, rows


def _time_title(r: Results) -> str:
    return f"Attention of one decode step over {r.timings[-1].context:,} entries, {r.layers} layers"


def context_table(r: Results) -> Table:
    keep = r.budget.keep
    head = ["entries", "PyTorch SDPA", "dense", f"{keep}: select", f"{keep}: attend"]
    rows = []
    for timing in r.timings:
        times = (median(timing.sdpa), median(timing.dense), *timing.sparse_ms(keep))
        rows.append([f"{timing.context:,}", *(f"{ms:.2f}" for ms in times)])
    return head, rows


def facts(r: Results) -> dict[str, str]:
    """What ran, where, on what."""
    budget = r.budget
    return {
        "Machine": f"{r.machine}, threads: {r.threads}; {r.versions}; backend {r.backend}",
        "Model": f"SmolLM2-135M-Instruct (weights of 4 bits, run in float32), {r.layers} layers; K and V in float32",
        "Text": f"{r.text}: {r.prompt:,} tokens of prompt, then {len(r.tails[0].losses):,} held out",
        "Selection": f"{r.selection}; for each token and KV head; the first {budget.first} and the last {budget.last} "
        f"entries always, never under {budget.floor}. The prompt is read densely",
        "Memory": f"K and V {r.kv_bytes / MIB:.0f} MiB, the selector's copy {r.copy_bytes / MIB:.0f} MiB; "
        f"process at its peak {r.peak_bytes / GIB:.2f} GiB, model included, comparison excluded",
        "Time": f"prompt {r.prefill_s:.1f} s; with the attention and the cache of transformers "
        f"{r.agreement.prefill_s:.1f} s; whole run {r.seconds:.0f} s",
    }


def summary(r: Results) -> str:
    """The main figures in one sentence."""
    keep = r.budget.keep
    tail = next(tail for tail in r.tails if tail.keep == keep)
    change, error = tail.change(r.tails[0])
    timing = r.timings[-1]
    sdpa = median(timing.sdpa)
    select, attend = timing.sparse_ms(keep)
    return (
        f"At {keep} of the pairs, perplexity changes by {change:+.2%} ± {error:.2%} and {r.ratios[keep].read:.3f} of "
        f"the KV bytes are read. Over {timing.context:,} entries, attention takes {attend / sdpa:.2f} of the time of "
        f"PyTorch SDPA (dense: {median(timing.dense) / sdpa:.2f}); with this selection {(select + attend) / sdpa:.2f}."
    )


def check(r: Results) -> str:
    """The sentence on agreement with transformers."""
    a = r.agreement
    tokens = len(r.continuations[0].tokens)
    return (
        f"{'PASSED' if a.holds else 'FAILED'}: dense attention through sparse_attn.attend against "
        f"{a.implementation} of transformers, {a.compared:,} tokens: logits differ by at most "
        f"{a.largest_difference:.1e} (allowed {ABSOLUTE:.0e} + {RELATIVE:.0e} |logit|, largest {a.largest_logit:.1f}); "
        f"the {tokens} greedy tokens are {'the same' if a.same_tokens else 'NOT the same'}"
    )


def continuations(r: Results) -> list[tuple[str, str, str]]:
    """Name, text, and what decoding took, of each continuation."""
    dense = r.continuations[0].tokens
    found = []
    for continuation, text in zip(r.continuations, r.decoded, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(continuation.tokens, dense, strict=True)) if a != b), len(dense))
        select, attend = (continuation.median_ms(part) for part in ("select", "attend"))
        if continuation.keep is None:
            found.append(("dense", text, f"a token: attend {attend:.1f} ms"))
        else:
            equal = "all tokens as dense" if same == len(dense) else f"the first {same} of {len(dense)} tokens as dense"
            note = f"a token: select {select:.1f} ms, attend {attend:.1f} ms; {equal}"
            found.append((str(continuation.keep), text, note))
    return found


NOTES = (
    "Perplexity is teacher-forced; its change to dense comes with the standard error of the paired difference over the "
    "tokens. One small model and one text: a lead, not a benchmark.",
    "KV bytes resident count K, V and the selector's copy. KV bytes read count the copy that is scored and the K and V "
    "that are attended, as if each token were decoded by itself. Pairs attended are (query token, entry) pairs.",
    "Time is one decode step's attention over all layers, on the model's own queries and keys: the median of "
    "measurements taken in turns. Selection counts apart. SDPA reads contiguous K and V.",
)


def text(r: Results) -> str:
    """The report for a terminal."""
    parts = ["\n".join(f"{name:<10} {value}" for name, value in facts(r).items())]
    parts.append("Greedy continuation of the prompt")
    parts += [f"  {name} ({note}):\n    {said!r}" for name, said, note in continuations(r)]
    parts.append(f"Held-out text, {len(r.tails[0].losses):,} tokens\n{_columns(loss_table(r))}")
    parts.append(f"{_time_title(r)}\n{_columns(time_table(r))}")
    parts.append(f"The same over the number of entries, ms\n{_columns(context_table(r))}")
    parts.append("\n".join(NOTES))
    parts.append(summary(r))
    parts.append(check(r))
    return "\n\n".join(parts)


def _columns(table: Table) -> str:
    head, rows = table
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells))
    return "\n".join(lines)


def html(r: Results) -> str:
    """The report as a page that needs no other file."""
    rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in facts(r).items())
    said = "".join(
        f"<h3>{escape(name)} <small>{escape(note)}</small></h3><blockquote>{escape(text.strip())}</blockquote>"
        for name, text, note in continuations(r)
    )
    plots = "".join(f"<figure>{plot(r)}</figure>" for plot in (plot_loss, plot_time, plot_context))
    notes = "".join(f"<li>{escape(note)}</li>" for note in NOTES)
    verdict = "good" if r.agreement.holds else "bad"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sparse_attn demo</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #1f2430 }}
h1 {{ font-size: 1.5rem }}
h2 {{ font-size: 1.1rem; margin-top: 1.8rem }}
h3 {{ font-size: 1rem; margin: .8rem 0 .2rem }}
small {{ font-weight: normal; color: {GREY} }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }}
.numbers td, .numbers th {{ text-align: right; border-bottom: 1px solid #e5e7eb }}
.numbers td:first-child, .numbers th:first-child {{ text-align: left }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(21rem, 1fr)); gap: 1rem }}
figure {{ margin: 0 }} figure svg {{ width: 100%; height: auto }}
blockquote {{ margin: 0; padding: .3rem .8rem; border-left: 3px solid #d1d5db; white-space: pre-wrap }}
.good, .bad {{ padding: .5rem .8rem; border-left: 4px solid {GREEN}; background: #f0f7f3 }}
.bad {{ border-color: #b91c1c; background: #fdf1f1 }}
</style>
</head>
<body>
<h1>A language model decodes through sparse_attn.attend</h1>
<p>{escape(summary(r))}</p>
<p class="{verdict}">{escape(check(r))}</p>
<div class="plots">{plots}</div>
<h2>Held-out text</h2>
{_html_table(loss_table(r))}
<h2>{_time_title(r)}</h2>
{_html_table(time_table(r))}
<h2>The same over the number of entries, ms</h2>
{_html_table(context_table(r))}
<h2>Greedy continuation of the prompt</h2>
{said}
<h2>What ran</h2>
<table>{rows}</table>
<h2>How to read the numbers</h2>
<ul>{notes}</ul>
</body>
</html>
"""


def _html_table(table: Table) -> str:
    head, rows = table
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f'<table class="numbers">{"".join(lines)}</table>'


def _plot(draw: Callable[[Any], None], title: str, x: str, y: str) -> str:
    """One plot as inline SVG. ``draw`` gets the axes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.6, 3.5), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.set_ylim(bottom=0 if y.endswith("ms") else None)
        figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
        file = StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :]


def _shares(keeps: Sequence[Fraction]) -> tuple[list[int], list[str]]:
    return list(range(len(keeps) + 1)), ["dense", *map(str, keeps)]


def plot_loss(r: Results) -> str:
    def draw(axes: Any) -> None:
        dense = r.tails[0]
        places, names = _shares([tail.keep for tail in r.tails if tail.keep is not None])
        errors = [0.0] + [tail.perplexity * tail.change(dense)[1] for tail in r.tails[1:]]
        axes.axhline(dense.perplexity, color=GREY, linewidth=1, linestyle="--")
        values = [tail.perplexity for tail in r.tails]
        axes.errorbar(places, values, errors, color=BLUE, marker="o", capsize=4, label="± standard error of the change")
        axes.set_xticks(places, names)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.97 * dense.perplexity), max(high, 1.03 * dense.perplexity))  # noise stays small

    return _plot(draw, "Perplexity of the held-out text", "pairs attended", "perplexity")


def plot_time(r: Results) -> str:
    def draw(axes: Any) -> None:
        timing = r.timings[-1]
        places, names = _shares(list(timing.sparse))
        pairs = [(0.0, median(timing.dense)), *(timing.sparse_ms(keep) for keep in timing.sparse)]
        attend = [pair[1] for pair in pairs]
        axes.bar(places, attend, color=BLUE, width=0.6, label="attend")
        axes.bar(places, [pair[0] for pair in pairs], bottom=attend, color=ORANGE, width=0.6, label="select")
        axes.axhline(median(timing.sdpa), color=GREY, linestyle="--", label="PyTorch SDPA, dense")
        axes.set_xticks(places, names)

    title = f"Attention of a decode step, {r.timings[-1].context:,} entries"
    return _plot(draw, title, "pairs attended", "time over all layers, ms")


def plot_context(r: Results) -> str:
    def draw(axes: Any) -> None:
        keep = r.budget.keep
        contexts = [timing.context for timing in r.timings]
        sparse = [timing.sparse_ms(keep) for timing in r.timings]
        lines = (
            ("PyTorch SDPA, dense", GREY, "--", [median(timing.sdpa) for timing in r.timings]),
            ("dense", GREEN, "-", [median(timing.dense) for timing in r.timings]),
            (f"{keep}: attend", BLUE, "-", [attend for _, attend in sparse]),
            (f"{keep}: select and attend", ORANGE, "-", [select + attend for select, attend in sparse]),
        )
        for name, color, style, values in lines:
            axes.plot(contexts, values, color=color, linestyle=style, marker="o", markersize=4, label=name)

        axes.set_xticks(contexts, [f"{context:,}" for context in contexts], rotation=45)

    return _plot(draw, "Attention of a decode step", "entries in the cache", "time over all layers, ms")


def write(path: Path, page: str) -> None:
    """Write ``page`` to ``path``, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
