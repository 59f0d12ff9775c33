"""``python -m sparse_attn quality``: the tasks, what is measured on a small random model, and what follows from it."""

from __future__ import annotations

import json
from math import expm1, inf

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers")

from sparse_attn.__main__ import main as command
from sparse_attn.quality import cli, judge, tasks
from sparse_attn.quality.measure import prepare, run

TEXT = " ".join(f"word{n} of a text" for n in range(900))


class Letters:
    """A tokenizer of letters, whose chat template marks turns."""

    chat_template = "there is one"

    def __call__(self, text, **_):
        ids = [min(ord(c), 127) for c in text]
        return {"input_ids": torch.tensor([ids]) if _.get("return_tensors") else ids}

    def decode(self, ids):
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return text + "<assistant>" if add_generation_prompt else text


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_needles_are_where_their_distances_say():
    task = tasks.needles(Letters(), Letters()(TEXT)["input_ids"], 2000)
    assert len(task.prompt) == 2000 and task.exact
    prompt = Letters().decode(task.prompt)
    for (begin, end), question in zip(tasks.FACTS, task.questions, strict=True):
        assert prompt[len(prompt) - question.distance :].startswith(f"\n\n{begin}{end}.")
        assert Letters().decode(question.tokens).endswith(begin + end)
        assert Letters().decode(question.tokens[-question.answer :]) == end
    with pytest.raises(ValueError, match="more than"):
        tasks.needles(Letters(), Letters()(TEXT)["input_ids"], 300)


@pytest.mark.parametrize("template", [True, False])
def test_recall_is_a_conversation_whose_facts_are_where_their_distances_say(template):
    tokenizer = Letters()
    if not template:
        tokenizer.chat_template = None
    task = tasks.recall(tokenizer, TEXT, 4000)
    assert abs(len(task.prompt) - 4000) <= tasks.TURNS + 8
    prompt = tokenizer.decode(task.prompt)
    assert prompt.startswith("<user>Remember this: " if template else "User: Remember this: ")
    for (begin, end), question in zip(tasks.FACTS, task.questions, strict=True):
        before = prompt[: len(prompt) - question.distance]
        assert before.rstrip("\n").removesuffix("</>").endswith(f"I will remember: {begin}{end}.")
        asked = tokenizer.decode(question.tokens)
        assert asked.startswith("<user>Repeat" if template else "User: Repeat")
        assert asked.endswith(("<assistant>" if template else "Assistant: ") + begin + end)
        assert tokenizer.decode(question.tokens[-question.answer :]) == end
    with pytest.raises(ValueError, match="context of more than"):
        tasks.recall(tokenizer, TEXT, 500)


def test_a_template_that_rewrites_earlier_turns_is_refused():
    class Rewrites(Letters):
        def apply_chat_template(self, messages, **kwargs):
            return f"{len(messages)}" + super().apply_chat_template(messages, **kwargs)

    with pytest.raises(ValueError, match="leaves earlier turns"):
        tasks.recall(Rewrites(), TEXT, 4000)


def test_perplexity_is_that_of_transformers(llama):
    text = Letters()(TEXT)["input_ids"]
    task = tasks.perplexity(text, 700, 400)
    llama.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = llama(torch.tensor([text[:700]])).logits[0]
    expected = cross_entropy(logits, torch.tensor(text[1:701]), reduction="none")[300:]
    prepare(llama)
    dense, sparse, again = run(llama, task, [None, 0.25, None])
    torch.testing.assert_close(dense.values, expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(dense.values, again.values)  # the cache is as it was, and the selection is gone
    assert (sparse.values - dense.values).abs().max() > 0.05
    (whole,) = run(llama, task, [0.999], "", "int8_index_h")
    assert (whole.values - dense.values).abs().max() < 0.05
    with pytest.raises(ValueError, match="more than 5000 tokens"):
        tasks.perplexity(text[:5000], 5000, 400)


def test_answers_are_right_if_each_token_is_the_first_choice(llama):
    text = Letters()(TEXT)["input_ids"]
    prepare(llama)
    with torch.inference_mode():
        llama.set_attn_implementation("sdpa")
        said = llama(torch.tensor([text[:300]])).logits[0, -1].argmax().item()
        then = llama(torch.tensor([[*text[:300], said]])).logits[0, -1].argmax().item()
    prepare(llama)
    right = tasks.Question([*text[290:300], said, then], 2)
    wrong = tasks.Question([*text[290:300], said, (then + 1) % 128], 2)
    (found,) = run(llama, tasks.Task("t", text[:290], (right, wrong), exact=True), [None])
    assert found.values.tolist() == [1.0, 0.0]


def test_losses():
    dense, sparse = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.1, 2.3, 3.1, 4.3])
    found = judge.perplexity_loss("p", 0.25, dense, sparse)
    assert found.loss == pytest.approx(expm1(0.2)) and found.error == pytest.approx(0.2 / 12**0.5) and not found.void
    ten = torch.ones(10)
    assert judge.answers_loss("n", 0.25, ten, torch.tensor([1.0] * 9 + [0])).loss == pytest.approx(0.1)
    eight = torch.tensor([1.0] * 8 + [0] * 2)
    gained = torch.tensor([1.0] * 6 + [0] * 2 + [1.0] * 2)  # right where dense is wrong makes up for nothing
    assert judge.answers_loss("n", 0.25, eight, gained) == judge.Loss("n", 0.25, 0.25, 0.0, void=False)
    seven = torch.tensor([1.0] * 7 + [0] * 3)
    assert judge.answers_loss("n", 0.25, seven, seven).void
    assert judge.answers_loss("n", 0.25, 0 * ten, ten) == judge.Loss("n", 0.25, inf, 0.0, void=True)


def losses(**shares):
    return [
        judge.Loss(task, ratio, loss, 0.0, void=task == "void")
        for task, row in shares.items()
        for ratio, loss in zip((0.5, 0.25, 0.125), row, strict=True)
    ]


def test_the_worst_task_that_is_not_void_decides():
    found = losses(text=(0.0, 0.004, 0.02), needles=(0.0, 0.0, 0.0), void=(0.9, 0.9, 0.9))
    assert judge.recommended(found, 0.01) == 0.25
    assert judge.worst(found, 0.125).task == "text"
    assert judge.recommended(found, 0.001) == 0.5
    assert judge.recommended(losses(text=(0.02, 0.0, 0.0)), 0.01) is None  # luck at a smaller share is no reason
    assert judge.recommended(losses(void=(0.0, 0.0, 0.0)), 0.01) is None


@pytest.fixture
def small(llama, monkeypatch):
    monkeypatch.setattr(cli, "load", lambda options: (llama, Letters()))


def test_the_command(small, capsys, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    arguments = [
        "quality",
        "--context",
        "2400",
        "--scored",
        "100",
        "--ratios",
        "1/2,1/4",
        "--text",
        str(path),
        "--json",
    ]
    code = command([*arguments, "--budget", "99%"])
    found = json.loads(capsys.readouterr().out)
    assert [loss["task"] for loss in found["losses"]] == ["perplexity"] * 2 + ["needles"] * 2 + ["recall"] * 2
    assert all(
        loss["void"] == (loss["task"] != "perplexity") for loss in found["losses"]
    )  # random weights recall nothing
    assert len(found["answers"]) == 2 * len(tasks.FACTS)
    assert code == 0 and found["recommended"] == "1/4"
    options = cli.arguments().parse_args(arguments[1:-1])
    assert cli.report(options, {**found, "recommended": None}) == 1
    out = capsys.readouterr().out
    assert "void: dense fails it" in out and "| 1/4 |" in out and "loses more than 1.00%" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--context", "9000"], "less than the model's 8192, got 9000"),
        (["--scored", "4096"], "more than --scored"),
        (["--text", "/nonexistent"], "/nonexistent"),
        (["--context", "2400", "--scored", "64", "--format", "int7"], "format: expected one of"),
    ],
)
def test_what_cannot_run_is_said_in_a_sentence(small, capsys, arguments, message):
    assert command(["quality", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--ratios", "2"], ["--ratios", "x"], ["--budget", "-1"], ["--budget", "x"]])
def test_options_are_checked(arguments):
    with pytest.raises(SystemExit):
        command(["quality", *arguments])
