"""Which weights the fleet serves: the logic of the controller, without Ray.

A swap has two phases. Every replica stages the new weights beside the old; only when all have, the new version is
written to the history, which is the commit point, and all are told to commit; else all are told to drop them. A replica
that does not hear it learns it from its next heartbeat and is out of routing until it has caught up.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from engine import (
    InvalidRequest,
    PitstopError,
    SwapConflict,
    WeightsError,
    WeightsInvalid,
    WeightsSourceError,
)
from serve_app.messages import (
    CommittedVersion,
    CommittedWeights,
    FleetStatus,
    ReplicaReport,
    RollbackRequest,
    SwapOrder,
    SwapReply,
    SwapRequest,
    SwapResult,
)
from serve_app.metrics import CONTROLLER_METRICS, Recorder
from serve_app.protocol.errors import ManifestError, VersionUnavailable
from serve_app.replica_reports import ReplicaReports
from serve_app.settings import WeightSettings
from serve_app.weight_history import WeightHistory, now

logger = logging.getLogger("ray.serve.pitstop")

IN_FLIGHT_CHOICES = ("keep", "recompute", "abort")
RECOVERY_TIMEOUT_S = 10.0
"""For the reports of running replicas after a restart; ten heartbeats."""
MISSING_PATIENCE = 3
"""Times `forget_after_s`: long enough for Ray to reach a new replica, and for a lost one to be forgotten."""
SWAP_OUTCOMES = ("committed", "refused", "conflict", "rolled_back")
MAX_LABEL_LENGTH = 1024
"""Characters of a label and of an idempotency key, which the history keeps."""

CallAll = Callable[..., Awaitable[list[Any]]]
"""Calls (method, argument, timeout_s=...) on every running replica and gives the answers, as `broadcast.call_all`."""
CountRunning = Callable[[], Awaitable[int]]
"""Gives how many replicas are running and so will report."""


class FleetWeights:
    """Who serves what, and one swap at a time. One event loop only.

    Invariants: at most one swap is under way; the committed version changes only between staging and committing, and
    back only where it is certain that no replica has the new version.
    """

    def __init__(
        self, settings: WeightSettings, history: WeightHistory, *, call_all: CallAll, count_running: CountRunning
    ) -> None:
        self._deadlines = settings
        self._history = history
        self._call_all = call_all
        self._count_running = count_running
        self._swap_id: str | None = None
        self._outcome = "refused"
        self._reports = ReplicaReports(forget_after_s=settings.forget_after_s)
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
        self._swap_id, self._outcome = uuid.uuid4().hex, "refused"
        numbered = replace(version, version=self._history.next_version, swap_id=self._swap_id)
        try:
            result = await self._run(numbered, in_flight)
        except PitstopError as error:
            self._recorder.count("pitstop_swaps_total", self._outcome)
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

    async def _run(self, version: CommittedVersion, in_flight: str) -> SwapResult:
        started = time.monotonic()
        previous = self._history.newest.version
        order = SwapOrder(str(version.swap_id), version.version, version.source, in_flight, version.cast)
        # Before the weights are read, which takes minutes where they are large.
        await self._history.check_writable()
        logger.info("event=swap_started swap=%s version=%d", order.swap_id, order.version)
        staged = await self._stage(order)
        staged_s = round(time.monotonic() - started, 4)
        result = SwapResult(
            version=order.version,
            previous_version=previous,
            replicas=[],
            staged_s=staged_s,
            paused_s=0.0,
            total_s=staged_s,
            swap_id=order.swap_id,
            lagging=sorted(staged),
        )
        await self._decide(replace(version, committed_at=now(), result=result))
        replies = await self._commit(order)
        done = sorted(reply.replica_id for reply in replies)
        result = replace(
            result,
            replicas=done,
            paused_s=round(max((reply.paused_s for reply in replies), default=0.0), 4),
            total_s=round(time.monotonic() - started, 4),
            lagging=sorted((staged | self._reports.names()) - set(done)),
        )
        await self._history.keep_result(result)
        return result

    async def _stage(self, order: SwapOrder) -> set[str]:
        """Gives the replicas that have staged; where one has not, tells all to drop it and raises."""
        try:
            return await self._stage_everywhere(order)
        except WeightsError:
            await self._abort(order.swap_id)
            raise

    async def _stage_everywhere(self, order: SwapOrder) -> set[str]:
        """Asks until every replica that reports has staged.

        Ray reaches a replica a moment after its first report, and one that is gone is heard of for a while yet. Asking
        again costs nothing where the weights are staged already.
        """
        deadline: float | None = None
        while True:
            replies = await self._ask("stage", order, self._deadlines.stage_timeout_s)
            _raise_refusals(replies)
            staged = {reply.replica_id for reply in replies}
            missing = sorted(self._reports.names() - staged)
            if not missing and not staged:
                raise WeightsError(
                    "no replica is running, so no weights were loaded; try again when the fleet is ready"
                )
            if not missing:
                return staged
            deadline = deadline or time.monotonic() + MISSING_PATIENCE * self._deadlines.forget_after_s
            if time.monotonic() > deadline:
                raise WeightsError(f"replica {missing[0]} runs but did not stage the weights; try again")
            await asyncio.sleep(self._deadlines.heartbeat_interval_s / 2)

    async def _decide(self, version: CommittedVersion) -> None:
        """Commits in the history; where that fails, tells all to drop what they staged, and raises."""
        try:
            await self._history.commit(version)
        except WeightsError:
            await self._abort(str(version.swap_id))
            raise

    async def _commit(self, order: SwapOrder) -> list[SwapReply]:
        """Gives the replies of those that committed; goes back only if every replica says that it failed."""
        try:
            answers = await self._ask("commit", order, self._deadlines.commit_timeout_s)
        except WeightsError as error:
            logger.warning("event=commit_unanswered version=%d error=%r", order.version, str(error))
            return []
        replies = [answer for answer in answers if isinstance(answer, SwapReply)]
        if replies and len(replies) == len(answers) and not any(reply.ok for reply in replies):
            await self._take_back(order, replies)
        for reply in replies:
            if reply.ok:
                self._reports.note_commit(reply, order)
        return [reply for reply in replies if reply.ok]

    async def _take_back(self, order: SwapOrder, replies: list[SwapReply]) -> None:
        """Raises the first refusal, with the version before committed again.

        Returns only where that could not be made durable: then the decision stands, and the replicas catch up.
        """
        try:
            await self._history.take_back(order.version)
        except ManifestError as error:
            logger.warning("event=decision_stands version=%d error=%r", order.version, str(error))
            return
        self._outcome = "rolled_back"
        await self._abort(order.swap_id)
        _raise_refusals(replies)

    async def _abort(self, swap_id: str) -> None:
        try:
            await self._ask("abort", swap_id, self._deadlines.commit_timeout_s)
        except WeightsError as error:
            # Replicas that did not hear it drop their staged weights at their next heartbeat.
            logger.warning("event=abort_unanswered swap=%s error=%r", swap_id, str(error))

    async def _ask(self, method: str, argument: object, timeout_s: float) -> list[Any]:
        try:
            return await self._call_all(method, argument, timeout_s=timeout_s)
        except TimeoutError:
            raise WeightsError(f"not every replica answered to {method} within {timeout_s:g} s") from None

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


def _raise_refusals(answers: list[Any]) -> None:
    """Raises the first refusal as the error it was, naming the replica."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise WeightsError(f"a replica failed: {answer}") from answer
        if answer.ok:
            continue
        message = f"replica {answer.replica_id}: {answer.error}"
        if answer.error_type == WeightsInvalid.__name__:
            raise WeightsInvalid(message, tensor=answer.tensor)
        if answer.error_type == WeightsSourceError.__name__:
            raise WeightsSourceError(message)
        raise WeightsError(message)
