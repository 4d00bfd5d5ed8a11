"""What one router knows and chooses: reports, own work, prefixes, sessions, versions, and why it chose."""

import threading
import time
from collections import Counter
from typing import Any

import pytest

from engine import SamplingParams, WorkloadHints, prefix_digests
from serve_app.messages import GenerateRequest
from serve_app.routing.expected_work import DEFAULT_EXPECTED_TOKENS, expected_work
from serve_app.routing.prefix_map import pack_names
from serve_app.routing.request_routing import RequestRouting
from serve_app.routing.score import Work

PAGE = 16
PROMPT = list(range(100, 100 + 8 * PAGE))


def report(**changes: Any) -> dict[str, Any]:
    idle = {
        "step_s": 0.02,
        "request_s": 0.002,
        "token_s": 0.002,
        "step_tokens": 256,
        "max_running": 16,
        "total_tokens": 10_000,
        "free_tokens": 10_000,
        "page_size": PAGE,
        "weight_version": 1,
        "reported_at": time.time(),
    }
    return idle | changes


def told(prompt: list[int], *, version: int = 1, salt: str | None = None) -> bytes:
    return pack_names(prefix_digests(prompt, page_size=PAGE, version=version, salt=salt))


def ask(
    name: str = "r", prompt: list[int] | None = None, *, session: str | None = None, **fields: Any
) -> GenerateRequest:
    sampling, hints = SamplingParams(max_new_tokens=20), WorkloadHints(session_id=session)
    return GenerateRequest(name, [1, 2, 3] if prompt is None else prompt, sampling, hints, **fields)


def fleet(policy: str = "prefix", **reports: dict[str, Any]) -> RequestRouting:
    routing = RequestRouting(policy, seed=1)
    routing.update(reports)
    return routing


def test_hints_say_what_to_expect_and_the_limit_bounds_it() -> None:
    def work(expected: int, limit: int | None, number: int = 1, room: int = 0) -> Work:
        sampling = SamplingParams(max_new_tokens=limit, num_return_sequences=number)
        hints = WorkloadHints(expected_generated_length=expected, max_generated_length=room)
        return expected_work(GenerateRequest("r", [1] * 10, sampling, hints))

    assert work(30, 100) == Work(10, 30)
    assert work(0, 100) == Work(10, 100)
    assert work(30, 20) == Work(10, 20)
    assert work(0, None) == Work(10, DEFAULT_EXPECTED_TOKENS)
    assert work(30, 100, 4) == Work(10, 120, 4)
    assert work(2**31 - 1, None, room=500) == work(0, None, room=500) == Work(10, 500)
    assert work(2**31 - 1, None, 4, room=500) == Work(10, 2000, 4)


def test_a_request_goes_where_its_prefix_is_unless_that_replica_is_too_busy() -> None:
    routing = fleet(a=report(), b=report(prefixes=told(PROMPT)))
    assert routing.choose(ask(prompt=[*PROMPT, 7]), "ab") == ["b", "a"]
    assert routing.sent(ask(prompt=[*PROMPT, 7]), "b") is not None
    assert routing.take_expected_hit("r") == len(PROMPT)
    assert routing.take_expected_hit("r") is None
    busy = report(prefixes=told(PROMPT), prefill_tokens=5000, num_waiting=40, num_running=16, decode_tokens=4000)
    routing.update({"a": report(), "b": busy})
    assert routing.choose(ask(prompt=[*PROMPT, 7]), "ab") == ["a", "b"]
    assert routing.reasons["prefix"] == 1
    assert routing.reasons["load"] == 1


@pytest.mark.parametrize(
    "other", [{"cache_salt": "tenant"}, {"weight_version": 2}, {"prompt": [9, *PROMPT]}], ids=lambda o: next(iter(o))
)
def test_a_prefix_of_another_tenant_version_or_prompt_is_none(other: dict[str, Any]) -> None:
    version = other.pop("weight_version", 1)
    routing = fleet(a=report(weight_version=version), b=report(weight_version=version, prefixes=told(PROMPT)))
    chosen = Counter(routing.choose(ask(f"r{i}", **{"prompt": PROMPT, **other}), "ab")[0] for i in range(40))
    assert set(chosen) == {"a", "b"}


def test_prompts_that_were_just_sent_draw_their_like_before_any_report() -> None:
    routing = fleet(a=report(), b=report(), c=report())
    (first, *_) = routing.choose(ask("r0", PROMPT), "abc")
    token = routing.sent(ask("r0", PROMPT), first)
    assert token is not None
    routing.done(token)
    assert [routing.choose(ask(f"r{i}", PROMPT), "abc")[0] for i in range(1, 9)] == [first] * 8


def test_a_session_stays_where_it_was_until_that_costs_too_much() -> None:
    routing = fleet("work", a=report(), b=report(), c=report())
    (first, *_) = routing.choose(ask("r0", session="s"), "abc")
    routing.sent(ask("r0", session="s"), first)
    routing.update({name: report(reported_at=time.time() + 1) for name in "abc"})
    assert [routing.choose(ask(f"r{i}", session="s"), "abc")[0] for i in range(1, 20)] == [first] * 19
    assert routing.reasons["session"] == 19
    busy = report(prefill_tokens=5000, num_running=16, num_waiting=9, decode_tokens=4000, reported_at=time.time() + 2)
    routing.update({name: busy if name == first else report() for name in "abc"})
    assert routing.choose(ask("r20", session="s"), "abc")[0] != first


def test_routers_that_never_talk_send_new_sessions_to_the_same_replicas() -> None:
    def places(names: str) -> list[str]:
        return [fleet("work", **{n: report() for n in names}).choose(ask(session=f"s{i}"), names)[0] for i in range(60)]

    before, after = places("abcd"), places("dcbae")
    assert before == places("bdca")
    assert all(20 > before.count(name) > 5 for name in "abcd")
    assert all(new in (old, "e") for old, new in zip(before, after, strict=True))
    assert after.count("e") > 3


@pytest.mark.parametrize(("wish", "expected"), [
    ({}, {"old", "new", "silent"}), ({"min_weight_version": 3}, {"new"}), ({"min_weight_version": 2}, {"old", "new"}),
    ({"weight_version": 2}, {"old"}), ({"weight_version": 3}, {"new"}),
    ({"min_weight_version": 3, "weight_version": 3}, {"new"}),
])  # fmt: skip
def test_a_request_goes_to_the_weights_it_accepts(wish: dict[str, int], expected: set[str]) -> None:
    routing = fleet(
        old=report(weight_version=2),
        new=report(weight_version=3, decode_tokens=10**6),
        fenced=report(weight_version=3, is_fenced=True),
        silent={},
    )
    assert set(routing.choose(ask(**wish), ["old", "new", "fenced", "silent"])) == expected
    assert routing.reasons["version"] == (len(expected) < 3)


@pytest.mark.parametrize("wish", [{"min_weight_version": 4}, {"weight_version": 1}])
def test_a_wish_nobody_fulfils_is_left_to_a_replica_to_refuse(wish: dict[str, int]) -> None:
    routing = fleet(a=report(weight_version=3), b=report(weight_version=3, is_fenced=True))
    assert routing.choose(ask(**wish), "ab") == ["a"]


def test_paused_replicas_are_the_last_resort_and_fenced_ones_none() -> None:
    routing = fleet(a=report(is_avoided=True), b=report(decode_tokens=10**6), c=report(is_fenced=True))
    assert routing.choose(ask(), "abc") == ["b"]
    assert routing.choose(ask(), "ac") == ["a"]
    assert routing.choose(None, "ac") == ["a"]
    assert routing.choose(ask(), "c") == []
    assert routing.reasons["waited"] == 1


def test_an_unknown_candidate_is_not_offered_and_one_that_left_is_forgotten() -> None:
    routing = fleet(a=report(), b=report())
    assert routing.choose(ask(), "abz") in (["a", "b"], ["b", "a"])
    routing.update({"b": report()})
    assert routing.choose(ask(), "ab") == ["b"]
    assert routing.sent(ask(), "a") is None
    routing.note_count("a", 4)
    routing.update({"b": report(), "c": report()})
    assert set(routing.choose(ask(), "bc")) == {"b", "c"}


def test_round_robin_takes_turns_and_power_of_two_the_shorter_queue() -> None:
    turns = fleet("round_robin", a=report(), b=report(), c=report(decode_tokens=10**6, num_running=16))
    seen = [turns.choose(ask(f"r{i}"), "abc")[0] for i in range(6)]
    assert Counter(seen) == Counter("abcabc")
    assert turns.reasons["turn"] == 6
    shorter = fleet("power_of_two", a=report(num_running=9), b=report(num_running=3))
    assert [shorter.choose(ask(f"r{i}"), "ab")[0] for i in range(9)] == ["b"] * 9
    shorter.note_count("b", 30)
    assert shorter.choose(ask(), "ab")[0] == "a"


def test_the_prospect_grows_with_the_work_that_is_there_and_is_none_without_replicas() -> None:
    idle = fleet(a=report(), b=report()).prospect(ask(prompt=PROMPT))
    full = report(prefill_tokens=3000, num_running=16, num_waiting=30, decode_tokens=3000)
    busy = fleet(a=full, b=full).prospect(ask(prompt=PROMPT))
    assert idle is not None
    assert busy is not None
    assert busy.first_token_s > 5 * idle.first_token_s
    assert idle.first_token_s == pytest.approx(idle.alone_s)
    assert busy.alone_s == pytest.approx(idle.alone_s)
    assert (idle.num_replicas, idle.room_tokens) == (2, 2 * 4 * 256)
    assert fleet(a=report(is_fenced=True)).prospect(ask()) is None
    assert fleet(a={}).prospect(ask()) is None


def test_many_threads_leave_the_books_whole() -> None:
    routing = fleet(**{name: report() for name in "abcd"})

    def work(number: int) -> None:
        for i in range(50):
            one = ask(f"{number}-{i}", PROMPT[: 16 * (i % 8 + 1)], session=f"s{i % 5}")
            (name, *_) = routing.choose(one, "abcd")
            token = routing.sent(one, name)
            routing.update({other: report(num_running=i) for other in "abcd"})
            if token is not None:
                routing.done(token)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(routing.reasons.values()) == 200
    assert routing.reasons["fallback"] == 0
