"""What must not grow: calls per step with the text or the line, memory with the line, keys read with sharing.

Counts, not times: `python -m benchmarks.growth` measures.
"""

import gc
import sys
import tracemalloc
from types import FrameType

import pytest
import torch

from benchmarks.growth import EngineSide, make_factory, shared_prefix_prompts
from engine.active_request import ActiveRequest
from engine.attention.step import LayerView
from engine.batch import MAX_GROUP_TOKENS, build_batch
from engine.config import ResolvedConfig
from engine.kv_cache import KVCache, LayerShape
from engine.plan import PlannedRow
from engine.request import SamplingParams

MAX_WAITING_BYTES = 2048


def calls_of_a_step(side: EngineSide) -> int:
    """Counts the calls of Python and C functions in one step; a step that goes over a list in Python makes more."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        side.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def stream_of(length: int) -> EngineSide:
    """Gives an engine with one streaming request that has generated `length` tokens."""
    side = EngineSide(num_running=1)
    side.add(1, prompt_length=100, max_new_tokens=40_000)
    for _ in range(length):
        side.step()
    return side


def test_a_token_of_a_long_stream_costs_what_one_of_a_short_one_costs() -> None:
    # Both a few tokens into a block of the cache, so that neither step opens or closes one.
    short, long = stream_of(1_000), stream_of(32_000)
    assert calls_of_a_step(long) == calls_of_a_step(short)
    (output,) = long.last_outputs
    assert len(output.new_tokens) == 1
    assert len(output.generated_tokens) == 32_001


def test_a_step_does_the_same_whether_ten_or_five_thousand_wait() -> None:
    calls = []
    for num_waiting in (10, 5_000):
        side = EngineSide(num_running=16)
        side.add(16 + num_waiting, prompt_length=20, max_new_tokens=1_000)
        side.run_until_decoding()
        calls.append(calls_of_a_step(side))
    assert calls[0] == calls[1]


@pytest.mark.parametrize("prompt_length", [10, 1_000])
def test_a_waiting_request_costs_little_beyond_its_ids(prompt_length: int) -> None:
    num_requests = 500
    side, factory = EngineSide(num_running=1), make_factory()
    prompts = [list(range(prompt_length)) for _ in range(num_requests)]
    gc.collect()
    tracemalloc.start()
    try:
        for prompt in prompts:
            side.submit(factory.make(prompt, request_id=None, sampling=SamplingParams(max_new_tokens=5)))
        side.take_in()
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / num_requests - 8 * prompt_length < MAX_WAITING_BYTES


@pytest.mark.parametrize("num_tokens_of_a_step", [128, 8_192])
def test_a_shared_system_prompt_saves_four_fifths_of_the_work(num_tokens_of_a_step: int) -> None:
    side, factory = EngineSide(num_running=64, page_size=16, max_batch_tokens=num_tokens_of_a_step), make_factory()
    prompts = shared_prefix_prompts(64, vocab_size=1_000)
    for prompt in prompts:
        side.submit(factory.make(prompt, request_id=None, sampling=SamplingParams(max_new_tokens=1)))
    side.take_in()
    while side.scheduler.has_requests:
        side.step()
    counters = side.scheduler.counters
    assert counters.prompt_tokens == sum(map(len, prompts))
    assert counters.prompt_tokens / (counters.prompt_tokens - counters.cached_tokens) >= 5


def view_of(ends: list[int]) -> tuple[LayerView, list[PlannedRow], KVCache]:
    """Gives the view of a step in which a row decodes at each of these lengths, all on the same blocks."""
    config = ResolvedConfig(
        page_size=64, num_blocks=200, max_batch_tokens=512, max_requests_per_batch=256, max_model_len=12_800,
        vocab_size=10, allow_block_sharing=True, safety_margin=0, max_queue_size=0, target_step_s=None, seed=0,
        return_logprobs=False,
    )  # fmt: skip
    cache = KVCache([LayerShape(1, 1, 1)], config, dtype=torch.float32, device=torch.device("cpu"))
    table = list(range(7, 7 + 160))
    rows = [PlannedRow(_request(), end - 1, [1], [table], samples=True) for end in ends]
    return build_batch(rows, cache, (None,), torch.device("cpu")).step.views[0], rows, cache


def _request() -> ActiveRequest:
    return ActiveRequest("r", [1], SamplingParams(), created_time=0.0)


def test_rows_that_share_a_prefix_are_read_in_groups_of_bounded_size() -> None:
    view, rows, cache = view_of([2_000] * 64)
    assert [group.end - group.start for group in view.groups] == [4] * 16
    assert view.groups[0].start == 0
    assert all(len(group.chunk_ids) * cache.chunk_tokens <= MAX_GROUP_TOKENS for group in view.groups)
    assert len(rows) == 64


def test_each_row_of_a_group_reads_its_own_chunks_and_pads_with_one_of_them() -> None:
    view, _, _ = view_of([33, 60, 70, 129])
    first, second = view.groups
    assert first.lengths_R.tolist() == [33, 60, 70]
    assert first.chunk_ids.view(3, -1).tolist() == [[14, 15, 14], [14, 15, 14], [14, 15, 16]]
    assert second.chunk_ids.tolist() == [14, 15, 16, 17, 18]
