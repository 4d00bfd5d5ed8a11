"""The scheduler without a model: a fake cache checks every key that a row reads, and the next token is a function of
the tokens before it.
"""

import random
from collections import deque
from dataclasses import replace
from itertools import count
from weakref import WeakKeyDictionary

import pytest

from engine.active_request import ActiveRequest
from engine.block_pool import BlockCopy, CopyKind
from engine.config import ResolvedConfig
from engine.plan import PlannedRow, SampledToken, StepPlan
from engine.request import FinishReason, RequestStatus, SamplingParams
from engine.scheduler import MAX_PREFILL_STEPS, Scheduler
from engine.waiting_line import MAX_OVERTAKEN

EOS = 96
PIPELINES: WeakKeyDictionary[Scheduler, "Pipeline"] = WeakKeyDictionary()
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


class FakeCache:
    """Remembers, for every slot of every group, which tokens led to it; a read of anything else is an error."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.config = scheduler.config
        self.device: list[dict[tuple[int, int], int]] = [{} for _ in scheduler.groups]
        self.host: list[dict[tuple[int, int], int]] = [{} for _ in scheduler.groups]
        self.newest: WeakKeyDictionary[ActiveRequest, int] = WeakKeyDictionary()

    def run(self, plan: StepPlan) -> dict[str, SampledToken]:
        for group, copies in enumerate(plan.copies):
            for copy in copies:
                self._copy(group, copy)
        samples = {}
        for row in plan.rows:
            tokens = self._tokens_of(row)
            for group, window in enumerate(self.config.windows):
                self._check_and_write(row, tokens, group, window)
            if row.samples:
                self.newest[row.request] = next_token(tokens)
                samples[row.request.request_id] = SampledToken(self.newest[row.request])
        return samples

    def _tokens_of(self, row: PlannedRow) -> list[int]:
        """All tokens up to the end of the row, as the device knows them: those it sampled, before they are told."""
        tokens = row.request.token_ids[: row.end]
        if row.is_ahead:
            assert not row.request.needs_processors, "they would not see the token"
            tokens = [*tokens[: row.start], self.newest[row.request]]
        else:
            assert row.token_ids == tokens[row.start :]
        assert len(tokens) == row.end
        return tokens

    def _copy(self, group: int, copy: BlockCopy) -> None:
        source = self.host if copy.kind is CopyKind.FROM_HOST else self.device
        target = self.host if copy.kind is CopyKind.TO_HOST else self.device
        for offset in range(self.config.page_size):
            content = source[group].get((copy.source, offset))
            target[group].pop((copy.target, offset), None)
            if content is not None:
                target[group][copy.target, offset] = content

    def _check_and_write(self, row: PlannedRow, tokens: list[int], group: int, window: int | None) -> None:
        page, table = self.config.page_size, row.block_tables[group]
        first = 0 if window is None else max(0, row.start - window + 1)
        for position in range(first, row.end):
            slot = (table[position // page], position % page)
            content = hash(tuple(tokens[: position + 1]))
            assert slot[0] >= 0
            if position >= row.start:
                self.device[group][slot] = content
            assert self.device[group][slot] == content, "these keys belong to somebody else"


class Pipeline:
    """Plans ahead as the loop does; the device is as late as it may be and runs a step when it is waited for."""

    def __init__(self, scheduler: Scheduler, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.cache = FakeCache(scheduler)
        self.depth = depth
        self.in_flight: deque[StepPlan] = deque()

    def step(self, max_tokens: int) -> StepPlan:
        """Gives the plan that was launched, which may be empty while others are in flight."""
        plan = StepPlan([])
        if not (self.in_flight and self.scheduler.must_drain):
            plan = self.scheduler.plan(max_tokens, now=0.0)
            self.scheduler.check_invariants()
        if plan.rows:
            for earlier in self.in_flight:
                check_apart(earlier, plan, self.scheduler.config)
            self.in_flight.append(plan)
        if not plan.rows or len(self.in_flight) == self.depth:
            self.land()
        return plan

    def land(self) -> None:
        plan = self.in_flight.popleft()
        self.scheduler.commit(plan, self.cache.run(plan), now=0.0)
        self.scheduler.check_invariants()

    def drain(self) -> None:
        while self.in_flight:
            self.land()


def check_apart(earlier: StepPlan, later: StepPlan, config: ResolvedConfig) -> None:
    """Asserts that a step writes to no block that a request of the step in flight before it still uses."""
    page = config.page_size
    for group, window in enumerate(config.windows):
        owners = {
            block: row.request
            for row in earlier.rows
            for block in row.block_tables[group][0 if window is None else max(0, row.start - window + 1) // page :]
        }
        for row in later.rows:
            for block in row.block_tables[group][row.start // page :]:
                assert owners.get(block, row.request) is row.request, "a step in flight uses this block"
        assert not {copy.target for copy in later.copies[group] if copy.kind is not CopyKind.TO_HOST} & owners.keys()


def step(scheduler: Scheduler, max_tokens: int = 64) -> StepPlan:
    return PIPELINES.setdefault(scheduler, Pipeline(scheduler)).step(max_tokens)


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
    PIPELINES[scheduler] = Pipeline(scheduler)
    samples = PIPELINES[scheduler].cache.run(plan) | {bad.request_id: SampledToken(0, error="boom")}
    scheduler.commit(plan, samples, now=0.0)
    scheduler.check_invariants()
    assert (bad.status, bad.error) == (RequestStatus.FAILED, "boom")
    while scheduler.has_requests:
        step(scheduler)
    assert good.output_ids == expected_output(good)


def random_config(rng: random.Random) -> ResolvedConfig:
    num_blocks = rng.randint(8, 24)
    windows: tuple[int | None, ...] = rng.choice([(None,), (None,), (5,), (None, 6), (None, 9)])
    return make_config(
        num_blocks=num_blocks,
        max_model_len=num_blocks * 4,
        max_batch_tokens=rng.choice([8, 16, 64]),
        max_requests_per_batch=rng.randint(1, 8),
        allow_block_sharing=rng.random() < 0.8,
        safety_margin=rng.choice([0.0, 0.15, 0.5]),
        scheduler_type=rng.choice(["fifo", "prefill_first", "priority", "fair"]),
        windows=windows,
        blocks_of_group=tuple(num_blocks if window is None else rng.randint(5, 16) for window in windows),
        num_host_slots=rng.choice([0, 0, 3, 20]),
    )


def random_request(rng: random.Random, prefix: list[int]) -> ActiveRequest:
    tail = [rng.randrange(97) for _ in range(rng.randint(1, 8))]
    request = make_request(prefix[: rng.randint(0, 12)] + tail, max_new_tokens=rng.randint(1, 12))
    request.tenant, request.priority = rng.choice([None, "a", "b"]), rng.randint(0, 2)
    request.needs_processors = rng.random() < 0.2
    if rng.random() < 0.2:
        request.children = [make_request(request.prompt_ids, rng.randint(1, 12)) for _ in range(rng.randint(1, 3))]
    return request


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_right_on_a_random_walk(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(random_config(rng))
    pipeline = Pipeline(scheduler, depth)
    prefix = [rng.randrange(97) for _ in range(12)]
    submitted: list[ActiveRequest] = []
    version = 1
    for tick in range(300):
        if tick < 200 and rng.random() < 0.4:
            request = random_request(rng, prefix)
            submitted += [request, *request.children]
            scheduler.add(request)
        if submitted and rng.random() < 0.05:
            scheduler.end(rng.choice(submitted).request_id, FinishReason.CANCELLED, now=0.0)
        if rng.random() < 0.03:
            pipeline.drain()
            version += 1
            scheduler.set_version(version, recompute=rng.random() < 0.5)
        scheduler.check_invariants()
        if scheduler.has_requests:
            is_alone = not pipeline.in_flight
            assert pipeline.step(rng.choice([1, 16, 64])).rows or not is_alone
    while scheduler.has_requests:
        is_alone = not pipeline.in_flight
        assert pipeline.step(64).rows or not is_alone
    pipeline.drain()
    assert scheduler.requests() == []
    assert all(group.pool.num_free == group.pool.num_blocks for group in scheduler.groups)
    assert sum(scheduler.counters.ended.values()) == len(submitted)
    assert scheduler.counters.generated_tokens == sum(len(request.output_ids) for request in submitted)
    for request in submitted:
        check_ending(request)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(16))
def test_requests_that_finish_before_a_swap_are_of_one_version_on_a_random_walk(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(random_config(rng))
    pipeline = Pipeline(scheduler, depth)
    prefix = [rng.randrange(97) for _ in range(12)]
    only_pinned = seed % 2 == 1
    is_holding = False
    submitted: list[ActiveRequest] = []
    for tick in range(400):
        if tick < 300 and rng.random() < 0.3:
            request = random_request(rng, prefix)
            for member in (request, *request.children):
                member.pinned_version = scheduler.version if rng.random() < 0.3 or not only_pinned else None
            submitted += [request, *request.children]
            scheduler.add(request)
        if submitted and rng.random() < 0.03:
            scheduler.end(rng.choice(submitted).request_id, FinishReason.CANCELLED, now=0.0)
        is_holding = go_on_swapping(rng, pipeline, only_pinned=only_pinned, is_holding=is_holding)
        if scheduler.has_requests:
            is_alone = not pipeline.in_flight
            assert pipeline.step(rng.choice([1, 16, 64])).rows or not is_alone
    scheduler.hold_back(everybody=False, pinned=False)
    while scheduler.has_requests:
        pipeline.step(64)
    pipeline.drain()
    assert scheduler.requests() == []
    assert all(group.pool.num_free == group.pool.num_blocks for group in scheduler.groups)
    assert scheduler.version > 1
    for request in submitted:
        check_ending(request)
        if request.pinned_version is not None:
            assert {span.version for span in request.spans} <= {request.pinned_version}
            gone = request.finish_reason is FinishReason.WEIGHT_VERSION_GONE
            assert not (gone and request.output_ids), "what had begun was to finish"


def go_on_swapping(rng: random.Random, pipeline: "Pipeline", *, only_pinned: bool, is_holding: bool) -> bool:
    """Begins a swap now and then, ends or abandons one that was begun; gives whether one is under way."""
    scheduler = pipeline.scheduler
    if not is_holding:
        is_begun = rng.random() < 0.05
        if is_begun:
            scheduler.hold_back(everybody=not only_pinned, pinned=only_pinned)
        scheduler.check_invariants()
        return is_begun
    is_clear = not scheduler.has_begun(only_pinned=only_pinned)
    if is_clear:
        swap(scheduler, pipeline, in_flight=rng.choice(["keep", "recompute"]))
    if is_clear or rng.random() < 0.02:
        scheduler.hold_back(everybody=False, pinned=False)
        is_holding = False
    scheduler.check_invariants()
    return is_holding


def swap(scheduler: Scheduler, pipeline: "Pipeline", *, in_flight: str) -> None:
    """What the loop does in a pause, to a version one higher."""
    pipeline.drain()
    for request in scheduler.requests():
        if request.pinned_version not in (None, scheduler.version + 1):
            scheduler.end(request.request_id, FinishReason.WEIGHT_VERSION_GONE, now=0.0)
    scheduler.set_version(scheduler.version + 1, recompute=in_flight == "recompute")


def check_ending(request: ActiveRequest) -> None:
    whole = expected_output(request)
    assert request.output_ids == whole[: len(request.output_ids)]
    assert request.status is RequestStatus.CANCELLED or request.output_ids == whole
    ends = [0, *(span.end for span in request.spans)]
    assert [span.start for span in request.spans] == ends[:-1]
    assert ends[-1] == len(request.output_ids)
    versions = [span.version for span in request.spans]
    assert versions == sorted(set(versions))


def test_evicted_blocks_sink_to_the_host_and_come_back_as_hits() -> None:
    scheduler = Scheduler(make_config(num_blocks=4, max_model_len=16, num_host_slots=8))
    first = make_request(list(range(1, 13)), 1)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(make_request(list(range(50, 63)), 1))
    step(scheduler)
    again = make_request(list(range(1, 13)), 1)
    scheduler.add(again)
    plan = step(scheduler)
    assert [copy.kind for copy in plan.copies[0]].count(CopyKind.FROM_HOST) == 2
    assert (again.num_cached_tokens, again.output_ids) == (8, first.output_ids)


def test_a_sliding_window_holds_only_the_blocks_it_can_see() -> None:
    config = make_config(num_blocks=16, windows=(None, 6), blocks_of_group=(16, 4), max_batch_tokens=8)
    scheduler = Scheduler(config)
    request = make_request(list(range(40)), max_new_tokens=8)
    scheduler.add(request)
    while scheduler.has_requests:
        step(scheduler)
    assert request.output_ids == expected_output(request)
    assert request.num_preemptions == 0


def test_a_hybrid_prefix_hit_needs_the_full_blocks_and_the_last_window() -> None:
    config = make_config(num_blocks=16, windows=(None, 6), blocks_of_group=(16, 8))
    scheduler = Scheduler(config)
    prompt = list(range(1, 22))
    scheduler.add(make_request(prompt, 1))
    step(scheduler)
    same = make_request(prompt, 1)
    scheduler.add(same)
    step(scheduler)
    assert same.num_cached_tokens == 20
    for _ in range(4):  # other requests push the window's blocks out, not the full ones
        scheduler.groups[1].pool.release(scheduler.groups[1].pool.acquire(8))
    late = make_request(prompt, 1)
    scheduler.add(late)
    step(scheduler)
    assert late.num_cached_tokens == 0


def test_further_samples_share_the_prompt_and_copy_only_its_last_block() -> None:
    scheduler = Scheduler(make_config(num_blocks=32))
    parent = make_request(list(range(1, 12)), max_new_tokens=3)
    parent.children = [make_request(parent.prompt_ids, max_new_tokens=3) for _ in range(3)]
    family = [parent, *parent.children]
    scheduler.add(parent)
    assert step(scheduler).num_tokens == 10
    assert scheduler.stats().num_used_blocks == 2 + 4
    plan = step(scheduler)
    assert plan.num_tokens == 4
    assert [copy.kind for copy in plan.copies[0]] == [CopyKind.ON_DEVICE] * 3
    while scheduler.has_requests:
        step(scheduler)
    assert [request.output_ids for request in family] == [expected_output(parent)] * 4


def test_samples_of_a_one_token_prompt_and_of_a_prompt_wholly_cached() -> None:
    scheduler = Scheduler(make_config(num_blocks=32))
    scheduler.add(make_request(list(range(1, 10)), 1))
    step(scheduler)
    for prompt in ([5], list(range(1, 10))):
        parent = make_request(prompt, max_new_tokens=2)
        parent.children = [make_request(prompt, max_new_tokens=2)]
        family = [parent, *parent.children]
        scheduler.add(parent)
        while scheduler.has_requests:
            step(scheduler)
        assert [request.output_ids for request in family] == [expected_output(parent)] * 2


def test_a_request_goes_on_from_a_token_that_has_no_name_yet() -> None:
    scheduler = Scheduler(make_config())
    pipeline = Pipeline(scheduler, depth=2)
    request = make_request([1, 2, 3], max_new_tokens=4)
    scheduler.add(request)
    plans = [pipeline.step(64) for _ in range(5)]
    assert [[(row.start, row.end, row.is_ahead) for row in plan.rows] for plan in plans] == [
        [(0, 3, False)],
        [(3, 4, True)],
        [(4, 5, True)],
        [(5, 6, True)],
        [],  # its last token is on its way
    ]
    assert request.output_ids == expected_output(request)
    assert not pipeline.in_flight


def test_a_request_whose_processors_see_its_tokens_waits_for_each() -> None:
    scheduler = Scheduler(make_config())
    pipeline = Pipeline(scheduler, depth=2)
    seeing, other = make_request([1, 2, 3], max_new_tokens=3), make_request([4, 5, 6], max_new_tokens=5)
    seeing.needs_processors = True
    scheduler.add(seeing)
    scheduler.add(other)
    rows = [[row.request for row in pipeline.step(64).rows] for _ in range(5)]
    assert rows == [[seeing, other], [other], [seeing, other], [other], [seeing, other]]
    pipeline.drain()
    assert [request.output_ids for request in (seeing, other)] == [expected_output(seeing), expected_output(other)]


def ended_in_flight(scheduler: Scheduler, pipeline: Pipeline) -> ActiveRequest:
    """Gives a request that runs, with a step in flight that has a row of it."""
    request = make_request([1, 2, 3], max_new_tokens=9)
    scheduler.add(request)
    pipeline.step(64)
    pipeline.step(64)
    assert (len(pipeline.in_flight), request.num_in_flight, request.output_ids) == (1, 1, expected_output(request)[:1])
    return request


def test_the_blocks_of_a_cancelled_request_are_free_when_its_row_has_run() -> None:
    scheduler = Scheduler(make_config())
    pipeline = Pipeline(scheduler, depth=2)
    request = ended_in_flight(scheduler, pipeline)
    scheduler.end(request.request_id, FinishReason.CANCELLED, now=0.0)
    scheduler.check_invariants()
    assert (scheduler.has_requests, scheduler.stats().num_used_blocks) == (False, 1)
    again = make_request([7, 8], max_new_tokens=2)
    again.request_id = request.request_id
    scheduler.add(again)
    pipeline.step(64)
    assert scheduler.stats().num_used_blocks == 1, "those of the second request of this id"
    pipeline.drain()
    assert request.output_ids == expected_output(request)[:1]
    assert again.output_ids == expected_output(again)[:1]


def test_the_token_after_the_end_is_thrown_away() -> None:
    scheduler = Scheduler(make_config())
    pipeline = Pipeline(scheduler, depth=2)
    request = ended_in_flight(scheduler, pipeline)
    end = next_token(request.token_ids)
    request.sampling = replace(request.sampling, eos_token_ids=(end,))
    plan = pipeline.step(64)
    assert (request.finish_reason, [row.request for row in plan.rows]) == (FinishReason.STOP, [request])
    assert scheduler.stats().num_used_blocks == 2
    pipeline.drain()
    assert request.output_ids[-1] == end
    assert len(request.output_ids) == 2
    assert (scheduler.stats().num_used_blocks, scheduler.counters.generated_tokens) == (0, 2)


def test_a_row_that_fails_takes_its_next_one_with_it_and_no_other() -> None:
    scheduler = Scheduler(make_config())
    pipeline = Pipeline(scheduler, depth=2)
    good, bad = make_request([1, 2, 3]), make_request([4, 5, 6])
    scheduler.add(good)
    scheduler.add(bad)
    for _ in range(2):
        pipeline.in_flight.append(scheduler.plan(64, now=0.0))
    plan = pipeline.in_flight.popleft()
    scheduler.commit(plan, pipeline.cache.run(plan) | {bad.request_id: SampledToken(0, error="boom")}, now=0.0)
    scheduler.check_invariants()
    assert (bad.status, bad.error, bad.output_ids) == (RequestStatus.FAILED, "boom", [])
    while scheduler.has_requests:
        pipeline.step(64)
    assert bad.output_ids == []
    assert good.output_ids == expected_output(good)
    assert scheduler.stats().num_used_blocks == 0


def test_nobody_gives_way_while_a_step_is_in_flight() -> None:
    scheduler = Scheduler(make_config(num_blocks=4))
    pipeline = Pipeline(scheduler, depth=2)
    old, new = make_request([1] * 6, max_new_tokens=9), make_request([2] * 7, max_new_tokens=9)
    scheduler.add(old)
    scheduler.add(new)
    pipeline.step(64)
    while not scheduler.must_drain:
        pipeline.step(64)
    assert new.num_preemptions == 0
    pipeline.step(64)
    assert not pipeline.in_flight
    pipeline.step(64)
    assert new.num_preemptions == 1
    while scheduler.has_requests:
        pipeline.step(64)
    assert [old.output_ids, new.output_ids] == [expected_output(old), expected_output(new)]


def admission_order(scheduler: Scheduler, requests: list[ActiveRequest]) -> list[int]:
    for request in requests:
        scheduler.add(request)
    order: list[int] = []
    while scheduler.has_requests:
        for row in step(scheduler).rows:
            index = requests.index(row.request)
            if index not in order:
                order.append(index)
    return order


def test_priority_takes_the_smallest_first_and_then_the_oldest() -> None:
    requests = [make_request([1, 2], 1) for _ in range(4)]
    for index, priority in enumerate([5, 0, 5, -1]):
        requests[index].priority = priority
    scheduler = Scheduler(make_config(scheduler_type="priority", max_requests_per_batch=1, max_batch_tokens=2))
    assert admission_order(scheduler, requests) == [3, 1, 0, 2]


@pytest.mark.parametrize("order", ["fifo", "prefill_first", "priority", "fair"])
def test_who_has_waited_elsewhere_goes_where_that_time_puts_it(order: str) -> None:
    requests = [make_request([1, 2], 1) for _ in range(5)]
    for request, came, waited_s in zip(requests, [10, 20, 30, 40, 40], [0, 0, 0, 15, 0], strict=True):
        request.created_time, request.waited_s = came, waited_s
    scheduler = Scheduler(make_config(scheduler_type=order, max_requests_per_batch=1, max_batch_tokens=2))
    assert admission_order(scheduler, requests) == [0, 1, 3, 2, 4]


def test_no_request_is_overtaken_for_ever() -> None:
    scheduler = Scheduler(make_config(scheduler_type="priority", max_requests_per_batch=1, max_batch_tokens=2))
    low = make_request([1, 2], 1)
    low.priority = 9
    scheduler.add(low)
    num_overtaking = 0
    while low.first_scheduled_time < 0:
        scheduler.add(make_request([3, 4], 1))
        step(scheduler)
        num_overtaking += 1
    assert num_overtaking == MAX_OVERTAKEN + 1


def test_fair_gives_a_quiet_tenant_its_turn_before_a_busy_one() -> None:
    requests = [make_request([1, 2, 3, 4], 2) for _ in range(7)]
    for index, tenant in enumerate(["busy"] * 5 + ["quiet", "late"]):
        requests[index].tenant = tenant
    scheduler = Scheduler(make_config(scheduler_type="fair", max_requests_per_batch=1, max_batch_tokens=4))
    order = admission_order(scheduler, requests)
    assert order.index(5) <= 2
    assert order.index(6) <= 3


def test_prefill_first_takes_prompts_before_decoding_but_not_for_ever() -> None:
    scheduler = Scheduler(make_config(scheduler_type="prefill_first", num_blocks=64, max_batch_tokens=4))
    decoding = make_request([1], max_new_tokens=4)
    scheduler.add(decoding)
    step(scheduler)
    for _ in range(3):
        scheduler.add(make_request([2] * 20, max_new_tokens=1))
    plans = [step(scheduler) for _ in range(MAX_PREFILL_STEPS + 1)]
    with_decoding = [any(row.request is decoding for row in plan.rows) for plan in plans]
    assert with_decoding[:2] == [False, False]
    assert any(with_decoding)


def test_the_cost_of_a_step_does_not_depend_on_the_line() -> None:
    def touched(num_waiting: int) -> int:
        scheduler = Scheduler(make_config(max_requests_per_batch=2))
        for _ in range(num_waiting):
            scheduler.add(make_request([1, 2, 3]))
        visits = 0
        original = scheduler._admit

        def counting(*args: object) -> object:
            nonlocal visits
            visits += 1
            return original(*args)  # type: ignore[arg-type]

        scheduler._admit = counting  # type: ignore[method-assign,assignment]
        scheduler.plan(64, now=0.0)
        return visits

    assert touched(5000) == touched(10)
