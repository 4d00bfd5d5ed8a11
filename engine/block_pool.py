"""Which block of the KV cache belongs to whom: ids, reference counts, and the prefix cache over them, in two tiers.

Pure bookkeeping: the bytes live in `kv_cache`, which carries out the copies planned here, in order, before the next
step. A full block is named by a digest of everything before it (weight version, salt, all tokens), so equal digests
mean equal keys and values.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from engine.prefix_index import PrefixIndex

DIGEST_BYTES = 16
"""128 bits: a collision would hand one request another's keys and values."""


class CopyKind(Enum):
    """Between which tiers a block is copied."""

    TO_HOST = "to_host"
    FROM_HOST = "from_host"
    ON_DEVICE = "on_device"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole block; `source` and `target` are block ids on the device and slot numbers on the host."""

    kind: CopyKind
    source: int
    target: int


def root_digest(version: int, salt: str | None) -> bytes:
    """Gives the start of the hash chain for one weight version and one tenant."""
    salt_bytes = b"" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
    return blake2b(version.to_bytes(8, "little") + salt_bytes, digest_size=DIGEST_BYTES).digest()


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Gives the name of a full block that holds `tokens` and follows the block named `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


def prefix_digests(token_ids: Sequence[int], *, page_size: int, version: int, salt: str | None = None) -> list[bytes]:
    """Gives the names of all full blocks of a prompt, as a cache under these weights knows them."""
    digests: list[bytes] = []
    parent = root_digest(version, salt)
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        parent = block_digest(parent, token_ids[start : start + page_size])
        digests.append(parent)
    return digests


class BlockPool:
    """Block ids 0 to num_blocks - 1, each held (count > 0), cached (count 0, found by digest) or blank.

    Invariants: a digest names at most one block and one host slot; cached and blank blocks have no holder; the three
    kinds add up. Cached blocks are evicted oldest first, and only when no blank one is left; with host slots they sink
    there, where again the oldest makes room.
    """

    def __init__(self, num_blocks: int, *, num_host_slots: int = 0) -> None:
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._blank_slots = list(range(num_host_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[BlockCopy] = []
        self.prefixes = PrefixIndex()
        """The names of what is known, in either tier, under the present weights."""
        self.num_evicted = 0
        """Cached blocks that had to make room, since the start; the two below likewise."""
        self.num_sunk = 0
        """Blocks copied to the host tier."""
        self.num_restored = 0
        """Blocks that came back from it."""

    @property
    def num_free(self) -> int:
        """Blocks that `acquire` can give: blank ones and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without a holder that a later request may still find."""
        return len(self._cached)

    @property
    def num_on_host(self) -> int:
        """Blocks that the host tier holds."""
        return len(self._slot_of)

    def acquire(self, count: int) -> list[int]:
        """Takes `count` blocks of undefined content; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = []
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._evict_oldest()
            self._num_holders[block] = 1
            taken.append(block)
        return taken

    def knows(self, digest: bytes) -> bool:
        """True where a block of this name can be taken, from either tier."""
        return digest in self._block_of or digest in self._slot_of

    def cost(self, digests: Iterable[bytes]) -> int:
        """How many free blocks taking these known ones uses up."""
        blocks = [self._block_of.get(digest) for digest in digests]
        return sum(block is None or self._num_holders[block] == 0 for block in blocks)

    def take(self, digests: Sequence[bytes]) -> list[int]:
        """Becomes a holder of each known block; those on the host come back. The caller has checked `cost`."""
        for digest in digests:
            block = self._block_of.get(digest)
            if block is not None:
                self._hold(block)
        # Pinned before room is made, which may push other blocks out of the host tier.
        pinned = {digest: self._slot_of.pop(digest) for digest in digests if digest not in self._block_of}
        taken = []
        for digest in digests:
            if digest in pinned:
                (block,) = self.acquire(1)
                self._copies.append(BlockCopy(CopyKind.FROM_HOST, pinned[digest], block))
                self.num_restored += 1
                self._name(block, digest)
            taken.append(self._block_of[digest])
        # Still there, and the newest: when the block is evicted again, its bytes need no second copy.
        self._slot_of.update(pinned)
        self.prefixes.touch(digests)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to blocks that have one."""
        for block in blocks:
            self._hold(block)

    def fork(self, block: int) -> int:
        """Gives a new block with a copy of a held one."""
        (copy,) = self.acquire(1)
        self._copies.append(BlockCopy(CopyKind.ON_DEVICE, block, copy))
        return copy

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

    def publish(self, block: int, digest: bytes, *, depth: int = 0) -> None:
        """Makes a full, held block findable; where an equal one is known already, that one stays the known one.

        depth: how many blocks come before it.
        """
        if digest not in self._block_of and self._digest_of[block] is None:
            self._name(block, digest)
            self.prefixes.add(digest, depth=depth)

    def drain_copies(self) -> list[BlockCopy]:
        """Gives the copies planned since the last call, in the order in which they have to happen."""
        copies, self._copies = self._copies, []
        return copies

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
        slots = [*self._slot_of.values(), *self._blank_slots]
        assert sorted(slots) == list(range(len(slots)))
        self.prefixes.check_invariants()
        assert all(self.knows(digest) for digest in self.prefixes.newest(len(self.prefixes)))

    def _name(self, block: int, digest: bytes) -> None:
        self._block_of[digest] = block
        self._digest_of[block] = digest

    def _hold(self, block: int) -> None:
        if self._num_holders[block] == 0:
            del self._cached[block]
        self._num_holders[block] += 1

    def _evict_oldest(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digest_of[block]
        assert digest is not None
        del self._block_of[digest]
        self._digest_of[block] = None
        self.num_evicted += 1
        self._sink(block, digest)
        if digest not in self._slot_of:
            self.prefixes.discard(digest)
        return block

    def _sink(self, block: int, digest: bytes) -> None:
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            return
        if self._blank_slots:
            slot = self._blank_slots.pop()
        elif self._slot_of:
            oldest, slot = self._slot_of.popitem(last=False)
            if oldest not in self._block_of:
                self.prefixes.discard(oldest)
        else:
            return
        self._slot_of[digest] = slot
        self.num_sunk += 1
        self._copies.append(BlockCopy(CopyKind.TO_HOST, block, slot))
