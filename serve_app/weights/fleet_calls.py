"""Asking replicas for one phase of a swap: the answer of each, whichever way it comes, within a deadline.

An answer comes from the call, or with a heartbeat where the call waits for another replica that is silent. What was not
answered is asked again: every phase bears being carried out twice, and late.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Set
from typing import Any

from ray.exceptions import RayActorError

from engine import InvalidRequest, NotFinished, WeightsError, WeightsInvalid, WeightsSourceError
from serve_app.messages import PauseOrder, SwapOrder, SwapReply
from serve_app.protocol.errors import ReplicaGone
from serve_app.settings import WeightSettings
from serve_app.weights.replica_reports import ReplicaReports

MISSING_PATIENCE = 3
"""Times `forget_after_s`: long enough for Ray to reach a new replica, and for a lost one to be forgotten."""

CallAll = Callable[..., Awaitable[list[Any]]]
"""Calls (method, argument, timeout_s=...) on every running replica and gives the answers, as `broadcast.call_all`."""


class FleetCalls:
    """Calls of the controller. One event loop only."""

    def __init__(self, settings: WeightSettings, reports: ReplicaReports, *, call_all: CallAll) -> None:
        self._reports = reports
        self._call_all = call_all
        self._again_after_s = settings.heartbeat_interval_s / 2
        self._patience_s = MISSING_PATIENCE * settings.forget_after_s

    async def ask(self, phase: str, order: SwapOrder, names: Set[str], *, timeout_s: float) -> dict[str, SwapReply]:
        """Gives the replies of these replicas: fewer where the time is up, or where all others have fallen silent."""
        sending = _Sending(self._call_all, phase, order, order.swap_id, timeout_s)
        try:
            while True:
                replies = self._replies(sending)
                pending = names - replies.keys()
                if not pending & self._reports.names() or sending.remaining_s <= 0:
                    return {name: reply for name, reply in replies.items() if name in names}
                await self._wait(sending)
        finally:
            sending.cancel()

    async def ask_everyone(
        self, phase: str, order: SwapOrder | PauseOrder, *, timeout_s: float
    ) -> dict[str, SwapReply]:
        """Gives the replies of all running replicas, those that start meanwhile too; none where none runs.

        Raises the first refusal as the error it was, and WeightsError where a replica that runs does not answer.
        """
        swap_id = order.swap_id if isinstance(order, SwapOrder) else order.lease_id
        sending = _Sending(self._call_all, phase, order, swap_id, timeout_s)
        patience_end: float | None = None
        try:
            while True:
                replies = self._replies(sending)
                raise_refusals([*sending.failures, *replies.values()])
                missing = sorted(self._reports.names() - replies.keys())
                if not missing and sending.was_answered:
                    return replies
                if sending.remaining_s <= 0:
                    raise WeightsError(f"not every replica answered to {phase} within {timeout_s:g} s")
                if sending.was_answered or not missing:
                    now = asyncio.get_running_loop().time()
                    patience_end = patience_end or now + self._patience_s
                    if now > patience_end:
                        who = f"replica {missing[0]} runs" if missing else "a replica runs"
                        raise WeightsError(f"{who} but did not {phase} the weights; try again")
                await self._wait(sending)
        finally:
            sending.cancel()

    async def tell(self, phase: str, argument: object, *, timeout_s: float) -> list[Any]:
        """Gives the answers that came in time, of whoever was reached."""
        try:
            return await self._call_all(phase, argument, timeout_s=timeout_s)
        except TimeoutError:
            return []

    def _replies(self, sending: "_Sending") -> dict[str, SwapReply]:
        sending.collect()
        return self._reports.replies(sending.swap_id, sending.phase) | sending.replies

    async def _wait(self, sending: "_Sending") -> None:
        """Waits for news of any kind, or until it is time to ask again."""
        news = asyncio.ensure_future(self._reports.next_report())
        waiting = {news, sending.task} if sending.task is not None else {news}
        try:
            await asyncio.wait(
                waiting,
                timeout=min(self._again_after_s, max(0.0, sending.remaining_s)),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            news.cancel()
        sending.send_again(self._again_after_s)


class _Sending:
    """One phase on its way to the replicas; it is sent again after an answer that was not enough."""

    def __init__(self, call_all: CallAll, phase: str, order: object, swap_id: str, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._call_all = call_all
        self._order = order
        self._deadline = self._loop.time() + timeout_s
        self._answered_at = self._loop.time()
        self.phase = phase
        self.swap_id = swap_id
        self.replies: dict[str, SwapReply] = {}
        self.failures: list[BaseException] = []
        self.was_answered = False
        """Whether every replica that the latest call reached has answered it."""
        self.task: asyncio.Task[list[Any]] | None = self._start()

    @property
    def remaining_s(self) -> float:
        return self._deadline - self._loop.time()

    def collect(self) -> None:
        """Takes the answers of a call that has ended."""
        if self.task is None or not self.task.done():
            return
        task, self.task = self.task, None
        self._answered_at = self._loop.time()
        if (error := task.exception()) is not None:
            if not isinstance(error, TimeoutError):
                self.failures.append(error)
            return
        self.was_answered = True
        for answer in task.result():
            if isinstance(answer, SwapReply):
                self.replies[answer.replica_id] = answer
            elif isinstance(answer, BaseException):
                self.failures.append(answer)

    def send_again(self, after_s: float) -> None:
        """Asks anew where the last call was answered that long ago."""
        if self.task is None and self.remaining_s > 0 and self._loop.time() >= self._answered_at + after_s:
            self.failures.clear()
            self.task = self._start()

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def _start(self) -> asyncio.Task[list[Any]]:
        return self._loop.create_task(self._send(max(0.001, self.remaining_s)))

    async def _send(self, timeout_s: float) -> list[Any]:
        return await self._call_all(self.phase, self._order, timeout_s=timeout_s)


def raise_refusals(answers: Iterable[SwapReply | BaseException]) -> None:
    """Raises the first refusal as the error it was, naming the replica."""
    for answer in answers:
        if isinstance(answer, RayActorError):
            # Ray's own words are of its actors, which nobody outside knows.
            raise ReplicaGone(
                "a replica went away before it had answered; the weights are those of before, so try again"
            ) from answer
        if isinstance(answer, BaseException):
            raise WeightsError(f"a replica failed: {answer}") from answer
        if answer.ok:
            continue
        message = f"replica {answer.replica_id}: {answer.error}"
        if answer.error_type == InvalidRequest.__name__:
            raise InvalidRequest(message)
        if answer.error_type == WeightsInvalid.__name__:
            raise WeightsInvalid(message, tensor=answer.tensor)
        if answer.error_type == WeightsSourceError.__name__:
            raise WeightsSourceError(message)
        if answer.error_type == NotFinished.__name__:
            raise NotFinished(message)
        raise WeightsError(message)
