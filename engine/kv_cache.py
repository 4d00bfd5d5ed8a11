"""Keys and values of every block, layer by layer.

Shapes: H kv heads, T tokens of a step, N chunks of the cache, C tokens a chunk, D width of a key or value, B blocks,
P tokens a block. A block is page_size / C chunks. Reads copy whole chunks, so a short request in a large page costs
little, and a chunk is long enough to be copied at memory speed.
In memory either the heads lead, so that a gather copies long runs, or the tokens do, as flash attention reads blocks
in place; the tensors are H x N x C x D to the eye in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, gcd

import torch
from torch import Tensor

from engine.block_pool import BlockCopy, CopyKind
from engine.config import ResolvedConfig
from engine.room import Room, populate

CHUNK_TOKENS = 32
"""32 float32 keys of width 64 are 8 KiB, two memory pages: long copies, and half a chunk wasted on average."""
FIRST_BYTES = 2 * 2**30
"""Of a cache on the CPU, at hand from the start: what the first requests use costs them no page faults, which take 0.4
seconds a GiB, and 2 where a host lends its memory page by page."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token, and how it looks back."""

    num_kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None
    has_sinks: bool = False

    @property
    def values_per_token(self) -> int:
        return self.num_kv_heads * (self.key_width + self.value_width)


class KVCache:
    """Invariant: what is copied out by `read` holds values of its own request or zeros, by way of `clear`.

    So a request that produced NaN leaves none to the next owner of its blocks: zero weight times NaN would be NaN.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        config: ResolvedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tokens_lead: bool = False,
        has_scratch: bool = False,
    ) -> None:
        """tokens_lead: keep the heads of a token together, for a backend that asks for `pages`. has_scratch: one more
        block in each pool, for the padding of a step.
        """
        self.device = device
        self.page_size = config.page_size
        self.chunk_tokens = gcd(config.page_size, CHUNK_TOKENS)
        self.chunks_per_block = config.page_size // self.chunk_tokens
        self.group_of_layer = [config.group_of(layer.window) for layer in layers]
        self._tokens_lead = tokens_lead
        self._pool_sizes = config.pool_sizes
        self._filling = Room().filling()
        blocks = [config.pool_sizes[group] + has_scratch for group in self.group_of_layer]

        def room(
            shapes: Sequence[tuple[int, int]], num_blocks: Sequence[int], *, on_host: bool = False
        ) -> list[Tensor]:
            # Not zeroed: memory that no request has used yet is then not touched either, but for some of it.
            return [
                self._empty(
                    (num_heads, count * self.chunks_per_block, self.chunk_tokens, width),
                    dtype=dtype,
                    device=torch.device("cpu") if on_host else device,
                    pin_memory=on_host and device.type == "cuda",
                )
                for (num_heads, width), count in zip(shapes, num_blocks, strict=True)
            ]

        key_shapes = [(layer.num_kv_heads, layer.key_width) for layer in layers]
        value_shapes = [(layer.num_kv_heads, layer.value_width) for layer in layers]
        slots = [config.num_host_slots] * len(layers)
        self._keys_HNCD, self._values_HNCD = room(key_shapes, blocks), room(value_shapes, blocks)
        self._host_HNCD = [*room(key_shapes, slots, on_host=True), *room(value_shapes, slots, on_host=True)]
        if device.type == "cpu":
            self._populate()
        if has_scratch:  # what is there is never seen, and must not be NaN, which spreads
            for group, store in zip(self.group_of_layer * 2, [*self._keys_HNCD, *self._values_HNCD], strict=True):
                self._block(store, self.scratch_block(group)).zero_()
        # Gathers reuse these: fresh memory for each would cost more in page faults than the copy itself.
        self._read_keys = torch.empty(0, dtype=dtype, device=device)
        self._read_values = torch.empty(0, dtype=dtype, device=device)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        """Carries out planned copies of whole blocks, one after the other, in the layers of a group."""
        stores = [
            (device, host)
            for layer_group, device, host in zip(
                self.group_of_layer * 2, [*self._keys_HNCD, *self._values_HNCD], self._host_HNCD, strict=True
            )
            if layer_group == group
        ]
        for copy in copies:
            for device, host in stores:
                source = host if copy.kind is CopyKind.FROM_HOST else device
                target = host if copy.kind is CopyKind.TO_HOST else device
                self._block(target, copy.target).copy_(self._block(source, copy.source))

    def clear(self, group: int, chunk_ids: Tensor) -> None:
        """Zeroes chunks in every layer of a group, before their first token is written."""
        for layer_group, keys_HNCD, values_HNCD in zip(
            self.group_of_layer, self._keys_HNCD, self._values_HNCD, strict=True
        ):
            if layer_group == group:
                keys_HNCD.index_fill_(1, chunk_ids, 0)
                values_HNCD.index_fill_(1, chunk_ids, 0)

    def write(self, layer: int, key_HTD: Tensor, value_HTD: Tensor, slots_T: Tensor) -> None:
        """Stores the tokens of a step; slot = block * page_size + offset in the block."""
        for store_HNCD, new_HTD in (
            (self._keys_HNCD[layer], key_HTD),
            (self._values_HNCD[layer], value_HTD),
        ):
            store_HNCD.view(store_HNCD.shape[0], -1, store_HNCD.shape[-1]).index_copy_(1, slots_T, new_HTD)

    def read(self, layer: int, chunk_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Gives keys and values of the chunks in the order named, as H x (tokens) x D. Valid until the next read."""
        self._read_keys, keys_HTD = _gather(self._keys_HNCD[layer], chunk_ids, self._read_keys)
        self._read_values, values_HTD = _gather(self._values_HNCD[layer], chunk_ids, self._read_values)
        return keys_HTD, values_HTD

    def chunks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Gives all keys and values of a layer as H x N x C x D, in place."""
        return self._keys_HNCD[layer], self._values_HNCD[layer]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Gives all keys and values of a layer as B x P x H x D, in place; only where the tokens lead."""
        keys, values = (
            store.permute(1, 2, 0, 3).view(-1, self.page_size, store.shape[0], store.shape[-1])
            for store in (self._keys_HNCD[layer], self._values_HNCD[layer])
        )
        return keys, values

    def scratch_block(self, group: int) -> int:
        """Gives the block behind those of a group's pool, which no request gets."""
        return self._pool_sizes[group]

    def _empty(
        self, shape_HNCD: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device, pin_memory: bool
    ) -> Tensor:
        if not self._tokens_lead and device.type == "cpu" and not pin_memory:
            return self._filling.empty(shape_HNCD, dtype)
        if not self._tokens_lead:
            return torch.empty(shape_HNCD, dtype=dtype, device=device, pin_memory=pin_memory)
        heads, *chunks, width = shape_HNCD
        store_NCHD = torch.empty(*chunks, heads, width, dtype=dtype, device=device, pin_memory=pin_memory)
        return store_NCHD.permute(2, 0, 1, 3)

    def _populate(self) -> None:
        """Takes the blocks that are used first, in every layer."""
        stores = [*self._keys_HNCD, *self._values_HNCD]
        share = min(1.0, FIRST_BYTES / max(1, sum(store.nbytes for store in stores)))
        for store_HNCD in stores:
            for store_NCD in store_HNCD:
                populate(store_NCD[: ceil(share * len(store_NCD))])

    def _block(self, store_HNCD: Tensor, block: int) -> Tensor:
        return store_HNCD.narrow(1, block * self.chunks_per_block, self.chunks_per_block)


def _gather(store_HNCD: Tensor, chunk_ids: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    num_heads, _, chunk, width = store_HNCD.shape
    size = num_heads * len(chunk_ids) * chunk * width
    if buffer.numel() < size:
        buffer = torch.empty(size + size // 4, dtype=store_HNCD.dtype, device=store_HNCD.device)
    out = buffer[:size].view(num_heads, len(chunk_ids), chunk, width)
    torch.index_select(store_HNCD, 1, chunk_ids, out=out)
    return buffer, out.view(num_heads, len(chunk_ids) * chunk, width)
