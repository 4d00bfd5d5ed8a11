"""Who may send a request to the fleet, and when: whose turn it is, what would come too late, and what is too much.

Requests wait here, where one tenant can be served before another, and only a few steps of work wait in the engines.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.messages import GenerateRequest
from serve_app.metrics import Recorder
from serve_app.protocol.errors import DeadlineExceeded, DeadlineTooShort, LineFull, TooLate
from serve_app.routing.expected_work import expected_work
from serve_app.routing.fair_line import FairLine, Outlook, Refusal, Verdict, judge
from serve_app.routing.prospect import Prospect
from serve_app.settings import LimitSettings

ADMISSIONS = "pitstop_admissions_total"
OUTCOMES = ("at_once", "waited", "left", "expired", *Refusal)
"""What becomes of requests: sent at once, sent after waiting here, left by the client, out of time, or refused."""
MAX_RETRY_AFTER_S = 60
"""A client that waits longer than this has given up."""
SMOOTHING = 0.2
"""Weight of the newest wait in the average: the last dozen or so count."""
ANY_REQUEST = GenerateRequest("", [])
"""Stands for any, where only the room of replicas is asked for."""
LOOK_INTERVAL_S = 0.1
"""Between two looks for room while requests wait here: replicas come and go without a word to this."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request from its arrival to its first token; `begin` and `leave` may be called more than once."""

    admission: "Admission"
    request: GenerateRequest
    num_tokens: int
    arrived_at: float
    deadline: float
    is_sent: bool = False
    is_over: bool = False
    called: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        """Its first token has come."""
        self.admission.end(self, has_begun=True)

    def leave(self) -> None:
        """It needs its place no more."""
        self.admission.end(self, has_begun=False)


class Admission:
    """The line of one router. For one event loop.

    Invariants: `num_waiting` requests have no first token yet, `limits` bound them, and those that were sent are a few
    steps of work for the replicas that are open; a request alone is always sent.
    """

    def __init__(
        self,
        limits: LimitSettings,
        *,
        max_waiting: int,
        recorder: Recorder,
        prospect: Callable[[GenerateRequest], Prospect | None] = lambda _: None,
    ) -> None:
        """prospect: what a request may expect of the fleet; None is not known, and then nothing is held back."""
        self._limits = limits
        self._max_waiting = max_waiting
        self._recorder = recorder
        self._prospect = prospect
        self._line: FairLine[Turn] = FairLine()
        self._num_sent = 0
        self._sent_tokens = 0
        self._mean_wait_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        for outcome in OUTCOMES:
            # From zero, so that the first one is a rise.
            recorder.count(ADMISSIONS, outcome, amount=0)

    @property
    def num_waiting(self) -> int:
        """Requests without a first token: those in line, and those that were sent."""
        return len(self._line) + self._num_sent

    @property
    def num_in_line(self) -> int:
        """Requests that were not sent yet; those that were wait at replicas, or on the way there."""
        return len(self._line)

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts and expected answers in line."""
        return self._line.queued_tokens

    async def enter(self, request: GenerateRequest) -> Turn:
        """Waits until it is the turn of a request; whoever has it ends it.

        Raises at once what refuses it: LineFull, TooLate, DeadlineTooShort; and DeadlineExceeded when time is up.
        """
        now = asyncio.get_running_loop().time()
        work = expected_work(request)
        timeout_s = self._limits.request_timeout_s if request.timeout_s is None else request.timeout_s
        turn = Turn(self, request, work.prefill_tokens + work.decode_tokens, now, now + timeout_s)
        prospect = self._prospect(request)
        self._refuse(self._verdict(turn, prospect, timeout_s))
        if not len(self._line) and self._has_room(prospect):
            self._send(turn)
            self._recorder.count(ADMISSIONS, "at_once")
            return turn
        self._line.push(turn, tenant=_tenant_of(request), num_tokens=turn.num_tokens, deadline=turn.deadline)
        self._look_again()
        await self._wait(turn, timeout_s)
        return turn

    def end(self, turn: Turn, *, has_begun: bool) -> None:
        """Gives the place of a request to the next."""
        if turn.is_over:
            return
        turn.is_over = True
        if turn.is_sent:
            self._num_sent -= 1
            self._sent_tokens -= len(turn.request.prompt_ids)
        else:
            self._line.remove(turn)
        if has_begun:
            waited_s = asyncio.get_running_loop().time() - turn.arrived_at
            self._mean_wait_s += SMOOTHING * (waited_s - self._mean_wait_s)
        self._call_next()

    def retry_after_s(self) -> int:
        """Gives whole seconds after which a place is likely to be free: the usual wait for a first token."""
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(self._mean_wait_s)))

    async def _wait(self, turn: Turn, timeout_s: float) -> None:
        try:
            async with asyncio.timeout_at(turn.deadline):
                await turn.called.wait()
        except TimeoutError:
            turn.leave()
            self._recorder.count(ADMISSIONS, "expired")
            raise DeadlineExceeded(
                f"the request waited for {timeout_s:g} s, which is its timeout, and its turn had not come; retry later"
                " or allow more time"
            ) from None
        except asyncio.CancelledError:
            turn.leave()
            self._recorder.count(ADMISSIONS, "left")
            raise
        self._recorder.count(ADMISSIONS, "waited")

    def _verdict(self, turn: Turn, prospect: Prospect | None, timeout_s: float) -> Verdict:
        if self.num_waiting >= self._max_waiting:
            retry_s = self.retry_after_s()
            why = f"{self.num_waiting} requests wait already, which is the limit; retry in {retry_s} s"
            return Verdict(Refusal.QUEUE_FULL, retry_s, why)
        if prospect is None:
            # Nothing is known of speeds; only what stands in line counts.
            idle = Outlook(0.0, 0.0, 0.0, self._line.queued_tokens, self._mean_wait_s)
            return judge(idle, num_tokens=turn.num_tokens, timeout_s=math.inf, max_queued_tokens=self._bound(turn))
        before = self._line.tokens_before(_tenant_of(turn.request))
        outlook = Outlook(
            first_token_s=prospect.first_token_s + before * prospect.token_s,
            # A limit says little about the length of an answer.
            decode_s=prospect.decode_s if turn.request.hints.expected_generated_length else 0.0,
            alone_s=prospect.alone_s,
            queued_tokens=self._line.queued_tokens,
            drain_s=self._line.queued_tokens * prospect.token_s,
        )
        return judge(outlook, num_tokens=turn.num_tokens, timeout_s=timeout_s, max_queued_tokens=self._bound(turn))

    def _bound(self, turn: Turn) -> float:
        """Gives how many tokens may stand in line with this request.

        Who has less than a fair share in it may go beyond what others have filled, so it holds twice as much at most.
        """
        tenant, limit = _tenant_of(turn.request), self._limits.max_queued_tokens
        share = limit / max(1, self._line.num_tenants(besides=tenant) + 1)
        return limit if self._line.tokens_of(tenant) + turn.num_tokens > share else 2 * limit

    def _refuse(self, verdict: Verdict) -> None:
        if verdict.refusal is None:
            return
        self._recorder.count(ADMISSIONS, verdict.refusal)
        if verdict.refusal == Refusal.NEVER:
            raise DeadlineTooShort(verdict.why, "timeout")
        kind = TooLate if verdict.refusal == Refusal.TOO_LATE else LineFull
        raise kind(verdict.why, self.num_waiting, retry_after_s=verdict.retry_after_s or self.retry_after_s())

    def _has_room(self, prospect: Prospect | None) -> bool:
        if prospect is None or self._num_sent == 0:
            return True
        return self._sent_tokens < prospect.room_tokens and self._num_sent < prospect.room_requests

    def _send(self, turn: Turn) -> None:
        turn.is_sent = True
        self._num_sent += 1
        self._sent_tokens += len(turn.request.prompt_ids)

    def _call_next(self) -> None:
        while len(self._line):
            # Any request of the line does: what it looks for is how much room the replicas have.
            if not self._has_room(self._prospect(ANY_REQUEST)):
                self._look_again()
                return
            turn = self._line.pop()
            assert turn is not None
            self._send(turn)
            turn.called.set()

    def _look_again(self) -> None:
        if self._timer is None or self._timer.when() <= asyncio.get_running_loop().time():
            self._timer = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._call_next()


def _tenant_of(request: GenerateRequest) -> str:
    return request.hints.tenant or ""
