"""Admission refuses what cannot be in time, with a sentence, and takes tenants in turns by tokens."""

import random
from collections import Counter
from typing import Any

import pytest

from serve_app.routing.fair_line import FairLine, Outlook, Refusal, judge


def verdict(*, num_tokens: int = 100, timeout_s: float = 10.0, limit: float = 1000, **outlook: float) -> Any:
    given = {"first_token_s": 1.0, "decode_s": 2.0, "alone_s": 0.1, **outlook}
    return judge(Outlook(**given), num_tokens=num_tokens, timeout_s=timeout_s, max_queued_tokens=limit)


@pytest.mark.parametrize(
    ("outlook", "refusal", "retry_after_s"),
    [
        ({}, None, None),
        ({"first_token_s": 9.0}, None, None),
        ({"first_token_s": 12.5}, Refusal.TOO_LATE, 4),
        ({"first_token_s": 1e9}, Refusal.TOO_LATE, 60),
        ({"decode_s": 30.0}, Refusal.NEVER, None),
        ({"queued_tokens": 900.0}, None, None),
        ({"queued_tokens": 950.0, "drain_s": 19.0}, Refusal.QUEUE_FULL, 1),
        ({"queued_tokens": 2000.0, "drain_s": 20.0}, Refusal.QUEUE_FULL, 11),
        ({"num_tokens": 5000}, None, None),
    ],
)
def test_a_request_is_taken_or_refused_for_a_reason(
    outlook: dict[str, Any], refusal: Refusal | None, retry_after_s: int | None
) -> None:
    given = verdict(**outlook)
    assert (given.refusal, given.retry_after_s) == (refusal, retry_after_s)
    assert bool(given.why) == (refusal is not None)
    if retry_after_s is not None:
        assert f"retry in {retry_after_s} s" in given.why


def test_tenants_get_equal_shares_of_tokens_however_many_requests_they_send() -> None:
    line: FairLine[tuple[str, int]] = FairLine()
    for _ in range(1000):
        line.push(("many", 10), tenant="many", num_tokens=10)
    for _ in range(20):
        line.push(("large", 200), tenant="large", num_tokens=200)
    served: Counter[str] = Counter()
    while served["large"] < 3000:
        taken = line.pop()
        assert taken is not None
        served[taken[0]] += taken[1]
    assert abs(served["many"] - served["large"]) <= 210


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    line: FairLine[str] = FairLine()
    for _ in range(100):
        line.push("a", tenant="a", num_tokens=10)
    for _ in range(50):
        line.pop()
    for _ in range(50):
        line.push("b", tenant="b", num_tokens=10)
    first = Counter(line.pop() for _ in range(20))
    assert first["a"] in (9, 10, 11)


def test_within_a_tenant_first_come_is_first_served() -> None:
    line: FairLine[int] = FairLine()
    for number in range(10):
        line.push(number, tenant="t", num_tokens=10 - number)
    assert [line.pop() for _ in range(11)] == [*range(10), None]


def test_who_is_late_or_has_left_is_taken_out_and_delays_nobody() -> None:
    line: FairLine[str] = FairLine()
    line.push("late", tenant="a", num_tokens=5, deadline=3.0)
    line.push("in time", tenant="a", num_tokens=6, deadline=9.0)
    left = "".join(["le", "ft"])
    line.push(left, tenant="b", num_tokens=7)
    assert line.tokens_of("a") == 11
    assert line.expired(2.0) == []
    assert line.expired(3.0) == ["late"]
    assert line.remove(left)
    assert not line.remove(left)
    assert (line.queued_tokens, len(line)) == (6, 1)
    assert [line.pop(), line.pop()] == ["in time", None]


def test_tokens_before_a_newcomer_are_its_fair_share_not_the_whole_line() -> None:
    line: FairLine[int] = FairLine()
    for number in range(10):
        line.push(number, tenant="heavy", num_tokens=100)
    assert line.tokens_before("heavy") == 1000
    assert line.tokens_before("new") == 100


def test_a_tenant_is_not_charged_for_what_nobody_served() -> None:
    line: FairLine[str] = FairLine()
    for number in range(3):
        line.push(f"a{number}", tenant="a", num_tokens=100)
    for number in range(50):
        left = f"left {number}"
        line.push(left, tenant="b", num_tokens=100)
        assert line.remove(left)
    line.push("b", tenant="b", num_tokens=100)
    assert {line.pop(), line.pop()} == {"a0", "b"}


def test_tenants_that_come_once_are_forgotten_though_the_line_is_never_empty() -> None:
    line: FairLine[int] = FairLine()
    for number in range(20_000):
        line.push(number, tenant=f"tenant {number}", num_tokens=1 + number % 7)
        if number >= 10:
            assert line.pop() is not None
        assert len(line._finished) <= 2 * 12 + 1024 + 12
        assert len(line._heads) <= 12


@pytest.mark.parametrize("seed", range(20))
def test_a_random_walk_keeps_the_sums_and_serves_everybody(seed: int) -> None:
    chooser, line, plain = random.Random(seed), FairLine[list[int]](), dict[int, list[int]]()
    num_pushed, taken = 0, []
    for _ in range(800):
        act = chooser.random()
        if act < 0.5:
            item = [num_pushed, chooser.randrange(50)]
            line.push(item, tenant=str(chooser.randrange(5)), num_tokens=item[1], deadline=chooser.random() * 1000)
            plain[num_pushed] = item
            num_pushed += 1
        elif act < 0.8:
            popped = line.pop()
            taken += [popped] if popped is not None else []
        elif act < 0.9 and plain:
            item = plain[chooser.choice(list(plain))]
            if line.remove(item):
                taken.append(item)
        else:
            taken += line.expired(chooser.random() * 300)
        for item in taken:
            plain.pop(item[0], None)
        assert len(line) == len(plain)
        assert line.queued_tokens == sum(item[1] for item in plain.values())
    rest = [line.pop() for _ in range(len(line))]
    assert None not in rest
    assert line.pop() is None
    assert not line._finished
    assert not line._of
