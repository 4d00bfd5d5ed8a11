"""What requests can use of memory at most, in blocks and in bytes, and how much of it there is."""

from collections.abc import Callable
from dataclasses import dataclass

ACTIVATION_WIDTH = 20
"""Values that a step holds at once per token, in units of the hidden size: a block's input and output, queries, keys
and values, and two tensors of an MLP four times as wide."""
MASKED_TOKENS = 32_768
"""Attention masks each token of a prompt against those before it; longer contexts than this are not reserved for."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Bytes that the cache and the tensors of a step may take together, out of those that are free."""

    free_bytes: int
    share: float

    @property
    def allowed_bytes(self) -> int:
        return int(self.free_bytes * self.share)


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """What requests can use at most, and what it costs."""

    page_size: int
    max_requests: int
    longest: int
    """Tokens of the longest request."""
    windows: tuple[int | None, ...]
    block_bytes: tuple[int, ...]
    """Of one block over all layers of a group."""
    read_bytes: int
    """The buffers that attention gathers keys and values into."""
    mask_bytes: int
    """What attention masks take for one token of a step."""
    token_bytes: int
    """What else a step holds for one of its tokens, estimated."""
    measured_bytes: int | None = None
    """What a step of the greatest size holds instead, where one was run."""

    @property
    def useful_blocks(self) -> int:
        return self.max_requests * -(-self.longest // self.page_size)

    def pools(self, num_blocks: int, max_batch_tokens: int) -> tuple[int, ...]:
        """Gives the blocks that the layers of each group can use at most; one request alone always fits."""
        return tuple(self._pool_size(window, num_blocks, max_batch_tokens) for window in self.windows)

    def cache_bytes(self, num_blocks: int, max_batch_tokens: int) -> int:
        """Gives the size of a cache of `num_blocks`."""
        pools = self.pools(num_blocks, max_batch_tokens)
        return sum(count * size for count, size in zip(pools, self.block_bytes, strict=True))

    def step_bytes(self, max_batch_tokens: int) -> int:
        """Gives what a step of this size needs beside the cache."""
        activations = max_batch_tokens * self.token_bytes if self.measured_bytes is None else self.measured_bytes
        return self.read_bytes + max_batch_tokens * self.mask_bytes + activations

    def _pool_size(self, window: int | None, num_blocks: int, max_batch_tokens: int) -> int:
        if window is None:
            return num_blocks
        per_request = -(-window // self.page_size) + 1
        enough = self.max_requests * per_request + -(-max_batch_tokens // self.page_size)
        return max(per_request + 1, min(num_blocks, enough))


def greatest(fits: Callable[[int], bool], limit: int) -> int:
    """Gives the greatest number up to `limit` that fits, where all smaller ones fit too; 0 when none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
