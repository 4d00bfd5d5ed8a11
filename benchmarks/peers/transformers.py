"""transformers' own continuous batching, with the same room for keys and values."""

from collections.abc import Callable
from typing import Any

TITLE = "transformers, continuous batching"
SETTINGS = tuple({"max_batch_tokens": tokens} for tokens in (512, 1024, 2048))
NOTE = "model and KV cache float32"
PAGE_SIZE = 256


def load(job: dict[str, Any]) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Gives the function that generates."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from benchmarks.peers.ours import NO_EOS, generate_all

    torch.set_num_threads(job["num_threads"])
    loaded: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, num_blocks=job["num_kv_tokens"] // PAGE_SIZE, **job["setting"]
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=NO_EOS)
    manager = loaded.eval().init_continuous_batching(greedy, continuous_batching_config=config)
    manager.start()

    def generate(prompts: list[list[int]], num_new_tokens: int) -> list[list[int]]:
        with torch.inference_mode():
            return generate_all(manager, prompts, num_new_tokens)

    return generate
