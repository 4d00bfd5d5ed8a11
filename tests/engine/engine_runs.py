"""Runs a manager over a tiny model, and says what plain `generate` would have answered."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from engine import ContinuousBatchingConfig, ContinuousBatchingManager, EngineStats, GenerationOutput
from engine import init_continuous_batching as make_manager

DEADLINE_S = 30.0
"""No wait in a test comes near to it unless something hangs."""


DEFAULTS: dict[str, Any] = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 256}
"""The fixture `depth` adds to them."""


def small_config(**overrides: Any) -> ContinuousBatchingConfig:
    """Gives pages of 16 tokens and room for 1,024, unless told otherwise."""
    return ContinuousBatchingConfig(**{**DEFAULTS, **overrides})


@contextmanager
def running(
    model: PreTrainedModel,
    *,
    generation_config: GenerationConfig | None = None,
    tools: dict[str, Any] | None = None,
    **overrides: Any,
) -> Iterator[ContinuousBatchingManager]:
    """Runs a manager and proves on leaving that nothing is left in it. tools: what stands in for a GPU's."""
    config = small_config(**overrides)
    if tools:
        manager = ContinuousBatchingManager(model, generation_config, config, **tools)
    else:
        manager = make_manager(model, generation_config, config)
    manager.start()
    try:
        yield manager
        assert_idle(manager)
    finally:
        manager.stop(hard_stop=True, timeout=DEADLINE_S)


def assert_idle(manager: ContinuousBatchingManager) -> None:
    """Asserts that every block is free and every gauge zero; between two steps, so that no end is still under way."""
    with manager.pause(weights_changed=False):
        stats: EngineStats = manager.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert (stats.queued_prefill_tokens, stats.pending_decode_tokens) == (0, 0)
        manager._loop._scheduler.check_invariants()
    manager.check_health()


def result_of(manager: ContinuousBatchingManager, request_id: str) -> GenerationOutput:
    """Gives the terminal output of a request that does not stream."""
    output = manager.get_result(request_id, timeout=DEADLINE_S)
    assert output is not None, f"no result for {request_id}"
    assert output.is_finished()
    return output


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; fails when it does not in good time."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def run_all(
    manager: ContinuousBatchingManager, prompts: Sequence[Sequence[int]], max_new_tokens: int, **arguments: Any
) -> list[list[int]]:
    """Submits all prompts at once, so that a step begins with all of them, and gives the tokens of each."""
    with manager.pause(weights_changed=False) if manager.is_running() else nullcontext():
        ids = [manager.add_request(prompt, max_new_tokens=max_new_tokens, **arguments) for prompt in prompts]
    outputs = [result_of(manager, request_id) for request_id in ids]
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [list(output.generated_tokens) for output in outputs]


def greedy(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Gives what plain `generate` answers; not while a manager runs the model."""
    ids = torch.tensor([list(prompt)], device=model.device)
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def prompt_of(length: int, *, seed: int = 0, vocab_size: int = 256) -> list[int]:
    """Gives random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return ids


def is_pause_wanted(manager: ContinuousBatchingManager) -> bool:
    """Gives whether somebody waits for the loop to park, or holds it."""
    loop = manager._loop
    return bool(loop._num_pauses or loop._holds)


class StepGate:
    """Lets the generation thread do one step at a time. Make it after the manager, which tries the model out."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._arrived = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._is_open = False
        model.register_forward_pre_hook(self._enter)

    def wait(self) -> None:
        """Returns when a step stands at the start of its forward pass."""
        assert self._arrived.acquire(timeout=DEADLINE_S), "no step came"

    def let_through(self) -> None:
        """Lets the step that stands here run."""
        self._allowed.release()

    def step(self) -> None:
        """Lets the step that stands here run and returns when the next one stands here."""
        self.let_through()
        self.wait()

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Steps until it holds: a step that is prepared while another runs may be a step behind what was added."""
        while not condition():
            self.step()

    def open(self) -> None:
        """Lets every step through from here on."""
        self._is_open = True
        self._allowed.release()

    def _enter(self, *_: object) -> None:
        if not self._is_open:
            self._arrived.release()
            assert self._allowed.acquire(timeout=DEADLINE_S), "the gate was not opened"
