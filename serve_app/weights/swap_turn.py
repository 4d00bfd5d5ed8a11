"""One swap at a time: who comes second waits, or is told whose turn it is."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine import SwapConflict


class SwapTurn:
    """The turn to change the fleet's weights. One event loop only.

    Invariant: swap_id is the id of the swap under way, None where none is.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self.swap_id: str | None = None

    def refuse_if_taken(self, *, wait_s: float) -> None:
        """Raises SwapConflict where a swap that does not wait would not have its turn now."""
        # Whoever waits comes first, also where the swap before has just ended.
        if wait_s <= 0 and (self._lock.locked() or self._num_waiting > 0):
            raise SwapConflict(f"{self._other()} is under way; try again when it has ended, or set wait_s")

    @asynccontextmanager
    async def taken(self, *, wait_s: float) -> AsyncIterator[str]:
        """Gives a new swap's id once no other is under way; raises SwapConflict after wait_s, naming the other."""
        await self._acquire(wait_s)
        self.swap_id = uuid.uuid4().hex
        try:
            yield self.swap_id
        finally:
            self.swap_id = None
            self._lock.release()

    async def _acquire(self, wait_s: float) -> None:
        self.refuse_if_taken(wait_s=wait_s)
        self._num_waiting += 1
        try:
            # With no wait_s nobody is in its way.
            async with asyncio.timeout(wait_s if wait_s > 0 else None):
                await self._lock.acquire()
        except TimeoutError:
            raise SwapConflict(
                f"{self._other()} is still under way after {wait_s:g} s; try again when it has ended"
            ) from None
        finally:
            self._num_waiting -= 1

    def _other(self) -> str:
        return f"swap {self.swap_id}" if self.swap_id is not None else "another swap"
