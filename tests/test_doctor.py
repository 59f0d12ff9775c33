"""The doctor's reports of a service: verdicts of engines, expositions, and which limit binds."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sparse_attn.__main__ import main
from sparse_attn.layout import FORMATS
from sparse_attn.models import PRESETS
from sparse_attn.serving import exposition
from sparse_attn.serving.devices import DEVICES, Device
from sparse_attn.serving.diagnosis import diagnose, states
from sparse_attn.serving.engines import DENSE, ENGINES, FACTS, REFUSED, SPARSE, UNKNOWN, verdicts

PAGE = Path(__file__).parents[1] / "docs" / "doctor.md"


# --- Verdicts ------------------------------------------------------------------------------------------------------


def found(model: str, engine: str, device: str, formats: dict[str, str] | None = None) -> dict[tuple[str, str], str]:
    return {(v.phase, v.plane): v.verdict for v in verdicts(PRESETS[model], engine, DEVICES[device], formats)}


def test_facts_are_of_what_there_is():
    families = {device.family for device in DEVICES.values()}
    for fact in FACTS:
        assert fact.engine in ENGINES and set(fact.models) <= PRESETS.keys() and set(fact.families) <= families
        assert {*fact.formats, *fact.asked} <= FORMATS.keys()
        assert fact.reason and fact.source


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.engine}: {fact.reason}")
def test_no_fact_is_hidden_by_another(fact):
    """For some model, device, plane and phase it is the first that matches, and its formats fit the planes."""
    hit = False
    for model in map(PRESETS.get, fact.models or PRESETS):
        for device in DEVICES.values():
            for asked in fact.asked or ("",):
                formats = {"main": asked} if asked else None
                for verdict in verdicts(model, fact.engine, device, formats):
                    hit |= (verdict.reason, verdict.source) == (fact.reason, fact.source)
                    if verdict.format:
                        model.bytes_per_token({verdict.plane: verdict.format})
    assert hit


def test_a_verdict_for_each_phase_and_plane():
    assert found("deepseek-v4.1-flash", "vllm", "h200") == {
        (phase, plane): SPARSE for phase in ("prefill", "decode") for plane in ("main", "window", "index")
    }
    layers = {v.plane: v.layers for v in verdicts(PRESETS["deepseek-v4.1-flash"], "vllm", DEVICES["h200"])}
    assert layers == {"main": 38, "window": 38, "index": 8}


def test_one_phase_may_refuse_what_another_takes():
    int8 = {"main": "int8_v32"}
    assert found("deepseek-v3.2", "vllm-ascend", "ascend-910c", int8) == {
        ("prefill", "main"): SPARSE,
        ("prefill", "index"): SPARSE,
        ("decode", "main"): REFUSED,
        ("decode", "index"): SPARSE,
    }
    assert set(found("deepseek-v3.2", "vllm-ascend", "ascend-910c").values()) == {SPARSE}
    assert found("deepseek-v3.2", "vllm", "h200", int8)["decode", "main"] == REFUSED


def test_what_runs_densely_or_nobody_knows():
    assert found("glm-5", "transformers", "h200")["decode", "main"] == DENSE
    assert set(found("deepseek-v4.1-flash", "transformers", "h200").values()) == {REFUSED}
    assert set(found("deepseek-v3.2", "vllm", "cpu").values()) == {REFUSED}
    assert found("deepseek-v4.1-flash", "vllm-ascend", "ascend-910c")["decode", "main"] == UNKNOWN
    assert set(found("minimax-m3", "sglang", "h200").values()) == {UNKNOWN}
    own = verdicts(PRESETS["deepseek-v3.2"], "vllm", Device("our-card", ""))
    assert {v.verdict for v in own} == {UNKNOWN}
    assert found("llama-3.1-8b", "vllm", "h200") == {}


def test_the_same_numbers_in_another_order_are_the_same_format():
    kept = {
        v.plane: v.format for v in verdicts(PRESETS["deepseek-v4-flash"], "vllm", DEVICES["b200"], {"main": "fp8_v4"})
    }
    assert kept["main"] == "fp8_v4_planar"
    four = verdicts(PRESETS["deepseek-v4.1-flash"], "vllm", DEVICES["b200"], {"main": "fp4_v41"})
    assert {v.format for v in four if v.plane == "main"} == {"fp4_v41"}


CALL = ["doctor", "--model", "deepseek-v3.2", "--engine", "vllm", "--device", "h200"]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ([], 0),
        (["--device", "cpu"], 1),
        (["--engine", "transformers"], 1),
        (["--model", "minimax-m3"], 1),
        (["--model", "llama-3.1-8b"], 0),
        (["--format", "main=int8_v32"], 1),
    ],
)
def test_the_exit_status_is_1_unless_all_is_sparse(capsys, more, code):
    assert main([*CALL, *more]) == code
    shown = capsys.readouterr().out
    assert ("every sparse layer runs sparsely" in shown or "no layer selects" in shown) == (code == 0)


def test_bytes_in_the_formats_that_the_engine_keeps(capsys):
    main([*CALL, "--model", "deepseek-v4.1-flash", "--json"])
    report = json.loads(capsys.readouterr().out)["layers"]
    assert report["bytes_per_token"] == 2.5 * (584 + 132)
    assert report["plan_bytes_per_token"] == 890
    main([*CALL, "--engine", "vllm-ascend", "--model", "deepseek-v4.1-flash", "--device", "ascend-910c", "--json"])
    assert json.loads(capsys.readouterr().out)["layers"]["bytes_per_token"] == 2.5 * (1024 + 130)
    main([*CALL, "--model", "minimax-m3", "--json"])
    assert json.loads(capsys.readouterr().out)["layers"]["bytes_per_token"] is None


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (CALL[:5], "expected --model, --engine and --device together, got no --device"),
        ([*CALL, "--engine", "llm"], "engine: expected one of vllm, .*, got 'llm'"),
        ([*CALL, "--model", "gpt-2"], "model: expected one of .*, got 'gpt-2'"),
        ([*CALL, "--device", "abacus"], "device: expected one of .*, got 'abacus'"),
        ([*CALL, "--format", "fp8"], "expected bf16 or such as main=bf16,index=int8_index, got 'fp8'"),
        ([*CALL, "--format", "main=fp8"], "format of a main plane: expected one of .*, got 'fp8'"),
        (["doctor", "--max-num-seqs", "3"], "expected --model, --engine and --device, or --metrics"),
        (["doctor", "--metrics", "nowhere.txt"], "nowhere.txt"),
        (["doctor", "--metrics", "a", "b", "c"], "metrics: expected one source, or an older one and one of now, got 3"),
    ],
)
def test_refusals_are_one_sentence(capsys, call, sentence):
    with pytest.raises(SystemExit, match="2"):
        main(call)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(sentence, last), last


# --- Expositions ---------------------------------------------------------------------------------------------------


def test_expositions_of_every_shape():
    text = (
        "# HELP a What\n# TYPE a gauge\n"
        "a 1\n"
        "vllm:b{} 2.5e3 1700000000000\n"
        'c_total{path="C:\\\\d",says="\\"{x}, y=\\n\\"",le = "+Inf" , } +Inf # {trace="1"} 3\n\n'
        "d NaN\n"
    )
    first, second, third, fourth = exposition.parse(text)
    assert (first.name, first.labels, first.value) == ("a", {}, 1)
    assert (second.name, second.labels, second.value) == ("vllm:b", {}, 2500)
    assert third.labels == {"path": "C:\\d", "says": '"{x}, y=\n"', "le": "+Inf"}
    assert third.value == float("inf") and fourth.value != fourth.value


def test_it_reads_what_the_client_library_writes():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    gauge = client.Gauge("vllm:kv_cache_usage_perc", "Share.", ["model_name"], registry=registry)
    gauge.labels('a "b"\\c\nd').set(0.25)
    client.Histogram("h", "Times.", registry=registry).observe(3)
    samples = exposition.parse(client.generate_latest(registry).decode())
    assert samples[0] == ("vllm:kv_cache_usage_perc", {"model_name": 'a "b"\\c\nd'}, 0.25)
    assert ("h_sum", {}, 3.0) in samples


@pytest.mark.parametrize("line", ["a", "a b", 'a{b="c} 1', "a{b=c} 1", "<html>"])
def test_a_line_that_is_none_is_named(line):
    with pytest.raises(ValueError, match="metrics, line 2: expected a name, labels and a number, got"):
        exposition.parse(f"a 1\n{line}\n")


def test_metrics_come_from_a_url(capsys):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"sglang:num_running_reqs 2\nsglang:num_queue_reqs 0\nsglang:token_usage 0.5\n")

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert main(["doctor", "--metrics", f"http://127.0.0.1:{server.server_port}/metrics"]) == 0
        thread.join()
    assert "pool 50%, compute unknown, 2 running, 0 waiting\n  binds: none" in capsys.readouterr().out


# --- Which limit binds ---------------------------------------------------------------------------------------------


def service(**values: float) -> str:
    names = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"}
    names |= {"pool": "vllm:kv_cache_usage_perc", "compute": "sparse_attn_compute_watermark_ratio"}
    names |= {"budget": "sparse_attn_memory_watermark_ratio", "limit": "sparse_attn_batch_limit"}
    names |= {"preempted": "vllm:num_preemptions_total"}
    names |= {"deferred": 'vllm:num_requests_waiting_by_reason{reason="deferred"}'}
    names |= {"held": 'sparse_attn_admission_decisions_total{decision="wait",reason="memory"}'}
    names |= {"admitted": 'sparse_attn_admission_decisions_total{decision="admit",reason="none"}'}
    return "\n".join(f"{names[name]} {value}" for name, value in values.items())


def binds(now: str, before: str | None = None, max_num_seqs: int | None = None) -> str:
    (state,) = states(exposition.parse(now))
    older = None if before is None else states(exposition.parse(before))[0]
    return diagnose(state, older, max_num_seqs).binds


BUSY = dict(running=16, waiting=12, pool=0.3, compute=0.4)


@pytest.mark.parametrize(
    ("change", "max_num_seqs", "expected"),
    [
        ({}, 16, "max_num_seqs"),
        ({}, 17, "an admission limit"),
        ({}, None, "an admission limit"),
        ({"waiting": 0}, 16, "none"),
        ({"pool": 0.9}, 16, "pool"),
        ({"pool": 0.899}, 16, "max_num_seqs"),
        ({"compute": 0.9}, 16, "compute"),
        ({"compute": 0.95, "pool": 0.95}, 16, "pool"),
        ({"budget": 0.95}, 16, "admission's memory threshold"),
        ({"budget": 0.95, "pool": 0.95}, 16, "pool"),
        ({"limit": 16}, None, "sparse_attn_batch_limit"),
        ({"limit": 17}, None, "an admission limit"),
        ({"deferred": 12}, 16, "deferral"),
        ({"deferred": 11}, 16, "max_num_seqs"),
        ({"held": 700, "preempted": 9}, 16, "max_num_seqs"),  # counted some time ago, perhaps
    ],
)
def test_what_binds(change, max_num_seqs, expected):
    assert binds(service(**{**BUSY, **change}), None, max_num_seqs) == expected


def test_the_founding_incident():
    """Memory fell, latency did not: admission still used the threshold of the old cache."""
    before = service(**BUSY | {"pool": 0.9}, held=700, admitted=50)
    assert binds(before) == "pool"
    assert binds(service(**BUSY, held=900, admitted=70), before) == "admission's memory threshold"
    assert binds(service(**BUSY, held=700, admitted=90), before) == "an admission limit"
    assert binds(service(**BUSY, held=5, admitted=1), before) == "admission's memory threshold"  # began anew
    (state,) = states(exposition.parse(service(**BUSY, held=900)))
    (older,) = states(exposition.parse(before))
    finding = diagnose(state, older)
    assert "pool 30%" in finding.seen and "before: pool 90%, 16 running, 12 waiting" in finding.seen
    assert "while the pool is 30% in use" in finding.advice


def test_preemptions_since_tell_of_peaks():
    before = service(**BUSY, preempted=9)
    assert binds(service(**BUSY, preempted=10), before, 16) == "pool"
    assert binds(service(**BUSY, preempted=9), before, 16) == "max_num_seqs"
    assert binds(service(**BUSY, preempted=5), before, 16) == "pool"  # began anew


@pytest.mark.parametrize(("sum", "count"), [(40, 2000), (40, 500)])
def test_times_of_a_service_that_began_anew_count_from_its_start(sum, count):
    name = "vllm:inter_token_latency_seconds"
    before, now = (
        states(exposition.parse(f"{service(**BUSY)}\n{name}_sum {seconds}\n{name}_count {tokens}"))[0]
        for seconds, tokens in ((480, 1000), (sum, count))
    )
    assert f"480.0 ms a token and now {1e3 * sum / count:.1f}" in diagnose(now, before).seen


def test_a_value_that_is_no_number_shows_nothing():
    assert binds(service(**BUSY | {"pool": float("nan")})) == "unknown"
    with pytest.raises(ValueError, match="got neither"):
        states(exposition.parse(service(running=float("nan"), waiting=3, pool=0.3)))


def test_one_engine_of_sglang_has_no_rank():
    """Its metrics and those of this package are of one service."""
    labels = 'model_name="m",engine_type="unified",tp_rank="0"'
    values = {"num_running_reqs": 2, "num_queue_reqs": 3, "token_usage": 0.3}
    text = "".join(f"sglang:{name}{{{labels}}} {value}\n" for name, value in values.items())
    (state,) = states(exposition.parse(text + 'sparse_attn_compute_watermark_ratio{model_name="m",engine="0"} 0.97'))
    assert (state.service, diagnose(state).binds) == ("m 0", "compute")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-num-seqs", "0"], "expected --model, --engine and --device, or --metrics"),
        (["--metrics", "{now}", "--max-num-seqs", "0"], "max-num-seqs: expected at least 1, got 0"),
        (["--model", ""], "expected --model, --engine and --device together, got no --engine and no --device"),
        (["--metrics", "http://127.0.0.1:x/metrics"], "expected metrics as text: nonnumeric port: 'x'"),
        (["--metrics", "{binary}"], "binary: expected metrics as text: 'utf-8' codec can't decode"),
    ],
)
def test_services_are_refused_in_one_sentence(tmp_path, capsys, arguments, sentence):
    (tmp_path / "now").write_text(service(**BUSY))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    places = {name: str(tmp_path / name) for name in ("now", "binary")}
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", *(argument.format(**places) for argument in arguments)])
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_the_fullest_of_several_pools_binds():
    text = "sglang:num_running_reqs 2\nsglang:num_queue_reqs 3\nsglang:token_usage 0.97\n"
    pools = text + "sglang:full_token_usage 0.4\nsglang:swa_token_usage 0.97\n"
    assert binds(text) == "pool"
    assert binds(pools) == "window pool"


def test_without_pool_nothing_is_claimed():
    text = "vllm:num_requests_running 2\nvllm:num_requests_waiting 3\n"
    assert binds(text) == "unknown"
    (state,) = states(exposition.parse(service(running=2, waiting=3, pool=0.3)))
    assert "compute may bind, which no metric shows" in diagnose(state).advice
    assert "compute" not in diagnose(replace(state, compute=0.2)).advice
    with pytest.raises(ValueError, match="metrics: expected vllm:num_requests_running or .*, got neither"):
        states(exposition.parse("up 1"))


def test_services_are_told_apart():
    text = "".join(
        f'vllm:num_requests_running{{model_name="m",engine="{n}"}} 4\n'
        f'vllm:num_requests_waiting{{model_name="m",engine="{n}"}} {3 * n}\n'
        f'vllm:kv_cache_usage_perc{{model_name="m",engine="{n}"}} {0.95 if n == 0 else 0.3}\n'
        for n in (0, 1)
    )
    found = [(s.service, diagnose(s, max_num_seqs=4).binds) for s in states(exposition.parse(text + "up 1\n"))]
    assert found == [("m 0", "none"), ("m 1", "max_num_seqs")]


# --- The page ------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, str]]:
    return re.findall(r"```console\n\$ python -m sparse_attn (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("command", "output"), commands(), ids=[command for command, _ in commands()])
def test_commands_of_the_page(capsys, tmp_path, monkeypatch, command, output):
    for name, text in re.findall(r"```text\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) in (0, 1)
    assert capsys.readouterr().out == output
