"""The simulated fleet: replicas whose tokens add up, traffic that repeats itself, and runs in which nobody is lost."""

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fleet.replica import Replica
from benchmarks.fleet.routers import ROUTERS
from benchmarks.fleet.scaled import simulate_scaled
from benchmarks.fleet.simulation import Case, simulate
from benchmarks.fleet.traffic import PAGE_SIZE, Scale, Turn, draw, load, scales
from benchmarks.fleet_sim import _rate_at
from serve_app.scaling.decision import ScalingTargets

CPU = scales()["cpu"]
SMALL = Case("chat", "ours", 0.7, num_replicas=4, num_routers=2, turns_per_replica=20)


def turn(number: int, *, prompt: int, answer: int, names: list[int] | None = None) -> Turn:
    full = (prompt + answer) // PAGE_SIZE
    own = [number * 1000 + index for index in range(full)]
    shared = (names or [])[:full]
    return Turn(number, 0.0, "t", None, prompt, answer, shared + own[len(shared) :], [], None, 10_000)


def run_dry(replica: Replica) -> list[Turn]:
    ended = []
    while replica.busy_until < float("inf"):
        ended += replica.advance(replica.busy_until)[1]
        replica.check()
    return ended


def test_an_idle_replica_takes_the_time_that_its_steps_take() -> None:
    scale = Scale("s", step_s=0.01, request_s=0.001, token_s=0.0001, step_tokens=500, max_running=4, kv_tokens=10_000)
    replica, one = Replica(0, scale), turn(0, prompt=600, answer=11)
    replica.add(one, 11, 0.0)
    assert run_dry(replica) == [one]
    assert one.first_token_at == pytest.approx(0.06 + 0.02)
    # The last step ends at what is left of the answer.
    assert replica.busy_s == pytest.approx(0.08 + 10 * 0.011)
    assert replica.generated == 11


def test_a_prefix_is_found_again_and_never_the_whole_prompt() -> None:
    replica = Replica(0, CPU)
    replica.add(turn(0, prompt=2 * PAGE_SIZE, answer=5), 5, 0.0)
    run_dry(replica)
    again, longer = turn(1, prompt=2 * PAGE_SIZE, answer=5, names=[0, 1]), turn(2, prompt=900, answer=5, names=[0, 1])
    assert (replica.hit_blocks(again), replica.hit_blocks(longer)) == (1, 2)
    replica.add(longer, 5, 100.0)
    run_dry(replica)
    assert longer.hit_tokens == 2 * PAGE_SIZE


@pytest.mark.parametrize("seed", range(15))
def test_in_any_walk_tokens_add_up_and_everybody_ends(seed: int) -> None:
    """With a cache so small that requests are sent back to the line and prefixes are evicted all the time."""
    chooser = random.Random(seed)
    replica = Replica(0, replace(CPU, kv_tokens=6000, max_running=chooser.choice([2, 8, 32])))
    pool = [[group * 100_000 + index for index in range(20)] for group in range(5)]
    turns, ended, now = [], [], 0.0
    for number in range(1, 80):
        shared = chooser.choice(pool)[: chooser.randrange(8)]
        turns.append(turn(number, prompt=chooser.randrange(1, 2500), answer=chooser.randrange(1, 1500), names=shared))
        now += chooser.expovariate(0.3)
        while replica.busy_until <= now:
            ended += replica.advance(replica.busy_until)[1]
            replica.check()
        replica.add(turns[-1], 100, now)
        stats = replica.stats(now)
        assert all(value >= 0 for value in stats.values())
    ended += run_dry(replica)
    assert sorted(one.number for one in ended) == [one.number for one in turns]
    assert all(one.arrival <= one.first_token_at for one in turns)
    assert replica.generated == sum(one.answer_tokens for one in turns)


def test_steps_run_in_one_go_end_when_somebody_comes() -> None:
    replica = Replica(0, CPU)
    replica.add(turn(1, prompt=10, answer=1000), 10, 0.0)
    replica.advance(replica.busy_until)
    late = turn(2, prompt=10, answer=2)
    now = replica.busy_until / 2
    replica.add(late, 2, now)
    assert replica.busy_until - now <= CPU.step_s + CPU.request_s + 1e-9
    run_dry(replica)
    assert late.first_token_at - now < 0.2


@pytest.mark.parametrize("workload", ["chat", "agents", "rollouts", "bursts"])
def test_traffic_repeats_itself_and_uses_what_it_should(workload: str) -> None:
    described = load(workload)
    first, second = (draw(described, CPU, num_replicas=8, utilisation=0.7, num_turns=400) for _ in range(2))
    assert [one.names for one in first.all] == [one.names for one in second.all]
    assert [one.arrival for one in first.all] == [one.arrival for one in second.all]
    denser = draw(described, CPU, num_replicas=16, utilisation=0.7, num_turns=400)
    spans = [max(one.arrival for one in drawn.first) for drawn in (first, denser)]
    assert spans[0] / spans[1] == pytest.approx(2, rel=0.5)
    for one in first.all:
        assert len(one.names) == (one.prompt_tokens + one.answer_tokens) // PAGE_SIZE
        assert 1 <= one.answer_tokens <= described["max_tokens"]
        if one.next is not None:
            shared = (one.prompt_tokens + one.answer_tokens) // PAGE_SIZE
            assert one.next.names[:shared] == one.names
            assert one.next.prompt_tokens > one.prompt_tokens


@pytest.mark.parametrize("policy", ROUTERS)
def test_every_router_serves_everybody(policy: str) -> None:
    outcome = simulate(replace(SMALL, policy=policy), CPU)
    assert len(outcome.first_token_s) > 20
    assert (outcome.first_token_s > 0).all()
    assert (outcome.token_s >= 0).all()
    assert outcome.goodput > 0
    assert 0 <= outcome.hit_share < 1 <= outcome.imbalance


def test_a_run_repeats_itself() -> None:
    first, second = simulate(SMALL, CPU), simulate(SMALL, CPU)
    assert first.first_token_s.tolist() == second.first_token_s.tolist()


@pytest.mark.parametrize("policy", ["ours", "power of two"])
def test_a_replica_that_dies_takes_no_request_with_it(policy: str) -> None:
    case = replace(SMALL, workload="bursts", utilisation=0.95, policy=policy, turns_per_replica=60, crash_at=0.5)
    outcome = simulate(case, CPU)
    assert outcome.num_lost > 0
    assert (outcome.first_token_s > 0).all()
    assert len(outcome.first_token_s) == len(simulate(replace(case, crash_at=None), CPU).first_token_s)


def test_our_router_finds_prefixes_that_others_miss_and_is_sooner() -> None:
    case = replace(SMALL, num_replicas=8, turns_per_replica=40)
    ours, two = (simulate(replace(case, policy=policy), CPU) for policy in ("ours", "power of two"))
    assert ours.hit_share > 1.5 * two.hit_share
    assert np.quantile(ours.first_token_s, 0.9) < 0.6 * np.quantile(two.first_token_s, 0.9)


def test_a_fleet_follows_a_step_of_load_and_goes_back_without_turning_twice() -> None:
    case = Case("steps", "ours", 0.33, num_replicas=6, num_routers=1, turns_per_replica=320)
    targets = ScalingTargets(minimum=1, maximum=6, start_s=10.0)
    outcome, run = simulate_scaled(case, CPU, targets)
    assert (outcome.first_token_s > 0).all()
    step = [moment.wanted for moment in run.moments if 100 < moment.now < 400]
    calm = [moment.wanted for moment in run.moments if 900 < moment.now < 1200]
    assert min(step) >= 5
    assert max(calm) <= 3
    # Up at the first step, down after it, and at most up again at the next.
    assert run.num_turns() <= 2
    assert all(moment.ready <= 6 for moment in run.moments)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([1.0, 0.98, 0.5], "0.65"), ([0.98, 0.9, 0.5], "less than 0.60"), ([1.0, 1.0, 0.995], "more than 0.80")],
)
def test_a_rate_is_named_only_where_it_was_run(shares: list[float], expected: str) -> None:
    assert _rate_at(0.99, np.array(shares), [0.6, 0.7, 0.8]) == expected
