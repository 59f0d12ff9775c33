"""Plans: published figures, limits against brute force, the page in docs, and refusals."""

from __future__ import annotations

import json
import re
import shlex
from fractions import Fraction
from math import gcd
from pathlib import Path

import pytest

from sparse_attn import plan
from sparse_attn.__main__ import main
from sparse_attn.models import METHODS, PRESETS, dense, gqa, sparse
from sparse_attn.serving import devices, traces
from sparse_attn.serving.devices import DEVICES, Device, Figure
from sparse_attn.serving.planner import Rank, Request, cache_of, demand, dense_cache
from sparse_attn.serving.stats import Counter
from sparse_attn.serving.weights import Weights

PAGE = Path(__file__).parents[1] / "docs" / "plan.md"
SOURCE = "this test"


def figure(value: float) -> Figure:
    return Figure(value, "published", SOURCE)


def device(memory: float = 1e9, bandwidth: float = 1e12, compute: float = 1e14) -> Device:
    return Device("card", "", figure(memory), figure(bandwidth), figure(compute))


def weights(size: float = 1e8, active: float = 1e6) -> Weights:
    return Weights(figure(size), figure(active))


V41, V4, V32 = (PRESETS[f"deepseek-{version}"] for version in ("v4.1-flash", "v4-flash", "v3.2"))
LLAMA, SMOL = PRESETS["llama-3.1-8b"], PRESETS["smollm2-135m"]
QUARTERS = sparse(SMOL, METHODS["tokens"], 64)


def test_published_bytes_of_a_token():
    published = {"deepseek-v4.1-flash": 890, "deepseek-v4-flash": 3514, "deepseek-v3.2": 48068}
    for name, size in published.items():
        cache = cache_of(PRESETS[name])
        assert int(sum(cache.per_token.values())) == size
    assert dense_cache(V32).of(1000) == 61 * 576 * 2 * 1000
    assert dense_cache(LLAMA).of(1000) == cache_of(LLAMA).of(1000)


def test_a_quarter_of_the_bytes_is_four_times_one_or_the_other():
    """8K x 4 becomes 32K x 4, or 8K x 16, and not both."""
    whole, quarter = gqa("whole", 32, 8, 8, 64), gqa("quarter", 8, 8, 8, 64)
    rank = Rank(quarter, device(1e12), weights())
    change = rank.change(cache_of(whole), 8192, 4)
    uses = {use.name: use for use in change.uses}
    assert change.after * 4 == change.before
    assert (uses["requests"].amount, uses["context"].amount) == (16, 32768)
    assert rank.cache.of(32768) * 4 == rank.cache.of(8192) * 16 == change.before
    assert rank.cache.of(32768) * 16 == 4 * change.before
    assert uses["weights"].amount == change.freed == 0.75 * change.before


def test_the_three_ratios_are_three_numbers():
    found = Rank(V41, DEVICES["h200"], weights()).ratios(131072)
    counts = Counter(V41)([(131071, 131072)])
    assert found.read == counts.read_ratio and found.pairs == counts.effective_kv_ratio
    assert found.resident == cache_of(V41).of(131072) / (40 * 1024 * 131072)
    assert len({round(ratio, 4) for ratio in (found.resident, found.read, found.pairs)}) == 3


@pytest.mark.parametrize(("dim", "rise"), [(64, 34 / 256), (128, 66 / 512)])
def test_an_index_beside_bf16_keys_and_values_takes_memory(dim, rise):
    model = sparse(gqa("a", 4, 9, 3, dim), METHODS["tokens"], 64)
    rank = Rank(model, device(), weights(), formats={"index": "int4_index_h"})
    change = rank.change(rank.full, 4096, 8)
    assert -change.freed / change.before == pytest.approx(rise)
    assert change.uses == ()


SMALL = {
    "dense": LLAMA,
    "tokens": QUARTERS,
    "v4.1": V41,
    "v4": V4,
    "quest": sparse(gqa("a", 4, 8, 2, 64), METHODS["quest"], 8),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("slo", [None, 2e-3])
@pytest.mark.parametrize("context", [100, 3000])
def test_limits_are_the_last_that_fit(name, slo, context):
    """One request more takes too much of what binds, and the stated number does not."""
    rank = Rank(SMALL[name], device(), weights(), slo=slo, step_tokens=16)
    counts = Counter(rank.model)
    point = rank.limits(context)

    def fits(requests: int) -> dict[str, bool]:
        step = counts([(context - 1, context)] * requests)
        read = sum(size for kind, size in step.read.items() if kind != "dense")
        flops = sum(n for part, n in step.flops.items() if part != "dense")
        found = {"memory": requests * rank.cache.of(context) <= 0.9e9 - 1e8 - rank.workspace(context)}
        if slo is not None:
            found["bandwidth"] = (1e8 + read) / 1e12 <= slo
            found["compute"] = (flops + 2e6 * requests) / 1e14 <= slo
        return found

    assert point.limits.keys() == fits(1).keys()
    for resource, limit in point.limits.items():
        assert fits(limit)[resource] and not fits(limit + 1)[resource]
    assert point.requests == min(point.limits.values()) == point.limits[point.binds]


def test_the_longest_context_is_the_last_that_fits():
    rank = Rank(QUARTERS, device(), weights(), step_tokens=16)
    found, binds = rank.longest(5)
    assert binds == "memory"
    assert rank.limits(found).requests >= 5 > rank.limits(found + 1).requests


def test_index_scores_are_of_the_largest_list():
    rank = Rank(V41, device(), weights(), step_tokens=10)
    assert rank.workspace(1000) == 10 * 1000 * 4  # the layers of ratio 1
    m3 = Rank(PRESETS["minimax-m3"], device(), weights(), ranks=2, step_tokens=10)
    assert m3.workspace(1000) == 10 * 1000 * 4 * 2
    assert Rank(LLAMA, device(), weights()).workspace(1000) == 0
    assert Rank(V41, device(), weights(), step_tokens=0).workspace(1000) == 0


@pytest.mark.parametrize("name", ["tokens", "v4", "v4.1", "quest", "deepseek-v3.2 of 8"])
def test_break_even_lengths(name):
    """Just below, at a multiple of the step, selection costs as much or more; from there on always less."""
    rank = Rank(SMALL.get(name, V32), device(), weights(), ranks=8 if "of 8" in name else 1)
    own, other = Counter(rank.model), Counter(dense(rank.model))
    step = gcd(own.period, 128)

    def saves(what: str, context: int) -> bool:
        span = [(context - 1, context)]
        group, left = ("read", "dense") if what == "bytes read" else ("flops", "dense")
        sums = [sum(n for key, n in getattr(counter(span), group).items() if key != left) for counter in (own, other)]
        return sums[0] < sums[1]

    for what, found in rank.even_contexts().items():
        assert found is not None and found % step == 0
        assert not saves(what, found - step)
        assert all(saves(what, found + step * times) for times in (*range(300), 5000))


def test_break_even_is_the_same_for_a_share_that_is_hardly_another():
    """Whatever the period, which a share of 0.3333 makes 10,000 tokens."""
    whole, rounded = (
        Rank(sparse(PRESETS["llama-3.1-8b"], METHODS["tokens"], 256, share), device(), weights()).even_contexts()
        for share in (Fraction(1, 3), Fraction("0.3333"))
    )
    for name, context in whole.items():
        assert context <= rounded[name] <= context + 16


def test_break_even_batch():
    rank = Rank(V32, DEVICES["h200"], weights(6.7e11, 3.7e10), ranks=8)
    found = rank.even_requests(32768)
    own, other = Counter(rank.model), Counter(dense(rank.model))

    def seconds(counter: Counter, requests: int) -> float:
        step = counter([(32767, 32768)] * requests)
        read = sum(size for kind, size in step.read.items() if kind != "dense")
        flops = sum(n for part, n in step.flops.items() if part != "dense")
        return max((6.7e11 / 8 + read) / 4.8e12, (flops + 2 * 3.7e10 / 8 * requests) / 989e12)

    worth = [n for n in range(1, 200) if seconds(own, n) <= 0.9 * seconds(other, n)]
    assert found == worth[0]
    assert Rank(LLAMA, device(), weights()).even_requests(1000) is None
    assert Rank(LLAMA, device(), weights()).even_contexts() == {"bytes read": None, "FLOPs": None}


def test_what_the_baseline_cannot_hold_is_not_freed():
    rank = Rank(V41, device(1e9), weights(), step_tokens=0)
    change = rank.change(rank.full, 8192, 64)
    assert change.requests == 2 and change.before == 2 * rank.full.of(8192) <= rank.pool(8192)
    none = rank.change(rank.full, 131072, 64)
    assert (none.requests, none.after, none.freed) == (0, 0, rank.pool(131072))


def test_unknown_figures_leave_unknown_what_depends_on_them():
    rank = Rank(V32, DEVICES["h200"], Weights(), slo=0.05)
    assert rank.pool(8192) is None
    assert set(rank.limits(8192).limits.values()) == {None}
    assert (rank.limits(8192).requests, rank.limits(8192).binds) == (None, None)
    assert rank.even_requests(8192) is None
    assert rank.change(rank.full, 8192, 4).freed > 0
    assert Rank(V41, DEVICES["ascend-910b"], weights()).pool(8192) is None


def test_demand_of_a_trace():
    rank = Rank(LLAMA, device(1e12), weights(), slo=0.1)
    trace = [Request(0, 90, 10), Request(0.5, 190, 10), Request(0.9, 290, 10), Request(2.5, 400, 1)]
    found = demand(rank, trace)  # the first ends at 1.0, the third comes before
    assert (found.requests, found.bytes) == (3, rank.cache.of(600))
    assert (found.median_context, found.longest_context) == (300, 401)
    counts = Counter(LLAMA)([(99, 100), (199, 200), (299, 300)])
    assert found.seconds == rank.times(counts, 3)
    late = demand(rank, [trace[0], Request(1.0, 190, 10)])
    assert late.requests == 1  # a request that ends makes room for one that comes


def test_a_trace_on_the_command_line(capsys, tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ({"timestamp": 1000 * n, "input_length": 8000, "output_length": 192} for n in range(4))
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main([*CALL, "--slo", "10ms", "--trace", str(path)]) == 0
    shown = capsys.readouterr().out.split("\ntrace\n")[1]
    assert re.search(r"requests in flight  2 .*median 8,192, longest 8,192", shown)  # each takes 1.92 s
    assert re.search(r"binds first         bandwidth .* in use: fits", shown)


def test_traces_of_both_kinds(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [1]}\n')
    table = tmp_path / "a.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert traces.read(lines) == [Request(27.482, 6955, 52)]
    first, second = traces.read(table)
    assert (first.context, second.prompt) == (418, 396)
    assert second.arrival - first.arrival == pytest.approx(4.314579, abs=1e-6)
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,374,-1\n")
    with pytest.raises(ValueError, match="line 2: expected a time and two lengths"):
        traces.read(table)


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '{"timestamp": NaN, "input_length": 5, "output_length": 5}',
        '{"timestamp": 1, "input_length": 5, "output_length": 1e400}',
        '{"timestamp": 1, "input_length": 5}',
        "[]",
    ],
)
def test_lines_of_a_trace_are_refused(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 5, "output_length": 5}\n\n' + line)
    with pytest.raises(ValueError, match="trace.jsonl, line 3: expected a time and two lengths, got "):
        traces.read(path)


def test_a_request_without_answer_holds_its_cache_for_a_token():
    rank = Rank(PRESETS["llama-3.1-8b"], DEVICES["h200"], Weights(), slo=0.1)
    assert demand(rank, [Request(0, 10, 0)]).requests == 1
    assert demand(rank, [Request(0, 10, 0), Request(0.05, 10, 0), Request(0.12, 10, 0)]).requests == 2


def test_every_figure_has_a_source():
    found = [
        figure for one in DEVICES.values() for figure in (one.memory, one.bandwidth, one.compute) if figure is not None
    ]
    assert len(found) >= 15
    assert all(figure.source and figure.level in ("published", "derived") for figure in found)


OWN = {"memory_gb": 64, "bandwidth_gb_s": 1600, "bf16_tflops": 350, "source": SOURCE, "level": "measured"}


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_own_devices(tmp_path, suffix):
    path = tmp_path / f"own.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps({"our-card": OWN}))
    else:
        pytest.importorskip("tomllib")
        (table,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
        path.write_text(table)
    found = devices.find("our-card", path)
    assert (found.memory.value, found.bandwidth.value, found.compute.value) == (64e9, 1600e9, 350e12)
    assert found.memory.level == "measured"
    assert devices.find("h200", path) is DEVICES["h200"]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"memory_gb": 64}, "our-card: expected bandwidth_gb_s, bf16_tflops, memory_gb, source, .* got memory_gb"),
        (OWN | {"memory_gb": 0}, "memory_gb: expected a finite number above 0, got 0"),
        (OWN | {"memory_gb": float("nan")}, "memory_gb: expected a finite number above 0, got nan"),
        (OWN | {"level": "guessed"}, "level: expected one of published, derived, measured, got 'guessed'"),
        (OWN | {"family": "z80"}, "family: expected one of .*, got 'z80'"),
        (OWN | {"tdp": 3}, "got .*tdp"),
    ],
)
def test_own_devices_are_refused(tmp_path, table, sentence):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"our-card": table}))
    with pytest.raises(ValueError, match=sentence):
        devices.find("our-card", path)


DENSE = ["--model", "llama-3.1-8b", "--method", "tokens"]
CALL = ["plan", "--model", "deepseek-v4.1-flash", "--device", "h200", "--tp", "8"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--model", "gpt-2"], "model: expected one of deepseek-v3.2, .*, got 'gpt-2'"),
        (["--device", "abacus"], "device: expected one of h100, .*, got 'abacus'"),
        (["--baseline", "gpt-2"], "baseline: expected dense or one of .*, got 'gpt-2'"),
        (["--tp", "1"], "memory: expected room for a cache, got 32.* GB .* in the 126.90 GB .*; use more --tp"),
        (["--tp", "7"], "ranks: expected a divisor of the 64 query heads, got 7"),
        (["--tp", "0"], "tp: expected at least 1, got 0"),
        (["--context", "12q"], "expected a number of tokens such as 131072, 128k or 1m, got '12q'"),
        (["--slo", "50"], "expected a time such as 50ms or 0.05s, got '50'"),
        (["--format", "fp8"], "expected bf16 or such as main=bf16,index=int8_index, got 'fp8'"),
        (["--format", "main=fp8_v32"], "format 'fp8_v32': expected rows of 576 elements, got 512"),
        (["--k", "4"], "k, share: expected together with --method, got no method"),
        (["--method", "quest", "--k", "4"], "expected a dense model"),
        (["--memory-share", "2"], "memory share: expected above 0 and at most 1, got 2.0"),
        (["--weights-gb", "-1"], "weights_gb: expected a finite number above 0, got -1.0"),
        (["--active-b", "nan"], "active_b: expected a finite number above 0, got nan"),
        (["--share", "1/0"], "expected a share such as 1/4 or 0.25, got '1/0'"),
        ([*DENSE, "--k", "9999999"], "expected k and a share .* at most 2,097,152 tokens long, got 10,000,003; use"),
        ([*DENSE, "--k", "9", "--share", "0.33333333"], "expected k and a share whose pattern is at most 2,097,152"),
        (["--trace", "/dev/null", "--slo", "50ms"], "trace: expected at least one request, got none"),
        (["--trace", "nowhere.jsonl", "--slo", "50ms"], "nowhere.jsonl"),
    ],
)
def test_refusals_are_one_sentence(capsys, more, sentence):
    with pytest.raises(SystemExit, match="2"):
        main([*CALL, *more])
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(sentence, last), last


def test_json_is_the_report(capsys):
    assert main([*CALL, "--json", "--format", "bf16", "--slo", "50ms"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(report["cache"]["bytes_per_token"].values()) == 3200
    assert report["device"]["memory"]["level"] == "published"
    assert report["rank"]["weights_bytes"] == 40e9


def test_options_take_the_place_of_missing_sources(capsys):
    call = ["plan", "--model", "deepseek-v3.2", "--device", "h200", "--tp", "8"]
    assert main(call) == 0
    assert "no source: give --weights-gb" in capsys.readouterr().out
    assert main([*call, "--weights-gb", "690", "--active-b", "37"]) == 0
    assert "unknown" not in capsys.readouterr().out


def blocks(page: Path) -> list[tuple[list[str], str]]:
    """Commands of a page, and what it shows of their output."""
    found = re.findall(r"```console\n\$ python -m sparse_attn (.*?)\n(.*?)```", page.read_text(), re.DOTALL)
    return [(shlex.split(command), output) for command, output in found]


@pytest.mark.parametrize(("command", "output"), blocks(PAGE), ids=[command[2] for command, _ in blocks(PAGE)])
def test_commands_of_the_page(capsys, command, output):
    assert main(command) == 0
    assert capsys.readouterr().out == output


def test_plan_tokens_and_times():
    assert [plan.tokens(text) for text in ("131072", "128k", "1M")] == [131072, 131072, 1048576]
    assert (plan.seconds("50ms"), plan.seconds("0.05s")) == (0.05, 0.05)
