"""What Triton makes of the kernels of `cuda_triton` for AMD's gfx942 and gfx950, without a device:
`PYTHONPATH=. python tests/amd_compile.py`, with words only for the calls that they name. Launches are those of sm_86,
whose programs have little shared memory. The backend refuses such devices: nothing more is known of these kernels.
"""

from __future__ import annotations

import re
import sys

from cuda_compile import CALLS, MULTIPLY, kernels_of
from triton.backends.compiler import GPUTarget

SHARED = {"gfx942": 65536, "gfx950": 163840}
"""Bytes of shared memory of a compute unit."""


def fault(kernel: str, assembly: str, shared: int, most: int) -> str:
    """What is wrong with a compiled kernel, in words."""
    spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    faults = {
        "too much shared memory": shared > most,
        "spills": spilled is None or int(spilled[1]) > 0,
        "no matrix products": kernel in MULTIPLY and "v_mfma" not in assembly,
    }
    return ", ".join(name for name, found in faults.items() if found)


def main(words: list[str]) -> None:
    for arch, most in SHARED.items():
        fine, count = 0, 0
        for name in CALLS:
            if words and not any(word in name for word in words):
                continue
            count += 1
            faults = set()
            try:
                for kernel, _, code in kernels_of(86, CALLS[name](), GPUTarget("hip", arch, 64)):
                    faults.add(fault(kernel, code.asm["amdgcn"], code.metadata.shared, most))
            except Exception as error:  # whatever the compiler ran into is the answer
                faults.add(f"{type(error).__name__}: {error}".splitlines()[0][:200])
            wrong = "; ".join(sorted(faults - {""}))
            fine += not wrong
            print(f"{arch} {name}: {wrong or 'compiled'}", flush=True)
        print(f"{arch}: {fine} of {count} calls", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
