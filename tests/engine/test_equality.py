"""The root property: what the engine generates equals plain `generate`, however the work is cut up and shared."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import DEADLINE_S, greedy, prompt_of, result_of, run_all, running
from tiny_models import SLIDING_WINDOW, SUPPORTED, VOCAB_SIZE, tiny_model
from transformers import GenerationConfig, PreTrainedModel

from engine import RequestStatus, SamplingParams, generate_batch, stage_weights

pytestmark = pytest.mark.usefixtures("depth")

NUM_NEW = 20
SYSTEM_PROMPT = prompt_of(40, seed=9)
PROMPTS = [
    *(prompt_of(length, seed=1) for length in (1, 2, 5, 16, 17, 33, 70)),
    *(SYSTEM_PROMPT + prompt_of(length, seed=2) for length in (1, 9, 30)),
    SYSTEM_PROMPT,
]
"""Shorter, as long as and longer than a page and the window; four share a prefix, and one is that prefix."""

ALL_AT_ONCE: dict[str, Any] = {}
CHUNKED: dict[str, Any] = {"max_batch_tokens": 8, "page_size": 4, "num_blocks": 400}
PREEMPTED: dict[str, Any] = {"num_blocks": 8}
UNSHARED: dict[str, Any] = {"allow_block_sharing": False, "page_size": 64, "num_blocks": 20}


@cache
def model_and_answers(family: str) -> tuple[PreTrainedModel, list[list[int]]]:
    model = tiny_model(family)
    answers = [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) > len(answers) // 2, "a model this dull proves nothing"
    return model, answers


@pytest.mark.parametrize("family", SUPPORTED)
@pytest.mark.parametrize("how", [ALL_AT_ONCE, CHUNKED, PREEMPTED, UNSHARED], ids=["whole", "chunked", "tight", "alone"])
def test_greedy_output_equals_plain_generate(family: str, how: dict[str, Any]) -> None:
    model, answers = model_and_answers(family)
    with running(model, **how) as manager:
        assert run_all(manager, PROMPTS, NUM_NEW) == answers
        stats = manager.stats()
        assert (stats.preemptions_total > 0) == (how is PREEMPTED)
        cached_before = stats.cached_tokens_total
        # Again: now every full page of the prompts and answers may be known.
        assert run_all(manager, PROMPTS, NUM_NEW) == answers
        is_shared = manager.stats().cached_tokens_total > cached_before
        assert is_shared == (how is not UNSHARED)


@pytest.mark.parametrize("page_size", [4, 7, 16, 100, 256])
def test_the_page_size_changes_nothing(page_size: int) -> None:
    model, answers = model_and_answers("llama")
    with running(model, page_size=page_size, num_blocks=1500 // page_size) as manager:
        assert run_all(manager, PROMPTS, NUM_NEW) == answers


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 3, 33, 1000])
def test_the_size_of_a_step_changes_nothing(max_batch_tokens: int) -> None:
    model, answers = model_and_answers("llama")
    with running(model, max_batch_tokens=max_batch_tokens) as manager:
        assert run_all(manager, PROMPTS, NUM_NEW) == answers


@pytest.mark.parametrize("max_requests", [1, 2, 5])
def test_the_number_of_running_requests_changes_nothing(max_requests: int) -> None:
    model, answers = model_and_answers("llama")
    with running(model, max_requests_per_batch=max_requests) as manager:
        assert run_all(manager, PROMPTS, NUM_NEW) == answers


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_a_window_that_slides_far_is_exact(family: str) -> None:
    model = tiny_model(family)
    prompt, num_new = prompt_of(90, seed=5), 5 * SLIDING_WINDOW
    answer = greedy(model, prompt, num_new)
    with running(model, max_batch_tokens=11, page_size=4, num_blocks=100) as manager:
        assert run_all(manager, [prompt], num_new) == [answer]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_attention_a_model_was_loaded_with_does_not_matter(implementation: str) -> None:
    model = tiny_model("llama", attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    answers = [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]
    with running(model) as manager:
        assert run_all(manager, PROMPTS, NUM_NEW) == answers
    assert model.config._attn_implementation == implementation
    assert greedy(model, PROMPTS[0], NUM_NEW) == answers[0]


def test_requests_that_come_while_others_decode_change_nothing() -> None:
    model, answers = model_and_answers("llama")
    with running(model, num_blocks=40) as manager:
        first = [manager.add_request(prompt, max_new_tokens=NUM_NEW) for prompt in PROMPTS[:6]]
        outputs = [result_of(manager, first[0])]
        second = [manager.add_request(prompt, max_new_tokens=NUM_NEW) for prompt in PROMPTS[6:]]
        outputs += [result_of(manager, request_id) for request_id in [*first[1:], *second]]
    assert [output.generated_tokens for output in outputs] == answers


def test_an_end_token_ends_the_output_and_is_part_of_it() -> None:
    model, answers = model_and_answers("llama")
    ends = [answer[7] for answer in answers]
    expected = [answer[: answer.index(end) + 1] for answer, end in zip(answers, ends, strict=True)]
    with running(model) as manager:
        ids = [
            manager.add_request(prompt, max_new_tokens=NUM_NEW, eos_token_id=end)
            for prompt, end in zip(PROMPTS, ends, strict=True)
        ]
        outputs = [result_of(manager, request_id) for request_id in ids]
    assert [output.generated_tokens for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {"stop"}


def test_log_probabilities_are_those_of_one_forward_pass() -> None:
    model, _ = model_and_answers("llama")
    greedy_params = SamplingParams(temperature=0.0, logprobs=True)
    warm_params = SamplingParams(temperature=0.7, seed=3, logprobs=True, top_k=0, top_p=1.0)
    with running(model, num_blocks=10) as manager:
        for sampling in (greedy_params, warm_params):
            ids = [manager.add_request(prompt, max_new_tokens=NUM_NEW, sampling=sampling) for prompt in PROMPTS]
            for prompt, request_id in zip(PROMPTS, ids, strict=True):
                output = result_of(manager, request_id)
                with manager.pause(weights_changed=False):
                    expected = _logprobs(model, prompt, list(output.generated_tokens), sampling.temperature or 1.0)
                assert output.logprobs == pytest.approx(expected, abs=1e-4)
        assert manager.stats().preemptions_total > 0


def _logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs_TV = (logits_TV / temperature).log_softmax(dim=-1)
    values: list[float] = logprobs_TV.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return values


def test_a_seed_gives_the_same_tokens_whatever_else_runs() -> None:
    model, _ = model_and_answers("llama")
    sampling = [SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=seed) for seed in range(len(PROMPTS))]
    alone = []
    with running(model, max_requests_per_batch=1) as manager:
        for prompt, params in zip(PROMPTS, sampling, strict=True):
            alone += run_all(manager, [prompt], NUM_NEW, sampling=params)
    torch.manual_seed(123)
    for how in (CHUNKED, PREEMPTED, UNSHARED):
        with running(model, **how) as manager:
            ids = [
                manager.add_request(prompt, max_new_tokens=NUM_NEW, sampling=params)
                for prompt, params in zip(PROMPTS, sampling, strict=True)
            ]
            assert [list(result_of(manager, request_id).generated_tokens) for request_id in ids] == alone


def test_the_seed_of_a_manager_makes_its_requests_repeatable() -> None:
    model, _ = model_and_answers("llama")
    config = GenerationConfig(do_sample=True, temperature=1.2, max_new_tokens=NUM_NEW)
    runs = []
    for seed in (5, 5, 6):
        with running(model, generation_config=config, seed=seed) as manager:
            ids = [manager.add_request(prompt) for prompt in PROMPTS[:4]]
            runs.append([list(result_of(manager, request_id).generated_tokens) for request_id in ids])
    assert runs[0] == runs[1] != runs[2]


def test_streamed_tokens_add_up_to_the_whole() -> None:
    model, answers = model_and_answers("llama")
    with running(model, **PREEMPTED) as manager:
        request_id = manager.add_request(PROMPTS[7], max_new_tokens=NUM_NEW, streaming=True)
        pieces = [output.new_tokens for output in manager.request_id_iter(request_id)]
    assert [token for piece in pieces for token in piece] == answers[7]


@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_over_everything_changes_no_answer(seed: int, tmp_path: Path) -> None:
    model, answers = model_and_answers("llama")
    model.save_pretrained(tmp_path)
    walk = random.Random(seed)
    expected: dict[str, list[int]] = {}
    with running(model, num_blocks=walk.choice([8, 12, 30]), max_batch_tokens=walk.choice([9, 40, 256])) as manager:
        for number in range(60):
            action = walk.random()
            if action < 0.7:
                index, num_new, request_id = walk.randrange(len(PROMPTS)), walk.randint(1, NUM_NEW), f"r{number}"
                streaming = walk.random() < 0.2
                manager.add_request(PROMPTS[index], request_id, num_new, streaming, cache_salt=walk.choice([None, "a"]))
                expected[request_id] = answers[index][:num_new]
            elif action < 0.85:
                manager.cancel_request(f"r{walk.randrange(number + 1)}")
            elif action < 0.93:
                with manager.pause(weights_changed=walk.random() < 0.5):
                    manager._loop._scheduler.check_invariants()
            else:
                # The same weights again: a new version with the same answers.
                staged = stage_weights(model, str(tmp_path))
                manager.commit_weights(staged, in_flight=walk.choice(["keep", "recompute"]))
        for request_id, tokens in expected.items():
            *_, last = manager.request_id_iter(request_id)
            generated = list(last.generated_tokens)
            assert last.error is None
            assert generated == (tokens if last.status is RequestStatus.FINISHED else tokens[: len(generated)])


def test_generate_batch_answers_in_the_order_of_the_prompts() -> None:
    model, answers = model_and_answers("llama")
    results = generate_batch(model, PROMPTS, max_new_tokens=NUM_NEW)
    assert [output.generated_tokens for output in results.values()] == answers
    assert [list(output.prompt_ids) for output in results.values()] == PROMPTS


def test_a_prompt_may_fill_the_whole_length_of_the_model() -> None:
    model = tiny_model("gpt2", n_positions=64)
    prompt = prompt_of(60, vocab_size=VOCAB_SIZE)
    answer = greedy(model, prompt, 4)
    with running(model) as manager:
        request_id = manager.add_request(prompt)
        output = manager.get_result(request_id, timeout=DEADLINE_S)
    assert output is not None
    assert (output.generated_tokens, output.finish_reason) == (answer, "length")
