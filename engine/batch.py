"""From a plan to the static tensors of one packed forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.step import AttentionStep, DecodeGroup, PromptChunk
from engine.kv_cache import KVCache
from engine.plan import PlannedRow, StepPlan

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


def build_batch(plan: StepPlan, cache: KVCache, device: torch.device) -> Batch:
    """Packs single-token rows by length, then the prompt chunks, and clears chunks entered for the first time."""
    singles = sorted((row for row in plan.rows if len(row.token_ids) == 1), key=lambda row: row.end)
    chunked = [row for row in plan.rows if len(row.token_ids) > 1]
    rows = singles + chunked
    ends = np.cumsum([len(row.token_ids) for row in rows])

    def to_device(values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=device)

    fresh = [chunk for row in rows for chunk in _fresh_chunk(row, cache)]
    if fresh:
        cache.clear(to_device(fresh))
    positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
    step = AttentionStep(
        cache=cache,
        slots_T=to_device(np.concatenate([_slots(row, cache.page_size) for row in rows])),
        groups=[
            DecodeGroup(
                start=start,
                end=start + len(group),
                chunk_ids=to_device(_padded_chunk_ids(group, cache)),
                lengths_R=to_device([row.end for row in group]),
            )
            for start, group in _length_groups(singles, cache.chunk_tokens)
        ],
        chunks=[
            PromptChunk(
                start=int(end) - len(row.token_ids),
                end=int(end),
                context=row.start,
                chunk_ids=to_device(_chunk_ids(row, cache)) if row.start > 0 else None,
            )
            for row, end in zip(chunked, ends[len(singles) :], strict=True)
        ],
    )
    sampling = [(row, int(end) - 1) for row, end in zip(rows, ends, strict=True) if row.samples]
    return Batch(
        rows=rows,
        input_ids_1T=to_device([token for row in rows for token in row.token_ids])[None],
        position_ids_1T=to_device(positions)[None],
        sampling_rows=[row for row, _ in sampling],
        last_tokens_L=to_device([last for _, last in sampling]),
        step=step,
    )


def _length_groups(singles: list[PlannedRow], chunk_tokens: int) -> Iterator[tuple[int, list[PlannedRow]]]:
    start = 0
    for index, row in enumerate(singles):
        shortest = -(-singles[start].end // chunk_tokens)
        if -(-row.end // chunk_tokens) > max(GROUP_STRETCH * shortest, shortest + 1):
            yield start, singles[start:index]
            start = index
    if singles:
        yield start, singles[start:]


def _chunk_ids(row: PlannedRow, cache: KVCache) -> np.ndarray:
    """The chunks that hold the keys of a row, position 0 first."""
    per_block = cache.chunks_per_block
    ids = np.asarray(row.block_ids, dtype=np.int64)[:, None] * per_block + np.arange(per_block)
    return ids.reshape(-1)[: -(-row.end // cache.chunk_tokens)]


def _padded_chunk_ids(group: list[PlannedRow], cache: KVCache) -> np.ndarray:
    """As many ids a row as the longest (last) one has; a row is padded with its own first chunk, masked later."""
    width = -(-group[-1].end // cache.chunk_tokens)
    table = np.empty((len(group), width), dtype=np.int64)
    for index, row in enumerate(group):
        ids = _chunk_ids(row, cache)
        table[index, : len(ids)] = ids
        table[index, len(ids) :] = ids[0]
    return table.reshape(-1)


def _slots(row: PlannedRow, page_size: int) -> np.ndarray:
    positions = np.arange(row.start, row.end)
    return np.asarray(row.block_ids, dtype=np.int64)[positions // page_size] * page_size + positions % page_size


def _fresh_chunk(row: PlannedRow, cache: KVCache) -> list[int]:
    """The chunk that this row enters and does not fill: what stands behind its tokens is somebody else's."""
    index, filled = divmod(row.end, cache.chunk_tokens)
    if filled == 0 or index * cache.chunk_tokens < row.start:
        return []
    block, offset = divmod(index, cache.chunks_per_block)
    return [row.block_ids[block] * cache.chunks_per_block + offset]
