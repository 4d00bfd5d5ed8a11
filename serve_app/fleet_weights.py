"""Which weights the fleet serves: the logic of the controller, without Ray.

A swap has two phases. Every replica stages the new weights beside the old; only when all have, the new version is
written to the history, which is the commit point, and all are told to commit; else all are told to drop them. A replica
that does not hear it learns it from its next heartbeat and is out of routing until it has caught up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import replace
from pathlib import PurePath

from engine import InvalidRequest, PitstopError, SwapConflict, WeightsSourceError
from serve_app.hub_source import fetch_from_hub
from serve_app.messages import (
    CommittedVersion,
    CommittedWeights,
    FleetStatus,
    ReplicaReport,
    RollbackRequest,
    SwapOptions,
    SwapRequest,
    SwapResult,
)
from serve_app.metrics import CONTROLLER_METRICS, Recorder
from serve_app.protocol.errors import VersionUnavailable
from serve_app.replica_reports import ReplicaReports
from serve_app.settings import WeightSettings
from serve_app.swap_turn import SwapTurn
from serve_app.two_phase_swap import CallAll, TwoPhaseSwap
from serve_app.weight_history import WeightHistory

logger = logging.getLogger("ray.serve.pitstop")

IN_FLIGHT_CHOICES = ("keep", "recompute", "abort")
RECOVERY_TIMEOUT_S = 10.0
"""For the reports of running replicas after a restart; ten heartbeats."""
SWAP_OUTCOMES = ("committed", "refused", "conflict", "rolled_back")
MAX_LABEL_LENGTH = 1024
"""Characters of a label and of an idempotency key, which the history keeps."""

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
        recorder: Recorder | None = None,
    ) -> None:
        self._history = history
        self._count_running = count_running
        self._turn = SwapTurn()
        self._reports = ReplicaReports(forget_after_s=settings.forget_after_s)
        self._two_phases = TwoPhaseSwap(settings, history, self._reports, call_all=call_all)
        self._problem: tuple[int, str] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._is_recovered = False
        self._recorder = recorder or Recorder(CONTROLLER_METRICS)
        for outcome in SWAP_OUTCOMES:
            # From zero, so that the first swap is a rise.
            self._recorder.count("pitstop_swaps_total", outcome, amount=0)

    async def committed(self) -> CommittedWeights:
        """Gives what every replica has to serve; after a restart only once the replicas were heard."""
        await self._recover()
        return replace(self._history.committed, swap_in_progress=self._turn.swap_id)

    async def heartbeat(self, report: ReplicaReport) -> CommittedWeights:
        """Takes the report of a replica and tells it what it has to serve."""
        if self._reports.add(report):
            self._recorder.count("pitstop_replica_starts_total")
            # A replica has started, so what kept another from it is mended.
            self._problem = None
        await self._recover()
        if report.version > self._history.newest.version:
            # A replica that recovery did not hear of in time; versions only grow, so the others follow it.
            await self._history.adopt(report)
        self._set_gauges()
        return await self.committed()

    async def start_failed(self, replica_id: str, error: str) -> None:
        """Keeps for the status why a new replica could not take the committed weights."""
        self._recorder.count("pitstop_replica_start_failures_total")
        self._problem = (self._history.newest.version, f"replica {replica_id} cannot start: {error}")

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
        )

    async def swap(self, request: SwapRequest) -> SwapResult:
        """Brings new weights to the whole fleet; raises the error of the first replica that refuses them.

        The old weights then go on serving everywhere. Raises SwapConflict while another swap is under way, and for an
        idempotency key that another request has used.
        """
        await self._recover()
        _check_swap(request)
        return await self._carry_out(request)

    async def rollback(self, request: RollbackRequest) -> SwapResult:
        """Brings the weights of an earlier version to the whole fleet, under a new number, as a swap does.

        Raises VersionUnavailable where the history does not hold the version, and where its weights are gone.
        """
        await self._recover()
        _check_options(request)
        return await self._carry_out(request)

    async def metrics(self) -> str:
        """Gives the controller's numbers as Prometheus text."""
        self._set_gauges()
        return self._recorder.expose()

    def _set_gauges(self) -> None:
        version = self._history.newest.version
        self._recorder.set_gauge("pitstop_committed_weight_version", value=version)
        for state, count in self._reports.count_states(version).items():
            self._recorder.set_gauge("pitstop_replicas", state, value=count)

    async def _carry_out(self, request: SwapRequest | RollbackRequest) -> SwapResult:
        """Gives what this request has brought before, or brings it now, in its turn."""
        if (known := self._finished(request)) is not None:
            return known
        try:
            async with self._turn.taken(wait_s=request.wait_s) as swap_id:
                if (known := self._finished(request)) is not None:
                    return known
                self._refuse_used_key(request.idempotency_key)
                return await self._bring(request, swap_id)
        except SwapConflict:
            self._recorder.count("pitstop_swaps_total", "conflict")
            raise

    async def _bring(self, request: SwapRequest | RollbackRequest, swap_id: str) -> SwapResult:
        """Runs one swap, whose version gets its number here."""
        try:
            if isinstance(request, SwapRequest):
                result = await self._run(await self._wanted(request), request, swap_id)
            else:
                result = await self._go_back(request, swap_id)
        except SwapConflict:
            raise
        except PitstopError as error:
            outcome = "rolled_back" if self._two_phases.was_rolled_back else "refused"
            self._recorder.count("pitstop_swaps_total", outcome)
            logger.warning("event=swap_refused swap=%s error=%r", swap_id, str(error))
            raise
        self._record(result)
        return result

    async def _run(self, version: CommittedVersion, options: SwapOptions, swap_id: str) -> SwapResult:
        numbered = replace(
            version,
            version=self._history.next_version,
            swap_id=swap_id,
            requested_by=options.requested_by,
            idempotency_key=options.idempotency_key,
        )
        return await self._two_phases.run(numbered, in_flight=options.in_flight)

    async def _wanted(self, request: SwapRequest) -> CommittedVersion:
        source = request.source
        if source.hub is not None:
            self._two_phases.phase = "fetch"
            source = await asyncio.to_thread(fetch_from_hub, source)
        return CommittedVersion(0, source, request.cast, request.label)

    async def _go_back(self, request: RollbackRequest, swap_id: str) -> SwapResult:
        target = self._history.rollback_target(request.version)
        label = f"rollback of {self._history.newest.version} to {target.version}"
        version = CommittedVersion(0, target.source, target.cast, label, rollback_to=target.version)
        try:
            return await self._run(version, request, swap_id)
        except WeightsSourceError as error:
            raise VersionUnavailable(f"there is no going back to version {target.version}: {error}") from error

    def _finished(self, request: SwapRequest | RollbackRequest) -> SwapResult | None:
        """Gives what this request has brought, unless its swap is still under way."""
        known = self._history.find_key(request.idempotency_key)
        if known is None or known.swap_id == self._turn.swap_id or not _is_of(known, request):
            return None
        # Only the model the application was started with came without a swap, and it has no idempotency key.
        assert known.result is not None
        return known.result

    def _refuse_used_key(self, key: str | None) -> None:
        used = self._history.find_key(key)
        if used is not None:
            source = used.source or "the configured model"
            raise SwapConflict(f"idempotency_key {key!r} brought version {used.version} from {source}; use another")

    def _record(self, result: SwapResult) -> None:
        self._recorder.count("pitstop_swaps_total", "committed")
        self._recorder.observe("pitstop_swap_stage_seconds", value=result.staged_s)
        self._recorder.observe("pitstop_swap_pause_seconds", value=result.paused_s)
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


def _is_of(known: CommittedVersion, request: SwapRequest | RollbackRequest) -> bool:
    """Gives whether this request may have brought this version."""
    if isinstance(request, RollbackRequest):
        return known.rollback_to is not None and request.version in (None, known.rollback_to)
    return known.rollback_to is None and known.source is not None and known.source.as_asked == request.source


def _check_swap(request: SwapRequest) -> None:
    source = request.source
    _check_options(request)
    _check_text(label=request.label, path=source.path, hub=source.hub, revision=source.revision)
    if source.hub is None and not PurePath(source.path).is_absolute():
        raise InvalidRequest(f"path is {source.path!r}; it must be absolute, as replicas run in other folders", "path")


def _check_options(options: SwapOptions) -> None:
    """Raises InvalidRequest for what came over a handle, where nobody has checked it."""
    _check_text(idempotency_key=options.idempotency_key)
    if options.in_flight not in IN_FLIGHT_CHOICES:
        raise InvalidRequest(
            f"in_flight is {options.in_flight!r}; it must be one of {', '.join(IN_FLIGHT_CHOICES)}", "in_flight"
        )


def _check_text(**texts: object) -> None:
    """Raises InvalidRequest for what the manifest could not hold."""
    for name, text in texts.items():
        if text is None:
            continue
        if not isinstance(text, str):
            raise InvalidRequest(f"{name} is {text!r}; it must be text", name)
        if name != "path" and len(text) > MAX_LABEL_LENGTH:
            raise InvalidRequest(f"{name} has {len(text)} characters; at most {MAX_LABEL_LENGTH} are kept", name)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} is {text!r}, which has half a surrogate pair; use another", name) from None
