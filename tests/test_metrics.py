"""What is exported: against the counts, in several processes, and every query of dashboard and alert rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from queries import Samples, resolve

from sparse_attn.__main__ import main
from sparse_attn.models import PRESETS, Model, Selection, at_share, dense, mla
from sparse_attn.serving.admission import Decision
from sparse_attn.serving.cost import Work
from sparse_attn.serving.dashboard import alerts, dashboard, decode_ratio, to_yaml
from sparse_attn.serving.exposition import parse
from sparse_attn.serving.metrics import COMMON, MARGIN, METRICS, PLANES, Exporter, crossover
from sparse_attn.serving.observer import Observer
from sparse_attn.serving.records import Records
from sparse_attn.serving.service import ServiceMetrics
from sparse_attn.serving.stats import Counter, Stats, StepStats

prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
ROOT = Path(__file__).parents[1]

SMALL = mla("small", 2, 4, Selection(8, 2, 16, weighted=True), full=range(2), formats=("fp8_v32", "bf16"))
BATCHES = [{"a": (0, 40), "b": (0, 5)}, {"a": (40, 41), "b": (5, 6)}, {"a": (41, 42)}]


def exported(model: Model = SMALL, **options: bool) -> tuple[Samples, Observer]:
    """What an engine exports that ran ``BATCHES``, and whose request ``a`` has finished."""
    registry = prometheus_client.CollectorRegistry()
    observer = Observer(model, Exporter("m", plan=model.name, version="1", registry=registry), **options)
    for batch in BATCHES:
        observer.step(batch)
    observer.finish("a")
    return parse(prometheus_client.generate_latest(registry).decode()), observer


def value(found: Samples, name: str, **labels: str) -> float:
    (number,) = [v for n, had, v in found if n == name and {k: had.get(k) for k in labels} == labels]
    return number


def test_values_are_the_counts() -> None:
    found, observer = exported()
    total = observer.stats.total
    for phase, counts in (("prefill", total.prefill), ("decode", total.decode)):
        pairs = {"dense": counts.pairs["dense"], "scored": counts.pairs["scored"], "effective": counts.attended_pairs}
        for kind, number in pairs.items():
            assert value(found, "sparse_attn_kv_pairs_total", kind=kind, phase=phase) == number > 0
        assert value(found, "sparse_attn_query_tokens_total", phase=phase) == counts.tokens
    for part, label in (("select", "select"), ("attend", "attend"), ("dense", "dense_equiv")):
        assert value(found, "sparse_attn_flops_estimated_total", part=label) == total.total.flops[part] > 0
    for plane in PLANES:
        assert value(found, "sparse_attn_kv_read_bytes_estimated_total", plane=plane) == total.total.read.get(plane, 0)
        assert value(found, "sparse_attn_kv_written_bytes_estimated_total", plane=plane) == total.total.written.get(
            plane, 0
        )
    last = Counter(SMALL)([(41, 42)])
    assert value(found, "sparse_attn_step_effective_kv_ratio") == last.effective_kv_ratio == 8 / 42
    share = value(found, "sparse_attn_selection_overhead_ratio", source="estimated")
    assert share == last.selection_flops_ratio > 0
    assert value(found, "sparse_attn_dispatch_total", path="sparse", reason="plan") == len(BATCHES) * 2


def test_a_request_is_compared_with_the_plan() -> None:
    plan = Counter(SMALL)([(0, 40)]) + Counter(SMALL)([(40, 41)]) + Counter(SMALL)([(41, 42)])
    for runs_dense in (False, True):
        found, _ = exported(runs_dense=runs_dense)
        assert value(found, "sparse_attn_configured_kv_ratio_sum", crossover="past") == plan.effective_kv_ratio
        effective = value(found, "sparse_attn_effective_kv_ratio_sum", crossover="past")
        assert effective == (1.0 if runs_dense else plan.effective_kv_ratio)
        assert value(found, "sparse_attn_effective_kv_ratio_count", crossover="before") == 0


def test_measured_time_has_its_own_label() -> None:
    registry = prometheus_client.CollectorRegistry()
    exporter = Exporter("m", registry=registry)
    exporter.kernels(select=0.25, attend=0.75)
    found = parse(prometheus_client.generate_latest(registry).decode())
    assert value(found, "sparse_attn_selection_overhead_ratio", source="measured") == 0.25
    assert value(found, "sparse_attn_selection_overhead_ratio", source="estimated") == 0
    assert value(found, "sparse_attn_kernel_seconds_total", part="attend") == 0.75


def test_formats_that_are_not_known_give_no_bytes() -> None:
    registry = prometheus_client.CollectorRegistry()
    Observer(SMALL, Exporter("m", bytes_known=False, registry=registry)).step(BATCHES[0])
    names = {name for name, _, _ in parse(prometheus_client.generate_latest(registry).decode())}
    assert not {name for name in names if "bytes" in name}
    assert "sparse_attn_kv_pairs_total" in names


def test_labels_are_those_declared_and_no_request_is_one() -> None:
    found, _ = exported()
    for name, labels, _ in found:
        if name.endswith("_created"):
            continue
        metric = METRICS.get(name) or METRICS[name.rsplit("_", 1)[0]]
        assert labels.keys() - {"le"} == {*COMMON, *metric.labels}
        assert not {"a", "b"} & set(labels.values())


@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v4.1-flash", "minimax-m3", "glm-5"])
def test_past_the_crossover_dense_attention_exceeds_the_margin(name: str) -> None:
    model = PRESETS[name]
    tokens = crossover(model)
    assert tokens is not None

    def excess(n: int) -> float:
        span = [(0, n)]
        return Counter(dense(model))(span).effective_kv_ratio - Counter(model)(span).effective_kv_ratio

    assert excess(tokens - 1) <= MARGIN < excess(tokens)
    assert all(excess(n) > MARGIN for n in range(tokens, 40 * tokens, tokens))


def test_some_models_have_no_crossover() -> None:
    assert crossover(PRESETS["llama-3.1-8b"]) is None
    # full attention to V4's compressed entries reads little as well
    assert crossover(PRESETS["deepseek-v4-flash"]) is None


# --- Dashboard and alert rules ---------------------------------------------------------------------------------------


def everything() -> Samples:
    """What is exported where all paths were taken."""
    registry = prometheus_client.CollectorRegistry()
    for engine, runs_dense in (("0", False), ("1", True)):
        exporter = Exporter("m", engine, plan=SMALL.name, version="1", registry=registry)
        observer = Observer(SMALL, exporter, runs_dense=runs_dense)
        for batch in BATCHES:
            observer.step(batch)
        observer.finish("a"), observer.finish("b")
        exporter.kernels(0.1, 0.2)
        exporter.decision(Decision("a", False, "hold", "compute", 0.5, 1.2), "enforce")
    return parse(prometheus_client.generate_latest(registry).decode())


@pytest.mark.parametrize("model", [None, *PRESETS])
def test_every_query_resolves(model: str | None) -> None:
    found, plan = everything(), PRESETS[model] if model else None
    queries = [target["expr"] for panel in dashboard(plan, 32768)["panels"] for target in panel["targets"]]
    queries += [rule["expr"] for rule in alerts(plan)]
    assert len(queries) >= 20
    for query in queries:
        assert resolve(query, found) is not None, query
    shown = "".join(queries)
    assert [name for name in METRICS if name not in shown] == []  # and every metric is shown


@pytest.mark.parametrize(
    "query",
    [
        "sum (rate(sparse_attn_kv_pair_total[5m]))",
        'sum (rate(sparse_attn_kv_pairs_total{kind="attended"}[5m]))',
        'sum (rate(sparse_attn_kv_pairs_total{kinds="dense"}[5m]))',
        "sum by (kinds) (rate(sparse_attn_kv_pairs_total[5m]))",
        'sum (rate(sparse_attn_kv_pairs_total{kind=~"dense|attended"}[5m]))',
        'sparse_attn_build_info{models=~"$model_name"}',
    ],
)
def test_queries_that_name_what_is_not_exported_are_noticed(query: str) -> None:
    with pytest.raises(AssertionError):
        resolve(query, everything())


def fires(found: Samples) -> set[str]:
    firing = set()
    for rule in alerts():
        try:
            if resolve(rule["expr"], found):
                firing.add(rule["alert"])
        except AssertionError:  # a series that nobody wrote
            continue
    return firing


def test_the_alarm_is_raised_where_sparse_layers_run_dense() -> None:
    assert fires(exported()[0]) == set()
    dense_run = {"SparseAttentionRatioAboveConfigured", "SparseAttentionRunsDense"}
    assert fires(exported(runs_dense=True)[0]) == dense_run
    llama = PRESETS["llama-3.1-8b"]
    assert fires(exported(llama, runs_dense=True)[0]) == set()  # it has nothing to select


def test_short_requests_raise_no_alarm() -> None:
    registry = prometheus_client.CollectorRegistry()
    observer = Observer(SMALL, Exporter("m", registry=registry), runs_dense=True)
    observer.step({"short": (0, 8)})
    observer.finish("short")
    found = parse(prometheus_client.generate_latest(registry).decode())
    assert fires(found) == {"SparseAttentionRunsDense"}


def test_thresholds_are_computed() -> None:
    model = PRESETS["deepseek-v3.2"]
    assert decode_ratio(model, 32768) == 2048 / 32768

    def limits(board: dict) -> set[float]:
        steps = [panel["fieldConfig"]["defaults"]["thresholds"]["steps"] for panel in board["panels"]]
        return {step["value"] for found in steps for step in found if step["value"] is not None}

    assert limits(dashboard(model, 32768)) == {2048 / 32768 + MARGIN}
    assert limits(dashboard(model, 8192)) == {2048 / 8192 + MARGIN}
    assert limits(dashboard()) == set()
    first, *_ = alerts(model)
    assert f"requests of {crossover(model)} tokens and more" in first["description"]
    assert [rule["alert"] for rule in alerts(PRESETS["llama-3.1-8b"])] == ["SparseAttentionCostsMoreThanDense"]


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert [v["name"] for v in board["templating"]["list"]] == ["datasource", "model_name", "engine"]
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
        assert "sparse_attn_" in panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "$datasource"


def test_rules_are_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load(to_yaml(alerts()))["groups"]
    assert [rule["expr"] for rule in group["rules"]] == [rule["expr"] for rule in alerts()]
    assert {rule["labels"]["severity"] for rule in group["rules"]} == {"warning", "info"}
    assert main(["metrics", "--alerts", "--model", "deepseek-v3.2"]) == 0
    assert capsys.readouterr().out == to_yaml(alerts(PRESETS["deepseek-v3.2"]))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--dashboard", "--model", "glm-5", "--context", "128k"]) == 0
    assert json.loads(capsys.readouterr().out) == dashboard(PRESETS["glm-5"], 131072)
    assert main(["metrics"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in METRICS)


# --- Several processes, and records ----------------------------------------------------------------------------------

WORKER = """
import sys
sys.modules["torch"] = None  # not needed, and slow to import
from sparse_attn.serving.metrics import Exporter
from sparse_attn.serving.observer import Observer
from sparse_attn.serving.records import Records
engine, path = sys.argv[1:]
observer = Observer("deepseek-v3.2", Exporter("m", engine), Records(path))
for n in range(200):
    observer.step({engine: (n, n + 1)})
observer.finish(engine)
"""
READER = """
import prometheus_client
from prometheus_client import multiprocess
registry = prometheus_client.CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(prometheus_client.generate_latest(registry).decode())
"""


def test_several_processes_add_up_and_share_a_file(tmp_path: Path) -> None:
    shared, path = tmp_path / "shared", tmp_path / "records.jsonl"
    shared.mkdir()
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(shared)}
    command = [sys.executable, "-c", WORKER]
    workers = [subprocess.Popen([*command, engine, str(path)], cwd=ROOT, env=environment) for engine in ("0", "1", "1")]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    read = subprocess.run([sys.executable, "-c", READER], env=environment, capture_output=True, text=True, check=True)
    found = parse(read.stdout)
    one = Counter("deepseek-v3.2")([], [(1, 200)]) + Counter("deepseek-v3.2")([(0, 1)])
    for engine, times in (("0", 1), ("1", 2)):
        dense_pairs = [
            v for n, had, v in found
            if n == "sparse_attn_kv_pairs_total" and had["engine"] == engine and had["kind"] == "dense"
        ]  # fmt: skip
        assert sum(dense_pairs) == times * one.pairs["dense"]
        assert value(found, "sparse_attn_effective_kv_ratio_count", crossover="before", engine=engine) == times
        assert value(found, "sparse_attn_step_effective_kv_ratio", engine=engine) == 1
        assert value(found, "sparse_attn_build_info", engine=engine) == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["record"] for line in lines].count("step") == 600
    assert sorted(line["request"] for line in lines if line["record"] == "request") == ["0", "1", "1"]


def test_records_are_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with Records(str(path)) as records:
        observer = Observer(SMALL, records=records, runs_dense=True)
        steps = [observer.step(batch, seconds) for batch, seconds in zip(BATCHES, (None, 0.25, 0.5), strict=True)]
        request = observer.finish("a")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["record"] for line in lines] == ["step"] * 3 + ["request"]
    for line, counts in zip(lines, [*steps, request], strict=True):
        assert {key: line[key] for key in counts.to_dict()} == json.loads(json.dumps(counts.to_dict()))
    assert [line.get("seconds") for line in lines] == [None, 0.25, 0.5, None]
    last = lines[-1]
    assert (last["request"], last["tokens"], last["past_crossover"]) == ("a", 42, True)
    assert last["effective_kv_ratio"] == 1.0
    plan = Stats(SMALL)
    for batch in BATCHES:
        plan.step(batch)
    assert last["configured_kv_ratio"] == plan.finish("a").effective_kv_ratio < 0.5


def test_an_engine_that_chooses_is_counted_as_it_chose(tmp_path: Path) -> None:
    path, registry = tmp_path / "records.jsonl", prometheus_client.CollectorRegistry()
    steps = [
        ({"a": Work(0, 40, True), "b": Work(90, 91)}, {"prompt": 1, "plan": 1}),
        ({"a": Work.decode(41, True), "b": Work.decode(92)}, {"exact": 1, "plan": 1}),
        ({"a": Work.decode(42, share=Fraction(1, 3)), "b": Work.decode(93)}, {"plan": 2}),
    ]
    sparse, full, third = Counter(SMALL), Counter(dense(SMALL)), Counter(at_share(SMALL, Fraction(1, 3)))
    assert third([(41, 42)]).attended_pairs == 2 * 14 > sparse([(41, 42)]).attended_pairs
    with Records(str(path)) as records:
        observer = Observer(SMALL, Exporter("m", registry=registry), records=records)
        counts = [observer.works(works, reasons, 0.5) for works, reasons in steps]
        request = observer.finish("a")
    assert [each.total for each in counts] == [
        full([(0, 40)]) + sparse([(90, 91)]),
        full([(40, 41)]) + sparse([(91, 92)]),
        third([(41, 42)]) + sparse([(92, 93)]),
    ]
    assert request.total == full([(0, 40)]) + full([(40, 41)]) + third([(41, 42)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("reasons") for line in lines[:3]] == [reasons for _, reasons in steps]
    assert [set(line["works"]) for line in lines[:3]] == [{"chunk", "selecting"}, {"dense", "selecting"}, {"selecting"}]
    found = full([(40, 41)])
    attended = found.attended_pairs
    assert lines[1]["works"]["dense"] == {"sequences": 1, "tokens": 1, "scored": 0, "attended": attended}
    selecting = third([(41, 42)]) + sparse([(92, 93)])
    scored = {"scored": selecting.pairs["scored"], "attended": selecting.attended_pairs}
    assert lines[2]["works"]["selecting"] == {"sequences": 2, "tokens": 2, **scored}
    # what the engine chose is what was configured, so no alarm compares it with the plan
    assert lines[3]["configured_kv_ratio"] == lines[3]["effective_kv_ratio"] == request.effective_kv_ratio
    found = parse(prometheus_client.generate_latest(registry).decode())
    layers = sum(layer.selection is not None for layer in SMALL.layers)
    for path_, reason, times in (("sparse", "plan", 3), ("dense", "prompt", 1), ("dense", "exact", 1)):
        assert value(found, "sparse_attn_dispatch_total", path=path_, reason=reason) == times * layers


def test_an_observer_counts_what_its_engine_runs() -> None:
    observer = Observer(SMALL)
    total = sum((observer.step(batch) for batch in BATCHES), StepStats())
    assert observer.stats.total == total
    assert "a" in observer
    observer.finish("a")
    assert "a" not in observer
    with pytest.raises(KeyError, match="request 'a'"):
        observer.finish("a")


def test_the_metrics_of_a_service_have_names_of_their_own() -> None:
    """``serve`` exports both from one registry, which takes each name once."""
    registry = prometheus_client.CollectorRegistry()
    Exporter("m", registry=registry)
    ServiceMetrics(registry)
