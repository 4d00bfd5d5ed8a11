"""Two steps in flight: pauses, swaps, stops and failures find nothing half done, and the books are right."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from engine_runs import (
    DEADLINE_S,
    StepGate,
    greedy,
    is_pause_wanted,
    prompt_of,
    result_of,
    run_all,
    running,
    wait_until,
)
from tiny_models import tiny_model
from transformers import PreTrainedModel

from engine import (
    ContinuousBatchingManager,
    EngineDead,
    FinishReason,
    RequestStatus,
    SamplingParams,
    WeightSpan,
    stage_weights,
)
from engine.plan import FinishedStep, StepHandle, StepPlan
from engine.step_thread import StepThread

PROMPT = prompt_of(40, seed=4)
NUM_NEW = 24


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model(seed=1)


@pytest.fixture
def manager(model: PreTrainedModel) -> Iterator[ContinuousBatchingManager]:
    with running(model, use_async_batching=True) as manager:
        yield manager


def answer(seed: int = 1) -> list[int]:
    return greedy(tiny_model(seed=seed), PROMPT, NUM_NEW)


def in_flight(manager: ContinuousBatchingManager) -> int:
    return len(manager._loop._in_flight)


def begun_request(manager: ContinuousBatchingManager, model: PreTrainedModel) -> tuple[str, StepGate]:
    """Gives a request with five tokens; the step of its sixth stands at the gate, and that of its seventh behind it."""
    gate = StepGate(model)
    request_id = manager.add_request(PROMPT, max_new_tokens=NUM_NEW)
    gate.wait()
    for _ in range(5):
        gate.step()
    # Before the fifth is in the books, it is the fifth and the sixth that are in flight.
    wait_until(lambda: (manager.stats().steps_total, in_flight(manager)) == (5, 2))
    return request_id, gate


def commit_at_gate(manager: ContinuousBatchingManager, gate: StepGate, folder: Path, in_flight: str) -> None:
    staged = stage_weights(manager.model, str(folder))
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(manager.commit_weights, staged, in_flight=in_flight)
        wait_until(lambda: is_pause_wanted(manager))
        gate.open()
        commit.result(DEADLINE_S)


def test_a_pause_begins_when_both_steps_have_ended(manager: ContinuousBatchingManager, model: PreTrainedModel) -> None:
    expected = answer()
    request_id, gate = begun_request(manager, model)
    is_parked, may_leave = threading.Event(), threading.Event()

    def hold() -> None:
        with manager.pause(weights_changed=False):
            is_parked.set()
            assert may_leave.wait(DEADLINE_S)

    holder = threading.Thread(target=hold)
    holder.start()
    wait_until(lambda: is_pause_wanted(manager))
    gate.open()
    assert is_parked.wait(DEADLINE_S)
    (request,) = manager._loop._scheduler.requests()
    assert (in_flight(manager), request.num_pending, request.output_ids) == (0, 0, expected[:7])
    assert greedy(model, PROMPT, NUM_NEW) == expected, "the model is its owner's"
    may_leave.set()
    holder.join(DEADLINE_S)
    assert result_of(manager, request_id).generated_tokens == expected


def test_tokens_in_flight_belong_to_the_version_that_samples_them(
    manager: ContinuousBatchingManager, model: PreTrainedModel, tmp_path: Path
) -> None:
    old = answer()
    tiny_model(seed=2).save_pretrained(tmp_path)
    request_id, gate = begun_request(manager, model)
    commit_at_gate(manager, gate, tmp_path, "keep")
    output = result_of(manager, request_id)
    assert output.generated_tokens[:7] == old[:7]
    assert output.weight_versions == (WeightSpan(1, 0, 7), WeightSpan(2, 7, NUM_NEW))


def test_a_recomputed_request_goes_on_from_the_tokens_that_were_in_flight(
    manager: ContinuousBatchingManager, model: PreTrainedModel, tmp_path: Path
) -> None:
    old = answer()
    expected = old[:7] + greedy(tiny_model(seed=2), PROMPT + old[:7], NUM_NEW - 7)
    tiny_model(seed=2).save_pretrained(tmp_path)
    request_id, gate = begun_request(manager, model)
    commit_at_gate(manager, gate, tmp_path, "recompute")
    assert result_of(manager, request_id).generated_tokens == expected


def test_a_hard_stop_keeps_what_was_in_flight(manager: ContinuousBatchingManager, model: PreTrainedModel) -> None:
    expected = answer()
    request_id, gate = begun_request(manager, model)
    threads = threading.enumerate()
    manager.stop(hard_stop=True, block=False)
    gate.open()
    manager.join(perf_counter(), timeout=DEADLINE_S)
    output = result_of(manager, request_id)
    assert (output.status, output.generated_tokens) == (RequestStatus.FAILED, expected[:7])
    stats = manager.stats()
    assert (stats.num_running, stats.num_used_blocks, stats.generated_tokens_total) == (0, 0, 7)
    assert not [thread for thread in threads if thread.name == "pitstop-steps" and thread.is_alive()]
    manager.start()


def test_a_cancelled_request_keeps_the_tokens_of_steps_that_ended(
    manager: ContinuousBatchingManager, model: PreTrainedModel
) -> None:
    expected = answer()
    request_id, gate = begun_request(manager, model)
    manager.cancel_request(request_id)
    gate.open()
    output = result_of(manager, request_id)
    assert (output.finish_reason, output.generated_tokens) == (FinishReason.CANCELLED, expected[:6])
    wait_until(lambda: manager.stats().num_used_blocks == 0)


def test_a_device_that_breaks_with_two_steps_in_flight_leaves_nothing(
    manager: ContinuousBatchingManager, model: PreTrainedModel
) -> None:
    def break_down(*_: object) -> None:
        raise torch.AcceleratorError("the device fell off the bus")

    expected = answer()
    request_id, gate = begun_request(manager, model)
    hook = model.get_input_embeddings().register_forward_pre_hook(break_down)
    gate.open()
    output = result_of(manager, request_id)
    assert (output.status, output.generated_tokens) == (RequestStatus.FAILED, expected[:5])
    manager.join(perf_counter(), timeout=DEADLINE_S)
    with pytest.raises(EngineDead, match="fell off the bus"):
        manager.check_health()
    assert manager.stats().num_used_blocks == 0
    hook.remove()
    manager.start()
    assert run_all(manager, [PROMPT], NUM_NEW) == [expected]


@pytest.mark.parametrize("num_blocks", [64, 10])
def test_plain_penalised_and_repeated_requests_run_side_by_side(num_blocks: int, model: PreTrainedModel) -> None:
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.9, "seed": 3, "num_return_sequences": 3},
        {"temperature": 0.9, "seed": 4, "top_p": 0.9, "logprobs": True},
        {"temperature": 0.0, "min_new_tokens": 9, "eos_token_ids": (answer()[4],)},
        {"temperature": 0.0, "eos_token_ids": (answer()[4],)},
    ]
    runs = []
    for is_async in (False, True):
        with running(model, use_async_batching=is_async, num_blocks=num_blocks) as manager:
            ids = [
                manager.add_request(PROMPT, sampling=SamplingParams(max_new_tokens=NUM_NEW, **choice))
                for choice in choices
            ]
            ids += [f"{ids[2]}__child#{number}" for number in range(2)]
            outputs = [result_of(manager, request_id) for request_id in ids]
            runs.append([(output.finish_reason, output.generated_tokens) for output in outputs])
            logprobs = outputs[3].logprobs
            if not is_async:
                expected_logprobs = logprobs
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
    assert runs[0] == runs[1]


def test_the_seconds_of_steps_are_counted_once(model: PreTrainedModel) -> None:
    started = perf_counter()
    with running(model, use_async_batching=True) as manager:
        run_all(manager, [prompt_of(60, seed=seed) for seed in range(8)], NUM_NEW)
        stats = manager.stats()
    assert 0 < stats.last_step_s <= stats.step_seconds_total <= perf_counter() - started


class _Numbering:
    """A runner that notes the order of its steps; the second step of three fails."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        assert plan.rows == []
        self.steps.append(len(self.steps))
        if len(self.steps) == 2:
            raise EngineDead("the second")
        return FinishedStep({})


def test_a_step_thread_runs_steps_in_order_and_raises_where_they_are_waited_for() -> None:
    runner = _Numbering()
    thread = StepThread(runner)
    for _ in range(2):
        handles = [thread.launch(StepPlan([])) for _ in range(3)]
        assert handles[0].wait() == {}
        if len(runner.steps) <= 3:
            with pytest.raises(EngineDead, match="the second"):
                handles[1].wait()
        assert handles[2].wait() == {}
        thread.close()
    assert runner.steps == list(range(6))
    assert not [thread for thread in threading.enumerate() if thread.name == "pitstop-steps" and thread.is_alive()]
