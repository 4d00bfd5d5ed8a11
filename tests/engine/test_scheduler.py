"""The scheduler without a model: a fake runner whose next token is a function of the tokens before it."""

import random
from itertools import count

import pytest

from engine.active_request import ActiveRequest
from engine.config import ResolvedConfig
from engine.plan import SampledToken, StepPlan
from engine.request import FinishReason, RequestStatus, SamplingParams
from engine.scheduler import Scheduler

EOS = 96
numbers = count()


def make_config(**changes: object) -> ResolvedConfig:
    values: dict[str, object] = {
        "page_size": 4,
        "num_blocks": 16,
        "max_batch_tokens": 64,
        "max_requests_per_batch": 8,
        "max_model_len": 64,
        "vocab_size": 97,
        "allow_block_sharing": True,
        "safety_margin": 0.0,
        "max_queue_size": 0,
        "target_step_s": None,
        "seed": 0,
        "return_logprobs": False,
    }
    return ResolvedConfig(**{**values, **changes})  # type: ignore[arg-type]


def make_request(prompt: list[int], max_new_tokens: int = 4) -> ActiveRequest:
    sampling = SamplingParams(
        temperature=0.0, top_k=0, top_p=1.0, seed=0, max_new_tokens=max_new_tokens, eos_token_ids=(EOS,), logprobs=False
    )
    return ActiveRequest(f"r{next(numbers)}", prompt, sampling, created_time=0.0)


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 97


def fake_run(plan: StepPlan) -> dict[str, SampledToken]:
    for row in plan.rows:
        assert row.token_ids == row.request.token_ids[row.start : row.end]
        assert row.start == row.request.num_computed
        assert len(row.block_ids) * 4 >= row.end
    return {row.request.request_id: SampledToken(next_token(row.request.token_ids)) for row in plan.rows if row.samples}


def step(scheduler: Scheduler, max_tokens: int = 64) -> StepPlan:
    plan = scheduler.plan(max_tokens, now=0.0)
    scheduler.commit(plan, fake_run(plan), now=0.0)
    scheduler.check_invariants()
    return plan


def expected_output(request: ActiveRequest) -> list[int]:
    tokens = list(request.prompt_ids)
    while len(tokens) - len(request.prompt_ids) < request.max_new_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(request.prompt_ids) :]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    scheduler = Scheduler(make_config(max_batch_tokens=40))
    scheduler.add(make_request(list(range(50)), max_new_tokens=1))
    assert [step(scheduler, max_tokens=40).num_tokens for _ in range(2)] == [40, 10]
    assert not scheduler.has_requests


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    scheduler = Scheduler(make_config())
    short, long = make_request([1, 2], max_new_tokens=10), make_request([7] * 48, max_new_tokens=1)
    scheduler.add(short)
    step(scheduler)
    scheduler.add(long)
    plan = step(scheduler, max_tokens=33)
    assert {row.request.request_id: len(row.token_ids) for row in plan.rows} == {
        short.request_id: 1,
        long.request_id: 32,
    }


def test_a_step_never_exceeds_the_batch_bound_even_when_decoding_fills_it() -> None:
    scheduler = Scheduler(make_config(max_batch_tokens=8, max_requests_per_batch=8, num_blocks=64))
    for _ in range(20):
        scheduler.add(make_request([1, 2, 3, 4, 5], max_new_tokens=6))
    while scheduler.has_requests:
        assert step(scheduler, max_tokens=1).num_tokens <= 8


def test_a_second_equal_prompt_computes_only_what_is_not_shared() -> None:
    scheduler = Scheduler(make_config())
    prompt = list(range(1, 13))
    first, second = make_request(prompt, 1), make_request(prompt, 1)
    scheduler.add(first)
    assert step(scheduler).num_tokens == 12
    scheduler.add(second)
    assert step(scheduler).num_tokens == 4, "one block is left to compute, so that there is something to sample after"
    assert second.num_cached_tokens == 8
    assert second.output_ids == first.output_ids


def test_a_tenant_does_not_see_the_prefix_of_another() -> None:
    scheduler = Scheduler(make_config())
    for salt in ("a", "b", None):
        request = make_request(list(range(1, 13)), 1)
        request.cache_salt = salt
        scheduler.add(request)
        assert step(scheduler).num_tokens == 12


def test_after_a_weight_change_no_older_prefix_is_found_or_published() -> None:
    scheduler = Scheduler(make_config(num_blocks=32))
    prompt = list(range(1, 13))
    in_flight = make_request(prompt, max_new_tokens=12)
    scheduler.add(in_flight)
    step(scheduler)
    scheduler.set_version(2)
    while scheduler.has_requests:
        step(scheduler)
    assert [(span.version, span.start, span.end) for span in in_flight.spans] == [(1, 0, 1), (2, 1, 12)]
    late = make_request(prompt + in_flight.output_ids[:8], max_new_tokens=1)
    scheduler.add(late)
    step(scheduler)
    assert late.num_cached_tokens == 0


def test_recompute_starts_running_requests_anew_in_their_order() -> None:
    scheduler = Scheduler(make_config(num_blocks=32))
    requests = [make_request([i, 2, 3, 4, 5], max_new_tokens=6) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    scheduler.set_version(2, recompute=True)
    scheduler.check_invariants()
    assert scheduler.requests() == requests
    assert all(request.num_computed == 0 and len(request.output_ids) == 1 for request in requests)
    while scheduler.has_requests:
        step(scheduler)
    assert [request.output_ids for request in requests] == [expected_output(request) for request in requests]


def test_the_newest_gives_its_blocks_to_the_oldest_and_comes_back_as_a_prefix_hit() -> None:
    scheduler = Scheduler(make_config(num_blocks=6))
    old, new = make_request([1] * 8, max_new_tokens=12), make_request([2] * 8, max_new_tokens=8)
    scheduler.add(old)
    scheduler.add(new)
    while scheduler.has_requests:
        step(scheduler)
    assert new.num_preemptions > 0
    assert old.num_preemptions == 0
    assert [old.output_ids, new.output_ids] == [expected_output(old), expected_output(new)]


def test_the_head_of_the_line_is_not_overtaken_by_smaller_requests() -> None:
    scheduler = Scheduler(make_config(num_blocks=8))
    holder, big = make_request([1] * 16, max_new_tokens=12), make_request([2] * 28, max_new_tokens=1)
    scheduler.add(holder)
    step(scheduler)
    scheduler.add(big)
    small = [make_request([3], max_new_tokens=1) for _ in range(5)]
    for request in small:
        scheduler.add(request)
    while not big.status.is_terminal:
        step(scheduler)
        assert big.first_scheduled_time >= 0 or all(request.first_scheduled_time < 0 for request in small)


def test_a_failed_row_ends_alone() -> None:
    scheduler = Scheduler(make_config())
    good, bad = make_request([1, 2, 3]), make_request([4, 5, 6])
    scheduler.add(good)
    scheduler.add(bad)
    plan = scheduler.plan(64, now=0.0)
    samples = fake_run(plan) | {bad.request_id: SampledToken(0, error="boom")}
    scheduler.commit(plan, samples, now=0.0)
    scheduler.check_invariants()
    assert (bad.status, bad.error) == (RequestStatus.FAILED, "boom")
    while scheduler.has_requests:
        step(scheduler)
    assert good.output_ids == expected_output(good)


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_right_on_a_random_walk(seed: int) -> None:
    rng = random.Random(seed)
    config = make_config(
        num_blocks=rng.randint(8, 24),
        max_batch_tokens=rng.choice([8, 16, 64]),
        max_requests_per_batch=rng.randint(1, 8),
        allow_block_sharing=rng.random() < 0.8,
        safety_margin=rng.choice([0.0, 0.15, 0.5]),
    )
    scheduler = Scheduler(config)
    prefix = [rng.randrange(97) for _ in range(12)]
    submitted: list[ActiveRequest] = []
    version = 1
    for tick in range(300):
        if tick < 200 and rng.random() < 0.4:
            tail = [rng.randrange(97) for _ in range(rng.randint(1, 8))]
            request = make_request(prefix[: rng.randint(0, 12)] + tail, max_new_tokens=rng.randint(1, 12))
            submitted.append(request)
            scheduler.add(request)
        if submitted and rng.random() < 0.05:
            scheduler.end(rng.choice(submitted).request_id, FinishReason.CANCELLED, now=0.0)
        if rng.random() < 0.03:
            version += 1
            scheduler.set_version(version, recompute=rng.random() < 0.5)
        scheduler.check_invariants()
        if scheduler.has_requests:
            assert step(scheduler, max_tokens=rng.choice([1, 16, 64])).rows
    while scheduler.has_requests:
        assert step(scheduler).rows
    assert scheduler.pool.num_free == config.num_blocks
    assert sum(scheduler.counters.ended.values()) == len(submitted)
    assert scheduler.counters.generated_tokens == sum(len(request.output_ids) for request in submitted)
    for request in submitted:
        whole = expected_output(request)
        assert request.output_ids == whole[: len(request.output_ids)]
        assert request.status is RequestStatus.CANCELLED or request.output_ids == whole
        ends = [0, *(span.end for span in request.spans)]
        assert [span.start for span in request.spans] == ends[:-1]
        assert ends[-1] == len(request.output_ids)
        versions = [span.version for span in request.spans]
        assert versions == sorted(set(versions))


def test_the_cost_of_a_step_does_not_depend_on_the_line() -> None:
    def touched(num_waiting: int) -> int:
        scheduler = Scheduler(make_config(max_requests_per_batch=2))
        for _ in range(num_waiting):
            scheduler.add(make_request([1, 2, 3]))
        visits = 0
        original = scheduler._admit_head

        def counting(*args: object) -> object:
            nonlocal visits
            visits += 1
            return original(*args)  # type: ignore[arg-type]

        scheduler._admit_head = counting  # type: ignore[method-assign,assignment]
        scheduler.plan(64, now=0.0)
        return visits

    assert touched(5000) == touched(10)
