"""Planes of a model whose attention runs here: what each sequence holds of them, and what a step adds.

Tokens are those that the attention mask shows. Padding, on whichever side, is none: it has no position and no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...checks import expect
from ...layout import pages_for, slot
from ...models import Model, Plane
from ...serving.pages import OutOfPages, PageAllocator
from .attention import FORMATS as PLAIN
from .attention import Rows


@dataclass(frozen=True)
class Step:
    """What a forward pass of ``[B, S]`` adds: T tokens, of which sequence ``b`` has ``spans[b]``, from and to.

    ``places`` (int64 ``[T]``) are those of the tokens in ``[B * S]``, None if there is no padding. ``page_table`` is
    that of planes that grow, ``slots`` (int64 ``[T]``) the tokens' in planes with an entry for each.
    """

    shape: tuple[int, int]
    spans: tuple[tuple[int, int], ...]
    places: Tensor | None
    positions: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    page_table: Tensor
    slots: Tensor

    @property
    def lengths(self) -> dict[str, Any]:
        """The arguments that every op has."""
        return dict(
            cu_seqlens_q=self.cu_seqlens_q,
            seq_lens=self.seq_lens,
            max_seqlen_q=max(end - start for start, end in self.spans),
            max_seq_len=max(end for _, end in self.spans),
        )

    def pack(self, x: Tensor) -> Tensor:
        """The tokens' rows ``[T, ...]`` of ``x [B, S, ...]``, or ``[1, S, ...]`` for all sequences."""
        flat = x.expand(*self.shape, *x.shape[2:]).flatten(0, 1)
        return flat if self.places is None else flat[self.places]

    def unpack(self, rows: Tensor) -> Tensor:
        """``[B, S, ...]`` of ``rows [T, ...]``, zeros in padding."""
        if self.places is not None:
            padded = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[1:])
            rows = padded.index_copy(0, self.places, rows)
        return rows.unflatten(0, self.shape)

    def on(self, device: torch.device) -> Step:
        """The same with tensors on a device, for a model that is spread over several."""
        if self.positions.device == device:
            return self
        moved: dict[str, Any] = {}
        for field in fields(self):
            x = getattr(self, field.name)
            moved[field.name] = x.to(device) if isinstance(x, Tensor) else x
        return Step(**moved)


def ring_table(sequences: int, pages: int, columns: int, device: torch.device) -> Tensor:
    """int32 ``[B, columns]`` of planes in which a sequence has so many pages, and goes round in them."""
    column = torch.arange(columns, device=device) % pages
    return (torch.arange(sequences, device=device)[:, None] * pages + column).int()


class Planes:
    """The planes of every layer of a plan, for a batch of sequences.

    Args:
        plan: the layers.
        tokens: that fit into the planes that grow, of all sequences together.
        page_size: tokens of a page, a multiple of every ratio.
        formats: by kind of plane; ``""``: as the model computes.
        rewind: tokens that ``crop`` may take back where a plane keeps the last tokens alone.
    """

    def __init__(self, plan: Model, tokens: int, page_size: int, formats: dict[str, str], rewind: int) -> None:
        self.plan, self.formats, self.rewind = plan, formats, rewind
        self.rings = any(plane.entries for layer in plan.layers for plane in layer.planes)
        self.pages = PageAllocator(pages_for(tokens, page_size), page_size)
        self.layers: list[dict[str, Rows]] = [{} for _ in plan.layers]
        self.rotations: dict[str, Tensor] = {}
        self.step: Step | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        for b in range(len(getattr(self, "tokens", ()))):
            self.pages.free(b)
        self.tokens: list[int] = []
        self.most: list[int] = []  # tokens that each sequence ever had: rings reach back from there
        self.shifts: list[int | None] = []  # what the model adds to the positions of each
        self.seen: Tensor | None = None  # bool [B, places]: which of the model's places are tokens

    @property
    def places(self) -> int:
        """Tokens of the longest row of the batch, padding included."""
        return 0 if self.seen is None else self.seen.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(rows.rows.nbytes for layer in self.layers for rows in layer.values())

    def begin(self, shape: tuple[int, int], attention_mask: Any, device: torch.device) -> Tensor:
        """Start a step, make room for its tokens, and return ``seen`` with them. It counts once it has ``ended``."""
        batch, count = shape
        if not self.places:
            self.reset()
            self.tokens, self.most, self.shifts = [0] * batch, [0] * batch, [None] * batch
            for b in range(batch):
                self.pages.add(b)
        seen = torch.ones(batch, 0, dtype=torch.bool, device=device) if self.seen is None else self.seen.to(device)
        expect(len(self.tokens) == batch, "PagedCache", "input_ids", f"{len(self.tokens)} sequences", batch, RESET)
        for b, (now, most) in enumerate(zip(self.tokens, self.most, strict=True)):
            whole = not self.rings or most - now <= self.rewind
            expect(whole, "PagedCache", f"sequence {b}", "a last step that came to its end", "a part of one", RESET)
        seen = torch.cat([seen, self._new(seen, shape, attention_mask, device)], 1)
        new = seen[:, seen.shape[1] - count :]
        spans = tuple((now, now + more) for now, more in zip(self.tokens, new.sum(1).tolist(), strict=True))
        make_room(self.pages, [end for _, end in spans])
        self.step = self._step(shape, spans, None if bool(new.all()) else new.flatten().nonzero()[:, 0], device)
        return seen

    def _new(self, seen: Tensor, shape: tuple[int, int], attention_mask: Any, device: torch.device) -> Tensor:
        """Which of the new places are tokens."""
        batch, count = shape
        if attention_mask is None:
            padded = not bool(seen.all())
            expect(not padded, "PagedCache", "attention_mask", "a mask, as the cache was padded", "None")
            return torch.ones(shape, dtype=torch.bool, device=device)
        expected = [batch, seen.shape[1] + count]
        got = [*attention_mask.shape] if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        do = "pass the mask of padding, of all tokens so far"
        expect(got == expected, "PagedCache", "attention_mask", f"a tensor {expected}", got, do)
        real = attention_mask.to(device).bool()
        same = torch.equal(real[:, : seen.shape[1]], seen)
        expect(same, "PagedCache", "attention_mask", "the tokens that were seen so far", "others", RESET)
        return real[:, seen.shape[1] :]

    def _step(
        self, shape: tuple[int, int], spans: tuple[tuple[int, int], ...], places: Tensor | None, device: torch.device
    ) -> Step:
        tables = [self.pages.page_table(b) for b in range(shape[0])]
        width = max(max(map(len, tables)), 1)
        table = torch.tensor([[*pages, *[0] * (width - len(pages))] for pages in tables], device=device)
        which, positions = numbered(spans, device)
        size = self.pages.page_size
        return Step(
            shape,
            spans,
            places,
            positions,
            torch.tensor([0, *accumulate(end - start for start, end in spans)], dtype=torch.int32, device=device),
            torch.tensor([end for _, end in spans], dtype=torch.int32, device=device),
            table.int(),
            slot(table[which, positions // size], positions % size, size),
        )

    def shift(self, given: Tensor) -> None:
        """Note what the model adds to the position of each token (``[T]``), which must be one number a sequence."""
        assert self.step is not None
        for b, added in enumerate(given.split([end - start for start, end in self.step.spans])):
            known = {*added.tolist(), *(() if self.shifts[b] is None else (self.shifts[b],))}
            expected = f"the tokens of sequence {b} numbered one by one"
            do = "pass (attention_mask.cumsum(-1) - 1), the last of them in later steps"
            expect(len(known) <= 1, "PagedCache", "position_ids", expected, "gaps", do)
            self.shifts[b] = next(iter(known), None)

    def ended(self, seen: Tensor) -> None:
        """The step's tokens are in every plane."""
        assert self.step is not None
        self.tokens, self.seen, self.step = [end for _, end in self.step.spans], seen, None

    def crop(self, places: int) -> None:
        """Forget the newest ``places`` of every row of the batch."""
        expect(0 <= places <= self.places, "crop", "tokens_to_remove", f"-{self.places} to 0", -places)
        if self.seen is None or not places:
            return
        kept = self.places - places
        tokens = self.seen[:, :kept].sum(1).tolist()
        back = max(most - n for most, n in zip(self.most, tokens, strict=True))
        do = f"make the cache with rewind={back} or more"
        expected = f"at most {self.rewind} tokens back from the longest that a sequence was"
        expect(not self.rings or back <= self.rewind, "crop", "tokens_to_remove", expected, back, do)
        self.tokens, self.seen = tokens, self.seen[:, :kept]

    def of(self, number: int, like: Tensor) -> dict[str, Rows]:
        """Planes of a layer by kind, of two states the second as ``index_state``, for the step to write. They have the
        device of ``like``, and where no format was named its dtype."""
        assert self.step is not None
        self.most = [max(most, end) for most, (_, end) in zip(self.most, self.step.spans, strict=True)]
        found = self.layers[number]
        rings = [rows for name, rows in found.items() if name in ("window", "state")]
        if not found or (rings and rings[0].rows.shape[0] != len(self.tokens)):
            found.clear()
            for plane in self.plan.layers[number].planes:
                found["index_state" if plane.kind in found else plane.kind] = self._plane(plane, like)
        return found

    def _plane(self, plane: Plane, like: Tensor) -> Rows:
        format = self.formats.get(plane.kind, plane.format) or PLAIN[like.dtype]
        pages, page_size = self.pages.pages, self.pages.page_size // plane.ratio
        if plane.entries:  # a page for each sequence
            pages, page_size = len(self.tokens), plane.entries + self.rewind
        return Rows.zeros(format, pages, page_size, plane.heads, sum(plane.rows), like.device)


RESET = "call reset() or make another cache"


def make_room(pages: PageAllocator, ends: Sequence[int]) -> None:
    """Let each sequence have the pages of so many tokens, or raise ``OutOfPages``."""
    try:
        for b, end in enumerate(ends):
            pages.extend(b, max(end - pages.entries(b), 0))
    except OutOfPages:
        size = pages.page_size
        needed = sum(pages_for(max(end, pages.entries(b)), size) for b, end in enumerate(ends))
        raise OutOfPages(
            f"PagedCache: tokens: expected {needed * size} or more for {len(ends)} sequences of up to {max(ends)} "
            f"tokens in whole pages of {size}, got {pages.pages * size}; make a larger cache"
        ) from None


def numbered(spans: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and number (int64 ``[N]``) of each that the spans take in."""
    which = [torch.full((end - start,), b, device=device) for b, (start, end) in enumerate(spans)]
    numbers = [torch.arange(start, end, device=device) for start, end in spans]
    return torch.cat(which), torch.cat(numbers)
