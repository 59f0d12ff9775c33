"""The engine on a tiny model: its tokens are the model's own, whoever runs beside; nothing leaks, whatever happens."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch
import transformers
from tiny_engine import PAGE, engine, finish, nothing_leaked, prompt, submit, tiny_config, tiny_model

from sparse_attn.serving import runner
from sparse_attn.serving.admission import Admission, Limits
from sparse_attn.serving.crossover import Switch
from sparse_attn.serving.engine import Engine
from sparse_attn.serving.manager import CacheManager
from sparse_attn.serving.observer import Observer
from sparse_attn.serving.records import Records
from sparse_attn.serving.runner import ATTENTION, Runner, Sampling
from sparse_attn.serving.scheduler import Refused, Scheduler, Steps


def alone(tokens: list[int], output: int) -> list[int]:
    """What the model of transformers generates."""
    with torch.inference_mode():
        whole = torch.tensor([tokens])
        found = tiny_model().generate(
            whole, attention_mask=torch.ones_like(whole), max_new_tokens=output, do_sample=False, pad_token_id=0
        )
    return found[0, len(tokens) :].tolist()


def test_tokens_are_the_models_own_in_any_company() -> None:
    it = engine(pages=200, share=Fraction(1))
    lengths = (3, 40, 200, 17, 1, 130)
    heard = [submit(it, n, prompt(n, length), dense=n % 2 == 0) for n, length in enumerate(lengths)]
    finish(it)
    for n, length in enumerate(lengths):
        assert heard[n].tokens == alone(prompt(n, length), 8)
        assert heard[n][-1].finish == "length"
    nothing_leaked(it)


def test_what_selects_differs_from_what_is_dense_only_past_the_floor(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(runner, "FLOOR", 60)
    it = engine(pages=200, share=Fraction(1, 16))
    heard = {}
    for length in (30, 900):
        for dense in (False, True):
            heard[length, dense] = submit(it, (length, dense), prompt(1, length), output=24, dense=dense)
    finish(it)
    assert heard[30, False].tokens == heard[30, True].tokens == alone(prompt(1, 30), 24)
    assert heard[900, True].tokens == alone(prompt(1, 900), 24)
    assert heard[900, False].tokens != heard[900, True].tokens


def test_each_request_has_its_share_in_any_company(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(runner, "FLOOR", 60)
    shares = (Fraction(1, 4), Fraction(1, 16), Fraction(1, 2))
    alone_by_share = {}
    for share in shares:
        it = engine(pages=100, share=share)
        heard = submit(it, 0, prompt(1, 900), output=24)
        finish(it)
        alone_by_share[share] = heard.tokens
    assert len({tuple(tokens) for tokens in alone_by_share.values()}) == 3
    it = engine(pages=300, share=shares[0])
    together = {share: submit(it, share, prompt(1, 900), output=24, share=share) for share in shares[1:]}
    together[shares[0]] = submit(it, "default", prompt(1, 900), output=24)
    dense = submit(it, "dense", prompt(1, 900), output=24, dense=True, share=shares[1])
    finish(it)
    assert {share: heard.tokens for share, heard in together.items()} == alone_by_share
    assert dense.tokens == alone(prompt(1, 900), 24)


def test_below_the_switch_attention_is_dense_and_records_say_so(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Below what is exact the tokens are the same; below what is approximate they are those of dense attention."""
    monkeypatch.setattr(runner, "FLOOR", 60)
    path = tmp_path / "records"
    found = {}
    for name, switch in (("none", None), ("exact", Switch(60)), ("approximate", Switch(60, 1000))):
        it = engine(pages=200, share=Fraction(1, 16), switches={None: switch} if switch else None)
        if name == "approximate":
            it._observer = Observer(it.runner.plan, records=Records(str(path)))
        heard = {length: submit(it, length, prompt(1, length), output=24) for length in (30, 900)}
        submit(it, "dense", prompt(2, 40), output=3, dense=True)
        finish(it)
        found[name] = {length: each.tokens for length, each in heard.items()}
    assert found["none"][30] == found["exact"][30] == found["approximate"][30] == alone(prompt(1, 30), 24)
    assert found["none"][900] == found["exact"][900] != found["approximate"][900] == alone(prompt(1, 900), 24)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["record"] == "step"]
    reasons: dict[str, int] = {}
    for step in steps:
        assert sum(step["reasons"].values()) == step["prefill"]["sequences"] + step["decode"]["sequences"]
        for reason, sequences in step["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + sequences
        assert sum(work["tokens"] for work in step["works"].values()) == sum(
            step[phase]["tokens"] for phase in ("prefill", "decode")
        )
        assert set(step["works"]) <= {"dense", "chunk"}
    chunks = sum(step["works"].get("chunk", {"sequences": 0})["sequences"] for step in steps)
    assert reasons == {"prompt": chunks, "request": 2, "exact": 23, "approximate": 23}
    # every token was attended to in full, and is counted so
    requests = {line["request"]: line for line in lines if line["record"] == "request"}
    layers = 2
    for name, prompted, output in (("30", 30, 24), ("900", 900, 24), ("dense", 40, 3)):
        seen = prompted + output - 1
        pairs = requests[name]["prefill"]["attended_pairs"] + requests[name]["decode"]["attended_pairs"]
        assert pairs == layers * seen * (seen + 1) // 2, name


def test_preempted_requests_go_on_where_they_were() -> None:
    it = engine(pages=24, reserve=0.1)
    heard = [submit(it, n, prompt(n, 60), output=70, dense=True) for n in range(4)]
    finish(it)
    assert it.scheduler.preemptions > 0
    for n in range(4):
        assert heard[n].tokens == alone(prompt(n, 60), 70)
    nothing_leaked(it)


def test_a_prefix_is_computed_once() -> None:
    it = engine(pages=64)
    text = prompt(1, 5 * PAGE)
    first = submit(it, "first", [*text, 3], dense=True)
    finish(it)
    second, other = submit(it, "second", [*text, 4], dense=True), submit(it, "other", [*text, 3], dense=False)
    plan = it.step()
    assert {part.request.name: part.before for part in plan.parts} == {"second": 5 * PAGE, "other": 5 * PAGE}
    finish(it)
    assert second.tokens == alone([*text, 4], 8)
    assert first.tokens == other.tokens == alone([*text, 3], 8)
    nothing_leaked(it)


def test_a_stop_token_ends_a_request() -> None:
    tokens = alone(prompt(0, 30), 8)
    it = engine()
    heard = submit(it, "a", prompt(0, 30), stop=frozenset(tokens[3:4]), dense=True)
    finish(it)
    assert heard.tokens == tokens[: tokens.index(tokens[3]) + 1] and heard[-1].finish == "stop"
    nothing_leaked(it)


def test_sampling_is_a_requests_own() -> None:
    def draw(seed: int) -> Sampling:
        return Sampling(1.5, 0.9, torch.Generator().manual_seed(seed))

    found = []
    for company in (0, 3):
        it = engine(pages=100)
        heard = submit(it, "a", prompt(0, 30), output=20, options=draw(7))
        other = [submit(it, n, prompt(n, 30), output=20, options=draw(n)) for n in range(company)]
        finish(it)
        found.append(heard.tokens)
        assert all(len(each) == 20 for each in other)
    assert found[0] == found[1] != alone(prompt(0, 30), 20)


def test_top_p_leaves_out_what_is_unlikely() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, -2.0])
    draw = torch.Generator().manual_seed(0)
    assert {Sampling(1.0, 0.5, draw)(logits) for _ in range(50)} == {1}
    assert {Sampling(1.0, 0.9, draw)(logits) for _ in range(200)} == {1, 2}
    assert {Sampling(5.0, 1.0, draw)(logits) for _ in range(500)} == {0, 1, 2, 3}
    assert Sampling()(logits) == 1


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-300, 1.0), (5e-324, 1.0), (1.0, 1e-300), (2.0, 5e-324)])
def test_sampling_next_to_greedy_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.tensor([0.0, 3e38, 1.0, -3e38])
    assert Sampling(temperature, top_p, torch.Generator().manual_seed(0))(logits) == 1


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("Mistral", {"sliding_window": 16}, "expected layers without a window, got mistral"),
        ("Mistral", {"sliding_window": 2048}, ""),
        ("Qwen2", {"head_dim": None, "hidden_size": 64}, ""),
        ("Qwen3", {}, ""),
        ("Gemma2", {"sliding_window": 2048}, "expected layers without a soft cap, got gemma2"),
        ("GptOss", {"sliding_window": 2048, "num_local_experts": 2}, "expected layers without sinks, got gpt_oss"),
        ("Mamba", {}, "expected keys and values of one shape in every layer, got mamba"),
    ],
)
def test_models_that_ask_for_more_than_is_done_are_refused(kind: str, more: dict[str, object], said: str) -> None:
    config = {**tiny_config().to_dict(), "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, **more}
    for name in ("architectures", "model_type", "rope_parameters", "mlp_bias", "attention_bias", "layer_types"):
        config.pop(name, None)
    config = {name: value for name, value in config.items() if value is not None}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config)).eval()
    if said:
        with pytest.raises(ValueError, match=said):
            Runner(model, 8, PAGE)
        return
    it = Runner(model, 8, PAGE, format="fp32", index_format="fp32")
    scheduler = Scheduler(CacheManager([it.memory.plane], 8), Admission(Limits(1.0, memory=1.0), None), Steps(64, 16))
    both = Engine(it, scheduler)
    heard = submit(both, "a", prompt(0, 30))
    model.set_attn_implementation("eager")
    wanted = model.generate(torch.tensor([prompt(0, 30)]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    model.set_attn_implementation(ATTENTION)
    finish(both)
    assert heard.tokens == wanted[0, 30:].tolist()


# --- What goes wrong


def test_a_request_longer_than_the_pool_is_refused_at_once() -> None:
    it = engine(pages=10)
    with pytest.raises(Refused, match="expected at most the pool's 10 pages, got 11"):
        submit(it, "a", prompt(0, 10 * PAGE), output=1)
    nothing_leaked(it)


def test_a_pool_that_is_exhausted_serves_one_after_the_other() -> None:
    it = engine(pages=10, reserve=0.2)
    heard = [submit(it, n, prompt(n, 7 * PAGE), output=2 * PAGE, dense=True) for n in range(5)]
    finish(it)
    assert all(len(each.tokens) == 2 * PAGE for each in heard)
    assert heard[4].tokens == alone(prompt(4, 7 * PAGE), 2 * PAGE)
    nothing_leaked(it)


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_a_client_that_goes_leaves_nothing(steps: int) -> None:
    it = engine(pages=24, reserve=0.1)
    heard = [submit(it, n, prompt(n, 60), output=70, dense=True) for n in range(4)]
    for _ in range(steps):
        it.step()
    for n in range(3):
        it.cancel(n)
        it.cancel(n)
    finish(it)
    assert heard[3].tokens == alone(prompt(3, 60), 70)
    assert not any(each.ended for each in heard[:3])
    nothing_leaked(it)


def test_a_client_that_goes_while_a_step_runs_leaves_nothing() -> None:
    it = engine()
    run = it.runner.run

    def run_and_go(plan):  # type: ignore[no-untyped-def]
        it.runner.run = run
        it.cancel("a")
        return run(plan)

    heard, other = submit(it, "a", prompt(0, 30)), submit(it, "b", prompt(1, 30), dense=True)
    it.runner.run = run_and_go
    finish(it)
    assert not heard and other.tokens == alone(prompt(1, 30), 8)
    nothing_leaked(it)


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    it = engine()
    with torch.no_grad():
        it.runner.model.model.embed_tokens.weight[5] = float("nan")
    tokens = [token for token in prompt(0, 64) if token != 5]
    bad = submit(it, "bad", [*tokens[:40], 5, *tokens[40:50]], dense=True)
    good = submit(it, "good", tokens[:40], dense=True)
    finish(it)
    assert [(event.token, event.finish) for event in bad] == [(None, "error")]
    assert len(good.tokens) == 8 and good.tokens == alone(tokens[:40], 8)
    after = submit(it, "after", [*tokens[:40], 6], dense=True)
    finish(it)
    assert after.tokens == alone([*tokens[:40], 6], 8), "the pages held what was not finite"
    nothing_leaked(it)


def test_ten_thousand_that_wait() -> None:
    it = engine(pages=64, steps=Steps(64, 16, queued=10_000))
    heard = [submit(it, n, prompt(n, 4), output=1) for n in range(10_000)]
    with pytest.raises(Refused, match="expected at most 10000 requests that wait") as refused:
        submit(it, "more", prompt(0, 4))
    assert refused.value.reason == "queue"
    for _ in range(5):
        it.step()
    assert sum(each.ended for each in heard) == 5 * 16
    for n in range(10_000):
        it.cancel(n)
    nothing_leaked(it)


def test_who_waited_too_long_is_refused_but_not_who_was_preempted() -> None:
    now = [0.0]
    rule = Admission(Limits(1.0, memory=1.0, hold=5.0, overdue="refuse"), None)
    it = engine(pages=24, reserve=0.1, admission=rule)
    it.clock = lambda: now[0]
    heard = [submit(it, n, prompt(n, 60), output=70, dense=True) for n in range(6)]
    while it.step().parts:
        now[0] += 1.0
    assert it.scheduler.preemptions
    refused = [each for each in heard if isinstance(each[-1], Refused)]
    assert 1 <= len(refused) <= 4
    for n, each in enumerate(heard):
        if each in refused:
            assert each[0].reason == "overdue" and len(each) == 1
        else:
            assert each.tokens == alone(prompt(n, 60), 70)
    nothing_leaked(it)


def test_a_failure_of_a_step_tells_every_request() -> None:
    it = engine()

    def broken(plan):  # type: ignore[no-untyped-def]
        raise RuntimeError("no such device")

    it.runner.run = broken
    it.start()
    heard = submit(it, "a", prompt(0, 30))
    it._thread.join(10)
    assert isinstance(heard[0], Refused) and "the engine failed: no such device" in str(heard[0])
    with pytest.raises(Refused, match="expected a running engine"):
        submit(it, "b", prompt(0, 30))


def test_closing_waits_for_those_that_run() -> None:
    it = engine()
    it.start()
    heard = submit(it, "a", prompt(0, 30), output=20, dense=True)
    it.close(grace=30)
    assert heard.tokens == alone(prompt(0, 30), 20)
    nothing_leaked(it)
    it = engine()
    it.start()
    late = submit(it, "a", prompt(0, 30), output=500)
    it.close(grace=0.0)
    assert isinstance(late[-1], Refused) and late[-1].reason == "closed"
    nothing_leaked(it)
