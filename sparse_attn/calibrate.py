"""``python -m sparse_attn calibrate``: what measured steps say.

It measures nothing, but for ``--endpoint``, which times a service first.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .plan import preset
from .serving import calibration, endpoint
from .serving.cost import TERMS
from .serving.knee import NoKnee, knee

SAID = {
    "step": "of a step itself",
    "token": "of a query token",
    "scored": "of a pair scored",
    "attended": "of a pair attended",
}

WHOSE = {
    "selecting": "sequences that select: ",
    "dense": "sequences that decode densely: ",
    "chunk": "chunks of prompts: ",
}


def main(argv: list[str]) -> int:
    """``calibrate``: coefficients of a step's time with intervals, and the knee of decode throughput."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_attn calibrate",
        description="Coefficients of a step's time from measured steps, and the knee of throughput.",
    )
    parser.add_argument("file", metavar="FILE", help="JSON lines: see docs/serving.md")
    parser.add_argument("--json", action="store_true", help="print as JSON")
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
        fits, why = calibration.fits(rows, options.device)
        if options.save:
            calibration.profile(fits).save(options.save)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    found: dict[str, Any] = {"fits": {kind: asdict(fit) for kind, fit in fits.items()}, "not fitted": why}
    try:
        found["knee"] = asdict(knee(calibration.throughputs(rows)))
    except NoKnee as error:
        found["knee"] = str(error)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for kind, fit in fits.items():
        whose = WHOSE[kind] if len(fits) + len(why) > 1 else ""
        print(f"{whose}{fit.steps} steps; half of them are predicted within {fit.error:.1%}")
        for term in TERMS:
            low, high = fit.intervals[term]
            value = getattr(fit.cost, term)
            print(f"  {SAID[term]:<19} {1e6 * value:12.6g} us  95% {1e6 * low:.6g} to {1e6 * high:.6g}")
    for kind, reason in why.items():
        print(f"{WHOSE[kind]}{'from all steps' if kind == 'selecting' else 'as those that select'}: {reason}")
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
    path = Path(options.file)
    try:
        with path.open("x") as file:  # steps that were measured before are not lost
            for step in endpoint.measure(service, model, options.lengths, options.sequences, options.tokens):
                print(json.dumps(step), file=file)
    except ValueError:
        if not path.stat().st_size:
            path.unlink()
        raise
