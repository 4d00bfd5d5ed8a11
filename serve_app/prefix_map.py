"""Which replica has which prefix cached, as a router knows it: from what replicas tell, and from what it sent there.

A prefix is named by the digest of its last full block, which stands for all before it (`engine.prefix_digests`). Names
are cut to 32 bits here: among a million prefixes one look-up in four thousand is mistaken, and costs a worse choice.
A set of replicas is an int with a bit for each row, so that a look-up costs the same for 8 and for 512 of them.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from serve_app.routing_score import Floats

NAME_BYTES = 4


def short_names(digests: Iterable[bytes]) -> list[int]:
    """Gives the names of blocks as numbers."""
    return [int.from_bytes(digest[:NAME_BYTES], "little") for digest in digests]


def pack_names(digests: Iterable[bytes]) -> bytes:
    """Gives names as a report carries them: NAME_BYTES each."""
    return b"".join(digest[:NAME_BYTES] for digest in digests)


class ToldPrefixes:
    """What replicas tell they have. One thread only. Invariant: a name is known while some row has told it."""

    def __init__(self) -> None:
        self._rows_of: dict[int, int] = {}
        self._names_of: dict[int, frozenset[int]] = {}
        self._packed_of: dict[int, bytes] = {}

    def get(self, name: int) -> int:
        """Gives the rows that have told this name, as bits."""
        return self._rows_of.get(name, 0)

    def tell(self, row: int, packed: bytes) -> None:
        """Replaces what a replica has told: `pack_names` of its cached prefixes, in any order."""
        if self._packed_of.get(row) == packed:
            return
        self._packed_of[row] = packed
        self.tell_names(row, np.frombuffer(packed, dtype=f"<u{NAME_BYTES}").tolist())

    def tell_names(self, row: int, names: Iterable[int]) -> None:
        """Replaces what a replica has told, by `short_names`."""
        now, before, bit = frozenset(names), self._names_of.get(row, frozenset()), 1 << row
        self._names_of[row] = now
        for name in now - before:
            self._rows_of[name] = self._rows_of.get(name, 0) | bit
        for name in before - now:
            self._rows_of[name] &= ~bit
            if not self._rows_of[name]:
                del self._rows_of[name]

    def forget(self, row: int) -> None:
        """Forgets a replica that is gone."""
        self.tell_names(row, ())
        self._names_of.pop(row)
        self._packed_of.pop(row, None)


class SentPrefixes:
    """What was sent where lately, since it takes a while until replicas tell. One thread only.

    Two generations: when the newer one is full or as old as half of `memory_s`, it becomes the older one, which is
    forgotten. So nothing has to be looked through, and an entry lives for half of `memory_s` at least.
    """

    def __init__(self, *, memory_s: float = 30.0, max_names: int = 65_536) -> None:
        self._memory_s = memory_s
        self._max_names = max_names
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._since = -np.inf

    def get(self, name: int) -> int:
        """Gives the rows to which this name was sent, as bits."""
        return self._newer.get(name, 0) | self._older.get(name, 0)

    def add(self, row: int, names: Iterable[int], *, now: float) -> None:
        """Remembers that a replica is about to have these: the blocks of one prompt."""
        if now - self._since > self._memory_s / 2 or len(self._newer) > self._max_names / 2:
            is_old = now - self._since > self._memory_s
            self._older, self._newer, self._since = {} if is_old else self._newer, {}, now
        newer, bit = self._newer, 1 << row
        for name in names:
            newer[name] = newer.get(name, 0) | bit

    def discard(self, row: int, names: Iterable[int]) -> None:
        """Forgets that these were sent there, because the replica turned out not to have them."""
        keep = ~(1 << row)
        for name in names:
            for generation in (self._newer, self._older):
                if name in generation:
                    generation[name] &= keep

    def forget(self, row: int) -> None:
        """Forgets a replica that is gone."""
        self.discard(row, {*self._newer, *self._older})


def hit_blocks(names: Sequence[int], num_rows: int, told: ToldPrefixes, sent: SentPrefixes) -> Floats:
    """Gives, for each replica, how many leading blocks of a prompt it is likely to have; `names` in their order.

    A name that is known vouches for all before it, since replicas tell of long prefixes at a few depths only.
    """
    hits = np.zeros(num_rows)
    missing = (1 << num_rows) - 1
    for depth in range(len(names), 0, -1):
        name = names[depth - 1]
        rows = (told.get(name) | sent.get(name)) & missing
        if rows:
            missing &= ~rows
            _set_bits(hits, rows, depth)
            if not missing:
                break
    return hits


def _set_bits(values: Floats, bits: int, value: float) -> None:
    packed = np.frombuffer(bits.to_bytes(len(values) // 8 + 1, "little"), dtype=np.uint8)
    values[np.unpackbits(packed, count=len(values), bitorder="little").view(np.bool_)] = value
