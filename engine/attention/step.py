"""What attention has to know of one step: which rows of the packed batch read which chunks of the cache.

Shapes: R rows of a decode group, S keys a row may see, G query heads that share a kv head, Q tokens of a prompt chunk.
The packed batch holds all single-token rows first, group by group, then the prompt chunks.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows `start` to `end` of the batch, one token each, of about equal length; chunk_ids holds R x (S / C) ids.

    lengths_R counts the keys each row may see, its own token included.
    """

    start: int
    end: int
    chunk_ids: Tensor
    lengths_R: Tensor


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows `start` to `end` are consecutive tokens of one request, the first at position `context`.

    chunk_ids names its keys from position 0; None when there is no context: the batch itself then holds them all.
    """

    start: int
    end: int
    context: int
    chunk_ids: Tensor | None


@dataclass(slots=True)
class AttentionStep:
    """Lives for one forward pass; masks are made once and shared by the layers."""

    cache: KVCache
    slots_T: Tensor
    groups: list[DecodeGroup]
    chunks: list[PromptChunk]
    _masks: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)

    def group_mask(
        self,
        index: int,
        *,
        num_groups: int,
        num_keys: int,
        window: int | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Gives 0 where a row may look and -inf elsewhere, as 1 x R x G x S."""
        key = (index, window, num_groups)
        if key not in self._masks:
            lengths_R1 = self.groups[index].lengths_R[:, None]
            position_S = torch.arange(num_keys, device=lengths_R1.device)
            visible_RS = position_S < lengths_R1
            if window is not None:
                visible_RS &= position_S >= lengths_R1 - window
            mask_RS = torch.zeros(visible_RS.shape, dtype=dtype, device=lengths_R1.device)
            mask_RS.masked_fill_(~visible_RS, float("-inf"))
            self._masks[key] = mask_RS[None, :, None, :].repeat(1, 1, num_groups, 1)
        return self._masks[key]

    def chunk_mask(self, index: int, *, window: int | None, dtype: torch.dtype) -> Tensor:
        """Gives the causal mask of a prompt chunk over its keys, as Q x S."""
        key = (-1 - index, window, 0)
        if key not in self._masks:
            chunk = self.chunks[index]
            num_queries = chunk.end - chunk.start
            device = self.slots_T.device
            query_Q1 = torch.arange(chunk.context, chunk.context + num_queries, device=device)[:, None]
            position_S = torch.arange(chunk.context + num_queries, device=device)
            visible_QS = position_S <= query_Q1
            if window is not None:
                visible_QS &= position_S > query_Q1 - window
            mask_QS = torch.zeros(visible_QS.shape, dtype=dtype, device=device)
            self._masks[key] = mask_QS.masked_fill_(~visible_QS, float("-inf"))
        return self._masks[key]
