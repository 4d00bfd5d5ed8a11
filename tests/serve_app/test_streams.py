"""One open request: everything since the last read in one event, each token once, one ending."""

import asyncio
import time
from dataclasses import replace

import pytest

from engine import FinishReason, GenerationOutput, RequestStatus, SamplingParams, WeightSpan, WorkloadHints
from serve_app.messages import GenerateRequest
from serve_app.streams import TokenStream

DEADLINE_S = 5.0


def stream(*, limit: int = 10, expected: int = 0) -> TokenStream:
    request = GenerateRequest(
        "r", [1, 2, 3], SamplingParams(max_new_tokens=limit), WorkloadHints(expected_generated_length=expected)
    )
    return TokenStream(request, replica_id="a")


def output(
    tokens: list[int], spans: tuple[WeightSpan, ...], *, ended: FinishReason | None = None, error: str | None = None
) -> GenerationOutput:
    return GenerationOutput(
        "r",
        new_tokens=tokens,
        new_logprobs=[-float(token) for token in tokens],
        weight_versions=spans,
        status=RequestStatus.FINISHED if ended else RequestStatus.DECODING,
        finish_reason=ended,
        error=error,
        num_cached_tokens=2,
    )


async def test_one_event_carries_all_that_came_since_the_last() -> None:
    opened = stream()
    opened.deliver(output([1], (WeightSpan(1, 0, 1),)))
    opened.deliver(output([2, 3], (WeightSpan(1, 0, 2), WeightSpan(2, 2, 3))))
    event = await opened.read()
    assert (event.token_ids, event.logprobs) == ([1, 2, 3], [-1.0, -2.0, -3.0])
    assert event.weight_versions == (WeightSpan(1, 0, 2), WeightSpan(2, 2, 3))
    assert (event.request_id, event.replica_id, event.num_cached_tokens) == ("r", "a", 2)
    assert event.finish_reason is None


async def test_spans_cover_the_tokens_of_the_event_alone() -> None:
    opened = stream()
    opened.deliver(output([1, 2], (WeightSpan(1, 0, 2),)))
    await opened.read()
    opened.deliver(output([3, 4], (WeightSpan(1, 0, 3), WeightSpan(2, 3, 4)), ended=FinishReason.LENGTH))
    event = await opened.read()
    assert event.weight_versions == (WeightSpan(1, 2, 3), WeightSpan(2, 3, 4))
    assert event.finish_reason == "length"


async def test_an_ending_without_tokens_is_an_event_too() -> None:
    opened = stream()
    opened.deliver(output([], (), ended=FinishReason.FAILED, error="logits are not finite"))
    event = await opened.read()
    assert (event.token_ids, event.finish_reason, event.error) == ([], "failed", "logits are not finite")


async def test_reading_waits_for_the_next_output() -> None:
    opened = stream()
    reading = asyncio.get_running_loop().create_task(opened.read())
    await asyncio.sleep(0)
    assert not reading.done()
    opened.deliver(output([7], (WeightSpan(1, 0, 1),)))
    async with asyncio.timeout(DEADLINE_S):
        assert (await reading).token_ids == [7]


async def test_a_dead_engine_ends_the_stream_with_what_had_come() -> None:
    opened = stream()
    opened.deliver(output([7], (WeightSpan(1, 0, 1),)))
    opened.fail("the loop has died")
    event = await opened.read()
    assert (event.token_ids, event.finish_reason, event.error) == ([7], "failed", "the loop has died")


async def test_the_engines_own_ending_wins_over_a_later_failure() -> None:
    opened = stream()
    opened.deliver(output([7], (WeightSpan(1, 0, 1),), ended=FinishReason.STOP))
    opened.fail("the loop has died")
    event = await opened.read()
    assert (event.finish_reason, event.error) == ("stop", None)


async def test_remaining_tokens_shrink_but_never_to_nothing() -> None:
    opened = stream(limit=10, expected=2)
    assert opened.remaining_tokens == 2
    opened.deliver(output([1, 2, 3], (WeightSpan(1, 0, 3),)))
    assert opened.remaining_tokens == 1


async def test_several_sequences_share_an_event_and_end_one_by_one() -> None:
    request = GenerateRequest("r", [1, 2], SamplingParams(max_new_tokens=5, num_return_sequences=3))
    opened = TokenStream(request, replica_id="a")
    assert opened.sequence_ids == ["r", "r__child#0", "r__child#1"]
    opened.deliver(replace(output([7], ()), request_id="r__child#1"))
    opened.deliver(output([8], (), ended=FinishReason.STOP))
    event = await opened.read()
    assert (event.index, event.token_ids, event.finish_reason) == (0, [8], "stop")
    assert [(more.index, more.token_ids) for more in event.more] == [(2, [7])]
    assert opened.remaining_tokens == 13
    opened.fail("the device is gone")
    event = await opened.read()
    assert [(each.index, each.finish_reason) for each in (event, *event.more)] == [(1, "failed"), (2, "failed")]
    assert opened.is_over()


async def test_events_keep_apart_but_for_the_first_and_an_ending() -> None:
    opened = stream()
    opened.deliver(output([1], (WeightSpan(1, 0, 1),)))
    assert (await opened.read(apart_s=3600.0)).token_ids == [1]
    opened.deliver(output([2], (WeightSpan(1, 0, 2),)))
    reading = asyncio.ensure_future(opened.read(apart_s=3600.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not reading.done()
    opened.deliver(output([3], (WeightSpan(1, 0, 3),), ended=FinishReason.LENGTH))
    event = await asyncio.wait_for(reading, DEADLINE_S)
    assert (event.token_ids, event.finish_reason) == ([2, 3], "length")


async def test_events_that_had_to_keep_apart_come_by_themselves() -> None:
    opened = stream()
    opened.deliver(output([1], (WeightSpan(1, 0, 1),)))
    await opened.read(apart_s=0.05)
    opened.deliver(output([2], (WeightSpan(1, 0, 2),)))
    event = await asyncio.wait_for(opened.read(apart_s=0.05), DEADLINE_S)
    assert event.token_ids == [2]


async def test_a_failure_does_not_wait_for_its_turn() -> None:
    opened = stream()
    opened.deliver(output([1], (WeightSpan(1, 0, 1),)))
    await opened.read(apart_s=3600.0)
    opened.fail("the engine has died")
    event = await asyncio.wait_for(opened.read(apart_s=3600.0), DEADLINE_S)
    assert (event.finish_reason, event.error) == ("failed", "the engine has died")


async def test_an_answer_longer_than_expected_is_expected_to_go_on() -> None:
    opened = stream(limit=10_000, expected=20)
    opened.deliver(output([7] * 500, (WeightSpan(1, 0, 500),)))
    assert opened.remaining_tokens == 50


@pytest.mark.parametrize(("first_step_at", "computed_s"), [(97.0, 3.0), (-1.0, None)])
async def test_the_first_event_says_how_long_ago_the_first_step_was(
    monkeypatch: pytest.MonkeyPatch, first_step_at: float, computed_s: float | None
) -> None:
    own = stream()
    own.deliver(replace(output([7], ()), lifespan=(first_step_at, -1.0)))
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    assert (await own.read()).computed_s == computed_s
    own.deliver(output([8], ()))
    assert (await own.read()).computed_s is None
