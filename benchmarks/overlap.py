"""What a second step in flight hides of the loop's own work: planning, the books, publishing.

    python -m benchmarks.overlap

First with a device that sleeps, as one does that computes without Python; then with a model on this machine.
"""

import argparse
import os
import sys
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

from benchmarks.growth import make_config, make_factory
from engine.loop import GenerationLoop
from engine.outbox import Outbox
from engine.plan import FinishedStep, SampledToken, StepHandle, StepPlan
from engine.request import SamplingParams
from engine.scheduler import Scheduler
from engine.step_budget import StepBudget
from engine.step_thread import StepThread

NUM_STEPS = 100
NUM_RUNNING = (64, 256)
DEVICE_S = (0.005, 0.02)
"""What a decode step of a small and of a large model takes on a GPU."""


class SleepingDevice:
    """Takes the same time for every step, and answers every row with the same token."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def launch(self, plan: StepPlan) -> StepHandle:
        """Returns when the step has run."""
        sleep(self._step_s)
        return FinishedStep({row.request.request_id: SampledToken(7) for row in plan.rows if row.samples})

    def park(self) -> None:
        """Nothing to do."""

    def unpark(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a folder or hub id; the default model when not given")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--no-model", action="store_true", help="print the first table only")
    arguments = parser.parse_args()
    print(f"Load of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("\n| running | device | a step, one in flight | two in flight | of the loop's work, hidden |")
    print("|---|---|---|---|---|")
    for num_running in NUM_RUNNING:
        for device_s in DEVICE_S:
            one, two = (_step_s(num_running, device_s, depth) for depth in (1, 2))
            hidden = (one - two) / (one - device_s)
            print(
                f"| {num_running} | {device_s * 1e3:.0f} ms | {one * 1e3:.2f} ms | {two * 1e3:.2f} ms | {hidden:.0%} |"
            )
    if not arguments.no_model:
        _print_model(arguments)


def _step_s(num_running: int, device_s: float, depth: int) -> float:
    """Gives the median time from one step to the next, all requests decoding and streaming."""
    config = make_config(max_requests_per_batch=num_running)
    scheduler, outbox, factory = Scheduler(config), Outbox(), make_factory()
    device = SleepingDevice(device_s)
    loop = GenerationLoop(
        scheduler=scheduler,
        runner=device if depth == 1 else StepThread(device),
        outbox=outbox,
        budget=StepBudget(max_batch_tokens=config.max_batch_tokens, target_step_s=None),
        depth=depth,
    )
    loop.mark_started()
    for number in range(num_running):
        request = factory.make([number, 1, 2], request_id=None, sampling=SamplingParams(max_new_tokens=10_000))
        request.streaming = True
        loop.submit([request])
    times = []
    for _ in range(NUM_STEPS):
        started = perf_counter()
        loop._wait_for_work()
        loop._step()
        while outbox.take(None, 0) is not None:
            pass
        times.append(perf_counter() - started)
    loop._drain()
    loop._runner.close()
    return median(times[5:])


def _print_model(arguments: argparse.Namespace) -> None:
    from engine import load_model
    from serve_app.model_store import DEFAULT_MODEL, resolve_model

    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model or resolve_model(DEFAULT_MODEL.name), device="cpu")
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(arguments.rounds):
        for is_async, found in speeds.items():
            found.append(_tokens_per_s(model, arguments, is_async=is_async))
    one, two = (max(found) for found in speeds.values())
    print(f"\n| {arguments.requests} requests, {arguments.threads} threads | tokens/s | compared |\n|---|---|---|")
    print(f"| one step in flight | {one:.1f} | |\n| two | {two:.1f} | {two / one:.2f}x |")


def _tokens_per_s(model: Any, arguments: argparse.Namespace, *, is_async: bool) -> float:
    from engine import ContinuousBatchingConfig, init_continuous_batching

    config = ContinuousBatchingConfig(page_size=32, num_blocks=2_000, use_async_batching=is_async)
    manager = init_continuous_batching(model, continuous_batching_config=config)
    manager.start()
    greedy = SamplingParams(temperature=0.0, max_new_tokens=arguments.tokens, eos_token_ids=())
    vocab_size = model.config.get_text_config().vocab_size
    prompts = [[(7 * number + place) % vocab_size for place in range(32)] for number in range(arguments.requests)]
    started = perf_counter()
    for request_id in [manager.add_request(prompt, sampling=greedy) for prompt in prompts]:
        output = manager.get_result(request_id)
        assert output is not None
        assert output.error is None, output.error
    seconds = perf_counter() - started
    manager.stop()
    return arguments.requests * arguments.tokens / seconds


if __name__ == "__main__":
    if not __package__:
        sys.exit("run it as: python -m benchmarks.overlap")
    main()
