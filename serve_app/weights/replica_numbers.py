"""The numbers of replicas, which label their metrics."""

import asyncio
from collections.abc import Set

START_S = 60.0
"""For a replica that has its number until it reports."""


class ReplicaNumbers:
    """Gives each replica a number of its own for as long as it lives; the next one takes it over. One event loop only.

    Serve's ranks are not that: where one leaves, others move up, and counters would jump to those of another process.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._starting: dict[str, float] = {}

    def take(self, replica_id: str, *, alive: Set[str]) -> int:
        """Gives the least number that nobody has. alive: the replicas heard of lately."""
        now = asyncio.get_running_loop().time()
        self._starting = {name: at for name, at in self._starting.items() if at > now - START_S}
        kept = {*alive, *self._starting, replica_id}
        self._numbers = {name: number for name, number in self._numbers.items() if name in kept}
        if replica_id not in self._numbers:
            self._starting[replica_id] = now
            taken = set(self._numbers.values())
            self._numbers[replica_id] = next(number for number in range(len(taken) + 1) if number not in taken)
        return self._numbers[replica_id]

    def adopt(self, replica_id: str, number: int | None) -> None:
        """Takes the number of a replica that reports, which a restarted controller does not know."""
        self._starting.pop(replica_id, None)
        if number is not None:
            self._numbers[replica_id] = number
