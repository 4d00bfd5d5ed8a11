"""Which replica has which prefix cached, as a router knows it: from what replicas tell, and from what it sent there.

A prefix is named by the digest of its last full block, which stands for all before it (`engine.prefix_digests`). Names
are cut to 32 bits here: among a million prefixes one look-up in four thousand is mistaken, and costs a worse choice.
A set of replicas is an int with a bit for each row, so that a look-up costs the same for 8 and for 512 of them.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from serve_app.routing.score import Floats

NAME_BYTES = 4
SPARE_NAMES = 1024
"""So many stay that are computed by now, before all are looked through."""


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

    @property
    def known(self) -> Mapping[int, int]:
        """The rows that have told a name, as bits."""
        return self._rows_of

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

    What is computed still is kept apart. The rest has two generations: when the newer one is full or as old as half of
    `memory_s`, it becomes the older one, which is forgotten. So nothing has to be looked through, and an entry lives
    for half of `memory_s` at least.
    """

    def __init__(self, *, memory_s: float = 30.0, max_names: int = 65_536) -> None:
        self._memory_s = memory_s
        self._max_names = max_names
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._since = -np.inf
        self._coming: dict[int, int] = {}
        self._pending: list[tuple[float, int, int, Sequence[int]]] = []
        self._num_pending = 0
        """Names in it, as often as they are."""
        self._num_added = 0

    @property
    def known(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The rows that must have computed a name by now, as bits; in either."""
        return self._newer, self._older

    @property
    def coming(self) -> Mapping[int, int]:
        """The rows that compute a name at this moment, as bits; some may have computed it since."""
        return self._coming

    def add(self, row: int, names: Sequence[int], *, now: float, ready_at: float = 0.0) -> None:
        """Remembers that a replica will have these, the blocks of one prompt, from `ready_at` on."""
        self.settle(now)
        if ready_at <= now:
            self._keep(row, names, now)
            return
        self._num_added += 1
        # What was estimated from nonsense must not be kept for ever.
        heapq.heappush(self._pending, (min(ready_at, now + self._memory_s), self._num_added, row, names))
        self._num_pending += len(names)
        self._note_coming(row, names)

    def settle(self, now: float) -> None:
        """Takes what is ready by now for computed."""
        while self._pending and self._pending[0][0] <= now:
            _, _, row, names = heapq.heappop(self._pending)
            self._num_pending -= len(names)
            self._keep(row, names, now)
        # Under steady load there is always something pending; most of what is coming must still be.
        if len(self._coming) > 2 * self._num_pending + (SPARE_NAMES if self._pending else 0):
            self._coming.clear()
            for _, _, row, names in self._pending:
                self._note_coming(row, names)

    def discard(self, row: int, names: Iterable[int]) -> None:
        """Forgets that these were sent there, because the replica turned out not to have them."""
        keep = ~(1 << row)
        for name in names:
            for kept in (self._newer, self._older, self._coming):
                if name in kept:
                    kept[name] &= keep

    def forget(self, row: int) -> None:
        """Forgets a replica that is gone."""
        self._pending = [entry for entry in self._pending if entry[2] != row]
        self._num_pending = sum(len(names) for *_, names in self._pending)
        heapq.heapify(self._pending)
        self.discard(row, {*self._newer, *self._older, *self._coming})

    def _note_coming(self, row: int, names: Iterable[int]) -> None:
        bit = 1 << row
        for name in names:
            self._coming[name] = self._coming.get(name, 0) | bit

    def _keep(self, row: int, names: Sequence[int], now: float) -> None:
        if now - self._since > self._memory_s / 2 or len(self._newer) > self._max_names / 2:
            is_old = now - self._since > self._memory_s
            self._older, self._newer, self._since = {} if is_old else self._newer, {}, now
        newer, bit = self._newer, 1 << row
        for name in names:
            newer[name] = newer.get(name, 0) | bit


def hit_tokens(
    names: Sequence[int], told: ToldPrefixes, sent: SentPrefixes, *, page_size: int, step_tokens: Floats
) -> Floats:
    """Gives, for each replica, how many leading tokens of a prompt it is likely to have once the prompt's turn comes.

    names: of the blocks of the prompt, in order. A name that is known vouches for all before it, since replicas tell of
    long prefixes at a few depths only. Of what is computed at this moment the last step comes too late: requests that
    share a step find nothing of each other.
    """
    hits = page_size * _depths(names, len(step_tokens), (told.known, *sent.known))
    if sent.coming:
        hits = np.maximum(hits, page_size * _depths(names, len(step_tokens), (sent.coming,)) - step_tokens)
    return hits


def _depths(names: Sequence[int], num_rows: int, known: Sequence[Mapping[int, int]]) -> Floats:
    """Gives, for each row, how many names lead to the last one that it has; `known` gives rows as bits, by name."""
    num_bytes = num_rows // 8 + 1
    missing = (1 << num_rows) - 1
    depths, sets = [], []
    for depth in range(len(names), 0, -1):
        name, rows = names[depth - 1], 0
        for rows_of in known:
            if name in rows_of:
                rows |= rows_of[name]
        rows &= missing
        if rows:
            missing &= ~rows
            depths.append(float(depth))
            sets.append(rows.to_bytes(num_bytes, "little"))
            if not missing:
                break
    if not sets:
        return np.zeros(num_rows)
    packed = np.frombuffer(b"".join(sets), dtype=np.uint8).reshape(len(sets), num_bytes)
    # No row is in two sets, so the sum over them is the depth of the one it is in.
    bits = np.unpackbits(packed, axis=1, count=num_rows, bitorder="little")
    return np.asarray(depths) @ bits
