"""The blocks of a request, for every kind of layer: full attention keeps them all, a sliding window only its own.

Layers that look equally far back share a group, with a pool of its own. Within a group block i of a request holds
tokens i * page_size to (i + 1) * page_size - 1, so one hash chain names the blocks of all groups.
"""

from collections.abc import Sequence

from engine.block_pool import BlockCopy, BlockPool

DROPPED = -1
"""Stands in a table for a block that no later token can see."""


class BlockGroup:
    """The pool of one group of layers. window: how many tokens a token sees, itself included; None sees all."""

    def __init__(self, pool: BlockPool, *, window: int | None, page_size: int) -> None:
        self.pool = pool
        self.window = window
        self._page_size = page_size

    def first_visible(self, position: int) -> int:
        """Gives the first block that the token at `position`, or any after it, can see."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self._page_size

    @property
    def max_chunk(self) -> int:
        """Tokens that one request can always compute at once when it has the pool to itself."""
        if self.window is None:
            return self.pool.num_blocks * self._page_size
        return (self.pool.num_blocks - 1) * self._page_size - self.window + 1

    def num_missing(self, table: Sequence[int], end: int) -> int:
        """How many blocks the table lacks to hold tokens up to `end` (exclusive)."""
        return max(0, -(-end // self._page_size) - len(table))

    def extend(self, table: list[int], end: int) -> None:
        """Gives the table the blocks for tokens up to `end`; the caller has checked that they are there."""
        table += self.pool.acquire(self.num_missing(table, end))

    def drop_invisible(self, table: list[int], position: int) -> None:
        """Frees the blocks that no token from `position` on can see; they stay findable by hash."""
        for index in range(self.first_visible(position) - 1, -1, -1):
            if index >= len(table) or table[index] == DROPPED:
                # All before it were dropped earlier, or never taken.
                if index < len(table):
                    return
                continue
            self.pool.release([table[index]])
            table[index] = DROPPED

    def release(self, table: list[int]) -> None:
        """Frees all blocks of a table and empties it."""
        self.pool.release([block for block in table if block != DROPPED])
        table.clear()

    def share(self, table: Sequence[int], num_blocks: int) -> list[int]:
        """Gives a second holder's table of the first `num_blocks` blocks."""
        shared = list(table[:num_blocks])
        self.pool.share(block for block in shared if block != DROPPED)
        return shared


def find_prefix(groups: Sequence[BlockGroup], digests: Sequence[bytes], page_size: int) -> int:
    """Gives the longest number of leading blocks for which every group knows all that the next token can see."""
    known_runs = [_runs(group.pool, digests) for group in groups]
    for length in range(len(digests), 0, -1):
        if all(
            runs[length - 1] >= length - group.first_visible(length * page_size)
            for group, runs in zip(groups, known_runs, strict=True)
        ):
            return length
    return 0


def visible_digests(group: BlockGroup, digests: Sequence[bytes], page_size: int) -> Sequence[bytes]:
    """Gives the part of a prefix hit that the group has to take."""
    return digests[group.first_visible(len(digests) * page_size) :]


def drain_copies(groups: Sequence[BlockGroup]) -> list[list[BlockCopy]]:
    """Gives the copies to make before the next step, by group."""
    return [group.pool.drain_copies() for group in groups]


def _runs(pool: BlockPool, digests: Sequence[bytes]) -> list[int]:
    """For each index, how many blocks in a row, ending there, are known."""
    runs, length = [], 0
    for digest in digests:
        length = length + 1 if pool.knows(digest) else 0
        runs.append(length)
    return runs
