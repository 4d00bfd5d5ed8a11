"""One swap over the fleet: all replicas stage, the history decides, all commit; or all drop what they have staged."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from engine import WeightsError, WeightsInvalid, WeightsSourceError
from serve_app.messages import CommittedVersion, SwapOrder, SwapReply, SwapResult
from serve_app.protocol.errors import ManifestError
from serve_app.replica_reports import ReplicaReports
from serve_app.settings import WeightSettings
from serve_app.weight_history import WeightHistory, now

logger = logging.getLogger("ray.serve.pitstop")

MISSING_PATIENCE = 3
"""Times `forget_after_s`: long enough for Ray to reach a new replica, and for a lost one to be forgotten."""

CallAll = Callable[..., Awaitable[list[Any]]]
"""Calls (method, argument, timeout_s=...) on every running replica and gives the answers, as `broadcast.call_all`."""


class TwoPhaseSwap:
    """Brings one version after another to the fleet; its caller sees to it that they do not overlap.

    Invariant: the history changes only between staging and committing, and back only where it is certain that no
    replica has the new version.
    """

    def __init__(
        self, settings: WeightSettings, history: WeightHistory, reports: ReplicaReports, *, call_all: CallAll
    ) -> None:
        self._deadlines = settings
        self._history = history
        self._reports = reports
        self._call_all = call_all
        self.was_rolled_back = False
        """Whether the latest swap was committed and taken back."""
        self.phase = "stage"
        """What the swap under way is doing: fetch, stage, commit or abort."""

    async def run(self, version: CommittedVersion, *, in_flight: str) -> SwapResult:
        """Commits these weights on every replica, or raises with the old ones serving everywhere."""
        started = time.monotonic()
        self.was_rolled_back = False
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
        self.phase = "stage"
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
        self.phase = "commit"
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
        self.was_rolled_back = True
        await self._abort(order.swap_id)
        _raise_refusals(replies)

    async def _abort(self, swap_id: str) -> None:
        self.phase = "abort"
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
