"""Log-probabilities: of what was sampled, of the most likely tokens beside it, and of the prompt."""

import inspect
import math
from functools import cache
from typing import Any

import pytest
import torch
from engine_runs import prompt_of, result_of, running
from tiny_models import VOCAB_SIZE, tiny_model
from transformers import PreTrainedModel

from engine import FinishReason, GenerationOutput, SamplingParams

PROMPT = prompt_of(70, seed=4)
GREEDY = SamplingParams(temperature=0.0, eos_token_ids=())
TIGHT = {"num_blocks": 14, "max_batch_tokens": 24, "max_requests_per_batch": 3}
"""Prompts come in chunks and push each other out."""
TOLERANCE = 1e-4


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama")


def reference(token_ids: list[int]) -> torch.Tensor:
    """Gives the log-probabilities of the vocabulary after each token, by one pass over all."""
    with torch.inference_mode():
        return model()(torch.tensor([token_ids])).logits[0].float().log_softmax(dim=-1)


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, eos_token_ids=(), **fields)


def run(manager: Any, prompt: list[int], how: SamplingParams, max_new_tokens: int = 4) -> GenerationOutput:
    request_id = manager.add_request(prompt, max_new_tokens=max_new_tokens, sampling=how)
    return result_of(manager, request_id)


def assert_scores(output: GenerationOutput, prompt: list[int], num_top: int) -> None:
    expected = reference(prompt)
    assert len(output.prompt_logprobs) == len(output.prompt_top_logprobs) == len(prompt) - 1
    for place, (logprob, top) in enumerate(zip(output.prompt_logprobs, output.prompt_top_logprobs, strict=True)):
        assert math.isclose(logprob, float(expected[place, prompt[place + 1]]), abs_tol=TOLERANCE)
        assert_top(top, expected[place], num_top)


def assert_top(top: Any, expected_V: torch.Tensor, num_top: int) -> None:
    best = expected_V.topk(num_top)
    assert [token for token, _ in top] == best.indices.tolist()
    assert torch.allclose(torch.tensor([value for _, value in top]), best.values, atol=TOLERANCE)


@pytest.mark.parametrize("how", [{}, TIGHT, {"use_async_batching": True}], ids=["roomy", "tight", "async"])
def test_a_prompt_is_scored_as_one_pass_over_it_scores_it(how: dict[str, Any]) -> None:
    prompts = [PROMPT, prompt_of(50, seed=8), PROMPT[:33], [7], [7, 8]]
    with running(model(), **how) as manager:
        ids = [manager.add_request(ids, max_new_tokens=6, sampling=sampling(prompt_logprobs=3)) for ids in prompts]
        ids += [manager.add_request(ids, max_new_tokens=6, sampling=GREEDY) for ids in prompts]
        outputs = [result_of(manager, request_id) for request_id in ids]
        for prompt, scored, plain in zip(prompts, outputs, outputs[len(prompts) :], strict=False):
            assert_scores(scored, prompt, 3)
            assert list(scored.generated_tokens) == list(plain.generated_tokens)
            assert (plain.prompt_logprobs, plain.prompt_top_logprobs) == ([], [])


def test_a_prompt_that_the_cache_knows_is_scored_whole() -> None:
    with running(model()) as manager:
        first = run(manager, PROMPT, GREEDY)
        assert run(manager, PROMPT, GREEDY).num_cached_tokens == 64
        scored = run(manager, PROMPT, sampling(prompt_logprobs=0))
        assert scored.num_cached_tokens == 0
        expected = reference(PROMPT)
        places = torch.arange(len(PROMPT) - 1)
        wanted = expected[places, torch.tensor(PROMPT[1:])]
        assert torch.allclose(torch.tensor(list(scored.prompt_logprobs)), wanted, atol=TOLERANCE)
        assert set(scored.prompt_top_logprobs) == {()}
        assert list(scored.generated_tokens) == list(first.generated_tokens)


@pytest.mark.parametrize("how", [{}, TIGHT, {"use_async_batching": True}], ids=["roomy", "tight", "async"])
def test_a_prompt_can_be_computed_without_an_output(how: dict[str, Any]) -> None:
    prompts = [PROMPT, [7], prompt_of(50, seed=8)]
    with running(model(), **how) as manager:
        ids = [manager.add_request(ids, max_new_tokens=0, sampling=sampling(prompt_logprobs=1)) for ids in prompts]
        outputs = [result_of(manager, request_id) for request_id in ids]
        for prompt, output in zip(prompts, outputs, strict=True):
            assert (list(output.generated_tokens), output.finish_reason) == ([], FinishReason.LENGTH)
            assert_scores(output, prompt, 1)
        assert run(manager, PROMPT, SamplingParams(num_return_sequences=3), 0).finish_reason == FinishReason.LENGTH
        # A prompt as long as the model allows leaves room for nothing else.
        longest = prompt_of(manager.config.max_model_len, seed=2)
        assert len(run(manager, longest, sampling(prompt_logprobs=0), 0).prompt_logprobs) == len(longest) - 1


def test_a_step_has_few_rows_of_logits_however_long_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    forward = type(model()).forward

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        sizes.append(output.logits.shape[1])
        return output

    spy.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(model()), "forward", spy)
    with running(model(), num_blocks=64, max_requests_per_batch=4) as manager:
        for number in range(3):
            manager.add_request(
                prompt_of(200, seed=number), request_id=f"r{number}", max_new_tokens=3,
                sampling=sampling(prompt_logprobs=2),
            )  # fmt: skip
        outputs = [result_of(manager, f"r{number}") for number in range(3)]
    assert max(sizes) <= 32 + 4
    for number, output in enumerate(outputs):
        assert_scores(output, prompt_of(200, seed=number), 2)


def test_a_prompt_is_scored_once_for_all_its_sequences() -> None:
    how = SamplingParams(temperature=1.0, num_return_sequences=3, prompt_logprobs=1, seed=5)
    with running(model()) as manager:
        parent = manager.add_request(PROMPT, max_new_tokens=4, sampling=how)
        children = [result_of(manager, f"{parent}__child#{index}") for index in range(2)]
        assert parent is not None
        own = result_of(manager, parent)
    assert_scores(own, PROMPT, 1)
    assert all(child.prompt_logprobs is own.prompt_logprobs for child in children)


def test_the_most_likely_tokens_stand_beside_each_sampled_one() -> None:
    with running(model()) as manager:
        greedy = run(manager, PROMPT, sampling(logprobs=True, top_logprobs=5))
        plain = run(manager, PROMPT, sampling(logprobs=True))
        hot = run(manager, PROMPT, SamplingParams(temperature=2.0, seed=1, logprobs=True, top_logprobs=20, top_k=3))
        cold = run(manager, PROMPT, SamplingParams(temperature=0.0, top_logprobs=5))
    assert (plain.top_logprobs, cold.top_logprobs) == ([], [])
    expected = reference(PROMPT + list(greedy.generated_tokens))[len(PROMPT) - 1 :]
    for token, logprob, top, row in zip(
        greedy.generated_tokens, greedy.logprobs, greedy.top_logprobs, expected, strict=False
    ):
        assert_top(top, row, 5)
        assert top[0] == (token, logprob)
    # Of what top_k leaves nothing else has a probability.
    for token, logprob, top in zip(hot.generated_tokens, hot.logprobs, hot.top_logprobs, strict=True):
        assert len(top) == 3
        assert dict(top)[token] == pytest.approx(logprob)
        assert sum(math.exp(value) for _, value in top) == pytest.approx(1.0, abs=1e-4)
    assert VOCAB_SIZE > 20
