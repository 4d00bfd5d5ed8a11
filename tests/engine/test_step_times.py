"""The cost of a step is found from steps that differ, follows the machine, and stays sensible where steps are alike."""

import random

import pytest

from engine.step_times import StepCost, StepTimes


def learn(cost: StepCost, times: StepTimes, *, seed: int, num_steps: int = 300, noise: float = 0.1) -> None:
    rng = random.Random(seed)
    for _ in range(num_steps):
        decoding, prompt = rng.randrange(20), rng.choice([0, 0, 0, rng.randrange(1, 500)])
        step_s = cost.step_s(num_decoding=decoding, num_prompt_tokens=prompt) * (1 + noise * (rng.random() - 0.5))
        times.observe(num_decoding=decoding, num_prompt_tokens=prompt, step_s=step_s)


@pytest.mark.parametrize("cost", [StepCost(0.02, 0.004, 0.002), StepCost(0.008, 0.0002, 0.00005)])
def test_steps_that_differ_tell_what_each_part_costs(cost: StepCost) -> None:
    times = StepTimes()
    learn(cost, times, seed=1)
    assert times.cost.fixed_s == pytest.approx(cost.fixed_s, rel=0.15)
    assert times.cost.request_s == pytest.approx(cost.request_s, rel=0.25)
    assert times.cost.token_s == pytest.approx(cost.token_s, rel=0.1)
    slower = StepCost(3 * cost.fixed_s, 3 * cost.request_s, 3 * cost.token_s)
    learn(slower, times, seed=2, num_steps=600)
    assert times.cost.fixed_s == pytest.approx(slower.fixed_s, rel=0.15)


def test_a_step_that_was_held_up_changes_little() -> None:
    times = StepTimes()
    learn(StepCost(0.02, 0.002, 0.001), times, seed=3)
    before = times.cost
    times.observe(num_decoding=5, num_prompt_tokens=0, step_s=20.0)
    learn(StepCost(0.02, 0.002, 0.001), times, seed=4, num_steps=16)
    assert times.cost.fixed_s < 1.6 * before.fixed_s


def test_equal_steps_are_explained_by_a_fixed_time_and_a_small_share() -> None:
    times = StepTimes()
    assert times.cost == StepCost()
    for _ in range(50):
        times.observe(num_decoding=4, num_prompt_tokens=0, step_s=0.06)
    assert times.cost.step_s(num_decoding=4, num_prompt_tokens=0) == pytest.approx(0.06, rel=0.01)
    assert 0 < times.cost.request_s < 0.1 * times.cost.fixed_s
    assert 0 < times.cost.token_s < 0.1 * times.cost.fixed_s


def test_no_part_is_ever_negative_and_steps_stay_explained() -> None:
    for seed in range(200):
        rng, times = random.Random(seed), StepTimes()
        for _ in range(rng.randrange(1, 60)):
            times.observe(
                num_decoding=rng.choice([0, 1, 1000]),
                num_prompt_tokens=rng.choice([0, 1, 8192]),
                step_s=rng.choice([1e-6, 0.01, 1.0]),
            )
            parts = (times.cost.fixed_s, times.cost.request_s, times.cost.token_s)
            assert min(parts) >= 0
            assert 0 < sum(parts) < 10
