"""What the router costs: a call through `torch.ops.sparse_attn.attend` over a bare kernel of the same schema.

Both run a kernel that only allocates its outputs. Batches of calls alternate in one process; medians of their CPU time,
in microseconds a call.
Run: python benchmarks/router.py [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from sparse_attn import library, registry


def call() -> tuple[tuple, dict]:
    """One decode step of a GQA layer with token selection."""
    b, pages, page = 4, 64, 16
    table = torch.zeros(b, 16, dtype=torch.int32)
    leading = (
        torch.randn(b, 32, 128, dtype=torch.bfloat16), torch.arange(b + 1, dtype=torch.int32),
        torch.full((b,), 200, dtype=torch.int32), 0.1, 128, 1, 200,
    )  # fmt: skip
    planes = {name: torch.zeros(pages, page, 8, 128, dtype=torch.bfloat16) for name in ("kv", "v")}
    return leading, dict(planes, page_table=table, indices=torch.zeros(b, 8, 64, dtype=torch.int32))


def microseconds(function, leading, kwargs, calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        function(*leading, **kwargs)
    return (time.process_time() - start) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    leading, kwargs = call()
    stub = registry.Impl("attend", "stub", limits={}, run=lambda a, out, lse: None, priority=1000)
    registry.implementations()  # searched before the stub goes in front
    found, broken = registry._found()
    registry._found = lambda: ((stub, *found), broken)  # type: ignore[assignment]
    library.forget = lambda: library._memo.clear()  # type: ignore[assignment]

    bare_library = torch.library.Library("sparse_attn_bare", "DEF")
    bare_library.define(str(torch.ops.sparse_attn.attend.default._schema).replace("sparse_attn::", ""))

    def bare_kernel(*args, **kwargs):
        q = args[0]
        return q.new_empty((q.shape[0], q.shape[1], args[4])), q.new_empty((0,), dtype=torch.float32)

    bare_library.impl("attend", bare_kernel, "CPU")
    functions = {
        "bare": torch.ops.sparse_attn_bare.attend.default,
        "routed": torch.ops.sparse_attn.attend.default,
    }
    torch.set_num_threads(1)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    with torch.inference_mode():
        for _ in range(40):
            for name, function in functions.items():
                samples[name].append(microseconds(function, leading, kwargs, 500))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    medians["router"] = medians["routed"] - medians["bare"]
    if as_json:
        print(json.dumps(medians))
    else:
        print("  ".join(f"{name} {value:.2f} us" for name, value in medians.items()))


if __name__ == "__main__":
    main()
