"""The score is estimated time over arrays: more work is worse, hits and room are better, closed ones get nothing."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from serve_app.routing.score import Replicas, Work, estimate, ranked, score

IDLE = {
    "prefill_tokens": 0.0,
    "decode_tokens": 0.0,
    "num_running": 0.0,
    "num_waiting": 0.0,
    "max_running": 32.0,
    "free_tokens": 10_000.0,
    "total_tokens": 10_000.0,
    "step_s": 0.01,
    "request_s": 0.001,
    "token_s": 0.0005,
    "step_tokens": 1024.0,
    "age_s": 0.0,
    "sent_prefill_tokens": 0.0,
    "sent_decode_tokens": 0.0,
    "sent_age_s": 0.0,
}


def fleet(*rows: dict[str, Any]) -> Replicas:
    """Gives idle replicas but for what is said of each."""
    full = [{**IDLE, "is_open": True, **row} for row in rows]
    return Replicas(**{field.name: np.array([row[field.name] for row in full]) for field in fields(Replicas)})


def test_an_idle_replica_takes_the_time_of_the_prompt_and_of_the_steps() -> None:
    times = estimate(fleet({}), Work(prefill_tokens=1000, decode_tokens=100))
    per_token = 0.0005 + 0.01 / 1024
    assert times.first_token_s[0] == pytest.approx(1000 * per_token + 0.01)
    assert times.completion_s[0] - times.first_token_s[0] == pytest.approx(100 * 0.011)


@pytest.mark.parametrize("worse", [
    {"prefill_tokens": 5000.0}, {"num_running": 16.0}, {"step_s": 0.02}, {"request_s": 0.05}, {"token_s": 0.01},
    {"num_running": 32.0, "decode_tokens": 4000.0}, {"free_tokens": 500.0, "num_running": 3.0, "decode_tokens": 900.0},
    {"step_tokens": 64.0}, {"sent_prefill_tokens": 100.0}, {"num_running": 32.0, "sent_decode_tokens": 40.0},
])  # fmt: skip
def test_what_makes_a_replica_slower_makes_it_score_worse(worse: dict[str, float]) -> None:
    busy, idle = score(fleet(worse, {}), Work(1000, 100))
    assert busy > idle


def test_a_cached_prefix_is_worth_the_time_it_saves() -> None:
    replicas = fleet({"prefill_tokens": 2000.0}, {})
    work = Work(4000, 10)
    assert np.argmin(score(replicas, work)) == 1
    assert np.argmin(score(replicas, work, np.array([3900.0, 0.0]))) == 0


def test_queued_prompts_are_less_after_a_while_and_never_negative() -> None:
    now, later, much_later = (
        estimate(fleet({"prefill_tokens": 1000.0, "age_s": age}), Work(10, 1)).first_token_s[0]
        for age in (0.0, 0.2, 100.0)
    )
    assert later == pytest.approx(now - 0.2)
    assert much_later == pytest.approx(estimate(fleet({}), Work(10, 1)).first_token_s[0])


def test_what_was_sent_late_is_not_taken_to_be_done_by_an_old_report() -> None:
    sent = {"age_s": 5.0, "sent_prefill_tokens": 1000.0}
    idle, just_sent, long_sent = (
        estimate(fleet(row), Work(10, 1)).first_token_s[0]
        for row in ({}, {**sent, "sent_age_s": 0.1}, {**sent, "sent_age_s": 5.0})
    )
    assert just_sent == pytest.approx(idle + 1000 * (0.0005 + 0.01 / 1024) - 0.1)
    assert long_sent == pytest.approx(idle)


def test_a_full_batch_waits_for_places_in_proportion_to_the_line() -> None:
    full = {"num_running": 32.0, "decode_tokens": 3200.0}
    short, long = (
        estimate(fleet({**full, "num_waiting": waiting}), Work(10, 1)).first_token_s[0] for waiting in (0.0, 8.0)
    )
    assert long > 2 * short > 0


def any_fleet(num: int, rng: np.random.Generator) -> Replicas:
    """Gives replicas with nothing, little or absurdly much of everything, in all combinations."""
    arrays = {}
    for name in IDLE:
        least = (
            1e-6 if name in ("max_running", "total_tokens", "step_tokens", "step_s", "request_s", "token_s") else 0.0
        )
        arrays[name] = np.maximum(rng.choice([0.0, 1.0, 100.0, 1e7], num) * rng.random(num), least)
    return Replicas(**arrays, is_open=rng.random(num) < 0.7)


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_positive_and_infinite_only_where_closed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    replicas = any_fleet(20_000, rng)
    replicas.check()
    for work in (Work(), Work(10**6, 10**6, 8), Work(1, 0), Work(0, 1)):
        scores = score(replicas, work, work.prefill_tokens * rng.random(20_000))
        assert (scores > 0).all()
        assert (np.isinf(scores) == ~replicas.is_open).all()
        assert not np.isnan(scores).any()
    assert score(any_fleet(0, rng), Work()).tolist() == []


@pytest.mark.parametrize("column", ["prefill_tokens", "decode_tokens", "num_waiting", "step_s", "token_s"])
def test_more_to_do_never_makes_a_replica_better(column: str) -> None:
    rng = np.random.default_rng(7)
    replicas = any_fleet(20_000, rng)
    less = score(replicas, Work(500, 100))
    more = score(replace(replicas, **{column: getattr(replicas, column) * 2 + 1e-3}), Work(500, 100))
    assert (more >= less * (1 - 1e-9)).all()


def test_the_best_comes_first_and_equal_ones_in_any_order() -> None:
    rng = np.random.default_rng(1)
    assert ranked(np.array([3.0, 1.0, np.inf, 2.0]), rng).tolist() == [1, 3, 0]
    firsts = [int(ranked(np.array([1.0, 1.0, 1.0, 5.0]), rng)[0]) for _ in range(300)]
    assert {first: firsts.count(first) > 50 for first in range(4)} == {0: True, 1: True, 2: True, 3: False}
    assert ranked(np.array([np.inf, np.inf]), rng, 1.0).tolist() == []
    assert ranked(np.array([]), rng).tolist() == []


def test_within_the_margin_the_order_is_open_beyond_it_it_holds() -> None:
    rng = np.random.default_rng(2)
    orders = {tuple(ranked(np.array([1.0, 1.05, 3.0]), rng, 0.1).tolist()) for _ in range(200)}
    assert orders == {(0, 1, 2), (1, 0, 2)}


def test_several_answers_to_a_prompt_share_it_and_take_a_place_each() -> None:
    replicas = fleet({"num_running": 30.0, "decode_tokens": 3000.0}, {})
    one, four = (estimate(replicas, Work(100, 50 * count, count)).first_token_s for count in (1, 4))
    assert one[1] == pytest.approx(four[1])
    assert four[0] > one[0]
    assert replace(Work(1, 2), num_sequences=3) == Work(1, 2, 3)
