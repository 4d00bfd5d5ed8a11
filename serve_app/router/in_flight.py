"""Requests by the ids their clients know, so that they can be aborted."""

from typing import Protocol


class Abortable(Protocol):
    """What a request under way generates."""

    def abort(self) -> None:
        """Ends it with what it has, as cancelled."""
        ...


class InFlight:
    """For one event loop. Ids are the clients' and need not be unique: an abort ends all of its caller that have it."""

    def __init__(self) -> None:
        self._entries: dict[str, set[tuple[str, Abortable]]] = {}

    def add(self, ids: tuple[str, ...], owner: str, work: Abortable) -> None:
        for request_id in ids:
            self._entries.setdefault(request_id, set()).add((owner, work))

    def remove(self, ids: tuple[str, ...], owner: str, work: Abortable) -> None:
        for request_id in ids:
            entries = self._entries.get(request_id, set())
            entries.discard((owner, work))
            if not entries:
                self._entries.pop(request_id, None)

    def abort(self, request_id: str, owner: str) -> int:
        """Aborts the owner's requests of this id and gives how many there were; others' are none of its business."""
        found = [work for holder, work in self._entries.get(request_id, ()) if holder == owner]
        for work in found:
            work.abort()
        return len(found)
