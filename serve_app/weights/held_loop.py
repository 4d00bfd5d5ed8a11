"""A replica's loop while it stands still for a swap.

A hold ends by itself when the controller is silent for a lease, but only before the vote: who has voted stays until it
is told what became of the swap.
"""

import asyncio
from collections.abc import Callable

from engine import ParkedLoop


class SwapHold:
    """The loop parked for one swap at a time, or settled before. One event loop only."""

    def __init__(
        self, parked: ParkedLoop, *, swap_id: str, lease_s: float, pinned: str, on_expiry: Callable[[], None]
    ) -> None:
        self.parked = parked
        self.pinned = pinned
        """What the swap it was parked for did with pinned requests."""
        self._on_expiry = on_expiry
        self._lease: asyncio.TimerHandle | None = None
        self.take_over(swap_id, lease_s)

    @property
    def is_expired(self) -> bool:
        return self._lease is None and not self.has_voted

    def take_over(self, swap_id: str, lease_s: float) -> None:
        """Goes on standing still, now for this swap, which has no vote yet."""
        self.swap_id = swap_id
        self.has_voted = False
        self._lease_s = lease_s
        self.renew()

    def renew(self) -> None:
        """Begins the lease anew; does nothing after the vote."""
        self.end_lease()
        if not self.has_voted:
            self._lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire)

    def vote(self) -> None:
        """From here on only the controller's word ends the hold."""
        self.has_voted = True
        self.end_lease()

    def end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def _expire(self) -> None:
        self._lease = None
        self._on_expiry()
