"""``python -m sparse_attn calibrate`` and ``crossover``: what measured steps and calls say.

They measure nothing, but for ``calibrate --endpoint``, which times a service first.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from .plan import preset
from .serving import calibration, crossover, endpoint
from .serving.cost import TERMS
from .serving.knee import NoKnee, knee

SAID = {
    "step": "of a step itself",
    "token": "of a query token",
    "scored": "of a pair scored",
    "attended": "of a pair attended",
}


def _parser(command: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m sparse_attn {command}", description=about)
    parser.add_argument("file", metavar="FILE", help="JSON lines: see docs/serving.md")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    return parser


def main(argv: list[str]) -> int:
    """``calibrate``: coefficients of a step's time with intervals, and the knee of decode throughput."""
    parser = _parser("calibrate", "Coefficients of a step's time from measured steps, and the knee of throughput.")
    parser.add_argument("--device", default="", metavar="NAME", help="fingerprint of machine, model and formats")
    parser.add_argument("--save", metavar="FILE", help="write the coefficients as a profile for admission")
    service = parser.add_argument_group("of a running service", "FILE is written first: steps as seen from outside")
    service.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible service that is idle")
    service.add_argument("--model", metavar="NAME", help="the model's plan, a preset")
    service.add_argument("--served", default="", metavar="NAME", help="the model's name at the service")
    service.add_argument("--lengths", type=_numbers, default="256,1024,4096,8192", metavar="N,N", help="of prompts")
    service.add_argument("--sequences", type=_numbers, default="1,2,4,8,16", metavar="N,N", help="together")
    service.add_argument("--tokens", type=int, default=64, metavar="N", help="that each generates")
    options = parser.parse_args(argv)
    try:
        if options.endpoint:
            _measure(options)
        rows = calibration.read(options.file)
        fit = calibration.fit(rows, options.device)
        if options.save:
            with open(options.save, "w") as file:
                json.dump(fit.cost.to_dict(), file)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    found: dict[str, Any] = asdict(fit)
    try:
        found["knee"] = asdict(knee(calibration.throughputs(rows)))
    except NoKnee as error:
        found["knee"] = str(error)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{fit.steps} steps; half of them are predicted within {fit.error:.1%}")
    for term in TERMS:
        low, high = fit.intervals[term]
        value = getattr(fit.cost, term)
        print(f"  {SAID[term]:<19} {1e6 * value:12.6g} us  95% {1e6 * low:.6g} to {1e6 * high:.6g}")
    if isinstance(found["knee"], str):
        print(found["knee"])
    else:
        low, high = found["knee"]["interval"]
        print(f"knee at {found['knee']['at']:.3g} decoding sequences, 95% {low:.3g} to {high:.3g}")
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _measure(options: argparse.Namespace) -> None:
    if not options.model:
        raise ValueError("endpoint: expected --model with it, a preset that counts pairs, got none")
    model = preset(options.model)
    service = endpoint.Endpoint(options.endpoint, options.served)
    with open(options.file, "x") as file:  # steps that were measured before are not lost
        for step in endpoint.measure(service, model, options.lengths, options.sequences, options.tokens):
            print(json.dumps(step), file=file)


def main_crossover(argv: list[str]) -> int:
    """``crossover``: dense against sparse over length, for each batch and ratio."""
    parser = _parser("crossover", "Dense against sparse over length, for each batch and ratio, from measured calls.")
    parser.add_argument("--k", type=int, required=True, metavar="N", help="entries that are selected at least")
    options = parser.parse_args(argv)
    try:
        found = crossover.crossovers(crossover.read(options.file), options.k)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return 0
    print("| batch | ratio | length | dense ms | sparse ms | dense / sparse | faster | results |")
    print("|---|---|---|---|---|---|---|---|")
    for each in found:
        for cell in each.cells:
            times = f"{1e3 * cell.dense:.4g} | {1e3 * cell.sparse:.4g} | {cell.speedup:.2f}"
            results = "same" if cell.exact else "differ"
            print(
                f"| {each.batch} | {each.ratio:g} | {cell.length} | {times} | {cell.faster or 'neither'} | {results} |"
            )
    for each in found:
        where = "not in what was measured"
        if each.length:
            where = f"between {each.length[0]} and {each.length[1]}" if each.length[0] else "from the shortest on"
        print(f"batch {each.batch}, ratio {each.ratio:g}: sparse becomes faster for good {where}")
    return 0
