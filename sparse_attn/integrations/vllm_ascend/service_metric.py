"""Pairs and ratios of vllm-ascend's steps through ms_service_metric, which turns collection on and off at run time.

Observe mode for vLLM works on vllm-ascend as it is; this is for services whose metrics ms_service_metric collects.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ...serving.metrics import kinds
from ...serving.observer import Observer
from ..observing import guarded
from ..vllm import observe

PAIRS, RATIO, OVERHEAD = (
    "sparse_attn:kv_pairs",
    "sparse_attn:effective_kv_ratio",
    "sparse_attn:selection_overhead_ratio",
)
SYMBOL = "vllm.v1.core.sched.scheduler:Scheduler.update_from_output"

_observers: MutableMapping[Any, Observer] = WeakKeyDictionary()


def get_metric_provider() -> Any:
    """Entry point of the group ``ms_service_metric.providers``."""
    from ms_service_metric.provider_api import MetricProvider

    return MetricProvider(
        name="sparse-attn",
        config_paths=(str(Path(__file__).with_suffix(".yaml")),),
        priority=100,
        framework_package="vllm_ascend",
        owned_symbol_prefixes=(SYMBOL,),
        handler_module_prefixes=("sparse_attn.integrations.",),
    )


def update_from_output(original: Any, scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of the method of vLLM's scheduler of this name: the step it concludes is recorded."""
    outputs = original(scheduler, scheduler_output, *args, **kwargs)
    _record(scheduler, scheduler_output)
    return outputs


@guarded
def _record(scheduler: Any, output: Any) -> None:
    from ms_service_metric.provider_api import MetricType, get_metric_recorder

    if scheduler not in _observers:
        _observers[scheduler] = observe.watch(scheduler, export=False)
    found = observe.note(_observers[scheduler], output)
    if found is None:
        return
    recorder = get_metric_recorder()
    recorder.get_or_create_metric(PAIRS, metric_type=MetricType.COUNTER, label_names=["kind", "phase"])
    recorder.get_or_create_metric(RATIO, metric_type=MetricType.GAUGE, label_names=[])
    recorder.get_or_create_metric(OVERHEAD, metric_type=MetricType.GAUGE, label_names=["source"])
    for phase, counts in (("prefill", found.prefill), ("decode", found.decode)):
        for kind, pairs in kinds(counts).items():
            if pairs:  # the recorder would count 0 as 1
                recorder.record_metric(PAIRS, value=pairs, labels={"kind": kind, "phase": phase})
    recorder.record_metric(RATIO, value=found.effective_kv_ratio, labels={})
    share = found.total.selection_flops_ratio
    recorder.record_metric(OVERHEAD, value=share, labels={"source": "estimated"})
