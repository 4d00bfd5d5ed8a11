"""Pauses of the whole fleet that somebody holds: each ends by itself when its holder does not renew it."""

import asyncio
import uuid
from collections import deque
from dataclasses import replace

from serve_app.messages import PauseLease, PauseOrder, PauseRequest

NUM_ENDED = 64
"""Ended pauses that replicas are told of; more than end between two heartbeats."""
BARRIER = "barrier-"
"""Begins the id under which a replica that comes too late for a swap is held back; nobody leases that."""
HELD_BACK_S = 24 * 3600.0
"""At most. It ends with the controller's word, as what a vote holds: others may generate with new weights by then."""


class PauseLeases:
    """The leases in force, by the event loop's clock. One event loop only."""

    def __init__(self, *, finish_timeout_s: float) -> None:
        self._finish_timeout_s = finish_timeout_s
        self._leases: dict[str, tuple[float, PauseLease]] = {}
        self._ended: deque[str] = deque(maxlen=NUM_ENDED)
        self._expired: deque[str] = deque(maxlen=NUM_ENDED)
        """Those that nobody ended."""

    def grant(self, request: PauseRequest) -> PauseLease:
        """Gives a new lease."""
        lease = PauseLease(uuid.uuid4().hex, request.lease_s, request.lease_s, request.in_flight, request.requested_by)
        return self._put(lease, request.lease_s)

    def adopt(self, order: PauseOrder) -> None:
        """Takes up a lease that a replica stands in and that was given before a restart."""
        is_known = order.lease_id in self._leases or order.lease_id in self._ended
        if not is_known and order.remaining_s > 0 and not order.lease_id.startswith(BARRIER):
            lease = PauseLease(
                order.lease_id, order.remaining_s, order.remaining_s, order.in_flight, "before a restart"
            )
            self._put(lease, order.remaining_s)

    def renew(self, lease_id: str, lease_s: float | None) -> PauseLease | None:
        """Puts the end of a lease off, by its own length where none is given; None where it is over."""
        known = self.find(lease_id)
        return None if known is None else self._put(known, lease_s or known.lease_s)

    def note_parked(self, lease_id: str, replicas: list[str]) -> PauseLease | None:
        """Keeps which replicas stood still when the lease was given."""
        if lease_id in self._leases:
            until, lease = self._leases[lease_id]
            self._leases[lease_id] = (until, replace(lease, replicas=replicas))
        return self.find(lease_id)

    def end(self, lease_id: str) -> bool:
        """Ends a lease; gives whether it was in force."""
        if lease_id not in self._ended:
            self._ended.append(lease_id)
        return self._leases.pop(lease_id, None) is not None

    def was_ended(self, lease_id: str) -> bool:
        """Gives whether somebody ended this lease before its time."""
        return self.find(lease_id) is None and lease_id not in self._expired

    def find(self, lease_id: str) -> PauseLease | None:
        return next((lease for lease in self.listed() if lease.lease_id == lease_id), None)

    def listed(self) -> list[PauseLease]:
        """Gives the leases in force, with what remains of each."""
        now = asyncio.get_running_loop().time()
        for lease_id in [one for one, (until, _) in self._leases.items() if until <= now]:
            self.end(lease_id)
            self._expired.append(lease_id)
        return [replace(lease, remaining_s=round(until - now, 3)) for until, lease in self._leases.values()]

    def orders(self) -> tuple[PauseOrder, ...]:
        """Gives the leases as replicas are told of them."""
        return tuple(self.order(lease) for lease in self.listed())

    def ended(self) -> tuple[str, ...]:
        """Gives the leases that ended lately."""
        return tuple(self._ended)

    def order(self, lease: PauseLease) -> PauseOrder:
        return PauseOrder(lease.lease_id, lease.remaining_s, lease.in_flight, self._finish_timeout_s)

    def _put(self, lease: PauseLease, lease_s: float) -> PauseLease:
        lease = replace(lease, lease_s=lease_s, remaining_s=lease_s)
        self._leases[lease.lease_id] = (asyncio.get_running_loop().time() + lease_s, lease)
        return lease
