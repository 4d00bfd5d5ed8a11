"""Which weights the fleet serves: the logic of the controller, without Ray.

A swap goes in phases. Every replica stages the new weights beside the old; in a synchronous swap all then let finish
what is to, park and vote. Only when all have, the new version is written to the history, which is the commit point, and
all are told to commit, in a rolling swap in turn; else all are told to drop them. A replica that does not hear it
learns it from its next heartbeat and is out of routing until it has caught up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from dataclasses import replace

from engine import InvalidRequest, PitstopError, SwapConflict, WeightsError, WeightsInvalid, WeightsSourceError
from serve_app.messages import (
    Changes,
    CommittedVersion,
    CommittedWeights,
    FleetStatus,
    PauseLease,
    PauseOrder,
    PauseRequest,
    ReplicaReport,
    RollbackRequest,
    SwapOptions,
    SwapOrder,
    SwapRequest,
    SwapResult,
    WeightSource,
)
from serve_app.metrics import CONTROLLER_METRICS, Recorder
from serve_app.protocol.errors import LeaseGone, RollingFailed, VersionUnavailable
from serve_app.settings import WeightSettings
from serve_app.uninterrupted import run_uninterrupted
from serve_app.weights.failures import SwapFailures
from serve_app.weights.fleet_calls import CallAll, FleetCalls
from serve_app.weights.history import WeightHistory
from serve_app.weights.hub_source import HubFetches, fetch_from_hub
from serve_app.weights.pause_leases import BARRIER, HELD_BACK_S, PauseLeases
from serve_app.weights.replica_census import ReplicaCensus
from serve_app.weights.replica_numbers import ReplicaNumbers
from serve_app.weights.replica_reports import ReplicaReports
from serve_app.weights.stragglers import Stragglers
from serve_app.weights.swap_checks import MAX_LAYERS, check_base, check_lease, check_pause, check_rollback, check_swap
from serve_app.weights.swap_turn import SwapTurn
from serve_app.weights.two_phase_swap import CheckAlone, Kill, TwoPhaseSwap

logger = logging.getLogger("ray.serve.pitstop")

RECOVERY_TIMEOUT_S = 10.0
"""For the reports of running replicas after a restart; ten heartbeats."""
ENDED_EARLY = "the pause was ended by a resume before every replica stood still, so the fleet generates; pause again"
SWAP_OUTCOMES = ("committed", "refused", "conflict", "rolled_back")

CountRunning = Callable[[], Awaitable[int]]
"""Gives how many replicas are running and so will report."""


class FleetWeights:
    """Who serves what, and one swap at a time. One event loop only."""

    def __init__(
        self,
        settings: WeightSettings,
        history: WeightHistory,
        *,
        call_all: CallAll,
        count_running: CountRunning,
        check_alone: CheckAlone,
        kill: Kill,
        recorder: Recorder | None = None,
    ) -> None:
        self._settings = settings
        self._history = history
        self._count_running = count_running
        self._kill = kill
        self._turn = SwapTurn()
        self._fetches = HubFetches(fetch_from_hub)
        self._numbers = ReplicaNumbers()
        self._reports = ReplicaReports(forget_after_s=settings.forget_after_s)
        self._calls = FleetCalls(settings, self._reports, call_all=call_all)
        self._two_phases = TwoPhaseSwap(
            settings, history, self._reports, calls=self._calls, check_alone=check_alone, kill=kill
        )
        self._leases = PauseLeases(finish_timeout_s=settings.finish_timeout_s)
        self._stragglers = Stragglers(self._reports, converge_timeout_s=settings.converge_timeout_s)
        self._killing: set[asyncio.Task[None]] = set()
        """The event loop holds tasks weakly only."""
        self._problem: tuple[int, str] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._is_recovered = False
        self._recorder = recorder or Recorder(CONTROLLER_METRICS)
        self._census = ReplicaCensus(self._recorder, forget_after_s=settings.forget_after_s)
        # From zero, so that the first one is a rise.
        for outcome in SWAP_OUTCOMES:
            self._recorder.count("pitstop_swaps_total", outcome, amount=0)
        self._failures = SwapFailures(self._recorder)

    # What replicas ask

    async def committed(self) -> CommittedWeights:
        """Gives what every replica has to serve; after a restart only once the replicas were heard."""
        await self._recover()
        return replace(self._history.committed, swap_in_progress=self._turn.swap_id)

    async def heartbeat(self, report: ReplicaReport) -> CommittedWeights:
        """Takes the report of a replica and tells it what it has to serve."""
        self._reports.add(report)
        # Before recovery is done, those report that an earlier controller knew: a new one waits for it to join.
        is_serving = not self._is_recovered or report.generated_tokens > 0
        if self._census.hear(report.replica_id, is_serving=is_serving):
            # A replica has started, so what kept another from it is mended.
            self._problem = None
        self._numbers.adopt(report.replica_id, report.number)
        for order in report.leases:
            self._leases.adopt(order)
        await self._recover()
        if report.version > self._history.newest.version:
            # A replica that recovery did not hear of in time; versions only grow, so the others follow it.
            await self._history.adopt(report)
        self._replace_stragglers()
        self._set_gauges()
        committed = await self.committed()
        pauses = self._pauses_of(report.replica_id)
        # A controller that has restarted does not know of them.
        kept = {order.lease_id for order in pauses}
        over = [one.lease_id for one in report.leases if one.lease_id.startswith(BARRIER) and one.lease_id not in kept]
        return replace(committed, pauses=pauses, ended_pauses=(*self._leases.ended(), *over))

    async def number(self, replica_id: str) -> int:
        """Gives a new replica its number."""
        await self._recover()
        return self._numbers.take(replica_id, alive=self._reports.names())

    async def digests(self, version: int) -> Mapping[str, str]:
        """Gives the digest of each tensor of a committed version, none where they are not known any more."""
        await self._recover()
        details = await self._history.details(version)
        return details.digests if details is not None else {}

    async def start_failed(self, replica_id: str, error: str) -> None:
        """Keeps for the status why a new replica could not take the committed weights."""
        self._recorder.count("pitstop_replica_start_failures_total")
        self._problem = (self._history.newest.version, f"replica {replica_id} cannot start: {error}")

    def expect_leaving(self, num_replicas: int, *, within_s: float) -> None:
        """Takes that so many replicas are scaled away, and so are not lost if they end within this time."""
        self._census.expect_leaving(num_replicas, within_s=within_s)

    # What people and trainers ask

    async def status(self) -> FleetStatus:
        """Gives the committed version, those before it, and every replica heard of lately."""
        await self._recover()
        committed = self._history.committed
        is_current = self._problem is not None and self._problem[0] == committed.version
        return FleetStatus(
            committed,
            self._reports.listed(committed.version),
            self._turn.swap_id,
            phase=self._two_phases.phase if self._turn.swap_id is not None else None,
            history=self._history.listed(),
            problem=self._problem[1] if self._problem is not None and is_current else None,
            pauses=self._leases.listed(),
            failures=self._failures.listed(),
        )

    async def swap(self, request: SwapRequest) -> SwapResult:
        """Brings new weights to the whole fleet; raises the error of the first replica that refuses them.

        The old weights then go on serving everywhere. Raises SwapConflict while another swap is under way, and for an
        idempotency key that another request has used.
        """
        await self._recover()
        check_swap(request)
        return await self._carry_out(request)

    async def rollback(self, request: RollbackRequest) -> SwapResult:
        """Brings the weights of an earlier version to the whole fleet, under a new number, as a swap does.

        Raises VersionUnavailable where the history does not hold the version, and where its weights are gone.
        """
        await self._recover()
        check_rollback(request)
        return await self._carry_out(request)

    async def pause(self, request: PauseRequest) -> PauseLease:
        """Has every replica stand still until the lease ends; gives it once all do, or raises and pauses none.

        Raises LeaseGone where the lease is over before, or `resume` has ended it.
        """
        await self._recover()
        check_pause(request)
        lease = self._leases.grant(request)
        try:
            order = self._leases.order(lease)
            replies = await self._calls.ask_everyone("pause", order, timeout_s=request.lease_s)
        except BaseException as error:
            if isinstance(error, WeightsError) and self._leases.was_ended(lease.lease_id):
                raise LeaseGone(ENDED_EARLY) from error
            # Also where the caller has gone: nobody else could end it.
            await run_uninterrupted(self._end_pauses((lease.lease_id,)))
            raise
        kept = self._leases.note_parked(lease.lease_id, sorted(replies))
        if kept is None and self._leases.was_ended(lease.lease_id):
            raise LeaseGone(ENDED_EARLY)
        if kept is None:
            raise LeaseGone(f"the pause took longer than its lease of {lease.lease_s:g} s; ask for a longer one")
        return kept

    async def renew_pause(self, lease_id: str, lease_s: float | None = None) -> PauseLease:
        """Puts the end of a pause off, by the length of its lease where none is given. Raises LeaseGone."""
        await self._recover()
        if lease_s is not None:
            check_lease(lease_s)
        lease = self._leases.renew(lease_id, lease_s)
        if lease is None:
            is_still = bool(self._leases.listed())
            state = "the fleet stands still for another pause alone" if is_still else "the fleet generates"
            raise LeaseGone(f"pause {lease_id} is over, so {state}; pause again")
        # Who does not hear it hears it with the next heartbeat.
        await self._calls.tell("pause", self._leases.order(lease), timeout_s=self._settings.commit_timeout_s)
        return lease

    async def resume(self, lease_id: str | None = None) -> list[str]:
        """Ends one pause, or all; gives those that were ended. Raises LeaseGone where this one is over."""
        await self._recover()
        known = [lease.lease_id for lease in self._leases.listed()]
        ending = known if lease_id is None else [one for one in known if one == lease_id]
        if lease_id is not None and not ending:
            raise LeaseGone(f"pause {lease_id} is over already")
        await run_uninterrupted(self._end_pauses(tuple(ending)))
        return ending

    async def metrics(self) -> str:
        """Gives the controller's numbers as Prometheus text."""
        self._set_gauges()
        return self._recorder.expose()

    def _set_gauges(self) -> None:
        self._census.look()
        version = self._history.newest.version
        self._recorder.set_gauge("pitstop_committed_weight_version", value=version)
        for state, count in self._reports.count_states(version).items():
            self._recorder.set_gauge("pitstop_replicas", state, value=count)
        behind = [version - report.version for report in self._reports.listed(version)]
        self._recorder.set_gauge("pitstop_weight_skew_versions", value=max([0, *behind]))
        self._stragglers.look(version)
        self._recorder.set_gauge("pitstop_weight_skew_seconds", value=self._stragglers.behind_s)
        self._recorder.set_gauge("pitstop_pause_leases", value=len(self._leases.listed()))

    # One swap

    async def _carry_out(self, request: SwapRequest | RollbackRequest) -> SwapResult:
        """Gives what this request has brought before, or brings it now, in its turn."""
        if (known := await self._finished(request)) is not None:
            return known
        try:
            self._turn.refuse_if_taken(wait_s=request.wait_s)
            # Before its turn: other swaps need not wait for a download.
            source = await self._fetched(request) if isinstance(request, SwapRequest) else WeightSource()
            async with self._turn.taken(wait_s=request.wait_s) as swap_id:
                if (known := await self._finished(request)) is not None:
                    return known
                self._refuse_used_key(request.idempotency_key)
                return await self._bring(request, swap_id, source)
        except SwapConflict:
            self._recorder.count("pitstop_swaps_total", "conflict")
            raise

    async def _fetched(self, request: SwapRequest) -> WeightSource:
        """Gives the source, a hub's with the folder it was fetched to. Raises WeightsSourceError."""
        source = request.source
        if source.hub is None:
            return source
        try:
            return await self._fetches.fetch(source, timeout_s=self._settings.fetch_timeout_s)
        except PitstopError as error:
            self._failures.add(request, error, was_rolled_back=False)
            raise

    async def _bring(self, request: SwapRequest | RollbackRequest, swap_id: str, source: WeightSource) -> SwapResult:
        """Runs one swap, whose version gets its number here. source: of the request, fetched."""
        self._two_phases.was_rolled_back = False
        try:
            if isinstance(request, SwapRequest):
                result = await self._swap(request, swap_id, source)
            else:
                result = await self._go_back(request, swap_id)
        except SwapConflict:
            raise
        except PitstopError as error:
            self._failures.add(request, error, was_rolled_back=self._two_phases.was_rolled_back)
            logger.warning("event=swap_refused swap=%s error=%r", swap_id, str(error))
            raise
        finally:
            self._leases.end(_barrier_of(swap_id))
        self._stragglers.expect(result.lagging)
        self._record(result)
        return result

    async def _swap(self, request: SwapRequest, swap_id: str, source: WeightSource) -> SwapResult:
        check_base(request.base_version, self._history.newest.version)
        version = CommittedVersion(0, source, request.cast, request.label)
        changes = None
        if request.partial:
            newest = self._history.newest
            changes = Changes(source.folders, newest.version, request.cast)
            version = replace(
                version,
                source=_over(newest.source, source),
                cast=request.cast or newest.cast,
                asked=request.source,
                is_cast_asked=request.cast,
            )
        order = replace(self._order(version, request, swap_id), changes=changes, probes=request.probes)
        try:
            return await self._run(version, order, request)
        except RollingFailed as error:
            raise await self._return_all(error, request, swap_id) from error

    async def _go_back(self, request: RollbackRequest, swap_id: str) -> SwapResult:
        target = self._history.rollback_target(request.version)
        label = f"rollback of {self._history.newest.version} to {target.version}"
        version = _again(target, label)
        try:
            return await self._run(version, self._order(version, request, swap_id, target), request)
        except (WeightsSourceError, WeightsInvalid) as error:
            raise VersionUnavailable(f"there is no going back to version {target.version}: {error}") from error
        except RollingFailed as error:
            raise await self._return_all(error, request, swap_id) from error

    async def _return_all(self, failed: RollingFailed, options: SwapOptions, swap_id: str) -> WeightsError:
        """Brings the weights from before a rolling swap that failed back to all; gives what to raise."""
        # First: whoever repeats the request must not be told that it has succeeded, whatever becomes of going back.
        await self._history.note_failed(self._history.newest.version)
        target = self._history.previous
        version = _again(target, f"rollback of {self._history.newest.version}, which failed")
        options = replace(options, on_failure="continue", idempotency_key=None)
        order = self._order(version, options, f"{swap_id}-back", target)
        self._turn.swap_id = order.swap_id
        result = await self._run(version, order, options)
        self._two_phases.was_rolled_back = True
        return RollingFailed(
            f"{failed}; all replicas are back at the weights of version {target.version}, as version {result.version}"
        )

    async def _run(self, version: CommittedVersion, order: SwapOrder, options: SwapOptions) -> SwapResult:
        numbered = replace(
            version,
            version=order.version,
            swap_id=order.swap_id,
            requested_by=options.requested_by,
            idempotency_key=options.idempotency_key,
        )
        return await self._two_phases.run(numbered, order, options)

    def _order(
        self, version: CommittedVersion, options: SwapOptions, swap_id: str, target: CommittedVersion | None = None
    ) -> SwapOrder:
        """Gives the order of a swap; target: the version whose weights these have to be."""
        return SwapOrder(
            swap_id,
            self._history.next_version,
            version.source,
            in_flight=options.in_flight,
            cast=version.cast,
            pinned=options.pinned,
            finish_timeout_s=options.finish_timeout_s or self._settings.finish_timeout_s,
            lease_s=self._settings.lease_s,
            digest=self._history.digest_of(target) if target is not None else None,
        )

    async def _finished(self, request: SwapRequest | RollbackRequest) -> SwapResult | None:
        """Gives what this request has brought, unless its swap is still under way."""
        known = self._history.find_key(request.idempotency_key)
        if known is None or known.swap_id == self._turn.swap_id or not _is_of(known, request):
            return None
        return await self._history.result_of(known)

    def _refuse_used_key(self, key: str | None) -> None:
        used = self._history.find_key(key)
        if used is not None:
            source = used.source or "the configured model"
            raise SwapConflict(
                f"idempotency_key {key!r} brought version {used.version} from {source}; use another "
                "where source, partial or cast differ"
            )

    # Inside

    def _pauses_of(self, replica_id: str) -> tuple[PauseOrder, ...]:
        """Gives the pauses of the fleet, and that of a replica which comes too late for the swap under way."""
        swap_id = self._turn.swap_id
        if swap_id is not None and self._two_phases.has_resumed:
            self._leases.end(_barrier_of(swap_id))
        orders = self._leases.orders()
        if swap_id is None or not self._two_phases.holds_back(replica_id):
            return orders
        return (*orders, PauseOrder(_barrier_of(swap_id), HELD_BACK_S))

    async def _end_pauses(self, lease_ids: tuple[str, ...]) -> None:
        for lease_id in lease_ids:
            self._leases.end(lease_id)
        # Who does not hear it hears it with the next heartbeat.
        await self._calls.tell("end_pauses", lease_ids, timeout_s=self._settings.commit_timeout_s)

    def _replace_stragglers(self) -> None:
        if self._turn.swap_id is not None:
            return
        for name in self._stragglers.overdue(self._history.newest.version):
            logger.error("event=replica_replaced replica=%s reason='it did not catch up'", name)
            self._reports.forget(name)
            killing = asyncio.get_running_loop().create_task(run_uninterrupted(self._end_replica(name)))
            self._killing.add(killing)
            killing.add_done_callback(self._killing.discard)

    async def _end_replica(self, name: str) -> None:
        await self._kill(name)

    def _record(self, result: SwapResult) -> None:
        self._recorder.count("pitstop_swaps_total", "committed")
        self._recorder.count("pitstop_swap_bytes_total", amount=result.num_bytes * max(1, len(result.replicas)))
        self._recorder.observe("pitstop_swap_stage_seconds", value=result.staged_s)
        self._recorder.observe("pitstop_swap_pause_seconds", value=result.paused_s)
        for phase, seconds in result.phases_s.items():
            self._recorder.observe("pitstop_swap_phase_seconds", phase, value=seconds)
        logger.info(
            "event=weights_committed version=%d replicas=%d lagging=%d paused_s=%.4f",
            result.version,
            len(result.replicas),
            len(result.lagging),
            result.paused_s,
        )

    async def _recover(self) -> None:
        """Learns, once, what running replicas serve; with none running the application has just started."""
        if self._is_recovered:
            return
        if self._recovery is None:
            self._recovery = asyncio.get_running_loop().create_task(self._learn_version(), context=Context())
        try:
            await asyncio.shield(self._recovery)
        except Exception:
            # The next caller tries again.
            self._recovery = None
            raise

    async def _learn_version(self) -> None:
        await self._reports.wait_for(await self._count_running(), timeout_s=RECOVERY_TIMEOUT_S)
        newest = self._reports.newest_version()
        if newest is not None:
            await self._history.adopt(newest)
        self._is_recovered = True


def _barrier_of(swap_id: str) -> str:
    return f"{BARRIER}{swap_id}"


def _again(target: CommittedVersion, label: str) -> CommittedVersion:
    return CommittedVersion(0, target.source, target.cast, label, rollback_to=target.version)


def _over(below: WeightSource | None, changes: WeightSource) -> WeightSource:
    """Gives the whole that a partial source makes with what is served; raises InvalidRequest for too many layers."""
    under = below or WeightSource(on_model=True)
    layers = (*under.folders, *changes.folders)
    if len(layers) > MAX_LAYERS:
        raise InvalidRequest(
            f"with this partial swap the weights would lie in {len(layers)} folders, and every replica that starts "
            f"reads all; at most {MAX_LAYERS} are allowed, so swap whole weights once",
            "partial",
        )
    return WeightSource(layers=layers, on_model=under.on_model)


def _is_of(known: CommittedVersion, request: SwapRequest | RollbackRequest) -> bool:
    """Gives whether this request may have brought this version."""
    if isinstance(request, RollbackRequest):
        return known.rollback_to is not None and request.version in (None, known.rollback_to)
    if known.rollback_to is not None or known.source is None:
        return False
    if known.asked is not None:
        asked = (known.asked, True, known.is_cast_asked)
    else:
        asked = (known.source.as_asked, False, known.cast)
    return asked == (request.source, request.partial, request.cast)
