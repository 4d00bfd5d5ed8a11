"""Which weights the fleet serves: the logic of the controller, without Ray.

A swap has two phases. Every replica stages the new weights beside the old; only when all have, all are told to commit,
else all are told to drop them. The decision is made once, before the first commit is sent; a replica that does not hear
it learns it from its next heartbeat and is out of routing until it has caught up.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
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
    CommittedWeights,
    FleetStatus,
    ReplicaReport,
    SwapOrder,
    SwapReply,
    SwapResult,
    WeightSource,
)
from serve_app.metrics import CONTROLLER_METRICS, Recorder
from serve_app.settings import AppSettings

logger = logging.getLogger("ray.serve.pitstop")

IN_FLIGHT_CHOICES = ("keep", "recompute", "abort")
FIRST_VERSION = 1
RECOVERY_TIMEOUT_S = 10.0
"""For the reports of running replicas after a restart; ten heartbeats."""
MISSING_PATIENCE = 3
"""Times `forget_after_s`: long enough for Ray to reach a new replica, and for a lost one to be forgotten."""
SWAP_OUTCOMES = ("committed", "refused", "conflict")
REPLICA_STATES = ("loading", "ready", "staging", "staged", "paused", "lagging", "unhealthy")

CallAll = Callable[..., Awaitable[list[Any]]]
"""Calls (method, argument, timeout_s=...) on every running replica and gives the answers, as `broadcast.call_all`."""
CountRunning = Callable[[], Awaitable[int]]
"""Gives how many replicas are running and so will report."""


class FleetWeights:
    """Who serves what, and one swap at a time. One event loop only.

    Invariants: at most one swap is under way; a number that was committed is never given again; `committed` changes
    only between staging and committing, and back only where it is certain that no replica has the new version.
    """

    def __init__(self, settings: AppSettings, *, call_all: CallAll, count_running: CountRunning) -> None:
        self._deadlines = settings.weights
        self._call_all = call_all
        self._count_running = count_running
        self._committed = CommittedWeights(FIRST_VERSION)
        self._last_version = FIRST_VERSION
        self._swap_id: str | None = None
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._reported = asyncio.Event()
        self._recovery: asyncio.Task[None] | None = None
        self._is_recovered = False
        self._recorder = Recorder(CONTROLLER_METRICS)
        for outcome in SWAP_OUTCOMES:
            # From zero, so that the first swap is a rise.
            self._recorder.count("pitstop_swaps_total", outcome, amount=0)

    async def committed(self) -> CommittedWeights:
        """Gives what every replica has to serve; after a restart only once the replicas were heard."""
        await self._recover()
        return replace(self._committed, swap_in_progress=self._swap_id)

    async def heartbeat(self, report: ReplicaReport) -> CommittedWeights:
        """Takes the report of a replica and tells it what it has to serve."""
        self._reports[report.replica_id] = (time.monotonic(), report)
        self._reported.set()
        await self._recover()
        if report.version > self._committed.version:
            # A replica that recovery did not hear of in time; versions only grow, so the others follow it.
            self._adopt(report)
        return await self.committed()

    async def status(self) -> FleetStatus:
        """Gives the committed version and every replica heard of lately."""
        await self._recover()
        now = time.monotonic()
        reports = [
            replace(report, age_s=round(now - at, 3), state=self._state_of(report)) for at, report in self._fresh()
        ]
        return FleetStatus(self._committed, sorted(reports, key=lambda report: report.replica_id), self._swap_id)

    async def swap(self, source: WeightSource, *, in_flight: str, cast: bool) -> SwapResult:
        """Brings new weights to the whole fleet; raises the error of the first replica that refuses them.

        The old weights then go on serving everywhere. Raises SwapConflict while another swap is under way.
        """
        await self._recover()
        if in_flight not in IN_FLIGHT_CHOICES:
            raise InvalidRequest(
                f"in_flight is {in_flight!r}; it must be one of {', '.join(IN_FLIGHT_CHOICES)}", "in_flight"
            )
        if not PurePath(source.path).is_absolute():
            raise InvalidRequest(
                f"path is {source.path!r}; it must be absolute, as replicas run in other folders", "path"
            )
        if self._swap_id is not None:
            self._recorder.count("pitstop_swaps_total", "conflict")
            raise SwapConflict(f"swap {self._swap_id} is under way; try again when it has ended")
        self._swap_id = uuid.uuid4().hex
        try:
            order = SwapOrder(self._swap_id, self._last_version + 1, source, in_flight, cast)
            result = await self._run(order)
        except PitstopError as error:
            self._recorder.count("pitstop_swaps_total", "refused")
            logger.warning("event=swap_refused swap=%s error=%r", self._swap_id, str(error))
            raise
        finally:
            self._swap_id = None
        self._record(result)
        return result

    async def metrics(self) -> str:
        """Gives the controller's numbers as Prometheus text."""
        self._recorder.set_gauge("pitstop_committed_weight_version", value=self._committed.version)
        states = Counter(self._state_of(report) for _, report in self._fresh())
        for state in REPLICA_STATES:
            self._recorder.set_gauge("pitstop_replicas", state, value=states[state])
        return self._recorder.expose()

    async def _run(self, order: SwapOrder) -> SwapResult:
        previous, started = self._committed, time.monotonic()
        logger.info("event=swap_started swap=%s version=%d", order.swap_id, order.version)
        staged = await self._stage(order)
        staged_s = time.monotonic() - started
        # From here on the number is spent, because a replica may generate with it.
        self._last_version = order.version
        self._committed = CommittedWeights(order.version, order.source, order.cast, order.swap_id)
        replies = await self._commit(order, previous)
        done = sorted(reply.replica_id for reply in replies if reply.ok)
        return SwapResult(
            version=order.version,
            previous_version=previous.version,
            replicas=done,
            staged_s=round(staged_s, 4),
            paused_s=round(max(reply.paused_s for reply in replies), 4) if replies else 0.0,
            total_s=round(time.monotonic() - started, 4),
            swap_id=order.swap_id,
            lagging=sorted((staged | {report.replica_id for _, report in self._fresh()}) - set(done)),
        )

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
            missing = sorted({report.replica_id for _, report in self._fresh()} - staged)
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

    async def _commit(self, order: SwapOrder, previous: CommittedWeights) -> list[SwapReply]:
        """Gives the answers to the commit; goes back to `previous` only if every replica says that it failed."""
        try:
            answers = await self._ask("commit", order, self._deadlines.commit_timeout_s)
        except WeightsError as error:
            logger.warning("event=commit_unanswered version=%d error=%r", order.version, str(error))
            return []
        replies = [answer for answer in answers if isinstance(answer, SwapReply)]
        if replies and len(replies) == len(answers) and not any(reply.ok for reply in replies):
            self._committed = previous
            await self._abort(order.swap_id)
            _raise_refusals(replies)
        for reply in replies:
            self._note_version(reply, order)
        return [reply for reply in replies if reply.ok]

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

    def _note_version(self, reply: SwapReply, order: SwapOrder) -> None:
        """Keeps the status right until the next heartbeat."""
        if reply.ok and reply.replica_id in self._reports:
            at, report = self._reports[reply.replica_id]
            report = replace(report, version=reply.version, source=order.source, state="ready")
            self._reports[reply.replica_id] = (at, report)

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

    def _fresh(self) -> list[tuple[float, ReplicaReport]]:
        """Gives the reports of replicas that were heard of lately, and forgets the others."""
        oldest = time.monotonic() - self._deadlines.forget_after_s
        self._reports = {name: entry for name, entry in self._reports.items() if entry[0] >= oldest}
        return list(self._reports.values())

    def _state_of(self, report: ReplicaReport) -> str:
        if report.state == "ready" and report.version < self._committed.version:
            return "lagging"
        return report.state

    def _adopt(self, report: ReplicaReport) -> None:
        self._committed = CommittedWeights(report.version, report.source)
        self._last_version = max(self._last_version, report.version)
        logger.warning("event=version_recovered version=%d replica=%s", report.version, report.replica_id)

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
        deadline = time.monotonic() + RECOVERY_TIMEOUT_S
        num_running = await self._count_running()
        while len(self._fresh()) < num_running and time.monotonic() < deadline:
            self._reported.clear()
            await _wait(self._reported, deadline - time.monotonic())
        newest = max((report for _, report in self._fresh()), key=lambda report: report.version, default=None)
        if newest is not None and newest.version > self._committed.version:
            self._adopt(newest)
        self._is_recovered = True


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


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
