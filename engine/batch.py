"""From a plan to the static tensors of one packed forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.step import AttentionStep, DecodeGroup, LayerView, PromptChunk
from engine.kv_cache import KVCache
from engine.plan import PlannedRow

GROUP_STRETCH = 1.5
"""Rows of a decode group differ in length by this factor at most: they are padded to the longest, and each group costs
three more kernel calls a layer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in packed order, and what the model and its attention need; T tokens of the step, L rows that sample."""

    rows: list[PlannedRow]
    input_ids_1T: Tensor
    position_ids_1T: Tensor
    sampling_rows: list[PlannedRow]
    last_tokens_L: Tensor
    """Where in T the logits of each sampling row are."""
    step: AttentionStep


def build_batch(
    planned: Sequence[PlannedRow], cache: KVCache, windows: Sequence[int | None], device: torch.device
) -> Batch:
    """Packs single-token rows by length, then the prompt chunks, and clears chunks entered for the first time.

    windows: how far back the layers of each block group look.
    """
    singles = sorted((row for row in planned if len(row.token_ids) == 1), key=lambda row: row.end)
    chunked = [row for row in planned if len(row.token_ids) > 1]
    rows = singles + chunked
    ends = np.cumsum([len(row.token_ids) for row in rows])
    views = [_View(cache, group, window, device).build(singles, chunked, ends) for group, window in enumerate(windows)]
    sampling = [(row, int(end) - 1) for row, end in zip(rows, ends, strict=True) if row.samples]
    positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
    return Batch(
        rows=rows,
        input_ids_1T=_to_device([token for row in rows for token in row.token_ids], device)[None],
        position_ids_1T=_to_device(positions, device)[None],
        sampling_rows=[row for row, _ in sampling],
        last_tokens_L=_to_device([last for _, last in sampling], device),
        step=AttentionStep(views=views, group_of_layer=cache.group_of_layer),
    )


@dataclass(frozen=True, slots=True)
class _View:
    """Builds the step as one block group sees it."""

    cache: KVCache
    group: int
    window: int | None
    device: torch.device

    def build(self, singles: list[PlannedRow], chunked: list[PlannedRow], ends: np.ndarray) -> LayerView:
        rows = singles + chunked
        fresh = [chunk for row in rows for chunk in self._fresh_chunk(row)]
        if fresh:
            self.cache.clear(self.group, _to_device(fresh, self.device))
        return LayerView(
            cache=self.cache,
            window=self.window,
            slots_T=_to_device(np.concatenate([self._slots(row) for row in rows]), self.device),
            groups=[self._decode_group(start, group) for start, group in self._length_groups(singles)],
            chunks=[self._prompt_chunk(row, int(end)) for row, end in zip(chunked, ends[len(singles) :], strict=True)],
        )

    def _decode_group(self, start: int, group: list[PlannedRow]) -> DecodeGroup:
        tables = [self._chunk_ids(row) for row in group]
        width = max(map(len, tables))
        # A row is padded with a chunk of its own, which its mask hides.
        padded = [np.concatenate([ids, np.full(width - len(ids), ids[0])]) for ids in tables]
        first = [self._first_chunk(row) * self.cache.chunk_tokens for row in group]
        return DecodeGroup(
            start=start,
            end=start + len(group),
            chunk_ids=_to_device(np.concatenate(padded), self.device),
            first_R=_to_device(first, self.device),
            lengths_R=_to_device([row.end for row in group], self.device),
        )

    def _prompt_chunk(self, row: PlannedRow, end: int) -> PromptChunk:
        return PromptChunk(
            start=end - len(row.token_ids),
            end=end,
            context=row.start,
            first=self._first_chunk(row) * self.cache.chunk_tokens,
            chunk_ids=_to_device(self._chunk_ids(row), self.device) if row.start > 0 else None,
        )

    def _length_groups(self, singles: list[PlannedRow]) -> Iterator[tuple[int, list[PlannedRow]]]:
        start = 0
        for index, row in enumerate(singles):
            shortest = self._num_chunks(singles[start])
            if self._num_chunks(row) > max(GROUP_STRETCH * shortest, shortest + 1):
                yield start, singles[start:index]
                start = index
        if singles:
            yield start, singles[start:]

    def _first_chunk(self, row: PlannedRow) -> int:
        if self.window is None:
            return 0
        return max(0, row.start - self.window + 1) // self.cache.chunk_tokens

    def _num_chunks(self, row: PlannedRow) -> int:
        return -(-row.end // self.cache.chunk_tokens) - self._first_chunk(row)

    def _chunk_ids(self, row: PlannedRow) -> np.ndarray:
        """The chunks that hold the keys the row can see, in order."""
        per_block, first = self.cache.chunks_per_block, self._first_chunk(row)
        table = np.asarray(row.block_tables[self.group], dtype=np.int64)
        ids = (table[:, None] * per_block + np.arange(per_block)).reshape(-1)
        return ids[first : first + self._num_chunks(row)]

    def _slots(self, row: PlannedRow) -> np.ndarray:
        positions, page = np.arange(row.start, row.end), self.cache.page_size
        table = np.asarray(row.block_tables[self.group], dtype=np.int64)
        return table[positions // page] * page + positions % page

    def _fresh_chunk(self, row: PlannedRow) -> list[int]:
        """The chunk that this row enters and does not fill: what stands behind its tokens is somebody else's."""
        index, filled = divmod(row.end, self.cache.chunk_tokens)
        if filled == 0 or index * self.cache.chunk_tokens < row.start:
            return []
        block, offset = divmod(index, self.cache.chunks_per_block)
        return [row.block_tables[self.group][block] * self.cache.chunks_per_block + offset]


def _to_device(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int64), device=device)
