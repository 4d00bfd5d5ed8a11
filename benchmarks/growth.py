"""What the engine costs beside the model, and how that grows: with the text, with the line, with sharing.

    python -m benchmarks.growth

The engine side runs with a runner that builds each batch and computes nothing, and its times are processor time; the
shared-prefix workload runs the model, and its time is that of the clock.
"""

import argparse
import gc
import os
import sys
import tracemalloc
from collections.abc import Callable
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch

from engine.active_request import ActiveRequest
from engine.batch import build_batch
from engine.config import ResolvedConfig
from engine.generation_defaults import GenerationDefaults
from engine.kv_cache import KVCache, LayerShape
from engine.loop import GenerationLoop
from engine.outbox import Outbox
from engine.plan import FinishedStep, SampledToken, StepPlan
from engine.request import GenerationOutput, SamplingParams
from engine.scheduler import Scheduler
from engine.step_budget import StepBudget
from engine.submission import RequestFactory

VOCAB_SIZE = 50_000
MAX_MODEL_LEN = 65_536
NUM_STEPS = 100
NUM_RUNNING = 256
SYSTEM_LENGTH, NUM_USERS, SUFFIXES = 1_000, 64, (32, 128)
MEASURED_STREAMS = (1_000, 32_000)
MEASURED_LINES = (0, 1_000, 100_000)


def make_config(**changes: Any) -> ResolvedConfig:
    """Gives a config with room for everything that is measured here."""
    values: dict[str, Any] = {
        "page_size": 256,
        "num_blocks": 2_000,
        "max_batch_tokens": 8_192,
        "max_requests_per_batch": NUM_RUNNING,
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "allow_block_sharing": True,
        "safety_margin": 0.0,
        "max_queue_size": 0,
        "target_step_s": None,
        "seed": 0,
        "return_logprobs": False,
    }
    return ResolvedConfig(**{**values, **changes})


def make_factory() -> RequestFactory:
    """Gives what checks requests for such an engine."""
    defaults = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, eos_token_ids=(), logprobs=False)
    return RequestFactory(make_config(), defaults=GenerationDefaults(sampling=defaults), accepts_keywords=False)


class NoModel:
    """Builds the batch of each step, as the model's runner does, and answers every row with the same token."""

    def __init__(self, config: ResolvedConfig) -> None:
        self._config = config
        self._device = torch.device("cpu")
        self._cache = KVCache([LayerShape(1, 1, 1)], config, dtype=torch.float32, device=self._device)

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Gives a token for each row that samples."""
        batch = build_batch(plan.rows, self._cache, self._config.windows, self._device)
        return FinishedStep({row.request.request_id: SampledToken(7) for row in batch.sampling_rows})


class EngineSide:
    """Scheduler, loop and outbox on this thread, one step a call."""

    def __init__(self, *, num_running: int, **changes: Any) -> None:
        config = make_config(max_requests_per_batch=num_running, **changes)
        self.scheduler = Scheduler(config)
        self._outbox = Outbox()
        self._factory = make_factory()
        self._loop = GenerationLoop(
            scheduler=self.scheduler,
            runner=NoModel(config),
            outbox=self._outbox,
            budget=StepBudget(max_batch_tokens=config.max_batch_tokens, target_step_s=None),
            depth=1,
        )
        self._loop.mark_started()
        self.last_outputs: list[GenerationOutput] = []

    def add(self, count: int, *, prompt_length: int, max_new_tokens: int) -> None:
        """Submits requests that stream, each with a prompt of its own."""
        for number in range(count):
            prompt = [(number + offset) % VOCAB_SIZE for offset in range(prompt_length)]
            request = self._factory.make(
                prompt, request_id=None, sampling=SamplingParams(max_new_tokens=max_new_tokens)
            )
            request.streaming = True
            self.submit(request)
        self.take_in()

    def submit(self, request: ActiveRequest) -> None:
        """Posts one request."""
        self._loop.submit([request])

    def take_in(self) -> None:
        """Lets the loop take what was posted."""
        self._loop._wait_for_work()

    def step(self) -> None:
        """Runs one step and reads what it published."""
        self._loop._step()
        self.last_outputs = []
        while (output := self._outbox.take(None, 0)) is not None:
            self.last_outputs.append(output)

    def run_until_decoding(self) -> None:
        """Runs the prompts of all that find room, and a few steps more."""
        most = self.scheduler.config.max_requests_per_batch
        running = self.scheduler._running
        while len(running) < most or any(request.num_to_compute > 1 for request in running.values()):
            self.step()
        for _ in range(3):
            self.step()


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="for the shared-prefix workload: a folder; the default model when not given")
    parser.add_argument("--users", type=int, default=NUM_USERS, help="of the shared-prefix workload")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    print(f"Load of the machine at the start: {load:.1f}" + (" (not quiet)" if load > 1 else ""))
    print("\n| what | measured | compared |\n|---|---|---|")
    _print_streams()
    _print_lines()
    _print_memory()
    _print_sharing(arguments.model, arguments.users)


def _print_streams() -> None:
    first = None
    for length in MEASURED_STREAMS:
        side = EngineSide(num_running=1)
        side.add(1, prompt_length=100, max_new_tokens=40_000)
        for _ in range(length):
            side.step()
        seconds = _median_s(side.step)
        first = first or seconds
        print(f"| a token of a stream of {length:,} | {seconds * 1e6:.0f} us | {seconds / first:.2f}x |")


def _print_lines() -> None:
    first = None
    for num_waiting in MEASURED_LINES:
        side = EngineSide(num_running=NUM_RUNNING)
        side.add(NUM_RUNNING + num_waiting, prompt_length=300, max_new_tokens=10_000)
        side.run_until_decoding()
        seconds = _median_s(side.step)
        first = first or seconds
        what = f"a step of {NUM_RUNNING} running, {num_waiting:,} waiting"
        print(f"| {what} | {seconds * 1e3:.2f} ms | {seconds / first:.2f}x |")


def _print_memory() -> None:
    side, factory, count, length = EngineSide(num_running=1), make_factory(), 2_000, 1_000
    prompts = [list(range(length)) for _ in range(count)]
    gc.collect()
    tracemalloc.start()
    for prompt in prompts:
        side.submit(factory.make(prompt, request_id=None, sampling=SamplingParams(max_new_tokens=5)))
    side.take_in()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"| a waiting request, beyond its ids | {used / count - 8 * length:.0f} bytes | |")


def _print_sharing(model_name: str | None, num_users: int) -> None:
    from engine import load_model
    from serve_app.model_store import DEFAULT_MODEL, resolve_model

    model = load_model(model_name or resolve_model(DEFAULT_MODEL.name), device="cpu")
    speeds = {is_shared: _prefill_tokens_per_s(model, num_users, is_shared) for is_shared in (False, True)}
    what = f"prompts of {num_users} users behind one of {SYSTEM_LENGTH:,} tokens"
    for is_shared, speed in speeds.items():
        title = f"{what}, {'shared' if is_shared else 'not shared'}"
        print(f"| {title} | {speed:.0f} tokens/s | {speed / speeds[False]:.1f}x |")


def shared_prefix_prompts(num_users: int, vocab_size: int) -> list[list[int]]:
    """Gives one system prompt with a suffix for each user."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        drawn: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
        return drawn

    system = ids(SYSTEM_LENGTH)
    return [system + ids(length) for length in torch.linspace(*SUFFIXES, num_users).long().tolist()]


def _prefill_tokens_per_s(model: Any, num_users: int, is_shared: bool) -> float:
    """Prompt tokens over the time from the first submission to the last first token."""
    from engine import ContinuousBatchingConfig, init_continuous_batching

    prompts = shared_prefix_prompts(num_users, model.config.get_text_config().vocab_size)
    config = ContinuousBatchingConfig(page_size=16, num_blocks=6_000, allow_block_sharing=is_shared)
    manager = init_continuous_batching(model, continuous_batching_config=config)
    manager.start()
    manager.add_request(prompts[0][500:700], max_new_tokens=2, eos_token_id=-1)
    assert manager.get_result() is not None
    started = perf_counter()
    for request_id in manager.add_requests(prompts, max_new_tokens=1):
        output = manager.get_result(request_id)
        assert output is not None
        assert output.error is None, output.error
    seconds = perf_counter() - started
    manager.stop()
    return sum(map(len, prompts)) / seconds


def _median_s(step: Callable[[], None]) -> float:
    def timed() -> float:
        started = thread_time()
        step()
        return thread_time() - started

    return median(timed() for _ in range(NUM_STEPS))


if __name__ == "__main__":
    if not __package__:
        sys.exit("run it as: python -m benchmarks.growth")
    main()
