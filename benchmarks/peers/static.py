"""transformers' plain `generate` on batches padded on the left, prompts of like length together."""

from collections.abc import Callable
from typing import Any

TITLE = "transformers, static generate"
SETTINGS = tuple({"batch_size": size} for size in (8, 16, 64))
NOTE = "model and KV cache float32, prompts sorted by length"
PAD = 0


def load(job: dict[str, Any]) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Gives the function that generates."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["num_threads"])
    loaded: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    model, batch_size = loaded.eval(), job["setting"]["batch_size"]
    model.generation_config.eos_token_id = None

    def generate_batch(prompts: list[list[int]], num_new_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=num_new_tokens, do_sample=False, pad_token_id=PAD)
        return out[:, width:].tolist()

    def generate(prompts: list[list[int]], num_new_tokens: int) -> list[list[int]]:
        outputs: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            generated = generate_batch([prompts[index] for index in batch], num_new_tokens)
            outputs |= dict(zip(batch, generated, strict=True))
        return [outputs[index] for index in range(len(prompts))]

    return generate
