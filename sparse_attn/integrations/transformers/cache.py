"""A cache of transformers in paged planes."""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ... import configs, store
from ...checks import InvalidCall, expect, refuse
from ...layout import PLAIN_FORMATS, names, pages_for, slot
from ...serving.pages import PageAllocator
from .. import capabilities
from .attention import FORMATS, FROM_THE_FIRST_SLOT, NAME, Entries, Paged, Rows
from .planes import RESET, Planes, make_room

CLASSES = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa", "deepseek_v4": "DeepseekV4"}
"""Models whose attention runs here, over planes of their own: how transformers' names of their classes begin."""

DENSE = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
"""What transformers keeps for layers of keys and values, and for layers that read another layer's."""


class PagedCache(Cache):
    """What a model keeps of its tokens, in paged planes, for ``generate(..., cache=cache)``.

    Of a dense model, keys and values; layers with a sliding window keep every token. Of DeepSeek V3.2 and GLM-5, latent
    rows and index keys. Of DeepSeek V4, raw rows of the window, compressed entries, index keys, and the compressors'
    states. A batch of any size shares the pages. ``crop`` works, so assisted generation does; beams, which share and
    copy sequences, are refused.

    Args:
        config: the model's, with ``attn_implementation="sparse_attn"``.
        tokens: that fit, of all sequences together, each of which takes whole pages; in dense models, padding included.
        format: of what attention reads: ``""`` (as the model computes it), a format of plain rows, and ``"int8"`` for
            keys and values, ``"fp8_v32"`` or ``"int8_v32"`` for latent rows, ``"fp8_v4"``, ``"fp8_v4_640"`` or
            ``"fp8_v4_608"`` for the rows and entries of V4.
        index_format: of what a selection scores: ``""``, plain, or ``"fp8_index"``, ``"int8_index"``, ``"fp4_index"``.
            In dense models of a copy of the keys, ``"int8_index_h"`` or ``"int4_index_h"``; ``""`` for none: it scores
            the keys themselves.
        page_size: tokens of a page, a multiple of every ratio; 0: 64, or two entries of the largest ratio.
        rewind: tokens that ``crop`` may take back where a model keeps the last ones alone, as V4 does. Each costs as
            much as one of the window and of the states.

    Raises:
        InvalidCall: for a model that keeps something else, and when another implementation of attention, or another
            batch without ``reset`` in between, meets the cache.
        OutOfPages: in a step for which ``tokens`` are too few.
        Unsupported: for a format that does not hold what the model keeps.
    """

    def __init__(
        self,
        config: Any,
        tokens: int,
        format: str = "",
        index_format: str = "",
        page_size: int = 0,
        rewind: int = 0,
    ) -> None:
        given = type(config).__name__
        expect(isinstance(config, PreTrainedConfig), "PagedCache", "config", "the model's config", given)
        expect(tokens > 0, "PagedCache", "tokens", "1 or more", tokens)
        expect(page_size >= 0, "PagedCache", "page_size", "0 or more tokens", page_size)
        self.config = config = config.get_text_config(decoder=True)
        self.planes: Planes | None = None
        layers: list[Layer]
        if config.model_type in CLASSES:
            plan = configs.plan(config.to_dict())[0]
            named = {kind: name for kind, name in (("main", format), ("index", index_format)) if name}
            capabilities.check("transformers", "any", plan, named)
            formats = {"main": format, "window": format, "index": index_format}
            ratio = lcm(*(plane.ratio for layer in plan.layers for plane in layer.planes))
            page_size = page_size or max(64, 2 * ratio)
            expect(page_size % ratio == 0, "PagedCache", "page_size", f"a multiple of {ratio} tokens", page_size)
            expect(rewind >= 0, "PagedCache", "rewind", "0 or more tokens", rewind)
            self.planes = Planes(plan, tokens, page_size, formats, rewind)
            layers = [PlanesLayer(self.planes) for _ in plan.layers]
        else:
            self._expect_dense(format, index_format)
            page_size = page_size or 64
            self.pages = PageAllocator(pages_for(tokens, page_size), page_size)
            self._forget()
            layers = [PagedLayer(self, format, index_format) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=layers)

    def _expect_dense(self, format: str, index_format: str) -> None:
        kind = self.config.model_type
        other = any(getattr(self.config, name, None) for name in ("kv_lora_rank", "index_topk", "compress_ratios"))
        other = other or kind in FROM_THE_FIRST_SLOT
        other = other or any(type(layer) not in DENSE for layer in DynamicCache(config=self.config).layers)
        expected = f"{', '.join(CLASSES)}, or a model whose cache holds keys and values"
        expect(not other, "PagedCache", "config", expected, kind, "use its own cache")
        for name, given, use in (("format", format, "kv"), ("index_format", index_format, "index")):
            known = ("", *dict.fromkeys((*PLAIN_FORMATS, *names(use, packed=False))))
            expect(given in known, "PagedCache", name, f"one of {', '.join(map(repr, known))}", repr(given))

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        if self.planes is not None:
            return self.planes.nbytes
        planes = [plane for layer in self.layers for plane in layer.stored()]
        return sum(p.rows.nbytes + (0 if p.scale is None else p.scale.nbytes) for p in planes)

    def expect_implementation(self) -> None:
        """Raise ``InvalidCall`` if the model attends in another way."""
        implementation = self.config._attn_implementation
        do = "call model.set_attn_implementation"
        expect(implementation == NAME, "PagedCache", "attn_implementation", repr(NAME), repr(implementation), do)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.expect_implementation()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens, ``-tokens_to_remove`` of them."""
        if self.planes is None:
            super().crop(tokens_to_remove)
        else:
            self.planes.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        if self.planes is None:
            super().reset()
            for b in range(self._batch):
                self.pages.free(b)
            self._forget()
        else:
            self.planes.reset()

    def _forget(self) -> None:
        self._batch = 0
        self._last: tuple[Any, tuple[Tensor, Tensor]] = None, (torch.empty(0), torch.empty(0))

    def slots(self, batch: int, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Slots of tokens ``[start, start + count)`` of every sequence, int64 ``[B * count]``, and the page table."""
        step = batch, start, count, device
        if self._last[0] == step:  # every layer asks for the same
            return self._last[1]
        lengths = {layer.length for layer in self.layers if layer.is_initialized}
        whole = lengths <= {start, start + count}
        expect(whole, "PagedCache", "layers", "a last step that came to its end", "a part of one", RESET)
        if not self._batch:
            self._batch = batch
            for b in range(batch):
                self.pages.add(b)
        expect(batch == self._batch, "PagedCache", "input_ids", f"{self._batch} sequences", batch, RESET)
        make_room(self.pages, [start + count] * batch)
        table = torch.tensor([self.pages.page_table(b) for b in range(batch)], dtype=torch.int32, device=device)
        entries = torch.arange(start, start + count, device=device)
        size = self.pages.page_size
        slots = slot(table[:, entries // size].long(), entries % size, size)
        self._last = step, (slots.flatten(), table)
        return self._last[1]


class Layer(CacheLayerMixin):
    """One layer, of sequences that stay as many as they are."""

    is_croppable = True
    is_sliding = False

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise InvalidCall("PagedCache: beams: expected none, got a reordering; use the model's own cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise InvalidCall("PagedCache: sequences: expected as many as before, got copies; use the model's own cache")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise InvalidCall("PagedCache: sequences: expected as many as before, got some; use the model's own cache")


class PlanesLayer(Layer):
    """One layer of planes, for what transformers asks of it: how long the rows of the batch are."""

    def __init__(self, planes: Planes) -> None:
        super().__init__()
        self.planes = planes
        self.is_croppable = not planes.rings or planes.rewind > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise refuse("PagedCache", "attention", *UNREGISTERED)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise refuse("PagedCache", "attention", *UNREGISTERED)

    def get_seq_length(self) -> int:
        return self.planes.places

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.planes.places + query_length, 0


UNREGISTERED = (
    "that of the config's model, as register() leaves it",
    "an older one, or another model's",
    "call register() before the model is loaded, and make the cache from its config",
)


class PagedLayer(Layer):
    """One layer of keys and values."""

    def __init__(self, cache: PagedCache, format: str, index_format: str) -> None:
        super().__init__()
        self.cache, self.format, self.index_format = cache, format, index_format
        self.length = 0
        self.key_plane: Rows | None = None
        self.value_plane: Rows | None = None
        self.index_plane: Rows | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def plane(rows: Tensor, format: str) -> Rows:
            pages, size = self.cache.pages.pages, self.cache.pages.page_size
            return Rows.zeros(format or FORMATS[rows.dtype], pages, size, rows.shape[1], rows.shape[3], rows.device)

        self.key_plane, self.value_plane = plane(key_states, self.format), plane(value_states, self.format)
        self.index_plane = plane(key_states, self.index_format) if self.index_format else None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the step's rows. What is returned tells ``attention`` where all of them lie."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, count, _ = key_states.shape
        slots, table = self.cache.slots(batch, self.length, count, key_states.device)
        for plane, rows in zip(self.stored(), (key_states, value_states, key_states), strict=False):
            flat = rows.transpose(1, 2).flatten(0, 1)
            store(flat, plane.rows, slots, scale=plane.scale, format=plane.format)
        self.length += count
        keys, values = self.stored()[:2]
        entries = Entries(keys, values, self.index_plane or keys, table, self.length)
        return Paged.of(key_states, entries), Paged.of(value_states, entries)

    def stored(self) -> list[Rows]:
        """Planes of keys and values, and of the index if there is one."""
        return [p for p in (self.key_plane, self.value_plane, self.index_plane) if p is not None]

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens, ``-tokens_to_remove`` of them."""
        expect(
            -self.length <= tokens_to_remove <= 0, "crop", "tokens_to_remove", f"-{self.length} to 0", tokens_to_remove
        )
        self.length += tokens_to_remove

    def reset(self) -> None:
        self.length = 0
