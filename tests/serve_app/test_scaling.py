"""Scaling follows each target with a reason, lasts before it acts, never flaps, and goes to zero and back."""

import random
from dataclasses import replace
from math import nan
from typing import Any

import pytest

from serve_app.scaling.decision import FleetLoad, ScalingDecision, ScalingReason, ScalingState, ScalingTargets, decide

TARGETS = ScalingTargets(minimum=1, maximum=10, up_after_s=2.0, down_after_s=60.0, start_s=10.0)
SPEEDS = {"step_s": 0.02, "request_s": 0.002, "token_s": 0.001, "max_running": 64.0}


def load(num_replicas: int = 1, **numbers: float) -> FleetLoad:
    return FleetLoad(num_replicas, **{**SPEEDS, **numbers})


class Walk:
    """Decides again and again, a second apart."""

    def __init__(self, targets: ScalingTargets = TARGETS, *, current: int = 1) -> None:
        self.targets, self.current, self.now, self.state = targets, current, 0.0, ScalingState()
        self.sizes: list[int] = []
        self.latest: ScalingDecision | None = None

    def go(self, of: FleetLoad, seconds: int = 1, *, arriving: float = 0.0) -> ScalingDecision:
        for _ in range(seconds):
            self.now += 1.0
            of = replace(of, arrived_s=of.arrived_s + arriving)
            decision = decide(of, self.targets, current=self.current, now=self.now, state=self.state)
            self.current, self.state = decision.num_replicas, decision.state
            self.sizes.append(self.current)
            self.latest = decision
        assert self.latest is not None
        return self.latest


@pytest.mark.parametrize(("numbers", "size", "reason"), [
    ({"prefill_tokens": 9000, "num_requests": 50}, 5, ScalingReason.FIRST_TOKEN),
    ({"num_requests": 100}, 3, ScalingReason.TOKEN_TIME),  # 40 requests a replica keep a step to 0.1 s
    ({"kv_usage": 1.0, "num_replicas": 4, "num_requests": 10}, 5, ScalingReason.KV_PRESSURE),
    ({"work_s": 65.0, "num_requests": 10}, 7, ScalingReason.WORK),
    ({"work_s": 65.0, "num_requests": 2}, 2, ScalingReason.WORK),  # a request cannot be shared
    ({"work_s": 6500.0, "num_requests": 90}, 10, ScalingReason.WORK),
    ({"waiting_elsewhere": 100}, 3, ScalingReason.TOKEN_TIME),
])  # fmt: skip
def test_the_most_demanding_target_decides_and_says_so(
    numbers: dict[str, Any], size: int, reason: ScalingReason
) -> None:
    walk = Walk(current=numbers.get("num_replicas", 1))
    decision = walk.go(load(**numbers), 3)
    assert (decision.num_replicas, decision.reason) == (size, reason)
    assert decision.why
    # What stays needed changes nothing more.
    for _ in range(100):
        assert walk.go(load(**{**numbers, "num_replicas": size, "kv_usage": 0.8})).num_replicas == size


def test_the_limit_is_a_reason_of_its_own() -> None:
    decision = Walk(current=10).go(load(10, work_s=500.0, num_requests=99))
    assert (decision.num_replicas, decision.needed, decision.reason) == (10, 50, ScalingReason.LIMIT)


def test_a_spike_shorter_than_the_delay_starts_nothing() -> None:
    walk = Walk()
    for _ in range(20):
        assert walk.go(load(work_s=50.0, num_requests=9), 2).reason == ScalingReason.PENDING
        walk.go(load(work_s=5.0, num_requests=9), 2)
    assert set(walk.sizes) == {1}


def test_a_lull_shorter_than_the_delay_stops_nothing() -> None:
    walk = Walk(current=5)
    for _ in range(5):
        walk.go(load(5, work_s=5.0, num_requests=9), 55)
        walk.go(load(5, work_s=48.0, num_requests=9), 5)
    assert set(walk.sizes) == {5}


def test_after_the_lull_it_shrinks_to_the_most_that_was_needed_meanwhile() -> None:
    walk = Walk(current=8)
    walk.go(load(8, work_s=20.0, num_requests=9), 30)
    walk.go(load(8, work_s=38.0, num_requests=9), 10)
    walk.go(load(8, work_s=5.0, num_requests=9), 21)
    assert walk.current == 6
    walk.go(load(6, work_s=5.0, num_requests=9), 62)
    assert walk.current == 1


@pytest.mark.parametrize("seed", range(10))
def test_a_noisy_but_constant_load_never_flaps(seed: int) -> None:
    """Half of the noise that would be needed to go a replica down with room to spare."""
    chooser, walk = random.Random(seed), Walk()
    mean = chooser.uniform(1, 90)
    for _ in range(600):
        walk.go(load(walk.current, work_s=mean * chooser.uniform(0.87, 1.13), num_requests=99))
    assert walk.sizes == sorted(walk.sizes)


def test_it_goes_to_zero_when_idle_and_comes_back_at_once() -> None:
    walk = Walk(replace(TARGETS, minimum=0, idle_s=30.0), current=1)
    assert walk.go(load(num_requests=1), 100).num_replicas == 1
    assert walk.go(load(), 30).num_replicas == 1
    decision = walk.go(load(), 1)
    assert (decision.num_replicas, decision.reason) == (0, ScalingReason.IDLE)
    assert walk.go(FleetLoad(0), 10).num_replicas == 0
    decision = walk.go(FleetLoad(0, waiting_elsewhere=1))
    assert (decision.num_replicas, decision.reason) == (1, ScalingReason.WAKE)


def test_it_never_goes_to_zero_where_one_is_the_least() -> None:
    assert Walk(current=3).go(load(3), 500).num_replicas == 1
    assert Walk(replace(TARGETS, minimum=2), current=3).go(load(3), 500).num_replicas == 2


def test_growing_arrivals_are_followed_ahead_of_the_queue() -> None:
    walk, arrived = Walk(), 0.0
    for second in range(120):
        arrived += 0.025 * second
        walk.go(load(walk.current, num_requests=5, arrived_s=arrived))
    assert walk.current > 3.0 / TARGETS.utilisation
    assert walk.latest is not None
    assert walk.latest.reason in (ScalingReason.ARRIVALS, ScalingReason.STEADY, ScalingReason.PENDING)
    assert "expected a second" in walk.latest.why


def test_steady_arrivals_need_what_they_use_over_the_utilisation() -> None:
    walk, arrived = Walk(), 0.0
    for _ in range(300):
        arrived += 3.0
        walk.go(load(walk.current, num_requests=50, arrived_s=arrived))
    assert walk.current == 4


def test_a_count_that_starts_anew_is_no_negative_rate() -> None:
    walk, arrived = Walk(), 1000.0
    for second in range(200):
        arrived = 0.0 if second == 100 else arrived + 3.0
        walk.go(load(walk.current, num_requests=50, arrived_s=arrived))
        assert walk.state.rate >= 0
    assert walk.current == 4


@pytest.mark.parametrize("column", ["prefill_tokens", "work_s", "kv_usage", "arrived_s", "num_requests"])
def test_nonsense_is_refused(column: str) -> None:
    with pytest.raises(ValueError, match="has to be finite"):
        decide(load(**{column: nan}), TARGETS, current=1, now=0.0, state=ScalingState())


@pytest.mark.parametrize("seed", range(30))
def test_any_walk_stays_within_its_limits_and_says_why(seed: int) -> None:
    chooser = random.Random(seed)
    minimum = chooser.randrange(3)
    walk = Walk(replace(TARGETS, minimum=minimum, down_after_s=5.0, idle_s=5.0), current=max(1, minimum))
    for _ in range(300):
        size = chooser.choice([0.0, 1.0, 100.0, 1e6])
        decision = walk.go(load(
            walk.current, prefill_tokens=size * chooser.random(), work_s=size * chooser.random(),
            num_requests=chooser.choice([0, 1, 50]), kv_usage=chooser.random(), arrived_s=size,
        ))  # fmt: skip
        assert minimum <= decision.num_replicas <= 10
        assert decision.why
        if decision.reason in (ScalingReason.PENDING, ScalingReason.STEADY, ScalingReason.LIMIT):
            assert len(walk.sizes) < 2 or walk.sizes[-1] == walk.sizes[-2]


def test_a_fleet_shrinks_to_one_replica_for_one_long_request() -> None:
    load = FleetLoad(num_replicas=3, num_requests=1, work_s=1000.0, decode_tokens=10_000)
    targets = ScalingTargets(minimum=1, maximum=3, down_after_s=0.0)
    assert decide(load, targets, current=3, now=1.0, state=ScalingState()).num_replicas == 1
