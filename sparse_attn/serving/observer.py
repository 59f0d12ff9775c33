"""What an engine tells of its steps, counted and exported: the three lines of an engine of one's own. No torch.

observer = Observer("deepseek-v3.2", Exporter("my-model"))
observer.step({"a": (0, 4096), "b": (900, 901)})  # tokens of each request before and after the step
observer.finish("a")

An engine that chooses for each sequence whether it selects calls ``works`` instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from ..models import Model, dense
from .cost import DENSE, Path, Work, model_of, path_of
from .metrics import Exporter, crossover
from .records import Records
from .stats import Counts, Span, Stats, StepStats


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
        self._stats: dict[Path, Stats] = {None: self.stats}
        self._chooses = False
        self._formats = formats
        self._plan = plan if runs_dense else None
        self.exporter, self._records, self.runs_dense = exporter, records, runs_dense
        self._selecting = sum(layer.selection is not None for layer in self.model.layers)
        self._others = len(self.model.layers) - self._selecting
        self._lengths: dict[Hashable, int] = {}

    def step(self, batch: Mapping[Hashable, Span], seconds: float | None = None) -> StepStats:
        """Count a step: for each request, its tokens before and after. Its time, if known, goes into the records, for
        ``calibrate``."""
        found = self.stats.step(batch)
        if self._plan:
            self._plan.step(batch)
        reasons = {"engine" if self.runs_dense else "plan": len(batch)}
        self._tell(found, batch, reasons, {} if seconds is None else {"seconds": seconds})
        return found

    def works(
        self, works: Mapping[Hashable, Work], reasons: Mapping[str, int], seconds: float | None = None
    ) -> StepStats:
        """Count a step of an engine that chooses for each sequence how it attends.

        Args:
            works: of each request.
            reasons: why sequences attend as they do, and how many: ``"plan"`` for those that select.
            seconds: the step's time, if known.
        """
        batches: dict[Path, dict[Hashable, Span]] = {}
        for request, work in works.items():
            batches.setdefault(path_of(work), {})[request] = (work.before, work.after)
        found = {path: self._stats_of(path).step(batch) for path, batch in batches.items()}
        total = sum(found.values(), StepStats())
        self._chooses = True
        facts: dict[str, Any] = {} if seconds is None else {"seconds": seconds}
        facts |= {"reasons": dict(reasons), "works": _kinds(found)}
        self._tell(total, {request: (work.before, work.after) for request, work in works.items()}, reasons, facts)
        return total

    def _stats_of(self, path: Path) -> Stats:
        if path not in self._stats:
            self._stats[path] = Stats(model_of(self.model, path), drafts=self.stats.drafts, formats=self._formats)
        return self._stats[path]

    def _tell(
        self, found: StepStats, batch: Mapping[Hashable, Span], reasons: Mapping[str, int], facts: Mapping[str, Any]
    ) -> None:
        self._lengths.update({request: after for request, (_, after) in batch.items()})
        if self.exporter:
            self.exporter.step(found)
            if self._others:
                self.exporter.layers("dense", "plan", self._others)
            for reason in reasons if self._selecting else ():
                self.exporter.layers("sparse" if reason == "plan" else "dense", reason, self._selecting)
        if self._records:
            self._records.write("step", found, **facts)

    def finish(self, request: Hashable) -> StepStats:
        """The counts of a request, which is forgotten. Raises ``KeyError`` for one that was in no step."""
        if request not in self:
            raise KeyError(f"request {request!r}: expected one that was in a step, and has not finished")
        paths = {path: stats.finish(request) for path, stats in self._stats.items() if request in stats}
        found = sum(paths.values(), StepStats())
        # what an engine chooses for a sequence is as it was configured
        plan = self._plan.finish(request) if self._plan else found
        tokens = self._lengths.pop(request)
        past = self.crossover is not None and tokens >= self.crossover
        if self.exporter:
            self.exporter.request(found.effective_kv_ratio, plan.effective_kv_ratio, past)
        if self._records:
            facts: dict[str, Any] = dict(
                tokens=tokens, configured_kv_ratio=plan.effective_kv_ratio, past_crossover=past
            )
            if self._chooses:
                facts["works"] = _kinds(paths)
            self._records.write("request", found, request=str(request), **facts)
        return found

    def __contains__(self, request: Hashable) -> bool:
        """Whether the request was in a step and has not finished."""
        return request in self._lengths


def _kinds(found: Mapping[Path, StepStats]) -> dict[str, dict[str, int]]:
    """Counts by kind of sequence, of what was counted by path."""
    kinds = {
        "selecting": sum((stats.decode for path, stats in found.items() if path != DENSE), Counts()),
        "dense": found.get(DENSE, StepStats()).decode,
        "chunk": sum((stats.prefill for stats in found.values()), Counts()),
    }
    return {kind: _priced(counts) for kind, counts in kinds.items() if counts.tokens}


def _priced(counts: Counts) -> dict[str, int]:
    return {
        "sequences": counts.sequences,
        "tokens": counts.tokens,
        "scored": counts.pairs.get("scored", 0),
        "attended": counts.attended_pairs,
    }
