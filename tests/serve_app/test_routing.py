"""Routing: the score is estimated time, own work counts at once, fenced replicas get nothing, nothing raises."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from engine import SamplingParams, WorkloadHints
from serve_app import routing_state
from serve_app.messages import GenerateRequest
from serve_app.routing import DEFAULT_EXPECTED_TOKENS, ReplicaLoad, Work, WorkRouter, expected_work, score


def request(
    *, prompt: int = 10, limit: int | None = 20, expected: int = 0, least: int | None = None, pin: int | None = None
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_ids=[1] * prompt,
        sampling=SamplingParams(max_new_tokens=limit),
        hints=WorkloadHints(expected_generated_length=expected),
        min_weight_version=least,
        weight_version=pin,
    )


def test_the_score_is_the_estimated_time() -> None:
    load = ReplicaLoad(prefill_tokens=100, decode_tokens=50, prefill_tokens_per_s=1000, decode_tokens_per_s=100)
    assert score([load], Work(prefill_tokens=900, decode_tokens=150)) == [pytest.approx(1.0 + 2.0)]


def test_more_work_scores_worse_and_more_speed_better() -> None:
    loads = [
        ReplicaLoad(decode_tokens=100, decode_tokens_per_s=100),
        ReplicaLoad(decode_tokens=200, decode_tokens_per_s=100),
        ReplicaLoad(decode_tokens=100, decode_tokens_per_s=180),
    ]
    first, loaded, fast = score(loads, Work())
    assert fast < first < loaded


def test_an_unmeasured_replica_is_taken_to_be_as_fast_as_the_fastest() -> None:
    measured, new = score([ReplicaLoad(decode_tokens=10, decode_tokens_per_s=40), ReplicaLoad()], Work(0, 40))
    assert new == pytest.approx(1.0)
    assert measured > new


def test_small_batches_do_not_make_a_replica_look_hopeless() -> None:
    busy = ReplicaLoad(decode_tokens=800, decode_tokens_per_s=100)
    quiet = ReplicaLoad(decode_tokens=200, decode_tokens_per_s=15)
    busy_score, quiet_score = score([busy, quiet], Work(0, 100))
    assert quiet_score < busy_score


def test_fenced_replicas_score_infinity_and_scores_are_finite_otherwise() -> None:
    generator = random.Random(1)
    for _ in range(200):
        loads = [
            ReplicaLoad(
                generator.choice([0, generator.random() * 1e6]),
                generator.choice([0, generator.random() * 1e6]),
                generator.choice([0, generator.random() * 1e4]),
                generator.choice([0, generator.random() * 1e4]),
                generator.random() < 0.3,
            )
            for _ in range(generator.randrange(6))
        ]
        for load, seconds in zip(loads, score(loads, Work(5, 5)), strict=True):
            assert (seconds == float("inf")) == load.is_fenced
            assert seconds > 0


def test_hints_say_what_to_expect_and_the_limit_bounds_it() -> None:
    assert expected_work(request(limit=100, expected=30)) == Work(10, 30)
    assert expected_work(request(limit=100)) == Work(10, 100)
    assert expected_work(request(limit=20, expected=30)) == Work(10, 20)
    assert expected_work(request(limit=None)) == Work(10, DEFAULT_EXPECTED_TOKENS)


@dataclass
class Replica:
    """The part of Serve's RunningReplica that the policy reads."""

    replica_id: str
    routing_stats: dict[str, Any] = field(default_factory=dict)


class Result:
    """The part of Serve's ReplicaResult that the policy uses."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def finish(self) -> None:
        for callback in self.callbacks:
            callback(self)


def pending(*arguments: Any) -> Any:
    return SimpleNamespace(args=list(arguments), kwargs={}, routing_context=SimpleNamespace(should_backoff=False))


class Router(WorkRouter):
    """The policy without the rest of Serve's router."""

    def __init__(self) -> None:
        self._lazily_fetched_loop = asyncio.get_running_loop()
        self.initialize_state()


def names(groups: list[list[Any]]) -> list[str]:
    return [replica.replica_id for group in groups for replica in group]


async def test_own_requests_count_at_once_and_are_forgotten_when_done() -> None:
    router, result = Router(), Result()
    replicas: list[Any] = [Replica("a"), Replica("b", {"decode_tokens": 5})]
    order = pending(request())
    assert names(await router.choose_replicas(candidate_replicas=replicas, pending_request=order)) == ["a", "b"]
    assert order.routing_context.should_backoff
    router.on_request_routed(order, "a", result)  # type: ignore[arg-type]
    assert names(await router.choose_replicas(candidate_replicas=replicas, pending_request=order)) == ["b", "a"]
    result.finish()
    await asyncio.sleep(0)
    assert names(await router.choose_replicas(candidate_replicas=replicas, pending_request=order)) == ["a", "b"]


async def test_a_report_replaces_what_was_sent_before_it() -> None:
    router = Router()
    router.on_request_routed(pending(request(limit=10_000)), "a", Result())  # type: ignore[arg-type]
    stale, fresh = {"reported_at": time.time() - 10}, {"reported_at": time.time() + 10}
    busy: Any = Replica("b", {"decode_tokens": 100})
    for stats, expected in ((stale, ["b", "a"]), (fresh, ["a", "b"])):
        replicas: list[Any] = [Replica("a", stats), busy]
        assert names(await router.choose_replicas(replicas, pending(request()))) == expected


async def test_fenced_replicas_are_not_offered_and_all_fenced_means_wait() -> None:
    router = Router()
    fenced: Any = Replica("a", {"is_fenced": True})
    free: Any = Replica("b", {"decode_tokens": 10**6})
    assert names(await router.choose_replicas([fenced, free], pending(request()))) == ["b"]
    order = pending(request())
    waited = routing_state.COUNTS.waited
    assert await router.choose_replicas([fenced], order) == []
    assert order.routing_context.should_backoff
    assert routing_state.COUNTS.waited == waited + 1


@pytest.mark.parametrize(("wish", "expected"), [
    ({}, {"old", "new", "fenced", "silent"} - {"fenced"}), ({"least": 3}, {"new"}), ({"least": 2}, {"old", "new"}),
    ({"pin": 2}, {"old"}), ({"pin": 3}, {"new"}), ({"least": 3, "pin": 3}, {"new"}),
])  # fmt: skip
async def test_a_request_goes_to_the_weights_it_accepts(wish: dict[str, int], expected: set[str]) -> None:
    replicas: list[Any] = [
        Replica("old", {"weight_version": 2}),
        Replica("new", {"weight_version": 3, "decode_tokens": 10**6}),
        Replica("fenced", {"weight_version": 3, "is_fenced": True}),
        Replica("silent"),
    ]
    assert set(names(await Router().choose_replicas(replicas, pending(request(**wish))))) == expected


@pytest.mark.parametrize("wish", [{"least": 4}, {"pin": 1}])
async def test_a_wish_nobody_fulfils_is_left_to_a_replica_to_refuse(wish: dict[str, int]) -> None:
    replicas: list[Any] = [Replica("a", {"weight_version": 3}), Replica("b", {"weight_version": 3, "is_fenced": True})]
    order = pending(request(**wish))
    assert names(await Router().choose_replicas(replicas, order)) == ["a"]
    assert order.routing_context.should_backoff


async def test_equal_replicas_share_the_requests() -> None:
    router = Router()
    replicas: list[Any] = [Replica("a"), Replica("b")]
    first = {names(await router.choose_replicas(replicas, pending(request())))[0] for _ in range(64)}
    assert first == {"a", "b"}


@pytest.mark.parametrize("stats", [{"decode_tokens": "many"}, {"reported_at": None}, 7])
async def test_nonsense_in_a_report_offers_every_replica_and_is_counted(stats: Any) -> None:
    router = Router()
    replicas: list[Any] = [Replica("a", stats), Replica("b")]
    failed = routing_state.COUNTS.failed
    assert await router.choose_replicas(replicas, pending(request())) == [replicas]
    router.on_request_routed(pending(request()), "a", None)  # type: ignore[arg-type]
    assert routing_state.COUNTS.failed == failed + 2


async def test_calls_that_generate_nothing_weigh_nothing() -> None:
    router = Router()
    router.on_request_routed(pending("model_info"), "a", None)  # type: ignore[arg-type]
    assert router._sent == {}
