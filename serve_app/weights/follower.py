"""A replica's side of the weights: carries out each phase of a swap as the controller orders it, and catches up itself.

One change at a time, under a lock; reading, parking and exchanging happens in threads. A change is committed whole or
not at all, and the weights of before go on serving whatever fails.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from engine import (
    ContinuousBatchingManager,
    NotFinished,
    ParkedLoop,
    Patience,
    PitstopError,
    StagedWeights,
    WeightsError,
    WeightsInvalid,
)
from serve_app.messages import (
    CommittedWeights,
    Probes,
    StagedDetails,
    SwapOrder,
    SwapReply,
    WeightSource,
)
from serve_app.uninterrupted import run_uninterrupted
from serve_app.weights.checks import check_digest, check_probes, first_difference
from serve_app.weights.held_loop import SwapHold
from serve_app.weights.leased_pauses import LeasedPauses

logger = logging.getLogger("ray.serve.pitstop")

CATCH_UP_RETRY_S = 5.0
"""Between two attempts to catch up from a source that failed; reading it again at once would only load the disk."""
CATCH_UP_FINISH_S = 5.0
"""For requests that are to finish first, at each attempt: the next swap waits as long."""
NUM_ENDED_SWAPS = 64
"""Swaps that ended here, whose late orders are refused."""

DigestsOf = Callable[[int], Awaitable[Mapping[str, str]]]
"""Gives the digest of each tensor of a committed version, as far as the controller knows."""


@dataclass(frozen=True, slots=True)
class _Staged:
    order: SwapOrder
    weights: StagedWeights
    staged_s: float


class WeightFollower:
    """Keeps the weights of one engine at what the controller has committed.

    Invariants: `version`, `swap_id`, `source` and `cast` describe the tensors the engine generates with; at most one
    staged set exists; between its vote for a swap and the controller's word on it the engine generates nothing.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        pauses: LeasedPauses,
        *,
        replica_id: str,
        base_path: str,
        undo_folder: str | None = None,
    ) -> None:
        """pauses: those of the same loop. base_path: the model the application was started with.

        undo_folder: see `WeightSettings`.
        """
        self._manager = manager
        self._pauses = pauses
        self._undo_folder = undo_folder
        self._replica_id = replica_id
        self._base_path = base_path
        self._lock = asyncio.Lock()
        self._staged: _Staged | None = None
        self._retired: StagedWeights | None = None
        """The set that no longer serves, kept until the engine runs again: freeing it takes time."""
        self._hold: SwapHold | None = None
        self._finishing: tuple[str, Patience] | None = None
        """The swap for which requests finish."""
        self._drained_for: str | None = None
        self._ended: deque[str] = deque(maxlen=NUM_ENDED_SWAPS)
        self._served_digests: Mapping[str, str] = {}
        self._misread: Mapping[str, str] | None = None
        """Digests of weights that are not the committed ones."""
        self._paused_s = 0.0
        self._retry_at = 0.0
        self._num_changes = 0
        self.source: WeightSource | None = None
        self.cast = True
        """Whether weights of another dtype were converted; those it was started with may have been."""
        self.swap_id: str | None = None
        """The swap that brought the version."""
        self.is_lagging = False
        self.is_corrupt = False
        """Whether the weights were read back and are not those that were committed."""
        self.error: str | None = None
        self.reply: SwapReply | None = None
        """The latest one."""
        self._activity: str | None = None

    @property
    def version(self) -> int:
        return self._manager.weight_version

    @property
    def staged_swap_id(self) -> str | None:
        """The swap whose weights are staged here."""
        return self._staged.order.swap_id if self._staged is not None else None

    @property
    def held_swap_id(self) -> str | None:
        """The swap for which the engine stands still, or holds requests back."""
        return self._hold.swap_id if self._hold is not None else None

    @property
    def has_voted(self) -> bool:
        return self._hold is not None and self._hold.has_voted

    @property
    def is_fenced(self) -> bool:
        """Whether no new work is to come here."""
        return self.is_lagging or self.is_corrupt or self._drained_for is not None

    @property
    def num_changes(self) -> int:
        """Grows with every order; tells whether an answer of the controller is about how things are now."""
        return self._num_changes

    @property
    def state(self) -> str:
        """One of ready, staging, staged, paused, draining and lagging."""
        if self._activity is not None:
            return self._activity
        if self._hold is not None and self._hold.parked.is_parked:
            return "paused"
        if self.is_lagging:
            return "lagging"
        if self._drained_for is not None:
            return "draining"
        return "staged" if self._staged is not None else "ready"

    # The phases of a swap

    async def stage(self, order: SwapOrder) -> SwapReply:
        """Reads and checks new weights beside the old ones; takes the place of an earlier staged set."""
        return await self._carry_out("stage", order, "staging", self._stage)

    async def details(self, order: SwapOrder) -> StagedDetails | None:
        """Gives what is staged for this order, tensor by tensor."""
        staged = self._staged
        if not self._is_meant(order) or staged is None or staged.order.swap_id != order.swap_id:
            return None
        return StagedDetails(dict(staged.weights.digests), list(staged.weights.unchanged))

    async def finish(self, order: SwapOrder) -> SwapReply:
        """Lets requests that are to finish do so, and holds others of their kind back, for a lease."""
        return await self._carry_out("finish", order, None, self._finish)

    async def park(self, order: SwapOrder) -> SwapReply:
        """Stops between two steps, for a lease."""
        return await self._carry_out("park", order, "paused", self._park)

    async def vote(self, order: SwapOrder) -> SwapReply:
        """Promises to stay parked until the controller says what became of the swap."""
        return await self._carry_out("vote", order, None, self._vote)

    async def drain(self, order: SwapOrder) -> SwapReply:
        """Fences the replica, so that new work goes elsewhere until the swap has ended here."""
        return await self._carry_out("drain", order, None, self._drain)

    async def commit(self, order: SwapOrder) -> SwapReply:
        """Makes the staged weights of this order the serving ones; stays parked where it was."""
        return await self._carry_out("commit", order, "paused", self._commit)

    async def resume(self, order: SwapOrder) -> SwapReply:
        """Generates again, once the version of this order is served."""
        return await self._carry_out("resume", order, None, self._resume)

    async def abort(self, order: SwapOrder) -> SwapReply:
        """Drops the staged weights of this swap, if there are any, and resumes."""
        # Before the lock: whoever parks for it now sees that it is over.
        if order.swap_id not in self._ended:
            self._ended.append(order.swap_id)
        if self._finishing is not None and self._finishing[0] == order.swap_id:
            self._finishing[1].end()
        return await self._carry_out("abort", order, None, self._abort)

    async def verify(self, order: SwapOrder) -> SwapReply:
        """Reads the served weights back and compares them with what was staged."""
        return await self._carry_out("verify", order, None, self._verify)

    # What heartbeats bring

    async def settle(self, committed: CommittedWeights, *, seen: int) -> None:
        """Ends what the controller no longer drives: drops orphans, and resumes where nothing holds it any more.

        committed: what the controller answered to a report made when `num_changes` was `seen`.
        """
        driven = committed.swap_in_progress
        is_driven = driven is not None and driven in (self.staged_swap_id, self.held_swap_id)
        self.is_lagging = self.version < committed.version and not is_driven
        if self._drained_for != driven:
            self._drained_for = None
        if self._hold is not None and self.held_swap_id == driven:
            self._hold.renew()
        if seen == self._num_changes and not self._lock.locked():
            await run_uninterrupted(self._end_orphans(committed, seen))

    async def catch_up(self, committed: CommittedWeights, *, digests_of: DigestsOf | None = None) -> bool:
        """Brings the engine to the committed version; gives whether it is there. Retries no sooner than 5 s later."""
        if self.version >= committed.version:
            return True
        if _clock() < self._retry_at or self.staged_swap_id not in (None, committed.swap_id):
            return False
        reply = await self._reach(committed, digests_of)
        self.error = reply.error
        if not reply.ok:
            self._retry_at = _clock() + CATCH_UP_RETRY_S
        self.is_lagging = self.version < committed.version
        return not self.is_lagging

    async def _reach(self, committed: CommittedWeights, digests_of: DigestsOf | None) -> SwapReply:
        staged = self._staged
        if staged is not None:
            return await self._take(staged.order, committed)
        order = SwapOrder(
            swap_id=f"catch-up-{committed.version}",
            version=committed.version,
            source=committed.source,
            cast=committed.cast,
            digest=committed.digest,
        )
        reply = await self._carry_out("stage", order, "staging", self._stage_beside_nothing)
        if not reply.ok:
            return await self._explained(reply, order, digests_of)
        return await self._take(order, committed)

    async def _take(self, order: SwapOrder, committed: CommittedWeights) -> SwapReply:
        """Commits what is staged and resumes where the engine stood still for a swap that is over."""

        async def take(order: SwapOrder) -> SwapReply:
            reply = await self._commit(order)
            self.swap_id = committed.swap_id
            await self._release()
            return reply

        wait_s = min(order.finish_timeout_s, CATCH_UP_FINISH_S)
        return await self._carry_out("commit", replace(order, targets=None, finish_timeout_s=wait_s), "paused", take)

    async def _stage_beside_nothing(self, order: SwapOrder) -> SwapReply:
        if self._staged is not None and self.staged_swap_id != order.swap_id:
            raise WeightsError(f"swap {self.staged_swap_id} has staged its weights here meanwhile")
        return await self._stage(order)

    async def _explained(self, reply: SwapReply, order: SwapOrder, digests_of: DigestsOf | None) -> SwapReply:
        """Names the first tensor that is not the committed one, where the weights were read and are others."""
        misread, self._misread = self._misread, None
        if misread is None or digests_of is None:
            return reply
        name = first_difference(misread, await digests_of(order.version))
        return replace(reply, error=f"{reply.error}; the first tensor that differs is {name}", tensor=name)

    # Inside

    def _is_meant(self, order: SwapOrder) -> bool:
        return order.targets is None or self._replica_id in order.targets

    async def _carry_out(
        self,
        phase: str,
        order: SwapOrder,
        activity: str | None,
        change: Callable[[SwapOrder], Awaitable[SwapReply]],
    ) -> SwapReply:
        if not self._is_meant(order):
            # The controller reads only the answers of those it meant.
            return self._reply(ok=False)
        return await run_uninterrupted(self._answer(phase, order, activity, change))

    async def _answer(
        self,
        phase: str,
        order: SwapOrder,
        activity: str | None,
        change: Callable[[SwapOrder], Awaitable[SwapReply]],
    ) -> SwapReply:
        async with self._lock:
            self._activity = activity
            self._num_changes += 1
            try:
                reply = await change(order)
            except (PitstopError, OSError, RuntimeError, ValueError, MemoryError) as error:
                logger.warning("event=%s_refused version=%d error=%r", phase, self.version, str(error))
                reply = self._refusal(error)
            finally:
                self._activity = None
        reply = replace(reply, swap_id=order.swap_id, phase=phase)
        self.reply = reply
        return reply

    async def _stage(self, order: SwapOrder) -> SwapReply:
        if self.staged_swap_id == order.swap_id:
            return self._staged_reply()
        if order.swap_id in self._ended:
            raise WeightsError("this swap is over")
        self._discard()
        # Where the engine still stands still for the swap before: no more than two sets fit.
        await self._free_retired()
        if order.version <= self.version:
            raise WeightsError(f"version {order.version} is not above {self.version}, which is served already")
        started = time.perf_counter()
        weights = await asyncio.to_thread(self._read, order)
        try:
            self._misread = dict(weights.digests)
            check_digest(weights.digest, order)
            self._misread = None
            if order.probes is not None:
                await asyncio.to_thread(self._probe, weights, order.probes)
        except BaseException:
            weights.discard()
            raise
        self._staged = _Staged(order, weights, time.perf_counter() - started)
        return self._staged_reply()

    def _read(self, order: SwapOrder) -> StagedWeights:
        changes = order.changes
        if changes is not None and changes.base == self.version:
            return self._manager.stage_weights(
                list(changes.folders), cast=changes.cast, partial=True, undo_folder=self._undo_folder
            )
        source = order.source
        under = [self._base_path] if source is None or source.on_model else []
        paths = [*under, *(source.folders if source is not None else ())]
        return self._manager.stage_weights(paths, cast=order.cast, undo_folder=self._undo_folder)

    def _probe(self, weights: StagedWeights, probes: Probes) -> None:
        check_probes(self._manager.probe_weights(weights, probes.prompts), probes)

    async def _finish(self, order: SwapOrder) -> SwapReply:
        self._check_staged(order)
        await self._release_settled(but=order.swap_id)
        if self._hold is None:
            patience = Patience()
            self._finishing = (order.swap_id, patience)
            try:
                settled = await self._settled_loop(order, patience)
            finally:
                self._finishing = None
            await self._keep(settled, order)
        return self._reply()

    async def _park(self, order: SwapOrder) -> SwapReply:
        self._check_staged(order)
        await self._release_settled(but=order.swap_id)
        hold = self._hold
        if hold is not None and not hold.parked.is_parked:
            hold.end_lease()
            self._hold = None
            await asyncio.to_thread(hold.parked.park, order.finish_timeout_s)
            await self._keep(hold.parked, order)
            return self._reply()
        if hold is not None:
            if hold.swap_id != order.swap_id:
                if order.in_flight == "finish":
                    raise WeightsError(f"this replica stands still since swap {hold.swap_id}, so nothing can finish")
                if order.pinned == "finish" and hold.pinned == "end":
                    raise WeightsError(
                        f"it stands still since swap {hold.swap_id}, for which pinned requests were not to finish; "
                        "try again when it has resumed, or set pinned to end"
                    )
                # What it stood still for is over, as the controller drives this one; the loop need not run between.
                hold.take_over(order.swap_id, order.lease_s)
            return self._reply()
        parked = await asyncio.to_thread(
            self._manager.park, timeout_s=order.finish_timeout_s, in_flight=order.in_flight, pinned=order.pinned
        )
        await self._keep(parked, order)
        return self._reply()

    async def _release_settled(self, *, but: str) -> None:
        """Lets requests begin that were held back for a swap that is over, as the controller drives another."""
        if self._hold is not None and not self._hold.parked.is_parked and self._hold.swap_id != but:
            await self._release()

    async def _keep(self, parked: ParkedLoop, order: SwapOrder) -> None:
        if order.swap_id in self._ended:
            await asyncio.to_thread(parked.resume)
            raise WeightsError("this swap is over")
        self._hold = SwapHold(
            parked,
            swap_id=order.swap_id,
            lease_s=order.lease_s,
            pinned=order.pinned,
            on_expiry=self._lease_expired,
        )

    async def _settled_loop(self, order: SwapOrder, patience: Patience) -> ParkedLoop:
        """Waits for requests to finish; in a leased pause none ever does, so that is refused without a wait."""
        pauses = [lease.lease_id for lease in self._pauses.orders] if self._pauses.is_parked else []
        timeout_s = 0.0 if pauses else order.finish_timeout_s
        try:
            return await asyncio.to_thread(
                self._manager.settle,
                timeout_s=timeout_s,
                in_flight=order.in_flight,
                pinned=order.pinned,
                patience=patience,
            )
        except NotFinished as error:
            if not pauses:
                raise
            raise NotFinished(
                f"requests that are to finish first stand still in the pause {', '.join(pauses)}, so they never will;"
                " resume and try again, or set pinned to end and another in_flight than finish"
            ) from error

    async def _vote(self, order: SwapOrder) -> SwapReply:
        self._check_staged(order)
        if self._hold is None or self._hold.swap_id != order.swap_id or not self._hold.parked.is_parked:
            raise WeightsError(f"the controller was silent for {order.lease_s:g} s, so this replica has resumed")
        self._hold.vote()
        return self._reply()

    async def _drain(self, order: SwapOrder) -> SwapReply:
        self._check_staged(order)
        self._drained_for = order.swap_id
        return self._reply()

    async def _commit(self, order: SwapOrder) -> SwapReply:
        if self.version == order.version:
            return self._reply(paused_s=self._paused_s)
        self._check_staged(order)
        staged = self._staged
        assert staged is not None
        digests = staged.weights.digests
        try:
            await asyncio.to_thread(self._exchange, staged.weights, order)
        except NotFinished:
            # Nothing has changed: it stays staged, and new work goes elsewhere, until it is tried again.
            raise
        except BaseException:
            await self._retire(staged)
            raise
        await self._retire(staged)
        self._served_digests = digests
        self.source = order.source
        self.cast = order.cast
        self.swap_id = order.swap_id
        self.is_lagging = False
        self.is_corrupt = False
        self.error = None
        # How long it stood still is known when it runs again.
        logger.info("event=weights_committed version=%d", order.version)
        return self._reply(paused_s=self._paused_s)

    async def _retire(self, staged: _Staged) -> None:
        """Frees the set that does not serve, as soon as nobody waits: the old one, or after a failure the new one."""
        self._staged, self._retired = None, staged.weights
        if self._hold is None:
            await self._free_retired()
        self._drained_for = None

    def _exchange(self, weights: StagedWeights, order: SwapOrder) -> None:
        # A park ends with the loop that was parked; another one may run by now.
        if self._hold is not None and self._hold.parked.is_parked:
            self._hold.parked.commit(weights, version=order.version, in_flight=order.in_flight)
            return
        self._paused_s = self._manager.commit_weights(
            weights,
            version=order.version,
            in_flight=order.in_flight,
            pinned=order.pinned,
            finish_timeout_s=order.finish_timeout_s,
        )

    async def _resume(self, order: SwapOrder) -> SwapReply:
        if self.version < order.version:
            raise WeightsError(f"version {order.version} is not served here, but {self.version}")
        if self.held_swap_id == order.swap_id:
            await self._release()
        return self._reply(paused_s=self._paused_s)

    async def _abort(self, order: SwapOrder) -> SwapReply:
        if self.staged_swap_id == order.swap_id:
            self._discard()
        if self._drained_for == order.swap_id:
            self._drained_for = None
        if self.held_swap_id == order.swap_id:
            await self._release()
        return self._reply()

    async def _verify(self, order: SwapOrder) -> SwapReply:
        if self.version != order.version:
            raise WeightsError(f"version {order.version} is not served here, but {self.version}")
        found = await asyncio.to_thread(self._manager.weight_digests)
        if (name := first_difference(found, self._served_digests)) is not None:
            self.is_corrupt = True
            raise WeightsInvalid(f"{name} is not what was staged for version {order.version}", tensor=name)
        return self._reply()

    async def _end_orphans(self, committed: CommittedWeights, seen: int) -> None:
        """Drops and resumes what no swap under way needs. After a vote this is the controller's word."""
        async with self._lock:
            if seen != self._num_changes:
                # An order has come first, of which the answer does not know.
                return
            driven, staged_id = committed.swap_in_progress, self.staged_swap_id
            is_wanted = staged_id == committed.swap_id and self.version < committed.version
            if staged_id is not None and staged_id != driven and not is_wanted:
                self._discard()
            if self._hold is not None and self.held_swap_id != driven and self.version >= committed.version:
                await self._release()

    def _lease_expired(self) -> None:
        """Resumes on the old weights; called while the replica has not voted."""
        self._expiry = asyncio.get_running_loop().create_task(run_uninterrupted(self._expire()))

    async def _expire(self) -> None:
        async with self._lock:
            if self._hold is not None and self._hold.is_expired:
                logger.warning("event=swap_lease_expired swap=%s", self._hold.swap_id)
                self._num_changes += 1
                await self._release()

    async def _release(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.end_lease()
            self._paused_s = await asyncio.to_thread(hold.parked.resume)
            logger.info("event=swap_resumed version=%d paused_s=%.4f", self.version, self._paused_s)
        await self._free_retired()

    async def _free_retired(self) -> None:
        retired, self._retired = self._retired, None
        if retired is not None:
            await asyncio.to_thread(retired.discard)

    def _check_staged(self, order: SwapOrder) -> None:
        if order.swap_id in self._ended:
            raise WeightsError("this swap is over")
        if self.staged_swap_id != order.swap_id:
            raise WeightsError(f"version {order.version} was not staged here")

    def _discard(self) -> None:
        if self._staged is not None:
            self._staged.weights.discard()
            self._staged = None

    def _staged_reply(self) -> SwapReply:
        assert self._staged is not None
        weights = self._staged.weights
        return replace(
            self._reply(),
            staged_s=self._staged.staged_s,
            digest=weights.digest,
            num_bytes=weights.num_bytes,
            is_streamed=weights.is_streamed,
        )

    def _reply(self, *, ok: bool = True, paused_s: float = 0.0) -> SwapReply:
        return SwapReply(self._replica_id, self.version, ok=ok, paused_s=paused_s)

    def _refusal(self, error: Exception) -> SwapReply:
        return SwapReply(
            self._replica_id,
            self.version,
            ok=False,
            error=str(error) or type(error).__name__,
            error_type=type(error).__name__,
            tensor=error.tensor if isinstance(error, WeightsInvalid) else None,
        )


def _clock() -> float:
    return asyncio.get_running_loop().time()
