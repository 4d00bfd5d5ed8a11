"""The policy as Ray asks it: ranked replicas one by one, own work at once, and nothing ever raises."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import FIFOMixin, RequestRouter

from engine import SamplingParams
from serve_app.messages import GenerateRequest
from serve_app.routing import signals as routing_signals
from serve_app.routing import state as routing_state
from serve_app.routing.expected_work import expected_work
from serve_app.routing.request_routing import RequestRouting
from serve_app.routing.state import find_routing, share_routing
from serve_app.routing.work_router import WorkRouter

SPEED = {"step_s": 0.01, "request_s": 0.001, "token_s": 0.001, "step_tokens": 512, "max_running": 8}


@dataclass
class Id:
    unique_id: str

    def __hash__(self) -> int:
        return hash(self.unique_id)


@dataclass
class Replica:
    """The part of Serve's RunningReplica that the policy reads."""

    name: str
    routing_stats: Any = field(default_factory=dict)

    @property
    def replica_id(self) -> Id:
        return Id(self.name)


class Result:
    """The part of Serve's ReplicaResult that the policy uses."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def finish(self) -> None:
        for callback in self.callbacks:
            callback(self)


class Router(WorkRouter):
    """The policy without the rest of Serve's router."""

    def __init__(self, *replicas: Replica, policy: str = "prefix") -> None:
        self._deployment_id: Any = SimpleNamespace(app_name="test", name="EngineReplica")
        routing_state._routings.clear()
        self.initialize_state(policy=policy)
        self.replicas: Any = list(replicas)
        self.update_replicas(self.replicas)

    async def order(self, *arguments: Any) -> list[str]:
        groups = await self.choose_replicas(candidate_replicas=self.replicas, pending_request=pending(*arguments))
        assert all(len(group) == 1 for group in groups)
        return [_name_of(group[0]) for group in groups]


def _name_of(replica: Any) -> str:
    return str(replica.name)


@pytest.fixture(autouse=True)
def _without_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    monkeypatch.setattr(RequestRouter, "on_new_queue_len_info", lambda *_: None)


def request(*, name: str = "r", limit: int = 20) -> GenerateRequest:
    return GenerateRequest(name, [1] * 10, SamplingParams(max_new_tokens=limit))


def pending(*arguments: Any) -> Any:
    return SimpleNamespace(args=list(arguments), kwargs={}, routing_context=SimpleNamespace(should_backoff=False))


def test_serve_gives_calls_of_one_request_each_a_replica_of_its_own() -> None:
    assert issubclass(WorkRouter, FIFOMixin)


async def test_own_requests_count_at_once_and_are_forgotten_when_done() -> None:
    busy = {**SPEED, "prefill_tokens": 100, "reported_at": time.time()}
    router, result = Router(Replica("a", SPEED), Replica("b", busy)), Result()
    assert await router.order(request()) == ["a", "b"]
    router.on_request_routed(pending(request(limit=5000)), Id("a"), result)  # type: ignore[arg-type]
    for _ in range(9):
        router.on_request_routed(pending(request()), Id("a"), Result())  # type: ignore[arg-type]
    assert await router.order(request()) == ["b", "a"]
    result.finish()
    router.on_request_completed(Id("a"), "r")  # type: ignore[arg-type]


async def test_serve_is_told_to_wait_between_two_tries() -> None:
    router, order = Router(Replica("a", {"is_fenced": True})), pending(request())
    assert await router.choose_replicas(router.replicas, order) == []
    assert order.routing_context.should_backoff
    assert await router.choose_replicas(router.replicas, None) == [router.replicas]


async def test_all_handles_of_a_process_share_what_they_know() -> None:
    router = Router(Replica("a"))
    assert find_routing("test") is router._routing is share_routing("test", "prefix")
    assert find_routing("other") is None
    assert isinstance(share_routing("test", "work"), RequestRouting)
    assert share_routing("test", "work") is not router._routing


@pytest.mark.parametrize(
    "stats",
    [{"decode_tokens": "many"}, {"reported_at": [None]}, 7, {"prefixes": 3.5}, {"weight_version": float("inf")}],
)
async def test_nonsense_in_a_report_is_counted_and_changes_nothing_for_others(stats: Any) -> None:
    router = Router(Replica("a", stats), Replica("b", SPEED))
    assert router._routing.reasons["fallback"] == 1
    assert sorted(await router.order(request())) == ["a", "b"]


async def test_a_policy_that_fails_offers_every_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(Replica("a"), Replica("b"))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError

    for name in ("choose", "sent", "note_count"):
        monkeypatch.setattr(router._routing, name, fail)
    assert await router.choose_replicas(router.replicas, pending(request())) == [router.replicas]
    router.on_request_routed(pending(request()), Id("a"), Result())  # type: ignore[arg-type]
    router.on_new_queue_len_info(Id("a"), 3)  # type: ignore[arg-type]
    assert router._routing.reasons["fallback"] == 3


async def test_calls_that_generate_nothing_weigh_nothing() -> None:
    router, result = Router(Replica("a", SPEED)), Result()
    router.on_request_routed(pending("model_info"), Id("a"), result)  # type: ignore[arg-type]
    assert result.callbacks == []
    assert await router.order("model_info") == ["a"]
    assert sum(router._routing.reasons.values()) == 0


async def test_a_silent_replica_is_offered_to_nobody_and_one_that_failed_a_request_not_to_it() -> None:
    busy = {**SPEED, "prefill_tokens": 500, "reported_at": time.time()}
    router = Router(Replica("a", SPEED), Replica("b", busy))
    assert routing_signals.candidates() == {"a", "b"}
    failed = replace(request(), excluded=frozenset({"a"}))
    assert await router.order(request()) == ["a", "b"]
    assert routing_signals.place_of("r") == "a"
    assert await router.order(failed) == ["b"]
    assert routing_signals.place_of("r") == "b"
    try:
        routing_signals.avoid({"b"})
        assert await router.order(failed) == ["a"]
        assert await router.order("model_info") == ["a"]
    finally:
        routing_signals.avoid(())
        routing_signals.forget_place("r")
        routing_signals.set_candidates(frozenset())


def test_what_was_generated_elsewhere_counts_as_prompt() -> None:
    resumed = replace(request(limit=20), resumed=((1, 2, 3),))
    work = expected_work(resumed)
    assert (work.prefill_tokens, work.decode_tokens) == (13, 17)
    sampling = SamplingParams(max_new_tokens=20, num_return_sequences=3)
    work = expected_work(replace(resumed, sampling=sampling, resumed=((1,), None, (2, 3))))
    assert (work.prefill_tokens, work.decode_tokens, work.num_sequences) == (13, 37, 2)
