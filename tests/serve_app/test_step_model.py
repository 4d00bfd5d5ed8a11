"""The times of a step are found again from counters, through noise and changes, and are never negative."""

import numpy as np
import pytest

from serve_app.step_model import StepModel, StepTimes


def feed(model: StepModel, times: tuple[float, float, float], *, noise: float = 0.0, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(400):
        steps, batch, prompts = int(rng.integers(1, 20)), rng.integers(0, 64), rng.integers(0, 500)
        seconds = steps * (times[0] + times[1] * batch + times[2] * prompts) * (1 + noise * rng.standard_normal())
        model.observe(num_steps=steps, generated=steps * batch, prefilled=steps * prompts, seconds=seconds)


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-3), (0.1, 0.15)])
def test_times_are_found_again(noise: float, tolerance: float) -> None:
    model = StepModel()
    feed(model, (0.02, 0.001, 0.0005), noise=noise)
    found = model.times()
    assert (found.step_s, found.request_s, found.token_s) == pytest.approx((0.02, 0.001, 0.0005), rel=tolerance)


def test_a_machine_that_slows_down_is_followed() -> None:
    model = StepModel()
    feed(model, (0.02, 0.001, 0.0005))
    for seed in range(4):
        feed(model, (0.04, 0.002, 0.001), seed=seed)
    assert model.times().step_s == pytest.approx(0.04, rel=0.05)


def test_nothing_is_known_before_a_step_and_idle_intervals_say_nothing() -> None:
    model = StepModel()
    model.observe(num_steps=0, generated=0, prefilled=0, seconds=0)
    assert model.times() == StepTimes()
    feed(model, (0.02, 0.001, 0.0005))
    before = model.times()
    model.observe(num_steps=0, generated=5, prefilled=5, seconds=1)
    assert model.times() == before


def test_an_engine_that_only_ever_does_one_thing_has_times_that_explain_it() -> None:
    model = StepModel()
    for _ in range(100):
        model.observe(num_steps=10, generated=80, prefilled=0, seconds=0.4)
    found = model.times()
    assert 10 * found.step_s + 80 * found.request_s == pytest.approx(0.4, rel=1e-3)
    assert min(found.step_s, found.request_s, found.token_s) >= 0


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_observed_times_are_finite_and_not_negative(seed: int) -> None:
    model, rng = StepModel(), np.random.default_rng(seed)
    for _ in range(200):
        steps, generated, prefilled, seconds = rng.choice([-1.0, 0.0, 1e-3, 1.0, 1e6], 4) * rng.random(4)
        model.observe(num_steps=steps, generated=generated, prefilled=prefilled, seconds=seconds)
        found = model.times()
        assert all(0 <= value < np.inf for value in (found.step_s, found.request_s, found.token_s))
