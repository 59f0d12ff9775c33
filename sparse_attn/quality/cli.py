"""The command line of ``quality``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..checks import InvalidCall
from ..demo import model as own
from ..demo import text
from ..plan import shares

PROG = "python -m sparse_attn quality"


def percent(given: str) -> float:
    """``0.5%`` or ``0.005``."""
    try:
        value = float(given.rstrip("%")) / (100 if given.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a share such as 0.5% or 0.005, got {given!r}")
    return value


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="What a selection of tokens costs a dense model: perplexity of a text, sentences hidden in it, and "
        "what was said in a conversation. Recommends the smallest share that keeps the worst task within a budget.",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or name of a transformers model (SmolLM2-135M-Instruct)")
    add("--ratios", type=shares, default="1/2,1/4,1/8,1/16", metavar="LIST", help="(1/2,1/4,1/8,1/16)")
    add("--format", default="int8", metavar="NAME", help="of keys and values; '' as the model has them (int8)")
    add("--index", default="int4_index_h", metavar="NAME", help="of the index; '' scores the keys (int4_index_h)")
    add("--context", type=int, default=4096, metavar="N", help="tokens of each prompt and what follows it (4096)")
    add("--scored", type=int, default=512, metavar="N", help="tokens of the text whose losses count (512)")
    add("--budget", type=percent, default=0.01, metavar="SHARE", help="what the worst task may lose (1%%)")
    add("--text", type=Path, metavar="PATH", help="a UTF-8 text of your own kind (Python's reference manual)")
    add("--dtype", default="float32", metavar="NAME", help="of the model (float32)")
    add("--device", default="cpu", metavar="NAME", help="(cpu)")
    add("--json", action="store_true", help="print as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0 with a recommendation, 1 if no share is within the budget or every task is void, 2 if it cannot run."""
    options = arguments().parse_args(argv)
    options.ratios.sort(reverse=True)
    try:
        model, tokenizer = load(options)
        return report(options, measure(options, model, tokenizer))
    except (InvalidCall, own.CannotRun, OSError, ValueError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    if options.model is None:
        own.require_packages()
        model, tokenizer = own.load(say)
    else:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError:
            raise own.CannotRun("transformers is not installed: pip install 'sparse-attn[demo]'") from None
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    import torch

    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"--dtype: expected one such as float32 or bfloat16, got {options.dtype!r}")
    return model.to(options.device, dtype), tokenizer


def measure(options: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Losses of every task and share, and of each question what was right at which distance."""
    from . import judge, tasks
    from .measure import prepare, run

    limit = getattr(model.config, "max_position_embeddings", options.context)
    if not 0 < options.scored < options.context < limit:
        raise ValueError(
            f"--context: expected more than --scored ({options.scored}) and less than the model's {limit}, got "
            f"{options.context}"
        )
    written, source = text.read(options.text)
    tokens = text.tokenize(tokenizer, written, options.context + 1).tolist()
    room = options.context - 256  # for questions and turns
    todo = [
        tasks.perplexity(tokens, options.context, options.scored),
        tasks.needles(tokenizer, tokens, room),
        tasks.recall(tokenizer, tokenizer.decode(tokens), room),
    ]
    prepare(model)
    ratios = [float(share) for share in options.ratios]
    losses: list[judge.Loss] = []
    answers: list[dict[str, Any]] = []
    for task in todo:
        say(f"{task.name}: {len(task.prompt)} tokens, {len(task.questions)} questions")
        (dense,) = run(model, task, [None])
        rows = [*run(model, task, ratios, options.format, options.index)]
        for row in rows:
            assert row.ratio is not None
            compare = judge.answers_loss if task.exact else judge.perplexity_loss
            losses.append(compare(task.name, row.ratio, dense.values, row.values))
        if task.exact:
            for n, question in enumerate(task.questions):
                right = {"dense": bool(dense.values[n])}
                right |= {f"{share}": bool(row.values[n]) for share, row in zip(options.ratios, rows, strict=True)}
                answers.append({"task": task.name, "distance": question.distance, "right": right})
    found = judge.recommended(losses, options.budget)
    share = next((share for share in options.ratios if float(share) == found), None)
    return {
        "model": options.model or "SmolLM2-135M-Instruct",
        "text": source,
        "format": options.format,
        "index": options.index,
        "context": options.context,
        "budget": options.budget,
        "losses": [asdict(loss) for loss in losses],
        "answers": answers,
        "recommended": None if share is None else str(share),
    }


def report(options: argparse.Namespace, found: dict[str, Any]) -> int:
    """Print what was found; the exit code."""
    code = 0 if found["recommended"] else 1
    if options.json:
        print(json.dumps(found, indent=2))
        return code
    names = list(dict.fromkeys(loss["task"] for loss in found["losses"]))
    print("| share | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for share in options.ratios:
        row = [loss for loss in found["losses"] if loss["ratio"] == float(share)]
        print(f"| {share} | " + " | ".join(map(cell, row)) + " |")
    for answer in found["answers"]:
        marks = ", ".join(f"{name} {'right' if right else 'wrong'}" for name, right in answer["right"].items())
        print(f"{answer['task']}, {answer['distance']} tokens back: {marks}")
    if found["recommended"]:
        print(f"recommended: {found['recommended']}, the smallest whose worst task loses at most {options.budget:.2%}")
        decides = [x for x in found["losses"] if x["ratio"] == float(Fraction(found["recommended"])) and x["error"]]
        if any(x["loss"] + x["error"] > options.budget for x in decides):
            print("this is within its error: score more tokens with --scored, or other texts")
    elif all(loss["void"] for loss in found["losses"]):
        print("no recommendation: every task is void, as dense attention itself fails it")
    else:
        print(f"no recommendation: at every share the worst task loses more than {options.budget:.2%}")
    return code


def cell(loss: dict[str, Any]) -> str:
    """A loss as text."""
    if loss["void"]:
        return "void: dense fails it"
    error = f" ± {loss['error']:.2%}" if loss["error"] else ""
    return f"{loss['loss']:+.2%}{error}"
