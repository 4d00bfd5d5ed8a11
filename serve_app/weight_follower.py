"""A replica's side of the weights: stages, commits and drops what the controller orders, and catches up by itself.

One change at a time, under a lock; reading and exchanging tensors happens in threads. A change is committed whole or
not at all, and the weights of before go on serving whatever fails.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engine import ContinuousBatchingManager, PitstopError, StagedWeights, WeightsInvalid
from serve_app.messages import CommittedWeights, SwapOrder, SwapReply, WeightSource
from serve_app.uninterrupted import run_uninterrupted

logger = logging.getLogger("ray.serve.pitstop")

CATCH_UP_RETRY_S = 5.0
"""Between two attempts to catch up from a source that failed; reading it again at once would only load the disk."""


@dataclass(frozen=True, slots=True)
class _Staged:
    order: SwapOrder
    weights: StagedWeights


class WeightFollower:
    """Keeps the weights of one engine at what the controller has committed.

    Invariant: `version` and `source` describe the tensors the engine generates with; at most one staged set exists.
    """

    def __init__(self, manager: ContinuousBatchingManager, *, replica_id: str, base_path: str) -> None:
        self._manager = manager
        self._replica_id = replica_id
        self._base_path = base_path
        self._lock = asyncio.Lock()
        self._staged: _Staged | None = None
        self._staged_s = 0.0
        self._paused_s = 0.0
        self._retry_at = 0.0
        self.source: WeightSource | None = None
        self.is_lagging = False
        self.error: str | None = None
        self._activity: str | None = None

    @property
    def version(self) -> int:
        return self._manager.weight_version

    @property
    def staged_swap_id(self) -> str | None:
        """The swap whose weights are staged here."""
        return self._staged.order.swap_id if self._staged is not None else None

    @property
    def state(self) -> str:
        """One of ready, staging, staged, paused and lagging."""
        if self._activity is not None:
            return self._activity
        if self.is_lagging:
            return "lagging"
        return "staged" if self._staged is not None else "ready"

    async def stage(self, order: SwapOrder) -> SwapReply:
        """Reads and checks new weights beside the old ones; takes the place of an earlier staged set."""
        return await run_uninterrupted(self._answer("staging", lambda: self._stage(order)))

    async def commit(self, order: SwapOrder) -> SwapReply:
        """Makes the staged weights of this order the serving ones; again is the same as once."""
        return await run_uninterrupted(self._answer("paused", lambda: self._commit(order)))

    async def abort(self, swap_id: str) -> SwapReply:
        """Drops the staged weights of this swap, if there are any."""
        return await run_uninterrupted(self._answer(None, lambda: self._drop(swap_id)))

    def is_behind(self, committed: CommittedWeights) -> bool:
        """Gives whether the engine has yet to reach the committed version, and fences the replica until it has."""
        self.is_lagging = self.version < committed.version
        return self.is_lagging

    async def catch_up(self, committed: CommittedWeights) -> bool:
        """Brings the engine to the committed version; gives whether it is there. Retries no sooner than 5 s later."""
        if not self.is_behind(committed):
            return True
        if time.monotonic() < self._retry_at:
            return False
        reply = await self._reach(committed)
        self.error = reply.error
        if not reply.ok:
            self._retry_at = time.monotonic() + CATCH_UP_RETRY_S
        return not self.is_behind(committed)

    async def _reach(self, committed: CommittedWeights) -> SwapReply:
        staged = self._staged
        if staged is not None and staged.order.swap_id == committed.swap_id:
            return await self.commit(staged.order)
        order = SwapOrder(
            swap_id=f"catch-up-{committed.version}",
            version=committed.version,
            source=committed.source,
            cast=committed.cast,
        )
        reply = await self.stage(order)
        return await self.commit(order) if reply.ok else reply

    async def _answer(self, activity: str | None, change: Callable[[], Awaitable[SwapReply]]) -> SwapReply:
        async with self._lock:
            self._activity = activity
            try:
                return await change()
            except (PitstopError, OSError, RuntimeError, ValueError, MemoryError) as error:
                logger.warning("event=weights_refused version=%d error=%r", self.version, str(error))
                return self._refusal(error)
            finally:
                self._activity = None

    async def _stage(self, order: SwapOrder) -> SwapReply:
        if self.staged_swap_id == order.swap_id:
            return self._reply(staged_s=self._staged_s)
        self._discard()
        if order.version <= self.version:
            raise RuntimeError(f"version {order.version} is not above {self.version}, which is served already")
        started = time.perf_counter()
        path = order.source.path if order.source is not None else self._base_path
        weights = await asyncio.to_thread(self._manager.stage_weights, path, cast=order.cast)
        self._staged = _Staged(order, weights)
        self._staged_s = time.perf_counter() - started
        return self._reply(staged_s=self._staged_s)

    async def _commit(self, order: SwapOrder) -> SwapReply:
        if self.version == order.version:
            return self._reply(paused_s=self._paused_s)
        staged = self._staged
        if staged is None or staged.order.swap_id != order.swap_id:
            raise RuntimeError(f"version {order.version} was not staged here")
        self._staged = None
        try:
            self._paused_s = await asyncio.to_thread(
                self._manager.commit_weights, staged.weights, version=order.version, in_flight=order.in_flight
            )
        finally:
            # Frees the set that does not serve: the old one, or after a failure the new one.
            await asyncio.to_thread(staged.weights.discard)
        self.source = order.source
        self.is_lagging = False
        self.error = None
        logger.info("event=weights_committed version=%d paused_s=%.4f", order.version, self._paused_s)
        return self._reply(paused_s=self._paused_s)

    async def _drop(self, swap_id: str) -> SwapReply:
        if self._staged is not None and self._staged.order.swap_id == swap_id:
            self._discard()
        return self._reply()

    def _discard(self) -> None:
        if self._staged is not None:
            self._staged.weights.discard()
            self._staged = None

    def _reply(self, *, staged_s: float = 0.0, paused_s: float = 0.0) -> SwapReply:
        return SwapReply(self._replica_id, self.version, ok=True, staged_s=staged_s, paused_s=paused_s)

    def _refusal(self, error: Exception) -> SwapReply:
        return SwapReply(
            self._replica_id,
            self.version,
            ok=False,
            error=str(error) or type(error).__name__,
            error_type=type(error).__name__,
            tensor=error.tensor if isinstance(error, WeightsInvalid) else None,
        )
