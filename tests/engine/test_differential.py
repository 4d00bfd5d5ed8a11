"""transformers' own continuous batching as the oracle, on random requests of the kind that it survives."""

import random
from functools import cache
from typing import Any

import pytest
import transformers
from engine_runs import prompt_of, result_of, running
from tiny_models import tiny_model
from transformers import GenerationConfig, PreTrainedModel

pytestmark = pytest.mark.usefixtures("depth")

NUM_REQUESTS = 12
LONGEST = 80
"""Prompt and output; what does not fit their cache ends their loop."""

CONFIGS: dict[str, dict[str, Any]] = {
    "roomy": {"page_size": 16, "num_blocks": 80, "max_batch_tokens": 256},
    "tight": {"page_size": 16, "num_blocks": 14, "max_batch_tokens": 64},
    "chunked": {"page_size": 8, "num_blocks": 160, "max_batch_tokens": 16},
    "prompts first": {"page_size": 16, "num_blocks": 40, "max_batch_tokens": 64, "scheduler_type": "prefill_first"},
    "not shared": {"page_size": 32, "num_blocks": 40, "max_batch_tokens": 128, "allow_block_sharing": False},
}


def random_requests(rng: random.Random) -> list[tuple[list[int], int]]:
    """Gives prompts, half of them behind a common prefix, each with the number of its new tokens."""
    prefix = prompt_of(rng.randrange(1, LONGEST // 2), seed=rng.randrange(100))
    requests = []
    for number in range(NUM_REQUESTS):
        own = prompt_of(rng.randrange(1, LONGEST // 4), seed=1 + rng.randrange(100))
        prompt = prefix + own if number % 2 else own
        requests.append((prompt, rng.randrange(1, LONGEST - len(prompt))))
    rng.shuffle(requests)
    return requests


@cache
def requests_and_their_answers(family: str, name: str) -> tuple[list[tuple[list[int], int]], list[list[int]]]:
    requests = random_requests(random.Random(f"{family} {name}"))
    return requests, their_answers(tiny_model(family, attn_implementation="sdpa"), requests, CONFIGS[name])


def their_answers(
    model: PreTrainedModel, requests: list[tuple[list[int], int]], config: dict[str, Any]
) -> list[list[int]]:
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**config),
    )
    manager.start()
    try:
        ids = [
            manager.add_request(prompt, request_id=f"r{number}", max_new_tokens=num_new)
            for number, (prompt, num_new) in enumerate(requests)
        ]
        outputs: dict[str, Any] = {}
        while len(outputs) < len(ids):
            output = manager.get_result(timeout=60)
            assert output is not None, "their loop ended"
            assert output.error is None, output.error
            outputs[output.request_id] = output
    finally:
        manager.stop(block=True)
        manager.destroy()
    return [list(outputs[request_id].generated_tokens) for request_id in ids]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt2"])
def test_both_generate_the_same_tokens(family: str, name: str) -> None:
    requests, theirs = requests_and_their_answers(family, name)
    with running(tiny_model(family), **CONFIGS[name]) as manager:
        ids = [manager.add_request(prompt, max_new_tokens=num_new) for prompt, num_new in requests]
        ours = [list(result_of(manager, request_id).generated_tokens) for request_id in ids]
    assert ours == theirs
