"""The attention backend and the admission hook for SGLang, against the interfaces of SGLang 0.5.23."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stubs import LLAMA, V32, engine
from torch import Tensor

from sparse_attn import env
from sparse_attn.checks import InvalidCall
from sparse_attn.integrations.capabilities import Unsupported
from sparse_attn.serving.cost import StepCost

PACKAGE = "sparse_attn.integrations.sglang"
SIZE, HEADS, DIM, TOTAL = 512, 2, 32, (40, 70, 33)


class Mode(Enum):
    EXTEND, DECODE, VERIFY = range(3)

    def is_extend(self) -> bool:
        return self is not Mode.DECODE

    def is_decode(self) -> bool:
        return self is Mode.DECODE

    def is_target_verify(self) -> bool:
        return self is Mode.VERIFY

    def is_draft_extend_v2(self) -> bool:
        return False


class Pool:
    kv_cache_layout = "nhd"

    def __init__(self, page: int) -> None:
        self.keys, self.values = torch.randn(2, SIZE + page, HEADS, DIM)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.values

    def set_kv_buffer(self, layer: Any, loc: Any, k: Tensor, v: Tensor) -> None:
        self.keys[loc.loc], self.values[loc.loc] = k, v


class AddReqResult(Enum):
    CONTINUE, NO_TOKEN, OTHER = range(3)


@pytest.fixture
def sglang() -> Iterator[SimpleNamespace]:
    """SGLang's modules: its backends, the choices on its command line, its hooks, and the ranks of the process."""
    found = SimpleNamespace(backends={}, choices=["triton"], hooks={}, ranks=SimpleNamespace(attn_tp_size=1))

    def register_attention_backend(name: str) -> Any:
        return lambda made: found.backends.setdefault(name, made)

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: Any) -> None:
            found.hooks[target.rsplit(".", 1)[1], hook_type] = hook

    modules = {
        "sglang.srt.arg_groups.choices": dict(ATTENTION_BACKEND_CHOICES=found.choices),
        "sglang.srt.layers.attention.attention_registry": dict(register_attention_backend=register_attention_backend),
        "sglang.srt.layers.attention.base_attn_backend": dict(AttentionBackend=type("AttentionBackend", (), {})),
        "sglang.srt.mem_cache.memory_pool": dict(KVWriteLoc=lambda loc: SimpleNamespace(loc=loc)),
        "sglang.srt.plugins.hook_registry": dict(
            HookRegistry=HookRegistry, HookType=SimpleNamespace(AFTER="after", AROUND="around")
        ),
        "sglang.srt.runtime_context": dict(get_parallel=lambda: found.ranks),
        "sglang.srt.managers.schedule_policy": dict(AddReqResult=AddReqResult),
    }
    with engine(modules, PACKAGE):
        yield found


def runner(page: int, **changes: Any) -> SimpleNamespace:
    config = changes.pop("config", LLAMA)
    made = dict(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(8, 256, dtype=torch.int32)),
        token_to_kv_pool=Pool(page),
        page_size=page,
        kv_cache_dtype=torch.float32,
        device="cpu",
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: config)),
    )
    return SimpleNamespace(**made | changes)


def layer(**changes: Any) -> SimpleNamespace:
    made = dict(
        layer_id=0,
        tp_q_head_num=4,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=DIM**-0.5,
        sliding_window_size=-1,
        logit_cap=0.0,
        is_cross_attention=False,
        attn_type=SimpleNamespace(value="decoder"),
    )
    return SimpleNamespace(**made | changes)


def batch(mode: Mode, table: Tensor, requests: list[int], before: list[int], new: list[int]) -> SimpleNamespace:
    lengths = torch.tensor([b + n for b, n in zip(before, new, strict=True)])
    slots = [table[r, b : b + n] for r, b, n in zip(requests, before, new, strict=True)]
    return SimpleNamespace(
        forward_mode=mode,
        req_pool_indices=torch.tensor(requests),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=new,
        out_cache_loc=torch.cat(slots).long(),
    )


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("window", [-1, 9])
def test_attention_in_its_pools(sglang: Any, page: int, window: int) -> None:
    import_module(PACKAGE).register()
    made = runner(page)
    backend = sglang.backends["sparse_attn"](made)
    table, pool = made.req_to_token_pool.req_to_token, made.token_to_kv_pool
    pages, requests = (torch.randperm(SIZE // page) + 1).tolist(), [3, 1, 5]
    for request, tokens in zip(requests, TOTAL, strict=True):
        taken = [pages.pop() for _ in range(-(-(tokens + 1) // page))]
        table[request, : tokens + 1] = torch.tensor([taken[t // page] * page + t % page for t in range(tokens + 1)])
    steps = (
        (Mode.EXTEND, requests, [0, 0, 0], [30, 70, 20]),
        (Mode.EXTEND, [3, 5], [30, 20], [10, 13]),  # chunks
        (Mode.DECODE, requests, list(TOTAL), [1, 1, 1]),
    )
    one = layer(sliding_window_size=window)
    for mode, of, before, new in steps:
        b = batch(mode, table, of, before, new)
        q, k, v = torch.randn(sum(new), 4 * DIM), torch.randn(sum(new), HEADS, DIM), torch.randn(sum(new), HEADS, DIM)
        backend.init_forward_metadata(b)
        run = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
        out = run(q, k, v, one, b)
        assert torch.equal(pool.keys[b.out_cache_loc], k)
        row = 0
        for request, first, count in zip(of, before, new, strict=True):
            for position in range(first, first + count):
                seen = table[request, max(0, position - window if window > 0 else 0) : position + 1].long()
                for head in range(4):
                    scores = pool.keys[seen, head // 2] @ q[row].view(4, DIM)[head] * DIM**-0.5
                    right = scores.softmax(0) @ pool.values[seen, head // 2]
                    torch.testing.assert_close(out[row].view(4, DIM)[head], right, atol=2e-5, rtol=1e-4)
                row += 1


def test_it_is_a_choice_on_the_command_line(sglang: Any) -> None:
    package = import_module(PACKAGE)
    package.register()
    package.register()
    assert sglang.choices == ["triton", "sparse_attn"]
    assert ("add_one_req", "around") not in sglang.hooks  # admission is for those who ask


def test_what_does_not_run_is_refused(sglang: Any) -> None:
    backend = import_module(f"{PACKAGE}.attention").SparseAttnBackend
    with pytest.raises(Unsupported, match="sglang on cpu: .*expected layers of gqa, got dsa"):
        backend(runner(1, config=V32))
    with pytest.raises(Unsupported, match="prefill with the main plane in torch.float8_e4m3fn"):
        backend(runner(1, kv_cache_dtype=torch.float8_e4m3fn))
    with pytest.raises(InvalidCall, match="KV pool: expected one of rows .* got SWAKVPool"):
        backend(runner(1, token_to_kv_pool=type("SWAKVPool", (), {})()))
    made = runner(1)
    one, b = backend(made), batch(Mode.VERIFY, made.req_to_token_pool.req_to_token, [1], [4], [2])
    with pytest.raises(InvalidCall, match="leave out drafts"):
        one.init_forward_metadata(b)
    b.forward_mode = Mode.EXTEND
    one.init_forward_metadata(b)
    rows = torch.randn(2, 4 * DIM), torch.randn(2, HEADS, DIM), torch.randn(2, HEADS, DIM)
    for changed in (
        dict(logit_cap=30.0),
        dict(is_cross_attention=True),
        dict(attn_type=SimpleNamespace(value="encoder")),
    ):
        with pytest.raises(InvalidCall, match="choose another attention backend"):
            one.forward_extend(*rows, layer(**changed), b)
    with pytest.raises(InvalidCall, match="topk_indices"):
        one.forward_extend(*rows, layer(), b, topk_indices=torch.zeros(2, 4))


# --- Admission -------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    profile = tmp_path / "profile.json"
    cost = StepCost(step=1e-3, token=1e-5, attended=1e-7, device="cuda, llama, auto")
    profile.write_text(json.dumps(cost.to_dict()))

    def ask(**options: Any) -> None:
        monkeypatch.setenv("SPARSE_ATTN_ADMISSION", json.dumps(dict(profile=str(profile), budget=2e-3) | options))
        env.reset()

    yield ask
    monkeypatch.undo()
    env.reset()


def scheduler() -> Any:
    class Scheduler:
        server_args = SimpleNamespace(served_model_name="m", kv_cache_dtype="auto", device="cuda")
        model_config = SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: LLAMA))
        spec_algorithm = SimpleNamespace(is_none=lambda: True)

    return Scheduler()


def request(rid: str, tokens: int) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[0] * tokens,
        output_ids=[],
        prefix_len=0,
        sampling_params=SimpleNamespace(max_new_tokens=100),
    )


def adder(*running: Any, used: int = 0) -> Any:
    return SimpleNamespace(
        page_size=16,
        token_to_kv_pool_allocator=SimpleNamespace(size=16 * 1000, available_size=lambda: 16 * (900 - used)),
        tree_cache=SimpleNamespace(evictable_size=lambda: 16 * 100),
        running_batch=SimpleNamespace(reqs=list(running)),
        can_run_list=[],
    )


def add(taker: Any, req: Any, has_chunked_req: bool, truncation_align_size: Any) -> AddReqResult:
    taker.can_run_list.append(req)
    return AddReqResult.CONTINUE


@pytest.mark.parametrize("mode", ["off", "observe", "enforce"])
def test_a_request_waits_while_another_fills_the_budget(sglang: Any, asked: Any, mode: str) -> None:
    sglang.ranks = SimpleNamespace(attn_tp_size=1, attn_tp_rank=1, pp_size=1, dp_rank=0)  # which is not observed
    asked(mode=mode)
    import_module(PACKAGE).register()
    sglang.hooks["__init__", "after"](None, scheduler())
    around = sglang.hooks["add_one_req", "around"]

    def ask(taker: Any, req: Any) -> AddReqResult:
        return around(add, taker, req, has_chunked_req=False, truncation_align_size=None)

    assert ask(adder(), request("a", 4000)) is AddReqResult.CONTINUE  # nothing runs
    busy = adder(request("a", 4000), used=300)
    assert ask(busy, request("b", 4000)) is (AddReqResult.OTHER if mode == "enforce" else AddReqResult.CONTINUE)
    assert [r.rid for r in busy.can_run_list] == ([] if mode == "enforce" else ["b"])
    crowded = adder(request("a", 10), used=850)
    assert ask(crowded, request("c", 1600)) is (AddReqResult.OTHER if mode == "enforce" else AddReqResult.CONTINUE)
    assert ask(crowded, request("d", 160)) is AddReqResult.CONTINUE  # short


def test_ranks_that_decide_apart_are_refused(sglang: Any, asked: Any) -> None:
    sglang.ranks = SimpleNamespace(attn_tp_size=2, attn_tp_rank=1, pp_size=1, dp_rank=0)
    asked(mode="enforce")
    import_module(PACKAGE).register()
    with pytest.raises(ValueError, match="expected off or observe with tensor parallelism"):
        sglang.hooks["__init__", "after"](None, scheduler())
