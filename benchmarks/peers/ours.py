"""The engine itself, which chooses the size of its steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

TITLE = "pitstop"
SETTINGS: tuple[dict[str, Any], ...] = ({},)
NOTE = "model and KV cache float32"
PAGE_SIZE = 256
NO_EOS = -1
RESULT_TIMEOUT_S = 600.0


def load(job: dict[str, Any]) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Gives the function that generates."""
    return make(job)[0]


def make(job: dict[str, Any]) -> tuple[Callable[[list[list[int]], int], list[list[int]]], Any]:
    """Gives the function that generates, and the running manager behind it."""
    import torch
    from transformers import GenerationConfig

    from engine import ContinuousBatchingConfig, init_continuous_batching, load_model

    torch.set_num_threads(job["num_threads"])
    model = load_model(job["model"], dtype="float32", device="cpu")
    config = ContinuousBatchingConfig(page_size=PAGE_SIZE, num_blocks=job["num_kv_tokens"] // PAGE_SIZE)
    manager = init_continuous_batching(model, GenerationConfig(do_sample=False), config)
    manager.start()
    return partial(generate_all, manager), manager


def generate_all(manager: Any, prompts: list[list[int]], num_new_tokens: int) -> list[list[int]]:
    """Submits all prompts at once; transformers' manager has the same methods."""
    ids = [manager.add_request(prompt, max_new_tokens=num_new_tokens, eos_token_id=NO_EOS) for prompt in prompts]
    outputs: dict[str, list[int]] = {}
    while len(outputs) < len(ids):
        output = manager.get_result(timeout=RESULT_TIMEOUT_S)
        assert output is not None, "no result came"
        assert output.error is None, output.error
        outputs[output.request_id] = list(output.generated_tokens)
    return [outputs[request_id] for request_id in ids]
