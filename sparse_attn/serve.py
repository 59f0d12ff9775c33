"""``python -m sparse_attn serve``: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .models import at_share
from .plan import shares

HOLD = 30.0
"""Seconds a request may wait where admission enforces."""
LARGEST = 2**31 - 1
ALLOWED = {
    "port": range(65536),
    "pages": range(1, LARGEST + 1),
    "page_size": range(1, LARGEST + 1),
    "threads": range(1, LARGEST + 1),
    "grace": range(LARGEST + 1),
}
"""Of options that are integers."""
MODULES = ("starlette", "uvicorn", "prometheus_client", "transformers")


def main(argv: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM. Returns 2 if it cannot."""
    options = parse(argv)
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        print(f"serve needs {', '.join(missing)}: pip install 'sparse-attn[serve]'", file=sys.stderr)
        return 2
    import uvicorn

    from .demo.model import CannotRun

    try:
        app = application(options)
    except (CannotRun, OSError, ValueError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    # connections that are open when it is told to end have so long for their answers
    uvicorn.run(app, host=options.host, port=options.port, log_level="info", timeout_graceful_shutdown=options.grace)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_attn serve",
        description="Serves a Llama-style model of transformers with sparse attention on paged int8 K/V and int4 index "
        "keys: /v1/completions, /v1/chat/completions, /v1/models, /metrics, /health. Small on purpose; there are no "
        "keys and no users, so it listens to this machine alone unless told otherwise.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="a checkpoint of transformers; without, the demo's SmolLM2-135M")
    add("--host", default="127.0.0.1", help="address to listen to")
    add("--port", type=int, default=8000, help="0: any")
    add("--pages", type=int, default=1024, help="pages of the pool")
    add("--page-size", type=int, default=64, help="tokens of a page")
    add(
        "--share",
        type=shares,
        default="1/4",
        metavar="LIST",
        help="of the tokens before it that a generated token attends, such as 1/4,1/8: requests may name one, and the "
        "first is that of the others",
    )
    add("--reserve", type=float, default=0.15, help="share of the pool that admission leaves to requests that grow")
    add("--tokens", type=int, default=256, help="tokens of a step at most")
    add("--running", type=int, default=64, help="requests that run at most")
    add("--queue", type=int, default=256, help="requests that wait at most; more are answered by 429")
    add(
        "--mode",
        choices=("off", "observe", "enforce"),
        default="observe",
        help="of admission: observe tells, enforce acts",
    )
    add("--budget", type=float, default=0.2, help="seconds that a step may take")
    add(
        "--hold",
        type=float,
        help=f"seconds a request may wait; then 503 (with --mode enforce alone; {HOLD:g})",
    )
    add("--profile", type=Path, metavar="FILE", help="of step times, from calibrate; without, memory alone decides")
    add(
        "--crossover",
        type=Path,
        metavar="FILE",
        help="up to which lengths to attend densely, from crossover; without, those at which everything is selected",
    )
    add(
        "--device",
        default="",
        metavar="NAME",
        help="fingerprint of profile and crossover; without, found here and said",
    )
    add("--records", type=Path, metavar="FILE", help="append a line of JSON for each step and request, for calibrate")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights")
    add("--threads", type=int, metavar="N", help="CPU threads; without, PyTorch's choice")
    add("--grace", type=int, default=30, metavar="SECONDS", help="for requests that run when it is told to end")
    options = parser.parse_args(argv)
    for name, allowed in ALLOWED.items():
        value = getattr(options, name)
        if value is not None and value not in allowed:
            at_most = f" to {allowed[-1]}" if allowed[-1] < LARGEST else " or more"
            parser.error(f"--{name.replace('_', '-')}: expected {allowed[0]}{at_most}, got {value}")
    if options.hold is not None and options.mode != "enforce":
        parser.error(
            f"--hold: acts with --mode enforce alone, got --mode {options.mode}; choose it, or leave --hold out"
        )
    options.hold = HOLD if options.hold is None else options.hold
    return options


def application(options: argparse.Namespace) -> Any:
    """The app, whose engine runs while it does."""
    import torch
    from prometheus_client import CollectorRegistry

    from .doctor import package
    from .serving.admission import Admission, Limits
    from .serving.cost import Predictor, Profile
    from .serving.crossover import Switch, Switches
    from .serving.engine import Engine
    from .serving.http import Endpoint
    from .serving.manager import CacheManager
    from .serving.metrics import Exporter
    from .serving.observer import Observer
    from .serving.records import Records
    from .serving.runner import FLOOR, Runner
    from .serving.scheduler import Scheduler, Steps
    from .serving.service import ServiceMetrics
    from .serving.stats import Counter

    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer, name = load(options.model)
    runner = Runner(model.to(getattr(torch, options.dtype)), options.pages, options.page_size, options.share[0])
    for share in options.share:
        Counter(at_share(runner.plan, share))  # refuses one that cannot be counted, before a request names it
    predictor = None
    if options.profile:
        predictor = Predictor(runner.plan, Profile.load(options.profile))
    device = options.device or fingerprint(name, options.dtype)
    print(f"serve: on {device!r}", file=sys.stderr)
    limits = Limits(options.budget, hold=options.hold, overdue="refuse")
    admission = Admission(limits, predictor, device, options.mode)
    if admission.alarm:
        print(f"serve: {admission.alarm}", file=sys.stderr)
    measured = Switches.load(options.crossover) if options.crossover else None
    switches: dict[Fraction | None, Switch] = {}
    for share in options.share:
        switch, said = measured.of(float(share), device, FLOOR) if measured else (Switch(FLOOR), "")
        switches[None if share == options.share[0] else share] = switch
        if said:
            print(f"serve: crossover: {said}; {share} is dense up to {FLOOR} tokens until then", file=sys.stderr)
    manager = CacheManager([runner.memory.plane], options.pages, reserve=options.reserve)
    steps = Steps(options.tokens, options.running, options.queue)
    registry = CollectorRegistry()
    records = Records(str(options.records)) if options.records else None
    exporter = Exporter(name, plan=runner.plan.name, version=package()["version"], registry=registry)
    observer = Observer(runner.plan, exporter, records, formats=runner.formats)
    scheduler = Scheduler(manager, admission, steps, salt=name.encode(), switches=switches)
    engine = Engine(runner, scheduler, observer=observer, watcher=ServiceMetrics(registry))

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        engine.start()
        yield
        engine.close()

    return Endpoint(engine, served(model, tokenizer, name, runner.longest, options.share), registry).app(lifespan)


def fingerprint(name: str, dtype: str) -> str:
    """What times of steps and calls depend on: the machine, its threads, the model and its formats."""
    import torch

    from .doctor import cpu
    from .serving.runner import FORMAT, INDEX_FORMAT

    try:
        machine = cpu()["model"]
    except OSError:  # not Linux
        machine = platform.processor() or platform.machine()
    return f"{machine}, {torch.get_num_threads()} threads, {name} {dtype}, {FORMAT} {INDEX_FORMAT}"


def load(folder: Path | None) -> tuple[Any, Any, str]:
    """The model, its tokenizer, and the name it is served under."""
    if folder is None:
        from .demo.model import load

        return *load(lambda said: print(said, file=sys.stderr)), "smollm2-135m-instruct"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not folder.is_dir():
        raise ValueError(f"--model: expected a folder with a checkpoint of transformers, got {str(folder)!r}")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True), folder.resolve().name


def served(model: Any, tokenizer: Any, name: str, longest: int, shares: Sequence[Fraction]) -> Any:
    """What the endpoint needs to know of the model."""
    from tokenizers.decoders import DecodeStream

    from .serving.http import Served

    def decoder() -> Callable[[int], str | None]:
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(tokenizer.backend_tokenizer, token)

    def chat(messages: list[dict[str, Any]]) -> list[int]:
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(text, add_special_tokens=False))

    stop = {tokenizer.eos_token_id, *_ids(model.generation_config.eos_token_id)} - {None}
    size = model.config.vocab_size
    return Served(name, tokenizer.encode, chat, decoder, longest, size, frozenset(stop), tuple(shares))


def _ids(found: int | list[int] | None) -> list[int | None]:
    return list(found) if isinstance(found, list) else [found]
