"""Lengths are learned by tenant and route, follow changes, and cost bounded memory."""

import numpy as np
import pytest

from serve_app.routing.output_lengths import MAX_KEYS, OutputLengths, expected_tokens


def test_nothing_is_said_before_enough_was_seen() -> None:
    lengths = OutputLengths()
    for _ in range(7):
        lengths.add("t", "chat", 100)
    assert lengths.expected("t", "chat") is None
    lengths.add("t", "chat", 100)
    lengths.add("t", "chat", 100)
    assert lengths.expected("t", "chat") == pytest.approx(100, rel=0.2)


def test_each_tenant_and_route_has_its_own_and_new_ones_are_as_all() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.add("short", "chat", 10)
        lengths.add("long", "chat", 1000)
    assert lengths.expected("short", "chat") == pytest.approx(10, rel=0.2)
    assert lengths.expected("long", "chat") == pytest.approx(1000, rel=0.2)
    assert lengths.expected("new", "chat") == pytest.approx(505, rel=0.2)


def test_it_follows_a_change() -> None:
    lengths = OutputLengths()
    for _ in range(5000):
        lengths.add("t", "r", 10)
    for _ in range(500):
        lengths.add("t", "r", 1000)
    assert lengths.expected("t", "r") == pytest.approx(1000, rel=0.2)


def test_the_mean_of_a_heavy_tail_is_found_and_who_is_long_goes_on() -> None:
    lengths, rng = OutputLengths(), np.random.default_rng(1)
    drawn = np.minimum(100 * (1 + rng.pareto(1.5, 4000)), 16_000).astype(int)
    for length in drawn:
        lengths.add("t", "r", int(length))
    recent = drawn[-300:]
    assert lengths.expected("t", "r") == pytest.approx(recent.mean(), rel=0.5)
    remaining = [lengths.expected("t", "r", generated=generated) for generated in (150, 600)]
    assert remaining[0] < remaining[1]


def test_beyond_all_that_was_seen_some_more_is_expected() -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.add("t", "r", 50)
    assert lengths.expected("t", "r", generated=5000) == 5000
    assert lengths.expected("t", "r", generated=40) >= 1


def test_names_do_not_pile_up_and_old_counts_stay_finite() -> None:
    lengths = OutputLengths()
    for number in range(MAX_KEYS + 500):
        lengths.add(f"tenant {number}", "r", 10)
    for _ in range(10_000):
        lengths.add("t", "r", 0)
    assert len(lengths._of) == MAX_KEYS
    assert lengths.expected("t", "r") == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize(
    ("hint", "learned", "limit", "expected"),
    [(30, 90.0, 100, 30), (None, 90.4, 100, 90), (None, 900.0, 100, 100), (500, None, 100, 100), (None, None, 70, 70),
     (None, None, None, 256), (None, 0.2, None, 1), (0, 12.0, None, 12)],
)  # fmt: skip
def test_a_hint_goes_before_what_was_learned_and_the_limit_bounds_both(
    hint: int | None, learned: float | None, limit: int | None, expected: int
) -> None:
    assert expected_tokens(hint=hint, learned=learned, limit=limit, default=256) == expected
