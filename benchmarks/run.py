"""Times an op against eager torch, on this machine's CPU.

Every function of a case is called in turn, over and over in one process, so that a busy neighbour disturbs all of them
alike. With one thread the figure is CPU time of the process, else wall time. Printed: the lower quartile in
milliseconds; for peers, how many times as long as sparse_attn they take.
Run: python benchmarks/run.py [attend | compress | merge | select | store] [--only TEXT] [--threads N] [--rounds N]
[--json]; merge is also select_merge, store is also load and convert.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import attend
import compression
import parts
import rows
import selection
import torch
from torch import Tensor

OPS = {"attend": attend, "compress": compression, "merge": parts, "select": selection, "store": rows}


def measure(functions: dict[str, Callable[[int], Tensor]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Lower quartile of each function's time in seconds."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 2):
        for offset, (name, function) in enumerate(functions.items()):
            start = clock()
            function((turn + offset) % attend.VARIANTS)
            if turn >= 2:
                samples[name].append(clock() - start)
    return {name: statistics.quantiles(values, n=4)[0] for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "op", nargs="?", choices=OPS, default="attend", help="merge: and select_merge; store: and load and convert"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one object per case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    with torch.inference_mode():
        op = OPS[options.op]
        for make in op.cases():
            if options.only and options.only not in op.name_of(*make.args):
                continue
            case = make()
            op.check(case)
            seconds = measure(case.functions, options.rounds, clock)
            ours = seconds["sparse_attn"]
            if options.json:
                print(json.dumps({"case": case.name, "threads": options.threads, "seconds": seconds}), flush=True)
                continue
            peers = "  ".join(f"{n} {s / ours:5.2f}x" for n, s in seconds.items() if n != "sparse_attn")
            rates = f"{case.flops / ours / 1e9:6.1f} GFLOP/s {case.bytes / ours / 1e9:5.1f} GB/s"
            print(f"{case.name:36} {ours * 1e3:8.3f} ms  {rates}  {peers}", flush=True)


if __name__ == "__main__":
    main()
