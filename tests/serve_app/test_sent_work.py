"""Sent work counts at once, and no longer than until a report shows it."""

import numpy as np
import pytest

from serve_app.routing.score import Work
from serve_app.routing.sent_work import SentWork

NEVER = np.array([-np.inf, -np.inf])


def test_sent_work_counts_until_its_replica_reports() -> None:
    sent = SentWork()
    sent.add(0, Work(10, 5, 2), miss_tokens=7, now=1.0)
    sent.add(1, Work(10, 6), miss_tokens=8, now=2.0)
    unseen = sent.unseen(NEVER, now=3.0, horizon_s=10)
    assert unseen.prefill_tokens.tolist() == [7, 8]
    assert unseen.decode_tokens.tolist() == [5, 6]
    assert unseen.num_requests.tolist() == [2, 1]
    assert unseen.since.tolist() == [1, 2]
    assert sent.unseen(np.array([1.5, 1.5]), now=3.0, horizon_s=10).prefill_tokens.tolist() == [0, 8]
    assert len(sent) == 1


def test_what_has_ended_counts_no_more_and_twice_is_once() -> None:
    sent = SentWork()
    first = sent.add(0, Work(1, 1), miss_tokens=1, now=1.0)
    sent.add(0, Work(2, 2), miss_tokens=2, now=1.0)
    sent.done(first)
    sent.done(first)
    sent.done(first + 100)
    assert sent.unseen(NEVER, now=3.0, horizon_s=10).prefill_tokens.tolist() == [2, 0]


def test_a_silent_replica_does_not_make_the_ring_grow_for_ever() -> None:
    sent = SentWork()
    for second in range(5000):
        sent.add(second % 2, Work(1, 1), miss_tokens=1, now=float(second))
        sent.unseen(np.array([-np.inf, float(second)]), now=float(second), horizon_s=60)
    assert len(sent) <= 31


def test_a_replica_that_is_gone_leaves_nothing_to_the_next_in_its_row() -> None:
    sent = SentWork()
    sent.add(0, Work(9, 9), miss_tokens=9, now=1.0)
    sent.forget_row(0)
    assert sent.unseen(NEVER, now=3.0, horizon_s=10).prefill_tokens.tolist() == [0, 0]
    assert SentWork().unseen(np.zeros(0), now=3.0, horizon_s=10).prefill_tokens.tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_those_of_a_plain_list(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sent, plain, reported = SentWork(), {}, np.full(4, -np.inf)
    now = 0.0
    for _ in range(2000):
        now += float(rng.exponential(0.1))
        if rng.random() < 0.3:
            row = rng.integers(4)
            reported[row] = max(reported[row], now - float(rng.random()))
        elif rng.random() < 0.2 and plain:
            token = list(plain)[int(rng.integers(len(plain)))]
            sent.done(token)
            del plain[token]
        else:
            row, tokens = int(rng.integers(4)), int(rng.integers(1, 100))
            plain[sent.add(row, Work(tokens, 2 * tokens), miss_tokens=tokens, now=now)] = (now, row, tokens)
        expected = np.zeros(4)
        for at, row, tokens in plain.values():
            expected[row] += tokens * (at > reported[row])
        assert len(sent) <= len(plain)
        unseen = sent.unseen(reported, now=now, horizon_s=1e9)
        assert unseen.prefill_tokens.tolist() == expected.tolist()
        assert unseen.decode_tokens.tolist() == (2 * expected).tolist()


def test_rows_beyond_the_table_are_left_out() -> None:
    sent = SentWork()
    for row in (0, 1, 2, 3, 1):
        sent.add(row, Work(1, 1), miss_tokens=1, now=0.0)
    assert sent.unseen(NEVER, now=0.0, horizon_s=1).num_requests.tolist() == [1, 2]
