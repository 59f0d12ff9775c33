"""What FlashMLA takes, as data: each limit with its source. Paths are of FlashMLA at commit 9241ae3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from sparse_attn.registry import Impl, Limit, OneOf

from . import attend, installed, selfcheck

DECODE, PREFILL = "csrc/api/sparse_decode.h", "csrc/api/sparse_fwd.h"
INTERFACE = "flash_mla/flash_mla_interface.py"
OURS = "this package: {}"

PRIORITY = 5
"""Below `cuda_triton`, which takes every call: nothing was measured faster yet, and this one allocates its results."""

Sourced = Mapping[str, tuple[Limit, str]]
"""Fact to its limit, and where the limit comes from."""


@dataclass(frozen=True)
class Kernel:
    """One function of FlashMLA behind ``attend``, on rows of one format."""

    variant: str
    function: str
    devices: tuple[installed.Device, ...]
    limits: Sourced
    run: Callable[..., None]
    check: Callable[[Callable[..., None]], str | None]

    def available(self) -> str | None:
        """Why this machine cannot run it: the module, the device, or a wrong answer to what is known."""
        return installed.refusal(self.devices) or self.check(self.run)

    def impl(self) -> Impl:
        return Impl(
            "attend",
            "flash_mla",
            {"device": OneOf(("cuda",))} | {fact: limit for fact, (limit, _) in self.limits.items()},
            self.run,
            # Standard normal inputs. Keys, values and weights are bfloat16, sums float32.
            tolerance={"bfloat16": (1e-2, 1e-2)},
            priority=PRIORITY,
            available=partial(Kernel.available, self),
            variant=self.variant,
        )


SM90, SM100 = (9, 0), (10,)

SHARED: Sourced = {
    "dtype": (OneOf(("bfloat16",)), f"{DECODE} and {PREFILL}: q is bfloat16"),
    "v_format": (OneOf(("",)), f"{INTERFACE}: values are the first part of a row"),
    "q_heads": (OneOf((64, 128)), f"{DECODE} and {PREFILL}; others would have to be padded to 64"),
    "kv_heads": (OneOf((1,)), f"{DECODE}: h_kv is 1"),
    "rope_dim": (OneOf((0,)), f"{INTERFACE}: a row is whole"),
    "v_dim": (OneOf((512,)), f"{DECODE} and {PREFILL}: d_v is 512"),
    "index_heads": (OneOf((0, 1)), f"{INTERFACE}: one list a row"),
    "select_block": (OneOf((1,)), f"{INTERFACE}: lists of single rows"),
    "batch_invariant": (OneOf((False,)), "FlashMLA issue 212: lists are cut by the size of the batch"),
}
PAGES_APART = OneOf(("contiguous", "pages"))
WHOLE_PAGES = f"{DECODE}: kv.stride(1) is the bytes of a row"

V32: Sourced = {
    **SHARED,
    "planes": (OneOf(("main",)), "csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh: V3.2 has no extra cache"),
    "format": (OneOf(("fp8_v32",)), INTERFACE),
    "qk_dim": (OneOf((576,)), DECODE),
    "kv_strides": (PAGES_APART, WHOLE_PAGES),
}
V4: Sourced = {
    **SHARED,
    "format": (OneOf(("", "fp8_v4_planar")), "tests/quant.py: MODEL1_FP8Sparse"),
    "win_format": (OneOf(("", "fp8_v4_planar")), f"{DECODE}: both caches have one format"),
    "qk_dim": (OneOf((512,)), DECODE),
}
PLAIN: Sourced = {
    **SHARED,
    "planes": (OneOf(("main", "window")), f"{PREFILL}: one tensor of rows"),
    "format": (OneOf(("", "bf16")), f"{PREFILL}: kv is bfloat16"),
    "win_format": (OneOf(("", "bf16")), f"{PREFILL}: kv is bfloat16"),
    "qk_dim": (OneOf((512, 576)), PREFILL),
}

KERNELS = (
    # On sm_100 this function rounds the scales of such rows down to powers of two: FlashMLA pull request 184.
    Kernel(
        "fp8_v32 rows", "flash_mla_with_kvcache", (SM90,), V32, attend.packed_rows, selfcheck.rows_of("fp8_v32", 576)
    ),
    Kernel(
        "fp8_v4_planar rows",
        "flash_mla_with_kvcache",
        (SM90, SM100),
        V4,
        attend.packed_rows,
        selfcheck.rows_of("fp8_v4_planar", 512),
    ),
    Kernel(
        "bf16 rows", "flash_mla_sparse_fwd", (SM90, SM100), PLAIN, attend.plain_rows, selfcheck.rows_of("bf16", 576)
    ),
)
