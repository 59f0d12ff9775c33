"""What an engine tells of its steps, counted and exported: the three lines of an engine of one's own. No torch.

observer = Observer("deepseek-v3.2", Exporter("my-model"))
observer.step({"a": (0, 4096), "b": (900, 901)})  # tokens of each request before and after the step
observer.finish("a")
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ..models import Model, dense
from .metrics import Exporter, crossover
from .records import Records
from .stats import Span, Stats, StepStats


class Observer:
    """Counts the steps of an engine.

    Args:
        model: the plan, or the name of a preset.
        exporter, records: where counts go, if anywhere.
        runs_dense: the engine has no sparse kernels: layers that select attend to everything. The counts are then of
            that, and the plan is what the ratios of requests are compared with.
        drafts: tokens that the engine drafts in a step.
        formats: formats of planes, as ``Counter`` takes them.
    """

    def __init__(
        self,
        model: Model | str,
        exporter: Exporter | None = None,
        records: Records | None = None,
        *,
        runs_dense: bool = False,
        drafts: int = 0,
        formats: Mapping[str, str] | None = None,
    ) -> None:
        plan = Stats(model, drafts=drafts, formats=formats)
        self.model = plan.counter.model
        self.crossover = crossover(self.model)
        self.stats = Stats(dense(self.model), drafts=drafts, formats=formats) if runs_dense else plan
        self._plan = plan if runs_dense else None
        self.exporter, self._records, self.runs_dense = exporter, records, runs_dense
        selecting = sum(layer.selection is not None for layer in self.model.layers)
        others = len(self.model.layers) - selecting
        paths = {("dense", "plan"): others, ("dense", "engine") if runs_dense else ("sparse", "plan"): selecting}
        self._layers = {path: number for path, number in paths.items() if number}
        self._lengths: dict[Hashable, int] = {}

    def step(self, batch: Mapping[Hashable, Span], seconds: float | None = None) -> StepStats:
        """Count a step: for each request, its tokens before and after. Its time, if known, goes into the records, for
        ``calibrate``."""
        found = self.stats.step(batch)
        if self._plan:
            self._plan.step(batch)
        self._lengths.update({request: after for request, (_, after) in batch.items()})
        if self.exporter:
            self.exporter.step(found)
            for (path, reason), number in self._layers.items():
                self.exporter.layers(path, reason, number)
        if self._records:
            facts = {} if seconds is None else {"seconds": seconds}
            self._records.write("step", found, **facts)
        return found

    def finish(self, request: Hashable) -> StepStats:
        """The counts of a request, which is forgotten. Raises ``KeyError`` for one that was in no step."""
        found = self.stats.finish(request)
        plan = self._plan.finish(request) if self._plan else found
        tokens = self._lengths.pop(request)
        past = self.crossover is not None and tokens >= self.crossover
        if self.exporter:
            self.exporter.request(found.effective_kv_ratio, plan.effective_kv_ratio, past)
        if self._records:
            facts = dict(tokens=tokens, configured_kv_ratio=plan.effective_kv_ratio, past_crossover=past)
            self._records.write("request", found, request=str(request), **facts)
        return found

    def __contains__(self, request: Hashable) -> bool:
        """Whether the request was in a step and has not finished."""
        return request in self._lengths
