"""No request, whatever it holds, changes or ends another one (a witness runs beside each), and none leaves anything."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import (
    DEADLINE_S,
    StepGate,
    assert_idle,
    greedy,
    prompt_of,
    result_of,
    run_all,
    running,
    small_config,
    wait_until,
)
from tiny_models import VOCAB_SIZE, tiny_model
from transformers import PreTrainedModel

from engine import (
    ContextLengthExceeded,
    ContinuousBatchingManager,
    DuplicateRequest,
    EngineDead,
    EngineStopped,
    FinishReason,
    GenerationOutput,
    InvalidRequest,
    QueueFull,
    RequestStatus,
    SamplingParams,
    generate_batch,
    init_continuous_batching,
)

WITNESS_PROMPT = prompt_of(37, seed=7)
NUM_NEW = 24
POISON_ID = 13
"""In no other prompt here; its embedding can be made NaN."""
CAPACITY = 1024


@cache
def witness_answer() -> list[int]:
    answer = greedy(tiny_model(), WITNESS_PROMPT, NUM_NEW)
    assert POISON_ID not in WITNESS_PROMPT + answer
    return answer


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture
def manager(model: PreTrainedModel) -> Iterator[ContinuousBatchingManager]:
    with running(model, per_request_processors=True) as manager:
        yield manager


def add_witness(manager: ContinuousBatchingManager) -> str:
    return manager.add_request(WITNESS_PROMPT, request_id="witness", max_new_tokens=NUM_NEW)


def assert_witness(manager: ContinuousBatchingManager) -> None:
    output = result_of(manager, "witness")
    assert output.error is None
    assert output.generated_tokens == witness_answer()


BAD_PROMPTS: list[Any] = [
    [],
    (),
    torch.empty(0, dtype=torch.long),
    np.array([], dtype=np.int64),
    [VOCAB_SIZE],
    [1, 2, VOCAB_SIZE, 3],
    [-1],
    [2**40],
    [2**70],
    [1, "a"],
    "abc",
    b"",
    [1.0],
    [1.5],
    [float("nan")],
    [True],
    [None],
    [[1, 2]],
    torch.tensor([[1, 2], [3, 4]]),
    torch.tensor([1.0, 2.0]),
    torch.tensor(5),
    None,
    7,
    {"input_ids": [1]},
    object(),
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_a_malformed_prompt_is_refused_by_name(manager: ContinuousBatchingManager, prompt: Any) -> None:
    add_witness(manager)
    with pytest.raises(InvalidRequest) as caught:
        manager.add_request(prompt, max_new_tokens=4)
    assert caught.value.param == "input_ids"
    assert_witness(manager)


@pytest.mark.parametrize(
    "prompt", [(1, 2, 3), range(1, 4), np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [np.int32(1), torch.tensor(2), 3]]
)
def test_ids_in_any_integer_form_are_accepted(manager: ContinuousBatchingManager, prompt: Any) -> None:
    plain = run_all(manager, [[1, 2, 3]], 5)
    assert run_all(manager, [prompt], 5) == plain


def test_a_prompt_that_its_caller_changes_later_is_not_changed(manager: ContinuousBatchingManager) -> None:
    prompt = list(WITNESS_PROMPT)
    manager.add_request(prompt, request_id="witness", max_new_tokens=NUM_NEW)
    prompt[:] = [POISON_ID] * len(prompt)
    assert_witness(manager)


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 101.0},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": -0.1},
        {"top_p": float("nan")},
        {"top_p": [0.5]},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_k": "all"},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"seed": 1.0},
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"max_new_tokens": "many"},
        {"eos_token_ids": (1.5,)},
        {"eos_token_ids": (-2,)},
        {"eos_token_ids": ("end",)},
    ],
    ids=repr,
)
def test_a_bad_sampling_value_is_refused_by_name(manager: ContinuousBatchingManager, arguments: Any) -> None:
    add_witness(manager)
    (name,) = arguments
    with pytest.raises(InvalidRequest) as caught:
        manager.add_request([1, 2, 3], sampling=SamplingParams(**arguments))
    assert caught.value.param == name
    if name in {"temperature", "top_p", "top_k", "max_new_tokens"}:
        with pytest.raises(InvalidRequest) as caught:
            manager.add_request([1, 2, 3], **arguments)
        assert caught.value.param == name
    assert_witness(manager)


@pytest.mark.parametrize(
    "arguments",
    [
        {"request_id": ""},
        {"request_id": 5},
        {"eos_token_id": "end"},
        {"eos_token_id": 1.5},
        {"eos_token_id": [1, "end"]},
        {"eos_token_id": True},
        {"cache_salt": 5},
        {"min_q": 0.1},
        {"stop_strings": ["x"]},
        {"sampling": {"temperature": 0.5}},
        {"sampling": "greedy"},
    ],
    ids=repr,
)
def test_a_bad_argument_is_refused_by_name(manager: ContinuousBatchingManager, arguments: Any) -> None:
    add_witness(manager)
    (name,) = arguments
    with pytest.raises(InvalidRequest) as caught:
        manager.add_request([1, 2, 3], **arguments)
    assert caught.value.param in {name, "eos_token_ids"}
    assert_witness(manager)


def test_the_same_parameter_given_twice_is_refused(manager: ContinuousBatchingManager) -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        manager.add_request([1], max_new_tokens=3, sampling=SamplingParams(max_new_tokens=4))


def test_sampling_keywords_need_their_switch(model: PreTrainedModel) -> None:
    with running(model) as manager, pytest.raises(InvalidRequest, match="per_request_processors"):
        manager.add_request([1], temperature=0.5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": 1e-30},
        {"temperature": 1},
        {"temperature": 100.0},
        {"temperature": 0.5, "top_k": 10**9},
        {"temperature": 0.5, "top_p": 1e-12},
        {"temperature": 0.0, "top_p": 0.1, "top_k": 3},
        {"temperature": 1.0, "seed": -(2**63)},
        {"eos_token_ids": (-1,)},
        {"eos_token_ids": (10**6,)},
        {"max_new_tokens": 1},
        {"logprobs": True, "temperature": 2.0},
    ],
    ids=repr,
)
def test_extreme_but_legal_values_hurt_nobody(manager: ContinuousBatchingManager, arguments: Any) -> None:
    add_witness(manager)
    sampling = SamplingParams(**{"max_new_tokens": 5, "top_k": 0, "top_p": 1.0, **arguments})
    output = result_of(manager, manager.add_request([1, 2, 3], sampling=sampling))
    assert len(output.generated_tokens) == sampling.max_new_tokens
    assert all(0 <= token < VOCAB_SIZE for token in output.generated_tokens)
    assert_witness(manager)


@pytest.mark.parametrize(
    ("length", "max_new_tokens"), [(CAPACITY, 1), (513, None), (512, None), (500, 13), (1, 512), (5000, 5)]
)
def test_what_does_not_fit_is_refused_before_it_joins(
    length: int, max_new_tokens: int | None, model: PreTrainedModel
) -> None:
    with running(model) as manager:
        add_witness(manager)
        with pytest.raises(ContextLengthExceeded, match=r"more than the 512 that"):
            manager.add_request(prompt_of(length), max_new_tokens=max_new_tokens)
        assert_witness(manager)


def test_a_cache_smaller_than_the_model_is_the_limit(model: PreTrainedModel) -> None:
    with running(model, num_blocks=4) as manager:
        add_witness(manager)
        with pytest.raises(ContextLengthExceeded, match="64"):
            manager.add_request(prompt_of(40), max_new_tokens=25)
        assert_witness(manager)
        assert len(run_all(manager, [prompt_of(40)], 24)[0]) == 24


def test_a_request_without_a_limit_ends_at_that_of_the_model(model: PreTrainedModel) -> None:
    with running(model, num_blocks=4) as manager:
        output = result_of(manager, manager.add_request(prompt_of(40)))
        assert (len(output.generated_tokens), output.finish_reason) == (24, FinishReason.LENGTH)


def test_a_second_request_of_the_same_id_is_refused(manager: ContinuousBatchingManager) -> None:
    with manager.pause(weights_changed=False):
        add_witness(manager)
        with pytest.raises(DuplicateRequest, match="witness"):
            manager.add_request([1, 2], request_id="witness", max_new_tokens=3)
    assert_witness(manager)
    add_witness(manager)
    assert_witness(manager)


def test_a_full_queue_refuses_at_once_and_says_how_many_wait(model: PreTrainedModel) -> None:
    with running(model, max_queue_size=3) as manager:
        with manager.pause(weights_changed=False):
            add_witness(manager)
            ids = [manager.add_request([1, 2], max_new_tokens=3) for _ in range(2)]
            with pytest.raises(QueueFull, match="3 requests wait") as caught:
                manager.add_request([1, 2], max_new_tokens=3)
            assert caught.value.num_waiting == 3
        assert_witness(manager)
        assert all(len(result_of(manager, request_id).generated_tokens) == 3 for request_id in ids)


# Failures of a request that runs


@pytest.mark.parametrize("prompt", [[POISON_ID], [5, POISON_ID, 8], [*prompt_of(50, seed=3), POISON_ID]])
@pytest.mark.usefixtures("depth")
def test_scores_that_are_not_finite_end_their_request_alone(prompt: list[int], model: PreTrainedModel) -> None:
    witness_answer()
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON_ID] = float("nan")
    with running(model, num_blocks=8, max_batch_tokens=16) as manager:
        add_witness(manager)
        bad = manager.add_request(prompt, max_new_tokens=9)
        output = result_of(manager, bad)
        assert (output.status, output.finish_reason) == (RequestStatus.FAILED, FinishReason.FAILED)
        assert "not finite" in str(output.error)
        assert_witness(manager)
        # Its blocks come round again, and its prefix must not be found.
        for _ in range(4):
            add_witness(manager)
            assert_witness(manager)
        assert result_of(manager, manager.add_request(prompt, max_new_tokens=9)).status is RequestStatus.FAILED


@pytest.mark.usefixtures("depth")
def test_a_model_that_raises_on_one_request_serves_the_others(model: PreTrainedModel) -> None:
    def refuse_poison(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if bool((inputs[0] == POISON_ID).any()):
            raise ValueError("no such thing")

    with running(model) as manager:
        model.get_input_embeddings().register_forward_pre_hook(refuse_poison)
        with manager.pause(weights_changed=False):
            add_witness(manager)
            bad = manager.add_request([3, POISON_ID], max_new_tokens=5)
            other = manager.add_request(prompt_of(20), max_new_tokens=5)
        output = result_of(manager, bad)
        assert output.status is RequestStatus.FAILED
        assert "no such thing" in str(output.error)
        assert len(result_of(manager, other).generated_tokens) == 5
        assert_witness(manager)


@pytest.mark.usefixtures("depth")
def test_a_broken_device_ends_the_loop_and_says_so(model: PreTrainedModel) -> None:
    def break_down(*_: object) -> None:
        raise torch.AcceleratorError("the device fell off the bus")

    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    hook = model.get_input_embeddings().register_forward_pre_hook(break_down)
    with manager.pause(weights_changed=False):
        ids = [manager.add_request([1, 2, 3], max_new_tokens=5) for _ in range(3)]
    outputs = [result_of(manager, request_id) for request_id in ids]
    assert {output.status for output in outputs} == {RequestStatus.FAILED}
    assert all("fell off the bus" in str(output.error) for output in outputs)
    manager.join(0.0, timeout=DEADLINE_S)
    assert not manager.is_running()
    assert manager.stats().num_used_blocks == 0
    with pytest.raises(EngineDead, match="fell off the bus"):
        manager.check_health()
    with pytest.raises(EngineDead, match="fell off the bus"):
        manager.add_request([1, 2, 3], max_new_tokens=5)
    hook.remove()
    manager.start()
    add_witness(manager)
    assert_witness(manager)
    assert_idle(manager)
    manager.stop(timeout=DEADLINE_S)


# Cancelling, in every phase


def assert_cancelled(manager: ContinuousBatchingManager, request_id: str, num_tokens: int) -> None:
    output = result_of(manager, request_id)
    assert (output.status, output.finish_reason) == (RequestStatus.CANCELLED, FinishReason.CANCELLED)
    assert len(output.generated_tokens) == num_tokens


@pytest.mark.usefixtures("depth")
def test_cancel_before_any_step_took_it_up(manager: ContinuousBatchingManager) -> None:
    with manager.pause(weights_changed=False):
        add_witness(manager)
        request_id = manager.add_request([1, 2, 3], max_new_tokens=50)
        manager.cancel_request(request_id)
    assert_cancelled(manager, request_id, 0)
    assert_witness(manager)


@pytest.mark.usefixtures("depth")
def test_cancel_in_the_waiting_line(model: PreTrainedModel) -> None:
    with running(model, max_requests_per_batch=1) as manager:
        gate = StepGate(model)
        add_witness(manager)
        gate.wait()
        request_id = manager.add_request([1, 2, 3], max_new_tokens=50)
        gate.step()
        wait_until(lambda: manager.stats().num_waiting == 1)
        manager.cancel_request(request_id)
        gate.step()
        assert_cancelled(manager, request_id, 0)
        assert manager.stats().num_waiting == 0
        gate.open()
        assert_witness(manager)


@pytest.mark.usefixtures("depth")
def test_cancel_in_the_middle_of_a_prompt(model: PreTrainedModel) -> None:
    with running(model, max_batch_tokens=16) as manager:
        gate = StepGate(model)
        add_witness(manager)
        request_id = manager.add_request(prompt_of(100), max_new_tokens=50)
        for _ in range(5):
            gate.wait()
            gate.let_through()
        gate.wait()
        manager.cancel_request(request_id)
        gate.step()
        assert_cancelled(manager, request_id, 0)
        gate.open()
        assert_witness(manager)


def test_cancel_while_it_decodes_keeps_the_tokens_so_far(model: PreTrainedModel) -> None:
    with running(model) as manager:
        gate = StepGate(model)
        request_id = manager.add_request([1, 2, 3], max_new_tokens=50)
        add_witness(manager)
        gate.wait()
        for _ in range(4):
            gate.step()
        manager.cancel_request(request_id)
        # By the end of the step in progress, whose token it still gets.
        gate.step()
        assert_cancelled(manager, request_id, 5)
        gate.open()
        assert_witness(manager)


@pytest.mark.usefixtures("depth")
def test_cancel_of_a_preempted_request_keeps_the_tokens_so_far(model: PreTrainedModel) -> None:
    with running(model, num_blocks=5, allow_block_sharing=False) as manager:
        gate = StepGate(model)
        add_witness(manager)
        request_id = manager.add_request(prompt_of(13), max_new_tokens=60)
        gate.wait()
        gate.step_until(lambda: manager.stats().preemptions_total > 0)
        manager.cancel_request(request_id)
        gate.step()
        output = result_of(manager, request_id)
        assert output.status is RequestStatus.CANCELLED
        assert len(output.generated_tokens) > 0
        gate.open()
        assert_witness(manager)


@pytest.mark.usefixtures("depth")
def test_cancelling_twice_late_or_nobody_is_harmless(manager: ContinuousBatchingManager) -> None:
    add_witness(manager)
    with manager.pause(weights_changed=False):
        request_id = manager.add_request([1, 2, 3], max_new_tokens=50)
        manager.cancel_request(request_id)
        manager.cancel_request(request_id)
        manager.cancel_request("nobody")
    assert_cancelled(manager, request_id, 0)
    manager.cancel_request(request_id)
    assert_witness(manager)
    manager.cancel_request("witness")
    assert len(run_all(manager, [[1, 2, 3]], 5)[0]) == 5


@pytest.mark.usefixtures("depth")
def test_an_id_can_be_used_again_once_its_request_has_ended(manager: ContinuousBatchingManager) -> None:
    for _ in range(3):
        manager.add_request(prompt_of(30), request_id="witness", max_new_tokens=50)
        manager.cancel_request("witness")
        assert manager.get_result("witness", timeout=DEADLINE_S) is not None
    add_witness(manager)
    assert_witness(manager)


@pytest.mark.usefixtures("depth")
def test_a_storm_of_cancels_leaves_nothing(model: PreTrainedModel) -> None:
    with running(model, num_blocks=20, max_batch_tokens=24) as manager:
        add_witness(manager)
        ids = [manager.add_request(prompt_of(5 + i % 60, seed=i % 3), max_new_tokens=1 + i % 40) for i in range(150)]
        for request_id in ids[::2]:
            manager.cancel_request(request_id)
        outputs = [result_of(manager, request_id) for request_id in ids]
        assert_witness(manager)
        ended = manager.stats().requests_total
        cancelled = sum(output.status is RequestStatus.CANCELLED for output in outputs)
        assert {output.status for output in outputs} <= {RequestStatus.CANCELLED, RequestStatus.FINISHED}
        assert (ended["cancelled"], sum(ended.values())) == (cancelled, 151)
        total = sum(len(output.generated_tokens) for output in outputs) + NUM_NEW
        assert manager.stats().generated_tokens_total == total


# Callbacks


class LoopThread:
    """An asyncio event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def register(
        self, manager: ContinuousBatchingManager, request_id: str, callback: Callable[[GenerationOutput], None]
    ) -> None:
        async def register() -> None:
            manager.register_result_handler(request_id, callback)

        asyncio.run_coroutine_threadsafe(register(), self.loop).result(DEADLINE_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)
        self.loop.close()


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    if not thread.loop.is_closed():
        thread.close()


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.usefixtures("depth")
def test_a_closed_event_loop_hurts_nobody(
    streaming: bool, manager: ContinuousBatchingManager, loop_thread: LoopThread
) -> None:
    add_witness(manager)
    loop_thread.register(manager, "orphan", lambda _: None)
    loop_thread.close()
    manager.add_request([1, 2, 3], request_id="orphan", max_new_tokens=20, streaming=streaming)
    assert_witness(manager)
    assert len(run_all(manager, [[1, 2, 3]], 40)[0]) == 40


def test_a_raising_callback_hurts_nobody_and_is_called_on(
    manager: ContinuousBatchingManager, loop_thread: LoopThread
) -> None:
    ended: Future[GenerationOutput] = Future()

    def raise_always(output: GenerationOutput) -> None:
        if output.is_finished():
            ended.set_result(output)
        raise ValueError("a bug of the caller")

    add_witness(manager)
    loop_thread.register(manager, "raising", raise_always)
    manager.add_request([1, 2, 3], request_id="raising", max_new_tokens=10, streaming=True)
    assert len(ended.result(DEADLINE_S).generated_tokens) == 10
    assert_witness(manager)


@pytest.mark.usefixtures("depth")
def test_a_callback_that_cancels_its_own_request_ends_it(
    manager: ContinuousBatchingManager, loop_thread: LoopThread
) -> None:
    ended: Future[GenerationOutput] = Future()

    def stop_after_three(output: GenerationOutput) -> None:
        if output.is_finished():
            ended.set_result(output)
        elif len(output.generated_tokens) >= 3:
            manager.cancel_request("mine")

    add_witness(manager)
    loop_thread.register(manager, "mine", stop_after_three)
    manager.add_request([1, 2, 3], request_id="mine", max_new_tokens=400, streaming=True)
    output = ended.result(DEADLINE_S)
    assert output.status is RequestStatus.CANCELLED
    assert 3 <= len(output.generated_tokens) < 400
    assert_witness(manager)


def test_a_handler_needs_a_running_event_loop(manager: ContinuousBatchingManager) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        manager.register_result_handler("x", lambda _: None)


def test_generate_batch_reports_a_refused_prompt_among_the_others(model: PreTrainedModel) -> None:
    results = list(generate_batch(model, [[1, 2], [], WITNESS_PROMPT, [999]], max_new_tokens=NUM_NEW).values())
    assert [output.status.name for output in results] == ["FINISHED", "FAILED", "FINISHED", "FAILED"]
    assert "empty" in str(results[1].error)
    assert "999" in str(results[3].error)
    assert results[2].generated_tokens == witness_answer()


def test_nothing_can_be_submitted_to_a_manager_that_was_stopped(model: PreTrainedModel) -> None:
    with running(model) as manager:
        pass
    with pytest.raises(EngineStopped):
        manager.add_request([1, 2, 3], max_new_tokens=3)
