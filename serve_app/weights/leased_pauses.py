"""The pauses that somebody leases, as one replica stands in them. Each ends by itself, whoever is silent."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from engine import ContinuousBatchingManager, ParkedLoop, Patience, PitstopError, WeightsError
from serve_app.messages import PauseOrder, SwapReply
from serve_app.uninterrupted import run_uninterrupted

logger = logging.getLogger("ray.serve.pitstop")

NUM_ENDED = 64
"""Leases that ended here, whose late orders are ignored."""
RETRY_S = 1.0
"""Before a loop that could not be resumed is tried again."""


class LeasedPauses:
    """Parks the loop while a lease is in force. One event loop only, and its clock.

    Invariants: a parked loop resumes at the end of the last lease, without anybody's help; nobody waits for a loop to
    park for a lease that was ended.
    """

    def __init__(self, manager: ContinuousBatchingManager, *, replica_id: str) -> None:
        self._manager = manager
        self._replica_id = replica_id
        self._leases: dict[str, tuple[float, PauseOrder]] = {}
        self._ended: deque[str] = deque(maxlen=NUM_ENDED)
        self._parked: ParkedLoop | None = None
        self._parked_in_flight = ""
        self._waiting_for: tuple[str, Patience] | None = None
        """The lease that the loop is to park for, while it does not yet."""
        self._following = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_parked(self) -> bool:
        return self._parked is not None

    @property
    def orders(self) -> tuple[PauseOrder, ...]:
        """The leases in force, with what remains of each."""
        now = _clock()
        self._leases = {key: lease for key, lease in self._leases.items() if lease[0] > now}
        return tuple(replace(order, remaining_s=until - now) for until, order in self._leases.values())

    async def pause(self, order: PauseOrder) -> SwapReply:
        """Stands still until the lease is over; the same lease again puts its end off."""
        is_new = order.lease_id not in self._leases
        self._put(order)
        error = await self.follow()
        if order.lease_id in self._ended:
            error = WeightsError("this pause was ended before it had begun")
        if error is None and order.in_flight == "finish" and self._parked_in_flight != "finish" and self.is_parked:
            if is_new:
                self._leases.pop(order.lease_id, None)
            error = WeightsError("this replica stands still already, so nothing can finish; end the other pause first")
        return SwapReply(
            self._replica_id,
            self._manager.weight_version,
            ok=error is None,
            error=None if error is None else str(error),
            error_type=None if error is None else type(error).__name__,
            swap_id=order.lease_id,
            phase="pause",
        )

    async def end(self, lease_ids: Iterable[str]) -> None:
        """Ends leases before their time; those not known will not begin."""
        self._end(lease_ids)
        await self.follow()

    def hear(self, wanted: Iterable[PauseOrder], ended: Iterable[str]) -> None:
        """Takes what a heartbeat brings, and follows it beside the caller."""
        self._end(ended)
        for order in wanted:
            self._put(order)
        if bool(self._leases) != self.is_parked:
            self._follow_beside()

    async def follow(self) -> Exception | None:
        """Parks where a lease is in force and resumes where none is; gives why it cannot."""
        return await run_uninterrupted(self._follow())

    async def _follow(self) -> Exception | None:
        async with self._following:
            try:
                orders = self.orders
                if orders and self._parked is None:
                    await self._park(orders[0])
                if not self.orders and self._parked is not None:
                    await asyncio.to_thread(self._parked.resume)
                    self._parked = None
            except (PitstopError, RuntimeError) as error:
                logger.warning("event=pause_failed error=%r", str(error))
                return error
            finally:
                self._set_timer()
        return None

    async def _park(self, order: PauseOrder) -> None:
        # No longer than the lease: a loop that is parked after it would stand still for nobody.
        timeout_s = min(order.finish_timeout_s, order.remaining_s)
        patience = Patience()
        self._waiting_for = (order.lease_id, patience)
        try:
            self._parked = await asyncio.to_thread(
                self._manager.park, timeout_s=timeout_s, in_flight=order.in_flight, pinned="end", patience=patience
            )
        finally:
            self._waiting_for = None
        self._parked_in_flight = order.in_flight

    def _put(self, order: PauseOrder) -> None:
        if order.lease_id not in self._ended:
            self._leases[order.lease_id] = (_clock() + order.remaining_s, order)

    def _end(self, lease_ids: Iterable[str]) -> None:
        for lease_id in lease_ids:
            self._leases.pop(lease_id, None)
            if lease_id not in self._ended:
                self._ended.append(lease_id)
            if self._waiting_for is not None and self._waiting_for[0] == lease_id:
                self._waiting_for[1].end()

    def _set_timer(self) -> None:
        """Looks again when the first lease ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leases:
            first = max(min(until for until, _ in self._leases.values()), _clock())
            self._timer = asyncio.get_running_loop().call_at(first, self._follow_beside)
        elif self._parked is not None:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._follow_beside)

    def _follow_beside(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self.follow())


def _clock() -> float:
    return asyncio.get_running_loop().time()
