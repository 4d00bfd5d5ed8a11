"""`generate_batch`: order, errors, sequences, the progress bar, and what survives when requests give way."""

from collections.abc import Callable
from copy import copy, deepcopy
from functools import cache
from io import BytesIO
from typing import Any

import pytest
import torch
from engine_runs import StepGate, greedy, prompt_of, result_of, running, small_config
from tiny_models import tiny_model
from transformers import GenerationConfig, PreTrainedModel

from engine import (
    GenerationOutput,
    InvalidRequest,
    RequestStatus,
    SamplingParams,
    destroy_cached_continuous_batching_manager,
    enable,
    generate_batch,
    init_continuous_batching,
)

NUM_NEW = 10
PROMPTS = [prompt_of(length, seed=8) for length in (60, 3, 25, 1)]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


@cache
def answers() -> list[list[int]]:
    return [greedy(tiny_model(), prompt, NUM_NEW) for prompt in PROMPTS]


def generate(
    model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, **arguments: Any
) -> dict[str, GenerationOutput]:
    return generate_batch(
        model, prompts, continuous_batching_config=small_config(), **{"max_new_tokens": NUM_NEW, **arguments}
    )


def test_results_are_in_the_order_of_the_prompts_under_numbered_ids(model: PreTrainedModel) -> None:
    expected = answers()
    results = generate(model)
    assert list(results) == ["req_0", "req_1", "req_2", "req_3"]
    assert [output.generated_tokens for output in results.values()] == expected
    assert [output.prompt_ids for output in results.values()] == PROMPTS


@pytest.mark.parametrize("wanted", [True, False])
def test_timestamps_are_recorded_when_asked_for(wanted: bool, model: PreTrainedModel) -> None:
    for output in generate(model, record_timestamps=wanted).values():
        if not wanted:
            assert output.timestamps is None
            continue
        assert output.timestamps is not None
        assert len(output.timestamps) == NUM_NEW
        assert list(output.timestamps) == sorted(output.timestamps)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_progress_bar_counts_requests(
    wanted: bool, model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(model, progress_bar=wanted)
    assert ("4/4" in capsys.readouterr().err) == wanted


@pytest.mark.parametrize("warmup", [True, False])
def test_warming_up_or_not_changes_no_token(warmup: bool, model: PreTrainedModel) -> None:
    assert [output.generated_tokens for output in generate(model, warmup=warmup).values()] == answers()


def test_more_prompts_than_may_wait_are_submitted_as_there_is_room(model: PreTrainedModel) -> None:
    config = small_config(max_queue_size=2, max_requests_per_batch=2)
    results = generate_batch(model, PROMPTS * 4, continuous_batching_config=config, max_new_tokens=NUM_NEW)
    assert [output.generated_tokens for output in results.values()] == answers() * 4


def test_unknown_keywords_are_refused(model: PreTrainedModel) -> None:
    for keyword in ("max_tokens", "input_ids", "attention_mask", "n"):
        with pytest.raises(TypeError, match=keyword):
            generate(model, **{keyword: 1})
    with pytest.raises(InvalidRequest, match="num_beams"):
        generate(model, num_beams=2)


def test_a_refused_prompt_is_there_with_its_error_and_costs_the_others_nothing(model: PreTrainedModel) -> None:
    expected = answers()
    results = list(generate(model, [PROMPTS[0], [], [10**9], prompt_of(600), PROMPTS[1]]).values())
    assert [output.status for output in results] == [
        RequestStatus.FINISHED,
        *[RequestStatus.FAILED] * 3,
        RequestStatus.FINISHED,
    ]
    assert [output.generated_tokens for output in (results[0], results[4])] == expected[:2]
    for output, words in zip(results[1:4], ("empty", "ids of this model", "512 that fit"), strict=True):
        assert words in str(output.error)


def test_a_request_that_fails_on_its_way_is_there_with_its_error(model: PreTrainedModel) -> None:
    def fail(_module: object, _args: object, keywords: dict[str, Any]) -> None:
        if (keywords["input_ids"] == 77).any():
            raise ArithmeticError("this one")

    prompts = [[1, 2, 3], [4, 77, 5], [6, 7]]
    expected = [greedy(model, prompt, 2) for prompt in prompts]
    assert not any(77 in answer for answer in expected)
    hook = model.register_forward_pre_hook(fail, with_kwargs=True)
    results = list(generate(model, prompts, max_new_tokens=2).values())
    hook.remove()
    assert [output.error is None for output in results] == [True, False, True]
    assert "this one" in str(results[1].error)
    assert [results[0].generated_tokens, results[2].generated_tokens] == [expected[0], expected[2]]


@pytest.mark.parametrize("prompt_length", [1, 2, 16, 17, 40])
def test_sequences_of_a_prompt_come_with_the_plain_id_last(prompt_length: int, model: PreTrainedModel) -> None:
    warm = GenerationConfig(do_sample=True, temperature=1.3, num_return_sequences=3, max_new_tokens=NUM_NEW)
    prompts = [prompt_of(prompt_length, seed=1), prompt_of(prompt_length, seed=2)]
    results = generate(model, prompts, generation_config=warm, max_new_tokens=None)
    assert list(results) == [
        *("req_0__child#0", "req_0__child#1", "req_0"),
        *("req_1__child#0", "req_1__child#1", "req_1"),
    ]
    assert [list(output.prompt_ids) for output in results.values()] == [prompts[0]] * 3 + [prompts[1]] * 3
    assert len({tuple(output.generated_tokens) for output in results.values()}) == 6
    assert {len(output.generated_tokens) for output in results.values()} == {NUM_NEW}


def test_each_sequence_is_what_its_seed_gives_alone(model: PreTrainedModel) -> None:
    family = SamplingParams(temperature=1.3, seed=5, num_return_sequences=4, max_new_tokens=NUM_NEW, logprobs=True)
    config = small_config(num_blocks=6)
    (first, second) = (
        generate_batch(model, [PROMPTS[2]], continuous_batching_config=how, sampling=family)
        for how in (small_config(), config)
    )
    assert [output.generated_tokens for output in first.values()] == [
        output.generated_tokens for output in second.values()
    ]
    alone = SamplingParams(temperature=1.3, seed=5, max_new_tokens=NUM_NEW)
    (output,) = generate_batch(model, [PROMPTS[2]], continuous_batching_config=config, sampling=alone).values()
    assert output.generated_tokens == first["req_0"].generated_tokens


def test_a_persistent_manager_counts_on_and_refuses_another_config(model: PreTrainedModel) -> None:
    try:
        assert list(generate(model, PROMPTS[:1], persistent_manager=True)) == ["req_0"]
        # Not sized by the first call: any number of longer prompts may follow.
        assert list(generate(model, PROMPTS, persistent_manager=True)) == ["req_1", "req_2", "req_3", "req_4"]
        with pytest.raises(InvalidRequest, match="another continuous_batching_config"):
            init_continuous_batching(model, continuous_batching_config=small_config(page_size=4))
    finally:
        destroy_cached_continuous_batching_manager(model)
    assert list(generate(model, PROMPTS[:1])) == ["req_0"]


def pickled(model: PreTrainedModel) -> PreTrainedModel:
    file = BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: PreTrainedModel = torch.load(file, weights_only=False)
    return copied


@pytest.mark.parametrize("make_copy", [deepcopy, copy, pickled])
def test_a_model_that_keeps_a_manager_can_be_copied_and_the_copy_keeps_none(
    make_copy: Callable[[PreTrainedModel], PreTrainedModel], model: PreTrainedModel
) -> None:
    try:
        generate(model, persistent_manager=True)
        kept = init_continuous_batching(model)
        other = make_copy(model)
        destroy_cached_continuous_batching_manager(other)
        assert init_continuous_batching(model) is kept
        assert kept.is_running()
        if make_copy is copy:  # it has the same modules, which are in use
            return
        results = generate(other, persistent_manager=True)
        assert [output.generated_tokens for output in results.values()] == answers()
        assert init_continuous_batching(other) is not kept
        destroy_cached_continuous_batching_manager(other)
        assert kept.is_running()
    finally:
        destroy_cached_continuous_batching_manager(model)


def test_a_kept_manager_that_was_destroyed_is_not_given_again(model: PreTrainedModel) -> None:
    for _ in range(2):
        generate(model, persistent_manager=True)
        generate(model)
    generate(model, persistent_manager=True)
    init_continuous_batching(model).destroy()
    assert [output.generated_tokens for output in generate(model).values()] == answers()


def test_a_persistent_manager_is_not_sized_by_its_first_call(model: PreTrainedModel) -> None:
    try:
        generate_batch(model, [[1]], max_new_tokens=1, persistent_manager=True)
        results = list(generate_batch(model, PROMPTS * 3, max_new_tokens=NUM_NEW, persistent_manager=True).values())
        manager = init_continuous_batching(model)
        assert manager.config.max_requests_per_batch > 1
    finally:
        destroy_cached_continuous_batching_manager(model)
    assert [output.generated_tokens for output in results] == answers() * 3


def test_what_a_request_has_survives_when_it_gives_way(model: PreTrainedModel) -> None:
    prompts = [prompt_of(30, seed=seed) for seed in range(6)]
    sampling = [SamplingParams(temperature=0.8, seed=seed, logprobs=True, max_new_tokens=40) for seed in range(6)]
    with running(model, max_requests_per_batch=1) as manager:
        alone = [
            result_of(manager, manager.add_request(prompt, sampling=params, record_timestamps=True))
            for prompt, params in zip(prompts, sampling, strict=True)
        ]
    torch.manual_seed(99)
    state = torch.get_rng_state()
    with running(model, num_blocks=12, safety_margin=0.0) as manager:
        gate = StepGate(model)
        ids = [
            manager.add_request(prompt, sampling=params, record_timestamps=True)
            for prompt, params in zip(prompts, sampling, strict=True)
        ]
        gate.open()
        together = [result_of(manager, request_id) for request_id in ids]
        assert manager.stats().preemptions_total > 0
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(alone, together, strict=True):
        assert other.generated_tokens == one.generated_tokens
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert other.timestamps is not None
        assert len(other.timestamps) == 40
        assert list(other.timestamps) == sorted(other.timestamps)
        assert other.created_time < other.lifespan[0] <= other.timestamps[0] <= other.timestamps[-1]
        assert other.timestamps[-1] <= other.lifespan[1]
    created = [output.created_time for output in together]
    assert created == sorted(created)
    assert created[-1] < min(output.timestamps[0] for output in together if output.timestamps)


def test_generation_fields_act_as_in_generate_and_generate_itself_comes_here(model: PreTrainedModel) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    fields = {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.3}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **fields)[0].tolist()
    outputs = generate_batch(model, ids.tolist(), repetition_penalty=1.3, max_new_tokens=6)
    assert ids[0].tolist() + outputs["req_0"].generated_tokens == expected
    assert enable(model).generate(ids, cache_implementation="paged", **fields)[0, 0].tolist() == expected
