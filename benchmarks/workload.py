"""What every contestant generates, and what is measured of it."""

from dataclasses import dataclass
from typing import Any

SHORTEST_PROMPT, LONGEST_PROMPT = 32, 256
NUM_KV_TOKENS = 32_768
"""For everybody: all 64 requests fit, so that nobody pays for preemption."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as ids, submitted at once; an end token does not end a request."""

    model: str
    prompts: list[list[int]]
    num_new_tokens: int
    num_threads: int

    @property
    def max_model_len(self) -> int:
        """What the longest request needs, rounded up: some reserve room by it."""
        return -(-(LONGEST_PROMPT + self.num_new_tokens) // 128) * 128

    def job(self, setting: dict[str, Any]) -> dict[str, Any]:
        """Gives the order to measure, as the worker reads it."""
        return {
            "action": "measure",
            "model": self.model,
            "prompts": self.prompts,
            "num_new_tokens": self.num_new_tokens,
            "num_threads": self.num_threads,
            "num_kv_tokens": NUM_KV_TOKENS,
            "max_model_len": self.max_model_len,
            "setting": setting,
        }


@dataclass(frozen=True, slots=True)
class Measurement:
    """cpu_s is over all threads; peak_mib is of the whole process, model included."""

    seconds: float
    cpu_s: float
    peak_mib: float
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


def default_model() -> str:
    """Gives the folder of the model that `pitstop fetch` gets."""
    from serve_app.model_store import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL.name)


def draw_prompts(num_prompts: int, vocab_size: int) -> list[list[int]]:
    """Gives random ids, in lengths spread evenly between the shortest and the longest, in shuffled order."""
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(SHORTEST_PROMPT, LONGEST_PROMPT, num_prompts).round().long()
    order = torch.randperm(num_prompts, generator=generator)
    return [torch.randint(vocab_size, (int(n),), generator=generator).tolist() for n in lengths[order]]
