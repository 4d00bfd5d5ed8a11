"""Keys and values of every block, layer by layer.

Shapes: H kv heads, T tokens of a step, N chunks of the cache, C tokens a chunk, D width of a key or value.
A block is page_size / C chunks. Reads copy whole chunks, so a short request in a large page costs little, and a chunk
is long enough to be copied at memory speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

CHUNK_TOKENS = 32
"""32 float32 keys of width 64 are 8 KiB, two memory pages: long copies, and half a chunk wasted on average."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token, and how many query heads share a kv head."""

    num_kv_heads: int
    key_width: int
    value_width: int
    num_query_groups: int


class KVCache:
    """Invariant: every chunk that is read holds values of its own request or zeros.

    So a request that produced NaN leaves none to the next owner of its blocks: zero weight times NaN would be NaN.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.chunk_tokens = gcd(page_size, CHUNK_TOKENS)
        self.chunks_per_block = page_size // self.chunk_tokens
        num_chunks = num_blocks * self.chunks_per_block

        def room(num_heads: int, width: int) -> Tensor:
            # Not zeroed: memory that no request has used yet is then not touched either.
            return torch.empty(
                num_heads,
                num_chunks,
                self.chunk_tokens,
                width,
                dtype=dtype,
                device=device,
            )

        self._keys_HNCD = [room(layer.num_kv_heads, layer.key_width) for layer in layers]
        self._values_HNCD = [room(layer.num_kv_heads, layer.value_width) for layer in layers]
        # Gathers reuse these: fresh memory for each would cost more in page faults than the copy itself.
        self._read_keys = torch.empty(0, dtype=dtype, device=device)
        self._read_values = torch.empty(0, dtype=dtype, device=device)

    def clear(self, chunk_ids: Tensor) -> None:
        """Zeroes chunks in every layer, before their first token is written."""
        for keys_HNCD, values_HNCD in zip(self._keys_HNCD, self._values_HNCD, strict=True):
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


def bytes_per_block(layers: Sequence[LayerShape], *, page_size: int, dtype: torch.dtype) -> int:
    """Gives the size of one block over all layers."""
    per_token = sum(layer.num_kv_heads * (layer.key_width + layer.value_width) for layer in layers)
    return per_token * page_size * dtype.itemsize


def _gather(store_HNCD: Tensor, chunk_ids: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    num_heads, _, chunk, width = store_HNCD.shape
    size = num_heads * len(chunk_ids) * chunk * width
    if buffer.numel() < size:
        buffer = torch.empty(size + size // 4, dtype=store_HNCD.dtype, device=store_HNCD.device)
    out = buffer[:size].view(num_heads, len(chunk_ids), chunk, width)
    torch.index_select(store_HNCD, 1, chunk_ids, out=out)
    return buffer, out.view(num_heads, len(chunk_ids) * chunk, width)
