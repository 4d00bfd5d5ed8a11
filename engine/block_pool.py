"""Which block of the KV cache belongs to whom: ids, reference counts, and the prefix cache over them.

Pure bookkeeping: the bytes live in `kv_cache`. A full block is named by a digest of everything before it
(weight version, salt, all tokens), so equal digests mean equal keys and values.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
"""128 bits: a collision would hand one request another's keys and values."""


def root_digest(version: int, salt: str | None) -> bytes:
    """Gives the start of the hash chain for one weight version and one tenant."""
    salt_bytes = b"" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
    return blake2b(version.to_bytes(8, "little") + salt_bytes, digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Gives the name of a full block that holds `tokens` and follows the block named `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


class BlockPool:
    """Block ids 0 to num_blocks - 1, each held (count > 0), cached (count 0, found by digest) or blank.

    Invariants: a digest names at most one block; cached and blank blocks have no holder; the three kinds add up.
    Cached blocks are evicted oldest first, and only when no blank one is left.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `acquire` can give: blank ones and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without a holder that a later request may still find."""
        return len(self._cached)

    def acquire(self, count: int) -> list[int]:
        """Takes `count` blocks of undefined content; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = []
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._evict_oldest()
            self._num_holders[block] = 1
            taken.append(block)
        return taken

    def lookup(self, digests: Iterable[bytes]) -> list[int]:
        """Gives the blocks of the longest prefix of `digests` that is known, without taking them."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have no holder: sharing them takes them out of `num_free`."""
        return sum(self._num_holders[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each block that `lookup` gave."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._cached[block]
            self._num_holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes a holder from each; the last block of a chain is the first to be evicted."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            assert self._num_holders[block] >= 0, f"block {block} released too often"
            if self._num_holders[block] > 0:
                continue
            if self._digest_of[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Makes a full, held block findable; where an equal one is known already, that one stays the known one."""
        if digest not in self._block_of and self._digest_of[block] is None:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def check_invariants(self) -> None:
        """Asserts what the class promises; for tests."""
        held = {block for block, count in enumerate(self._num_holders) if count > 0}
        cached, blank = set(self._cached), set(self._blank)
        assert len(blank) == len(self._blank)
        assert not held & cached
        assert not held & blank
        assert not cached & blank
        assert len(held) + len(cached) + len(blank) == self.num_blocks
        assert all(self._digest_of[block] is not None for block in cached)
        assert all(self._digest_of[block] is None for block in blank)
        named = {block: digest for block, digest in enumerate(self._digest_of) if digest is not None}
        assert self._block_of == {digest: block for block, digest in named.items()}

    def _evict_oldest(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digest_of[block]
        assert digest is not None
        del self._block_of[digest]
        self._digest_of[block] = None
        return block
