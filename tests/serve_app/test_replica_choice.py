"""One router's choices by each policy, over reports that lag behind what it sent."""

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from serve_app.routing.fleet_table import COLUMNS, FleetTable
from serve_app.routing.prefix_map import pack_names, short_names
from serve_app.routing.replica_choice import ReplicaChoice, RoutingPolicy
from serve_app.routing.score import Work

SPEEDS = {
    "max_running": 32,
    "free_tokens": 50_000,
    "total_tokens": 50_000,
    "step_s": 0.01,
    "request_s": 0.001,
    "token_s": 0.0005,
    "step_tokens": 1024,
}
CHAIN = [bytes([number] * 16) for number in range(1, 9)]
NAMES = short_names(CHAIN)


def table(**reports: dict[str, Any]) -> FleetTable:
    made = FleetTable()
    for name, stats in reports.items():
        made.report(name, {**SPEEDS, "reported_at": 100.0, **stats})
    return made


def choice(of: FleetTable, policy: str = "prefix") -> ReplicaChoice:
    return ReplicaChoice(of, policy=RoutingPolicy(policy), rng=np.random.default_rng(1))


def firsts(chosen: ReplicaChoice, of: FleetTable, times: int = 100, **wish: Any) -> Counter[str]:
    return Counter(of.named(chosen.choose(Work(500, 50), now=100.0, **wish))[0] for _ in range(times))


def test_the_least_loaded_replica_is_first_and_closed_ones_are_left_out() -> None:
    fleet = table(a={"prefill_tokens": 4000}, b={}, c={"is_fenced": True})
    for policy in ("prefix", "work"):
        rows = choice(fleet, policy).choose(Work(500, 50), now=100.0)
        assert fleet.named(rows) == ["b", "a"]
    for policy in RoutingPolicy:
        rows = choice(fleet, policy).choose(Work(), now=100.0, candidates=np.zeros(len(fleet), dtype=np.bool_))
        assert rows.tolist() == []
        assert set(fleet.named(choice(fleet, policy).choose(Work(), now=100.0))) == {"a", "b"}


def test_replicas_that_measured_about_the_same_share_the_requests_of_a_quiet_fleet() -> None:
    fleet = table(a={"step_s": 0.009}, b={"token_s": 0.0006}, c={"request_s": 0.0012})
    assert min(firsts(choice(fleet), fleet).values()) > 15
    # One that is really slower gets nothing while the others are idle.
    fleet.report("c", {**SPEEDS, "reported_at": 101.0, "step_s": 0.05, "token_s": 0.003})
    assert firsts(choice(fleet), fleet).keys() == {"a", "b"}


def test_own_work_counts_at_once_until_it_ends_or_a_report_shows_it() -> None:
    fleet = table(a={}, b={"prefill_tokens": 100})
    router = choice(fleet)
    assert firsts(router, fleet) == {"a": 100}
    token = router.note_sent(fleet.rows["a"], Work(2000, 100), now=100.0)
    assert firsts(router, fleet) == {"b": 100}
    router.note_done(token)
    assert firsts(router, fleet) == {"a": 100}
    router.note_sent(fleet.rows["a"], Work(2000, 100), now=100.0)
    fleet.report("a", {**SPEEDS, "reported_at": 101.0})
    assert firsts(router, fleet) == {"a": 100}


def test_prefixes_draw_where_they_are_told_or_were_sent_and_only_in_that_policy() -> None:
    fleet = table(a={}, b={"prefixes": pack_names(CHAIN[:4])}, c={})
    assert firsts(choice(fleet), fleet, names=NAMES, page_size=64) == {"b": 100}
    assert set(firsts(choice(fleet, "work"), fleet, names=NAMES, page_size=64)) == {"a", "b", "c"}
    router = choice(fleet)
    router.choose(Work(500, 50), NAMES, now=100.0, page_size=64)
    router.note_sent(fleet.rows["c"], Work(500, 0), NAMES, now=90.0)
    assert firsts(router, fleet, names=NAMES, page_size=64) == {"c": 100}


def test_a_prefix_does_not_draw_into_a_queue_that_costs_more_than_it_saves() -> None:
    fleet = table(a={}, b={"prefixes": pack_names(CHAIN), "prefill_tokens": 20_000})
    assert firsts(choice(fleet), fleet, names=NAMES, page_size=64) == {"a": 100}


def test_a_session_stays_until_the_price_is_too_high() -> None:
    fleet = table(a={}, b={})
    router = choice(fleet)
    router.note_sent(fleet.rows["b"], Work(), now=0.0, session="s")
    assert firsts(router, fleet, session="s") == {"b": 100}
    fleet.report("b", {**SPEEDS, "reported_at": 100.0, "prefill_tokens": 4000})
    assert firsts(router, fleet, session="s") == {"a": 100}
    assert set(firsts(choice(fleet), fleet, session="other")) <= {"a", "b"}


def test_a_session_does_not_move_for_milliseconds() -> None:
    fleet = table(a={"step_s": 0.001, "request_s": 0.0, "token_s": 1e-5}, b={"step_s": 0.003, "token_s": 3e-5})
    router = choice(fleet)
    short = Work(3, 4)
    assert fleet.named(router.choose(short, now=100.0))[0] == "a"
    router.note_sent(fleet.rows["b"], short, now=0.0, session="s")
    assert fleet.named(router.choose(short, now=100.0, session="s")) == ["b", "a"]


def test_equal_replicas_share_alike() -> None:
    fleet = table(a={}, b={}, c={}, d={})
    for policy in RoutingPolicy:
        shares = firsts(choice(fleet, policy), fleet, times=400)
        assert min(shares[name] for name in "abcd") > 60, policy


def test_power_of_two_takes_the_one_with_fewer_requests_and_round_robin_looks_at_nothing() -> None:
    fleet = table(a={"num_running": 5}, b={"num_running": 1, "prefill_tokens": 10_000}, c={"num_waiting": 9})
    shares = firsts(choice(fleet, "power_of_two"), fleet, times=300)
    assert shares["b"] > shares["a"] > shares["c"] == 0
    assert firsts(choice(fleet, "round_robin"), fleet, times=300) == {"a": 100, "b": 100, "c": 100}


def test_counts_tell_of_what_others_have_sent_since_the_report() -> None:
    fleet = table(a={}, b={"prefill_tokens": 800})
    router = choice(fleet)
    for _ in range(50):
        router.note_done(router.note_sent(fleet.rows["a"], Work(1000, 100), now=90.0))
    router.note_count(fleet.rows["a"], 5, now=100.5)
    assert firsts(router, fleet) == {"b": 100}
    fleet.report("a", {**SPEEDS, "reported_at": 101.0})
    assert firsts(router, fleet) == {"a": 100}


def test_a_row_is_used_again_without_what_was_there() -> None:
    fleet = table(a={"prefill_tokens": 1e6, "prefixes": pack_names(CHAIN)}, b={})
    router = choice(fleet)
    row = fleet.rows["a"]
    router.note_sent(row, Work(9000, 9000), NAMES, now=100.0, session="s")
    router.forget(row)
    fleet.forget("a")
    fleet.forget("a")
    assert fleet.row_of("new") == row
    assert router.row_of_session("s") is None
    shares = firsts(router, fleet, names=NAMES, page_size=64)
    assert min(shares["new"], shares["b"]) > 20


def test_a_fleet_grows_beyond_its_first_size_and_keeps_what_it_knows() -> None:
    fleet = table(**{f"r{number}": {"prefill_tokens": 100 * (number % 50)} for number in range(100)})
    rows = choice(fleet, "work").choose(Work(500, 50), now=100.0)
    assert len(rows) == 100
    assert set(fleet.named(rows[:2])) == {"r0", "r50"}


def test_a_new_replica_is_taken_to_be_like_the_others() -> None:
    fleet = table(a={"prefill_tokens": 2000}, b={"prefill_tokens": 2000})
    fleet.row_of("new")
    router = choice(fleet)
    assert firsts(router, fleet) == {"new": 100}
    for _ in range(8):
        router.note_sent(fleet.rows["new"], Work(1000, 100), now=100.0)
    assert "new" not in firsts(router, fleet)


NONSENSE = ("many", None, [], float("nan"), float("inf"), -1, 1e300, 2**70)


@pytest.mark.parametrize("name", [*COLUMNS, "reported_at", "weight_version", "page_size"])
@pytest.mark.parametrize("value", NONSENSE)
def test_nonsense_in_a_report_raises_and_changes_nothing(name: str, value: Any) -> None:
    fleet = table(a={"prefill_tokens": 500}, b={"prefill_tokens": 2000})
    with pytest.raises((ValueError, TypeError, OverflowError)):
        fleet.report("a", {name: value})
    assert firsts(choice(fleet), fleet) == {"a": 100}


def test_names_that_are_cut_off_are_no_report() -> None:
    with pytest.raises(ValueError, match="multiple"):
        FleetTable().report("a", {"prefixes": b"odd"})


def num_calls(num_replicas: int) -> int:
    """Gives how many functions one choice calls, those of numpy included."""
    rng = np.random.default_rng(1)
    told = {"prefixes": rng.integers(0, 2**32, 500, dtype=np.uint32).tobytes()}
    fleet = table(**{f"r{number}": told for number in range(num_replicas)})
    router, counted = choice(fleet), 0
    for number in range(20):
        row = int(router.choose(Work(2000, 100), NAMES, now=100.0, page_size=64)[0])
        router.note_sent(row, Work(2000, 100), NAMES, now=100.0 + number * 1e-3)

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        router.choose(Work(2000, 100), NAMES, now=100.1, page_size=64)
    finally:
        sys.setprofile(None)
    return counted


def test_a_choice_among_512_takes_as_many_calls_as_one_among_16() -> None:
    assert num_calls(512) <= num_calls(16) + 40
