"""A step for flash attention as one array of integers: one copy to the device, and fixed places for a captured graph.

Shapes: T tokens, L places with logits, R rows that decode, B other rows, W blocks a row, by block group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from engine.attention.flash import DecodeRows, FlashKernels, FlashView, PackedRows
from engine.attention.step import AttentionStep
from engine.batch import Batch, logit_places, row_slots
from engine.kv_cache import KVCache
from engine.plan import PlannedRow
from engine.transfer import to_device


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many of everything a step has room for; steps of one shape have their parts in the same places.

    num_decoding rows lead, of one token each; then num_packed rows of up to max_q tokens. widths and max_ks: blocks and
    keys of a row, by block group.
    """

    num_tokens: int
    num_logits: int
    num_decoding: int
    num_packed: int
    max_q: int
    widths: tuple[int, ...]
    max_ks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPacker:
    """Lays steps out. max_decode_blocks: rows of more blocks than this do not go the decode way; 0 closes it."""

    cache: KVCache
    kernels: FlashKernels
    windows: Sequence[int | None]
    max_decode_blocks: int

    def build(self, planned: Sequence[PlannedRow], device: torch.device) -> Batch:
        """Gives a batch with room for these rows and no more."""
        rows = in_order(planned)
        shape = self.shape_of(rows)
        return self.unpack(to_device(self.pack(rows, shape), device), shape, rows)

    def shape_of(self, rows: Sequence[PlannedRow]) -> StepShape:
        """Gives the smallest shape for rows in order."""
        num_decoding = self._num_decoding(rows)
        groups = range(len(self.windows))
        return StepShape(
            num_tokens=sum(row.num_tokens for row in rows),
            num_logits=max(1, sum(row.samples + len(row.scored) for row in rows)),
            num_decoding=num_decoding,
            num_packed=len(rows) - num_decoding,
            max_q=max((row.num_tokens for row in rows[num_decoding:]), default=0),
            widths=tuple(max(len(self._blocks(row, group)) for row in rows) for group in groups),
            max_ks=tuple(max(self._num_keys(row, group) for row in rows) for group in groups),
        )

    def pack(self, rows: Sequence[PlannedRow], shape: StepShape) -> np.ndarray:
        """Gives the integers of a step. What the shape has room for beyond the rows reads and writes scratch blocks."""
        num_tokens = sum(row.num_tokens for row in rows)
        positions = [position for row in rows for position in range(row.start, row.end)]
        parts = [
            _padded([token for row in rows for token in row.token_ids], shape.num_tokens, 0),
            _padded(positions, shape.num_tokens, 0),
            _padded(logit_places(rows), shape.num_logits, 0),
        ]
        for group in range(len(self.windows)):
            parts += self._parts_of_group(rows, group, shape, num_tokens)
        return np.concatenate(parts)

    def unpack(self, values: Tensor, shape: StepShape, rows: list[PlannedRow]) -> Batch:
        """Gives the batch whose tensors are pieces of `values`, which stays as `pack` laid it out."""
        parts = _Parts(values)
        input_ids_T, position_ids_T = parts.take(shape.num_tokens), parts.take(shape.num_tokens)
        places_L = parts.take(shape.num_logits)
        views = [self._view(group, shape, parts) for group in range(len(self.windows))]
        return Batch(
            rows=rows,
            input_ids_1T=input_ids_T[None],
            position_ids_1T=position_ids_T[None],
            sampling_rows=[row for row in rows if row.samples],
            scored_rows=[row for row in rows if row.scored],
            logit_tokens_L=places_L,
            step=AttentionStep(views=views, group_of_layer=self.cache.group_of_layer),
            is_decode=shape.num_packed == 0,
        )

    def _num_decoding(self, rows: Sequence[PlannedRow]) -> int:
        if any(row.num_tokens > 1 for row in rows):
            return 0  # one call for a mixed step
        fits = [
            all(len(self._blocks(row, g)) <= self.max_decode_blocks for g in range(len(self.windows))) for row in rows
        ]
        return fits.index(False) if False in fits else len(fits)

    def _first_block(self, row: PlannedRow, group: int) -> int:
        """The first block that the row can see: those before it may be somebody else's by now."""
        window = self.windows[group]
        return 0 if window is None else max(0, row.start - window + 1) // self.cache.page_size

    def _blocks(self, row: PlannedRow, group: int) -> list[int]:
        return row.block_tables[group][self._first_block(row, group) : -(-row.end // self.cache.page_size)]

    def _num_keys(self, row: PlannedRow, group: int) -> int:
        """Of the keys before those blocks none is seen, and the kernels count back from the last one."""
        return row.end - self._first_block(row, group) * self.cache.page_size

    def _parts_of_group(
        self, rows: Sequence[PlannedRow], group: int, shape: StepShape, num_tokens: int
    ) -> Iterator[np.ndarray]:
        scratch = self.cache.scratch_block(group)
        slots = np.concatenate([np.empty(0, np.int64), *(row_slots(row, group, self.cache.page_size) for row in rows)])
        yield _padded(slots, shape.num_tokens, scratch * self.cache.page_size)
        num_decoding = min(len(rows), shape.num_decoding)
        keys = [self._num_keys(row, group) for row in rows]
        table = _table([self._blocks(row, group) for row in rows], shape.widths[group])
        if shape.num_decoding:
            yield _padded(keys[:num_decoding], shape.num_decoding, 1)
            yield _padded(table[:num_decoding].reshape(-1), shape.num_decoding * shape.widths[group], scratch)
        if shape.num_packed:
            lengths = [row.num_tokens for row in rows[num_decoding:]]
            # Tokens of padding are one more row with one key, and the kernels give zeros for what sees none.
            num_padding = shape.num_tokens - num_tokens
            yield _ends([*lengths, num_padding] if num_padding else lengths, shape.num_packed)
            yield _ends([*keys[num_decoding:], 1] if num_padding else keys[num_decoding:], shape.num_packed)
            yield _padded(table[num_decoding:].reshape(-1), shape.num_packed * shape.widths[group], scratch)

    def _view(self, group: int, shape: StepShape, parts: "_Parts") -> FlashView:
        rows, others, width = shape.num_decoding, shape.num_packed, shape.widths[group]
        slots_T = parts.take(shape.num_tokens)
        decode, packed = None, None
        if rows:
            decode = DecodeRows(parts.take_narrow(rows), parts.take_narrow(rows * width).view(rows, width))
        if others:
            packed = PackedRows(
                ends_q_B1=parts.take_narrow(others + 1),
                ends_k_B1=parts.take_narrow(others + 1),
                table_BW=parts.take_narrow(others * width).view(others, width),
                max_q=shape.max_q,
                max_k=shape.max_ks[group],
            )
        return FlashView(
            cache=self.cache,
            kernels=self.kernels,
            window=self.windows[group],
            slots_T=slots_T,
            decode=decode,
            packed=packed,
        )


class _Parts:
    """Cuts a step into its parts, in the order in which `pack` wrote them."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._narrow = values.to(torch.int32)
        self._start = 0

    def take(self, size: int) -> Tensor:
        self._start += size
        return self._values[self._start - size : self._start]

    def take_narrow(self, size: int) -> Tensor:
        """The kernels want int32; the embedding, the cache and the logits int64."""
        self._start += size
        return self._narrow[self._start - size : self._start]


def in_order(planned: Sequence[PlannedRow]) -> list[PlannedRow]:
    """Gives single tokens first, the shortest request first, so that those of few blocks lead."""
    singles = sorted((row for row in planned if row.num_tokens == 1), key=attrgetter("end"))
    return singles + [row for row in planned if row.num_tokens > 1]


def _padded(values: Sequence[int] | np.ndarray, size: int, filler: int) -> np.ndarray:
    out = np.full(size, filler, dtype=np.int64)
    out[: len(values)] = values
    return out


def _table(rows: Sequence[list[int]], width: int) -> np.ndarray:
    # Behind the blocks of a row stands its first one: any that exists does, none of it is read.
    padded = [blocks + blocks[:1] * (width - len(blocks)) for blocks in rows]
    return np.array(padded, dtype=np.int64).reshape(len(rows), width)


def _ends(lengths: Sequence[int], num_rows: int) -> np.ndarray:
    """Running sums from 0; the rows that are not there are empty."""
    ends = np.cumsum([0, *lengths])
    return _padded(ends, num_rows + 1, int(ends[-1]))
