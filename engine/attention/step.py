"""What attention has to know of one step: which rows of the packed batch read which chunks of the cache.

Shapes: R rows of a decode group, S keys a row may see, G query heads that share a kv head, Q tokens of a prompt chunk.
The packed batch holds all single-token rows first, group by group, then the prompt chunks. Layers that look equally
far back share a `LayerView`.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.kv_cache import KVCache

ViewT = TypeVar("ViewT")
"""What a backend wants to know of a step: `LayerView` or one of its own."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows `start` to `end` of the batch, one token each, of about equal length; chunk_ids holds R x (S / C) ids.

    first_R: the position of the first key that is read for each row. lengths_R: how many keys each row has, its own
    token included; those from there on are padding.
    """

    start: int
    end: int
    chunk_ids: Tensor
    first_R: Tensor
    lengths_R: Tensor


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows `start` to `end` are consecutive tokens of one request, the first at position `context`.

    chunk_ids names its keys from position `first` on; None when there is no context: the batch itself then holds them.
    """

    start: int
    end: int
    context: int
    first: int
    chunk_ids: Tensor | None

    @property
    def num_keys(self) -> int:
        return self.context + self.end - self.start - self.first


@dataclass(frozen=True, slots=True)
class Spans:
    """A step as a kernel takes it that reads in place: runs of consecutive tokens of a request, of few tokens each.

    places_J: of each the first token in the batch, their number, the position of the first, the position of the first
    key of its chunks, and where in chunk_ids those begin.
    """

    places_J: tuple[np.ndarray, ...]
    chunk_ids: np.ndarray


@dataclass(slots=True)
class LayerView:
    """One step as the layers of one block group see it. Masks and spans are made once and shared by the layers.

    window: how many tokens a token sees, itself included; None is all of them.
    """

    cache: KVCache
    window: int | None
    slots_T: Tensor
    groups: list[DecodeGroup]
    chunks: list[PromptChunk]
    spans: Spans | None = None
    _masks: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    def group_mask(self, index: int, *, num_groups: int, num_keys: int, dtype: torch.dtype) -> Tensor:
        """Gives 0 where a row may look and -inf elsewhere, as 1 x R x G x S."""
        key = ("group", index, num_groups)
        if key not in self._masks:
            group = self.groups[index]
            position_RS = group.first_R[:, None] + torch.arange(num_keys, device=group.first_R.device)
            visible_RS = position_RS < group.lengths_R[:, None]
            if self.window is not None:
                visible_RS &= position_RS >= group.lengths_R[:, None] - self.window
            self._masks[key] = _as_mask(visible_RS, dtype)[None, :, None, :].repeat(1, 1, num_groups, 1)
        return self._masks[key]

    def is_plain(self, index: int) -> bool:
        """True for a prompt chunk that sees itself alone and no window's end: without a mask half the work is saved."""
        chunk = self.chunks[index]
        return chunk.context == 0 and (self.window is None or self.window >= chunk.num_keys)

    def chunk_mask(self, index: int, *, dtype: torch.dtype) -> Tensor:
        """Gives the causal mask of a prompt chunk over its keys, as Q x S."""
        key = ("chunk", index, 0)
        if key not in self._masks:
            chunk, device = self.chunks[index], self.slots_T.device
            end = chunk.first + chunk.num_keys
            query_Q1 = torch.arange(chunk.context, end, device=device)[:, None]
            position_S = torch.arange(chunk.first, end, device=device)
            visible_QS = position_S <= query_Q1
            if self.window is not None:
                visible_QS &= position_S > query_Q1 - self.window
            self._masks[key] = _as_mask(visible_QS, dtype)
        return self._masks[key]


@dataclass(frozen=True, slots=True)
class AttentionStep(Generic[ViewT]):
    """Lives for one forward pass: the views by block group, and the group of each layer."""

    views: list[ViewT]
    group_of_layer: list[int]

    def view(self, layer: int) -> ViewT:
        return self.views[self.group_of_layer[layer]]


def _as_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))
