"""The names of the prefixes that a cache holds, newest first, for whoever chooses among several caches.

The name of a block is a digest of everything before it, so a single name stands for a whole prefix. Where there are
more names than may be told, those at a few depths are enough: whoever looks finds the deepest of them, and loses at
most a third of the prefix.
"""

from collections.abc import Iterable
from itertools import islice
from threading import Lock


class PrefixIndex:
    """Digests of findable blocks, in the order in which they were last of use. For any thread; nothing here is slow.

    Invariant: the landmarks are those digests whose depth is one, in the same order.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._depths: dict[bytes, int] = {}
        self._landmarks: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._depths)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._depths

    def add(self, digest: bytes, *, depth: int) -> None:
        """Takes the name of a block that `depth` others come before."""
        with self._lock:
            self._depths[digest] = depth
            if is_landmark(depth):
                self._landmarks[digest] = None

    def touch(self, digests: Iterable[bytes]) -> None:
        """Makes known ones the newest, the last of them most; ignores others."""
        with self._lock:
            for digest in digests:
                depth = self._depths.pop(digest, None)
                if depth is None:
                    continue
                self._depths[digest] = depth
                if self._landmarks.pop(digest, self) is None:
                    self._landmarks[digest] = None

    def discard(self, digest: bytes) -> None:
        """Forgets one, where it is known."""
        with self._lock:
            self._depths.pop(digest, None)
            self._landmarks.pop(digest, None)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._depths.clear()
            self._landmarks.clear()

    def newest(self, limit: int) -> list[bytes]:
        """Gives all names where they are `limit` at most, else the newest landmarks; newest first."""
        with self._lock:
            names = self._depths if len(self._depths) <= limit else self._landmarks
            return list(islice(reversed(names), limit))

    def check_invariants(self) -> None:
        """Asserts what the class promises; for tests."""
        with self._lock:
            assert list(self._landmarks) == [name for name, depth in self._depths.items() if is_landmark(depth)]


def is_landmark(depth: int) -> bool:
    """Gives whether depth + 1 blocks are a power of two, or one and a half times such a power."""
    length = depth + 1
    if length % 3 == 0:
        length //= 3
    return length & (length - 1) == 0
