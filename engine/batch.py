"""From a plan to the static tensors of one packed forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from engine.attention.flash import FlashView
from engine.attention.step import AttentionStep, DecodeGroup, LayerView, PromptChunk
from engine.kv_cache import KVCache
from engine.plan import PlannedRow
from engine.transfer import to_device

GROUP_STRETCH = 1.5
"""Rows of a decode group differ in length by this factor at most: they are padded to the longest, and each group costs
three more kernel calls a layer."""
MAX_GROUP_TOKENS = 8_192
"""Keys that a decode group of several rows reads at most: rows that share a prefix read it once each, so a group could
otherwise need many times the memory of the cache itself. At this size the kernel calls are lost in the copying."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in packed order, and what the model and its attention need; T tokens of the step, L places with logits.

    These are of the rows that sample, one each, and then of the scored positions, row by row.
    """

    rows: list[PlannedRow]
    input_ids_1T: Tensor
    position_ids_1T: Tensor
    sampling_rows: list[PlannedRow]
    scored_rows: list[PlannedRow]
    logit_tokens_L: Tensor
    """Where in T they are."""
    step: AttentionStep[LayerView] | AttentionStep[FlashView]
    is_decode: bool
    """Whether all rows are of one token, and go the way of those."""


def build_batch(
    planned: Sequence[PlannedRow],
    cache: KVCache,
    windows: Sequence[int | None],
    device: torch.device,
    *,
    reads_in_place: bool = False,
) -> Batch:
    """Packs single-token rows by length, then the prompt chunks, and clears chunks entered for the first time.

    windows: how far back the layers of each block group look. reads_in_place: attention copies no keys and looks at no
    token behind a row's end, so rows of any length share a group and nothing is cleared.
    """
    singles = sorted((row for row in planned if row.num_tokens == 1), key=attrgetter("end"))
    chunked = [row for row in planned if row.num_tokens > 1]
    rows = singles + chunked
    ends = list(accumulate(row.num_tokens for row in rows))
    views = [
        _View(cache, group, window, device, reads_in_place).build(singles, chunked, ends)
        for group, window in enumerate(windows)
    ]
    positions = [np.array([row.start for row in singles], dtype=np.int64)]
    positions += [np.arange(row.start, row.end) for row in chunked]
    return Batch(
        rows=rows,
        input_ids_1T=to_device([token for row in rows for token in row.token_ids], device)[None],
        position_ids_1T=to_device(np.concatenate(positions), device)[None],
        sampling_rows=[row for row in rows if row.samples],
        scored_rows=[row for row in rows if row.scored],
        logit_tokens_L=to_device(logit_places(rows), device),
        step=AttentionStep(views=views, group_of_layer=cache.group_of_layer),
        is_decode=not chunked,
    )


def logit_places(rows: Sequence[PlannedRow]) -> list[int]:
    """Gives where among the tokens of rows in packed order logits are wanted."""
    ends = list(accumulate(row.num_tokens for row in rows))
    places = [end - 1 for row, end in zip(rows, ends, strict=True) if row.samples]
    for row, end in zip(rows, ends, strict=True):
        places += [position + end - row.end for position in row.scored]
    return places


def row_slots(row: PlannedRow, group: int, page_size: int) -> np.ndarray:
    """Gives where in the cache of a block group the tokens of a row go."""
    positions = np.arange(row.start, row.end)
    table = np.asarray(row.block_tables[group], dtype=np.int64)
    slots: np.ndarray = table[positions // page_size] * page_size + positions % page_size
    return slots


def max_read_tokens(longest: int, max_requests: int) -> int:
    """Gives how many keys attention reads at once at most, for so many requests of up to `longest` tokens."""
    return max(longest, min(MAX_GROUP_TOKENS, max_requests * longest))


@dataclass(frozen=True, slots=True)
class _View:
    """Builds the step as one block group sees it. Single-token rows go through numpy together, a step has many."""

    cache: KVCache
    group: int
    window: int | None
    device: torch.device
    reads_in_place: bool

    def build(self, singles: list[PlannedRow], chunked: list[PlannedRow], ends: list[int]) -> LayerView:
        group, page, chunk = self.group, self.cache.page_size, self.cache.chunk_tokens
        slots = [row.block_tables[group][row.start // page] * page + row.start % page for row in singles]
        # A single token enters a chunk when it is its first.
        fresh = [slot // chunk for slot in slots if slot % chunk == 0] if chunk > 1 else []
        fresh += [entered for row in chunked for entered in self._fresh_chunk(row)]
        if fresh and not self.reads_in_place:
            self.cache.clear(group, to_device(fresh, self.device))
        all_slots = [np.array(slots, dtype=np.int64), *(row_slots(row, group, page) for row in chunked)]
        return LayerView(
            cache=self.cache,
            window=self.window,
            slots_T=to_device(np.concatenate(all_slots), self.device),
            groups=self._decode_groups(singles),
            chunks=[self._prompt_chunk(row, end) for row, end in zip(chunked, ends[len(singles) :], strict=True)],
        )

    def _decode_groups(self, singles: list[PlannedRow]) -> list[DecodeGroup]:
        ends_R = np.array([row.end for row in singles], dtype=np.int64)
        first_R = np.zeros_like(ends_R)
        if self.window is not None:
            first_R = np.maximum(0, ends_R - self.window) // self.cache.chunk_tokens
        num_R = -(-ends_R // self.cache.chunk_tokens) - first_R
        return [
            DecodeGroup(
                start=start,
                end=end,
                chunk_ids=to_device(
                    self._padded_ids(singles[start:end], first_R[start:end], num_R[start:end]), self.device
                ),
                first_R=to_device(first_R[start:end] * self.cache.chunk_tokens, self.device),
                lengths_R=to_device(ends_R[start:end], self.device),
            )
            for start, end in self._length_groups(num_R.tolist())
        ]

    def _length_groups(self, num_chunks: list[int]) -> Iterator[tuple[int, int]]:
        """Cuts the rows, which are in order of length, into groups."""
        if self.reads_in_place:
            yield from [(0, len(num_chunks))] if num_chunks else []
            return
        most = MAX_GROUP_TOKENS // self.cache.chunk_tokens
        start = 0
        for index, num in enumerate(num_chunks):
            shortest = num_chunks[start]
            is_full = num * (index - start + 1) > most and index > start
            if is_full or num > max(GROUP_STRETCH * shortest, shortest + 1):
                yield start, index
                start = index
        if num_chunks:
            yield start, len(num_chunks)

    def _padded_ids(self, rows: list[PlannedRow], first_R: np.ndarray, num_R: np.ndarray) -> np.ndarray:
        """The chunks that hold the keys each row can see, in order, row by row and all of the same number."""
        per_block, group = self.cache.chunks_per_block, self.group
        first_block_R = first_R // per_block
        seen = [row.block_tables[group][first:] for row, first in zip(rows, first_block_R.tolist(), strict=True)]
        width = max(map(len, seen))
        table_RB = np.array([blocks + blocks[:1] * (width - len(blocks)) for blocks in seen], dtype=np.int64)
        ids_RS = (table_RB[:, :, None] * per_block + np.arange(per_block)).reshape(len(rows), -1)
        step_S = np.arange(num_R.max())
        # A row is padded with a chunk of its own, which its mask hides.
        if self.window is None:
            ids_RS = np.where(step_S < num_R[:, None], ids_RS[:, : len(step_S)], ids_RS[:, :1])
        else:
            column_RS = (first_R - first_block_R * per_block)[:, None] + np.where(step_S < num_R[:, None], step_S, 0)
            ids_RS = np.take_along_axis(ids_RS, column_RS, axis=1)
        return ids_RS.reshape(-1)

    def _prompt_chunk(self, row: PlannedRow, end: int) -> PromptChunk:
        first = 0
        if self.window is not None:
            first = max(0, row.start - self.window + 1) // self.cache.chunk_tokens
        return PromptChunk(
            start=end - row.num_tokens,
            end=end,
            context=row.start,
            first=first * self.cache.chunk_tokens,
            chunk_ids=to_device(self._seen_ids(row, first), self.device) if row.start > 0 else None,
        )

    def _seen_ids(self, row: PlannedRow, first: int) -> np.ndarray:
        per_block = self.cache.chunks_per_block
        table = np.array(row.block_tables[self.group], dtype=np.int64)
        ids = (table[:, None] * per_block + np.arange(per_block)).reshape(-1)
        return ids[first : -(-row.end // self.cache.chunk_tokens)]

    def _fresh_chunk(self, row: PlannedRow) -> list[int]:
        """The chunk that this row enters and does not fill: what stands behind its tokens is somebody else's."""
        index, filled = divmod(row.end, self.cache.chunk_tokens)
        if filled == 0 or index * self.cache.chunk_tokens < row.start:
            return []
        block, offset = divmod(index, self.cache.chunks_per_block)
        return [row.block_tables[self.group][block] * self.cache.chunks_per_block + offset]
