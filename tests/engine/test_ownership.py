"""One manager runs a model at a time: the others wait for their turn, or are refused and leave it whole."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_runs import DEADLINE_S, StepGate, greedy, prompt_of, result_of, run_all, running, small_config
from tiny_models import tiny_model
from transformers import PreTrainedModel

from engine import (
    ContinuousBatchingManager,
    InvalidRequest,
    continuous_batching_context_manager,
    destroy_cached_continuous_batching_manager,
    generate_batch,
    init_continuous_batching,
)

NUM_NEW = 12
PROMPTS = [prompt_of(length, seed=3) for length in (7, 50, 30)]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


def answers(model: PreTrainedModel) -> list[list[int]]:
    return [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]


def make(model: PreTrainedModel) -> ContinuousBatchingManager:
    return init_continuous_batching(model, continuous_batching_config=small_config())


def test_a_second_manager_is_refused_while_one_runs_the_model(model: PreTrainedModel) -> None:
    expected = answers(model)
    second = make(model)
    with running(model) as manager:
        for attempt in (second.start, second.warmup, lambda: make(model)):
            with pytest.raises(InvalidRequest, match="another manager runs this model"):
                attempt()
        with pytest.raises(InvalidRequest, match="another manager"):
            generate_batch(model, PROMPTS, max_new_tokens=NUM_NEW)
        assert run_all(manager, PROMPTS, NUM_NEW) == expected
    assert not second.is_running()
    assert answers(model) == expected


def test_a_manager_starts_once_the_other_has_ended(model: PreTrainedModel) -> None:
    expected = answers(model)
    first, second = make(model), make(model)
    for manager in (first, second, first):
        manager.start()
        assert run_all(manager, PROMPTS, NUM_NEW) == expected
        # Its thread may need a moment, which who comes next waits for.
        manager.stop(block=False)
    second.start()
    second.destroy()
    with running(model) as third:
        assert run_all(third, PROMPTS, NUM_NEW) == expected


def test_a_manager_that_nobody_holds_stands_in_no_ones_way(model: PreTrainedModel) -> None:
    manager = make(model)
    manager.start()
    del manager
    with running(model) as cyclic:
        ring = [cyclic]
    ring.append(ring)  # type: ignore[arg-type]  # so that only the collector finds it
    cyclic.start()
    gc.disable()
    try:
        del cyclic, ring
        with running(model) as last:
            assert run_all(last, PROMPTS, NUM_NEW) == answers(tiny_model())
    finally:
        gc.enable()


def test_a_manager_that_still_finishes_its_requests_keeps_the_model(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ownership.END_S", 0.01)
    first, second = make(model), make(model)
    first.start()
    gate = StepGate(model)
    request_id = first.add_request(PROMPTS[0], max_new_tokens=NUM_NEW)
    gate.wait()
    first.stop(block=False)
    with pytest.raises(InvalidRequest, match="another manager"):
        second.start()
    gate.open()
    assert request_id is not None
    assert result_of(first, request_id).generated_tokens == answers(tiny_model())[0]
    first.join(0.0, timeout=DEADLINE_S)
    second.start()
    second.stop(timeout=DEADLINE_S)


def test_who_holds_a_pause_may_generate_with_the_model(model: PreTrainedModel) -> None:
    expected = answers(model)
    with running(model) as manager:
        request_id = manager.add_request(PROMPTS[1], max_new_tokens=NUM_NEW)
        with manager.pause(weights_changed=False):
            outputs = generate_batch(model, PROMPTS, max_new_tokens=NUM_NEW)
            with ThreadPoolExecutor(1) as pool, pytest.raises(InvalidRequest, match="another manager"):
                pool.submit(generate_batch, model, PROMPTS, max_new_tokens=NUM_NEW).result(DEADLINE_S)
        assert result_of(manager, request_id).generated_tokens == expected[1]
    assert [output.generated_tokens for output in outputs.values()] == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_calls_of_generate_batch_from_several_threads_come_in_turn(persistent: bool, model: PreTrainedModel) -> None:
    expected, implementation = answers(model), model.config._attn_implementation

    def call(_: int) -> list[list[int]]:
        outputs = generate_batch(model, PROMPTS, max_new_tokens=NUM_NEW, persistent_manager=persistent)
        return [output.generated_tokens for output in outputs.values()]

    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(call, range(8))) == [expected] * 8
    finally:
        destroy_cached_continuous_batching_manager(model)
    assert model.config._attn_implementation == implementation
    assert not any("forward" in vars(module) for module in model.modules())
    assert answers(model) == expected


def test_threads_that_make_managers_at_once_are_served_or_refused(model: PreTrainedModel) -> None:
    expected, barrier = answers(model), threading.Barrier(4)

    def use(_: int) -> list[list[int]] | str:
        barrier.wait(DEADLINE_S)
        try:
            with continuous_batching_context_manager(
                model, continuous_batching_config=small_config(), block=True
            ) as manager:
                return run_all(manager, PROMPTS, NUM_NEW)
        except InvalidRequest as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(use, range(4)))
    assert expected in found
    assert all(one == expected or "another manager" in one for one in found)
    assert answers(model) == expected


def test_a_call_of_the_model_beside_a_step_is_refused_by_a_sentence(model: PreTrainedModel) -> None:
    expected = answers(model)
    with running(model) as manager:
        gate = StepGate(model)
        started, may_go_on = threading.Event(), threading.Event()

        def stand_still(*_: object) -> None:
            started.set()
            assert may_go_on.wait(DEADLINE_S)

        hook = model.get_input_embeddings().register_forward_pre_hook(stand_still)
        request_id = manager.add_request(PROMPTS[0], max_new_tokens=NUM_NEW)
        gate.open()
        assert started.wait(DEADLINE_S)
        hook.remove()
        with pytest.raises(InvalidRequest, match="inside pause"):
            greedy(model, PROMPTS[1], 1)
        may_go_on.set()
        assert result_of(manager, request_id).generated_tokens == expected[0]
    assert answers(model) == expected


def test_models_that_share_a_config_run_beside_each_other(model: PreTrainedModel) -> None:
    other: PreTrainedModel = type(model)(model.config).eval()
    other.load_state_dict(tiny_model(seed=5).state_dict())
    other.generation_config = model.generation_config
    assert other.config is model.config
    expected, implementation = [answers(model), answers(other)], model.config._attn_implementation
    with running(model) as first, running(other) as second:
        gates = [StepGate(model), StepGate(other)]
        ids = [
            [manager.add_request(prompt, max_new_tokens=NUM_NEW) for prompt in PROMPTS] for manager in (first, second)
        ]
        for gate in gates:
            gate.wait()
        # The first to enter its step leaves it while the other one is in the middle of its own.
        for gate in gates:
            gate.open()
        found = [
            [result_of(manager, request_id).generated_tokens for request_id in its]
            for manager, its in zip((first, second), ids, strict=True)
        ]
    assert found == expected
    assert model.config._attn_implementation == implementation
    assert [answers(model), answers(other)] == expected
