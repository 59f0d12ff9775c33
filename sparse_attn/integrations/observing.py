"""What the hooks into all engines share: plan, observer, and that observing never disturbs the engine."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import configs, env
from ..models import BF16
from ..serving.metrics import Exporter
from ..serving.observer import Observer
from ..serving.records import Records

log = logging.getLogger("sparse_attn")

OWN = ("fp8_ds_mla",)
"""Cache types of engines that mean the formats of the model's release."""
SIXTEEN_BITS = ("auto", "bfloat16", "float16", "half")


def observer(
    config: Mapping[str, Any],
    *,
    model_name: str,
    engine: str = "0",
    cache_dtype: str = "auto",
    drafts: int = 0,
    runs_dense: bool = False,
    export: bool = True,
) -> Observer:
    """An observer of an engine that serves a model with this Hugging Face configuration.

    Args:
        model_name, engine: labels of the metrics.
        cache_dtype: type of the KV cache in the engine's words.
        drafts: tokens that it drafts in a step.
        runs_dense: whether it has no sparse kernels for the model.
        export: to Prometheus, and to the file that ``SPARSE_ATTN_RECORDS`` names.
    """
    model, note = configs.plan(config)
    if note:
        log.warning("sparse_attn observes: %s", note)
    bytes_known = cache_dtype in (*OWN, *SIXTEEN_BITS)
    if not bytes_known:
        log.warning(
            "sparse_attn observes: bytes are not counted, as the format of a %r cache is not known", cache_dtype
        )
    formats = {kind: BF16[kind] for kind in ("main", "window")} if cache_dtype in SIXTEEN_BITS else None
    dense = runs_dense and any(layer.selection for layer in model.layers)
    if dense:
        log.warning(
            "sparse_attn observes: %s selects, but the engine has no sparse kernels and runs it dense", model.name
        )
    exporter, path = None, ""
    if export:
        exporter, path = _exporter(model_name, engine, model.name, bytes_known), env.RECORDS.get()
    records = Records(path, bytes_known) if path else None
    return Observer(model, exporter, records, runs_dense=dense, drafts=drafts, formats=formats)


def _exporter(model_name: str, engine: str, plan: str, bytes_known: bool) -> Exporter | None:
    try:
        exporter = Exporter(model_name, engine, plan=plan, version=_version(), bytes_known=bytes_known)
    except ModuleNotFoundError as error:
        log.warning("sparse_attn observes: %s", error)
        return None
    if multiprocessing.parent_process() and "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        log.warning(
            "sparse_attn observes: its metrics do not reach /metrics, which another process serves: set "
            "PROMETHEUS_MULTIPROC_DIR to an empty folder before the server starts"
        )
    return exporter


def _version() -> str:
    try:
        return version("sparse-attn")
    except PackageNotFoundError:
        return "not installed"


def guarded(hook: Callable[..., object]) -> Callable[..., None]:
    """The hook, which logs its first error and does nothing from then on: observing must not stop an engine."""
    failed = False

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> None:
        nonlocal failed
        if failed:
            return
        try:
            hook(*args, **kwargs)
        except Exception:
            failed = True
            log.exception("sparse_attn stops observing, the engine goes on")

    return call
