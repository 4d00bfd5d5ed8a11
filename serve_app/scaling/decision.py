"""How many replicas the fleet needs, and why: `decide`, a pure function of what the replicas report."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, exp, inf, isfinite

LEAST_ROOM = 0.7
"""A smaller fleet has to have this much room left, else the next request would bring the replica back."""
TREND_SMOOTHING_S = 20.0
"""Over which arrivals are averaged; their trend is that average beside one three times as slow."""


class ScalingReason(StrEnum):
    """What decided."""

    FIRST_TOKEN = "first_token"
    TOKEN_TIME = "token_time"
    KV_PRESSURE = "kv_pressure"
    WORK = "work"
    ARRIVALS = "arrivals"
    LIMIT = "limit"
    """More are needed than there may be."""
    PENDING = "pending"
    """The need has to last for a while first."""
    IDLE = "idle"
    WAKE = "wake"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """Sums over the replicas, and what a usual one takes for a step (as in `routing.score`).

    arrived_s: seconds of work, of one replica, that came in since the fleet started; only grows. waiting_elsewhere:
    requests that no replica has yet.
    """

    num_replicas: int
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    num_requests: float = 0.0
    waiting_elsewhere: float = 0.0
    kv_usage: float = 0.0
    work_s: float = 0.0
    arrived_s: float = 0.0
    step_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0
    max_running: float = inf


@dataclass(frozen=True, slots=True)
class ScalingTargets:
    """What the fleet is to keep to, and how fast it may follow.

    first_token_s: of queued prompts at each replica. token_time_s: of a step, which is the time between two tokens.
    kv_usage: share of the cache that requests hold. work_s: seconds of work at each replica. utilisation: of the fleet,
    by arrivals. up_after_s, down_after_s: how long the need has to last. start_s: what a new replica takes to start;
    the trend is followed that far ahead. idle_s: without a request, before the fleet goes to `minimum` where that is 0.
    """

    minimum: int = 1
    maximum: int = 1
    first_token_s: float = 2.0
    token_time_s: float = 0.1
    kv_usage: float = 0.9
    work_s: float = 10.0
    utilisation: float = 0.8
    up_after_s: float = 2.0
    down_after_s: float = 60.0
    start_s: float = 30.0
    idle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What is carried from one decision to the next."""

    wanted_more_since: float | None = None
    wanted_fewer_since: float | None = None
    most_since_fewer: int = 0
    """The most that was needed since fewer were wanted: what the fleet shrinks to."""
    idle_since: float | None = None
    seen_at: float | None = None
    arrived_s: float = 0.0
    followed_s: float = 0.0
    quick_sum: float = 0.0
    slow_sum: float = 0.0

    @property
    def rate(self) -> float:
        """Seconds of work that come in a second, lately."""
        return _mean(self.quick_sum, self.followed_s, TREND_SMOOTHING_S)

    @property
    def slow_rate(self) -> float:
        """The same over three times as long."""
        return _mean(self.slow_sum, self.followed_s, 3 * TREND_SMOOTHING_S)


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """num_replicas: what the fleet should have. needed: what it needs at this moment. why: one sentence."""

    num_replicas: int
    needed: int
    reason: ScalingReason
    why: str
    state: ScalingState


@dataclass(frozen=True, slots=True)
class _Need:
    num_replicas: int
    reason: ScalingReason
    why: str


def decide(
    load: FleetLoad, targets: ScalingTargets, *, current: int, now: float, state: ScalingState
) -> ScalingDecision:
    """Gives the number of replicas from now on. current: what was decided before, which may not have started yet."""
    numbers = (load.prefill_tokens, load.decode_tokens, load.num_requests, load.work_s, load.arrived_s, load.kv_usage)
    if not all(map(isfinite, numbers)):
        raise ValueError(f"replicas report {load}; every number has to be finite")
    state = _follow_arrivals(load, state, now)
    num_requests = load.num_requests + load.waiting_elsewhere
    state = replace(state, idle_since=None if num_requests else _since(state.idle_since, now))
    need = _need(load, targets, current, state, now) if current else _wake(num_requests)
    wanted = min(need.num_replicas, targets.maximum)
    if need.reason != ScalingReason.IDLE:
        wanted = max(wanted, targets.minimum)
    if wanted > current:
        return _grow(need, targets, wanted, current, now, state)
    state = replace(state, wanted_more_since=None)
    if wanted < current:
        return _shrink(need, targets, wanted, current, now, state)
    state = replace(state, wanted_fewer_since=None)
    if need.num_replicas > targets.maximum:
        why = f"{need.why}; the limit is {targets.maximum}"
        return ScalingDecision(current, need.num_replicas, ScalingReason.LIMIT, why, state)
    return ScalingDecision(current, need.num_replicas, ScalingReason.STEADY, need.why, state)


def _grow(
    need: _Need, targets: ScalingTargets, wanted: int, current: int, now: float, state: ScalingState
) -> ScalingDecision:
    since = _since(state.wanted_more_since, now)
    lasted = now - since
    # Nobody is served while there is no replica, so there is nothing to wait for.
    if current > 0 and lasted < targets.up_after_s:
        state = replace(state, wanted_more_since=since)
        why = f"{need.why}, for {lasted:.1f} s so far of {targets.up_after_s:g}"
        return ScalingDecision(current, need.num_replicas, ScalingReason.PENDING, why, state)
    state = replace(state, wanted_more_since=None, wanted_fewer_since=None)
    return ScalingDecision(wanted, need.num_replicas, need.reason, need.why, state)


def _shrink(
    need: _Need, targets: ScalingTargets, wanted: int, current: int, now: float, state: ScalingState
) -> ScalingDecision:
    """Goes down to the most that was needed in the whole time of waiting, so that a pause between bursts costs none."""
    since = _since(state.wanted_fewer_since, now)
    most = wanted if state.wanted_fewer_since is None else max(wanted, state.most_since_fewer)
    lasted = now - since
    state = replace(state, wanted_fewer_since=since, most_since_fewer=most)
    # Who is idle has waited long enough.
    if need.reason != ScalingReason.IDLE and lasted < targets.down_after_s:
        why = f"{need.why}, for {lasted:.1f} s so far of {targets.down_after_s:g}"
        return ScalingDecision(current, need.num_replicas, ScalingReason.PENDING, why, state)
    wanted = wanted if need.reason == ScalingReason.IDLE else most
    return ScalingDecision(
        wanted, need.num_replicas, need.reason, need.why, replace(state, wanted_fewer_since=None, most_since_fewer=0)
    )


def _wake(num_requests: float) -> _Need:
    if num_requests:
        return _Need(1, ScalingReason.WAKE, f"{num_requests:g} requests wait and no replica runs")
    return _Need(0, ScalingReason.IDLE, "no requests, and no replica runs")


def _need(load: FleetLoad, targets: ScalingTargets, current: int, state: ScalingState, now: float) -> _Need:
    """Gives what the load needs now: by each target, and what the most demanding of them says."""
    if state.idle_since is not None and targets.minimum == 0 and now - state.idle_since >= targets.idle_s:
        return _Need(0, ScalingReason.IDLE, f"no request for {now - state.idle_since:.0f} s")
    wants = [want.need(current) for want in _wants(load, targets, state)]
    needed = max(wants, key=lambda need: need.num_replicas)
    return replace(needed, num_replicas=max(1, needed.num_replicas))


@dataclass(frozen=True, slots=True)
class _Want:
    """What one target asks for: so many replicas, but never more than `most`."""

    size: float
    reason: ScalingReason
    why: str
    most: float = inf

    def need(self, current: int) -> _Need:
        # A smaller fleet has to hold the load with room to spare.
        needed = ceil(self.size) if self.size > current - 1 else min(current, ceil(self.size / LEAST_ROOM))
        return _Need(ceil(min(needed, self.most)), self.reason, self.why)


def _wants(load: FleetLoad, targets: ScalingTargets, state: ScalingState) -> list[_Want]:
    num_requests = load.num_requests + load.waiting_elsewhere
    queued_s = load.prefill_tokens * load.token_s
    batch = load.max_running
    # Where a single request is too slow already, more replicas would not make it quicker.
    if load.request_s > 0 and load.step_s + load.request_s <= targets.token_time_s:
        batch = min(batch, max(1.0, (targets.token_time_s - load.step_s) / load.request_s))
    # A request cannot be shared, so more replicas than requests are of no use to those that are there.
    by_load = [
        (queued_s / targets.first_token_s, ScalingReason.FIRST_TOKEN, f"{queued_s:.1f} s of prompts are queued"),
        (num_requests / batch, ScalingReason.TOKEN_TIME, f"{num_requests:g} requests, {batch:g} a replica are quick"),
        (load.work_s / targets.work_s, ScalingReason.WORK, f"{load.work_s:.1f} s of work are there"),
    ]
    wants = [_Want(size, reason, why, most=num_requests) for size, reason, why in by_load]
    used = load.kv_usage * load.num_replicas
    # Of steady growth the quick average is one smoothing time behind and the slow one three.
    growth = max(0.0, state.rate - state.slow_rate) / (2 * TREND_SMOOTHING_S)
    ahead = state.rate + growth * (TREND_SMOOTHING_S + targets.start_s)
    # No trend goes on for ever: at most twice what comes in now.
    ahead = min(ahead, 2.0 * state.rate)
    wants += [
        _Want(used / targets.kv_usage, ScalingReason.KV_PRESSURE, f"{load.kv_usage:.0%} of the cache are held"),
        _Want(ahead / targets.utilisation, ScalingReason.ARRIVALS, f"{ahead:.2f} s of work are expected a second"),
    ]
    return wants


def _follow_arrivals(load: FleetLoad, state: ScalingState, now: float) -> ScalingState:
    """Follows how much work comes in, in seconds of one replica a second, quickly and slowly."""
    if state.seen_at is None or load.arrived_s < state.arrived_s:
        # The first look, or a replica is gone and its count with it.
        return replace(state, seen_at=now, arrived_s=load.arrived_s)
    elapsed_s = now - state.seen_at
    if elapsed_s <= 0:
        return state
    rate = (load.arrived_s - state.arrived_s) / elapsed_s
    quick, slow = (1 - exp(-elapsed_s / over) for over in (TREND_SMOOTHING_S, 3 * TREND_SMOOTHING_S))
    return replace(
        state,
        seen_at=now,
        arrived_s=load.arrived_s,
        followed_s=state.followed_s + elapsed_s,
        quick_sum=state.quick_sum + quick * (rate - state.quick_sum),
        slow_sum=state.slow_sum + slow * (rate - state.slow_sum),
    )


def _mean(smoothed: float, followed_s: float, over_s: float) -> float:
    """Gives a smoothed value without the zero that it began with, or every start would look like growth."""
    return smoothed / (1 - exp(-followed_s / over_s)) if followed_s > 0 else 0.0


def _since(since: float | None, now: float) -> float:
    return now if since is None else since
