"""Which weights the fleet serves: the logic of the controller, without Ray.

A swap has two phases. Every replica stages the new weights beside the old; only when all have, the new version is
written to the history, which is the commit point, and all are told to commit; else all are told to drop them. A replica
that does not hear it learns it from its next heartbeat and is out of routing until it has caught up.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import replace
from pathlib import PurePath

from engine import InvalidRequest, PitstopError, SwapConflict, WeightsSourceError
from serve_app.messages import (
    CommittedVersion,
    CommittedWeights,
    FleetStatus,
    ReplicaReport,
    RollbackRequest,
    SwapRequest,
    SwapResult,
)
from serve_app.metrics import CONTROLLER_METRICS, Recorder
from serve_app.protocol.errors import VersionUnavailable
from serve_app.replica_reports import ReplicaReports
from serve_app.settings import WeightSettings
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
        self, settings: WeightSettings, history: WeightHistory, *, call_all: CallAll, count_running: CountRunning
    ) -> None:
        self._history = history
        self._count_running = count_running
        self._swap_id: str | None = None
        self._reports = ReplicaReports(forget_after_s=settings.forget_after_s)
        self._two_phases = TwoPhaseSwap(settings, history, self._reports, call_all=call_all)
        self._problem: tuple[int, str] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._is_recovered = False
        self._recorder = Recorder(CONTROLLER_METRICS)
        for outcome in SWAP_OUTCOMES:
            # From zero, so that the first swap is a rise.
            self._recorder.count("pitstop_swaps_total", outcome, amount=0)

    async def committed(self) -> CommittedWeights:
        """Gives what every replica has to serve; after a restart only once the replicas were heard."""
        await self._recover()
        return replace(self._history.committed, swap_in_progress=self._swap_id)

    async def heartbeat(self, report: ReplicaReport) -> CommittedWeights:
        """Takes the report of a replica and tells it what it has to serve."""
        if self._reports.add(report):
            # A replica has started, so what kept another from it is mended.
            self._problem = None
        await self._recover()
        if report.version > self._history.newest.version:
            # A replica that recovery did not hear of in time; versions only grow, so the others follow it.
            await self._history.adopt(report)
        return await self.committed()

    async def start_failed(self, replica_id: str, error: str) -> None:
        """Keeps for the status why a new replica could not take the committed weights."""
        self._problem = (self._history.newest.version, f"replica {replica_id} cannot start: {error}")

    async def status(self) -> FleetStatus:
        """Gives the committed version, those before it, and every replica heard of lately."""
        await self._recover()
        committed = self._history.committed
        is_current = self._problem is not None and self._problem[0] == committed.version
        return FleetStatus(
            committed,
            self._reports.listed(committed.version),
            self._swap_id,
            history=self._history.listed(),
            problem=self._problem[1] if self._problem is not None and is_current else None,
        )

    async def swap(self, request: SwapRequest) -> SwapResult:
        """Brings new weights to the whole fleet; raises the error of the first replica that refuses them.

        The old weights then go on serving everywhere. Raises SwapConflict while another swap is under way, and for an
        idempotency key that another request has used.
        """
        await self._recover()
        _check_text(label=request.label, idempotency_key=request.idempotency_key, path=request.source.path)
        if not PurePath(request.source.path).is_absolute():
            raise InvalidRequest(
                f"path is {request.source.path!r}; it must be absolute, as replicas run in other folders", "path"
            )
        known = self._finished(request.idempotency_key)
        if known is not None and known.rollback_to is None and known.source == request.source:
            return _result_of(known)
        version = CommittedVersion(
            0,
            request.source,
            request.cast,
            request.label,
            requested_by=request.requested_by,
            idempotency_key=request.idempotency_key,
        )
        return await self._bring(version, request.in_flight)

    async def rollback(self, request: RollbackRequest) -> SwapResult:
        """Brings the weights of an earlier version to the whole fleet, under a new number, as a swap does.

        Raises VersionUnavailable where the history does not hold the version, and where its weights are gone.
        """
        await self._recover()
        _check_text(idempotency_key=request.idempotency_key)
        known = self._finished(request.idempotency_key)
        if known is not None and known.rollback_to is not None and request.version in (None, known.rollback_to):
            return _result_of(known)
        target = self._history.rollback_target(request.version)
        version = CommittedVersion(
            0,
            target.source,
            target.cast,
            label=f"rollback of {self._history.newest.version} to {target.version}",
            requested_by=request.requested_by,
            idempotency_key=request.idempotency_key,
            rollback_to=target.version,
        )
        try:
            return await self._bring(version, request.in_flight)
        except WeightsSourceError as error:
            raise VersionUnavailable(f"there is no going back to version {target.version}: {error}") from error

    async def metrics(self) -> str:
        """Gives the controller's numbers as Prometheus text."""
        version = self._history.newest.version
        self._recorder.set_gauge("pitstop_committed_weight_version", value=version)
        for state, count in self._reports.count_states(version).items():
            self._recorder.set_gauge("pitstop_replicas", state, value=count)
        return self._recorder.expose()

    async def _bring(self, version: CommittedVersion, in_flight: str) -> SwapResult:
        """Runs one swap to these weights, which get their number here, unless another one is under way."""
        if in_flight not in IN_FLIGHT_CHOICES:
            raise InvalidRequest(
                f"in_flight is {in_flight!r}; it must be one of {', '.join(IN_FLIGHT_CHOICES)}", "in_flight"
            )
        self._refuse_conflicts(version)
        self._swap_id = uuid.uuid4().hex
        numbered = replace(version, version=self._history.next_version, swap_id=self._swap_id)
        try:
            result = await self._two_phases.run(numbered, in_flight=in_flight)
        except PitstopError as error:
            outcome = "rolled_back" if self._two_phases.was_rolled_back else "refused"
            self._recorder.count("pitstop_swaps_total", outcome)
            logger.warning("event=swap_refused swap=%s error=%r", self._swap_id, str(error))
            raise
        finally:
            self._swap_id = None
        self._record(result)
        return result

    def _finished(self, idempotency_key: str | None) -> CommittedVersion | None:
        """Gives what a request with this key has brought, unless that swap is still under way."""
        known = self._history.find_key(idempotency_key)
        return known if known is not None and known.swap_id != self._swap_id else None

    def _refuse_conflicts(self, version: CommittedVersion) -> None:
        reason = None
        used = self._history.find_key(version.idempotency_key)
        if used is not None:
            path = used.source.path if used.source is not None else "the configured model"
            reason = f"idempotency_key {used.idempotency_key!r} brought version {used.version} from {path}; use another"
        if self._swap_id is not None:
            reason = f"swap {self._swap_id} is under way; try again when it has ended"
        if reason is not None:
            self._recorder.count("pitstop_swaps_total", "conflict")
            raise SwapConflict(reason)

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


def _result_of(version: CommittedVersion) -> SwapResult:
    # Only the model the application was started with came without a swap, and it has no idempotency key.
    assert version.result is not None
    return version.result
