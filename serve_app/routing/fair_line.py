"""Admission: whether a request can be done in time at all, and which tenant's turn it is. Pure, without a clock.

The line is fair in tokens (start-time fair queueing, Goyal et al. 1996): each tenant in it gets the same share, however
many requests or connections it has, and nobody saves up while away.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")

OPTIMISM = 0.5
"""Share of the expected answer that has to fit: it may be shorter, and a wrong refusal is worse than a late one."""
MAX_GONE = 1024
"""Tenants remembered beyond twice those in line: under steady load it is never empty, and tenants come and go."""
MAX_RETRY_AFTER_S = 60
"""A client that waits longer than this has given up."""


class Refusal(StrEnum):
    """Why a request is not taken."""

    QUEUE_FULL = "queue_full"
    TOO_LATE = "too_late"
    NEVER = "never"
    """Not even an idle fleet would be in time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """refusal None takes the request. retry_after_s: whole seconds, where another try may help. why: one sentence."""

    refusal: Refusal | None = None
    retry_after_s: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the fleet looks like to a request, at the replica that would take it.

    first_token_s, decode_s: estimated seconds until the first token, and from there to the last. alone_s: until the
    first token if nobody else were there. queued_tokens: that wait before it; drain_s: until they are done.
    """

    first_token_s: float
    decode_s: float
    alone_s: float
    queued_tokens: float = 0.0
    drain_s: float = 0.0


def judge(outlook: Outlook, *, num_tokens: int, timeout_s: float, max_queued_tokens: float) -> Verdict:
    """Gives whether a request of `num_tokens` that has `timeout_s` left is taken."""
    needed_s = OPTIMISM * outlook.decode_s
    if outlook.alone_s + needed_s > timeout_s:
        return Verdict(
            Refusal.NEVER,
            why=f"the request needs about {outlook.alone_s + outlook.decode_s:.1f} s even on an idle replica, and its"
            f" timeout is {timeout_s:g} s; allow more time or ask for fewer tokens",
        )
    if outlook.first_token_s + needed_s > timeout_s:
        retry_s = _whole(outlook.first_token_s + needed_s - timeout_s)
        return Verdict(
            Refusal.TOO_LATE,
            retry_after_s=retry_s,
            why=f"its turn would come in about {outlook.first_token_s:.1f} s, too late for a timeout of"
            f" {timeout_s:g} s; retry in {retry_s} s",
        )
    # One that is alone may always wait, or a long prompt could never be served.
    if outlook.queued_tokens and outlook.queued_tokens + num_tokens > max_queued_tokens:
        over = outlook.queued_tokens + num_tokens - max_queued_tokens
        retry_s = _whole(outlook.drain_s * min(1.0, over / outlook.queued_tokens))
        return Verdict(
            Refusal.QUEUE_FULL,
            retry_after_s=retry_s,
            why=f"{outlook.queued_tokens:.0f} tokens wait already and this request has {num_tokens}; the limit is"
            f" {max_queued_tokens:g}, retry in {retry_s} s",
        )
    return Verdict()


@dataclass(frozen=True, slots=True)
class Place(Generic[T]):
    """One entry of the line."""

    item: T
    tenant: str
    num_tokens: int
    deadline: float
    started: float


class FairLine(Generic[T]):
    """Requests that wait at a router, by tenant. One thread only.

    Invariant: `queued_tokens` is the sum over the entries; of two tenants that always have something in line, neither
    is ahead of the other by more than the longest request of each.
    """

    def __init__(self) -> None:
        self.queued_tokens = 0
        self._of: dict[str, deque[Place[T]]] = {}
        self._heads: list[tuple[float, int, str]] = []
        self._finished: dict[str, float] = {}
        self._virtual = 0.0
        self._num_pushed = 0

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def push(self, item: T, *, tenant: str, num_tokens: int, deadline: float = math.inf) -> None:
        """Puts a request behind those of its tenant."""
        if len(self._finished) > 2 * len(self._of) + MAX_GONE:
            # Those who have left start level with everybody when they come back: a debt of a request each is forgiven.
            self._finished = {name: at for name, at in self._finished.items() if name in self._of}
        started = max(self._virtual, self._finished.get(tenant, 0.0))
        self._finished[tenant] = started + max(1, num_tokens)
        waiting = self._of.setdefault(tenant, deque())
        waiting.append(Place(item, tenant, num_tokens, deadline, started))
        self.queued_tokens += num_tokens
        if len(waiting) == 1:
            self._offer(waiting[0])

    def pop(self) -> T | None:
        """Takes out the request whose turn it is; None from an empty line."""
        while self._heads:
            started, _, tenant = heapq.heappop(self._heads)
            waiting = self._of.get(tenant)
            if not waiting or waiting[0].started != started:
                continue
            place = waiting.popleft()
            self._virtual = max(self._virtual, started)
            self._after_removal(tenant)
            self.queued_tokens -= place.num_tokens
            return place.item
        return None

    def expired(self, now: float) -> list[T]:
        """Takes out the requests whose deadline has passed."""
        late = [place for waiting in self._of.values() for place in waiting if place.deadline <= now]
        for place in late:
            self._remove(place)
        return [place.item for place in late]

    def remove(self, item: T) -> bool:
        """Takes out one whose caller has left; False where it is not in line."""
        for waiting in self._of.values():
            for place in waiting:
                if place.item is item:
                    self._remove(place)
                    return True
        return False

    def tokens_of(self, tenant: str) -> int:
        """Gives how many tokens of this tenant wait."""
        return sum(place.num_tokens for place in self._of.get(tenant, ()))

    def num_tenants(self, *, besides: str) -> int:
        """Gives how many other tenants have something in line."""
        return len(self._of.keys() - {besides})

    def tokens_before(self, tenant: str) -> int:
        """Gives how many tokens would be served before a new request of this tenant."""
        started = max(self._virtual, self._finished.get(tenant, 0.0))
        return sum(place.num_tokens for waiting in self._of.values() for place in waiting if place.started <= started)

    def _remove(self, place: Place[T]) -> None:
        waiting = self._of[place.tenant]
        was_head = waiting[0] is place
        if waiting[-1] is place:
            # Nobody served it, so its tenant is not charged for it.
            self._finished[place.tenant] = place.started
        waiting.remove(place)
        self.queued_tokens -= place.num_tokens
        if was_head:
            self._after_removal(place.tenant)
        elif not waiting:
            del self._of[place.tenant]

    def _after_removal(self, tenant: str) -> None:
        waiting = self._of[tenant]
        if waiting:
            self._offer(waiting[0])
            return
        del self._of[tenant]
        if self._finished[tenant] <= self._virtual or not self._of:
            # It starts level with everybody when it comes back, so nothing has to be remembered.
            del self._finished[tenant]
        if not self._of:
            self._finished.clear()
            self._heads.clear()
            self._virtual = 0.0

    def _offer(self, place: Place[T]) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heads, (place.started, self._num_pushed, place.tenant))


def _whole(seconds: float) -> int:
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))
