"""What a step of the engine takes on this machine, as `benchmarks/fleet_sim.py` assumes it.

    python -m benchmarks.step_times
    python -m benchmarks.step_times --batches 1,4,16 --tokens 24

Batches of requests of several sizes, then prompts alone; the engine's counters before and after each give the time of a
step, of each request that generates in it and of each prompt token, by least squares.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.peers import ours
from benchmarks.workload import NUM_KV_TOKENS, default_model

PROMPT_TOKENS = 16
LONG_PROMPTS = (256, 512, 1024)


def main() -> None:
    """Measures and prints the times, and how well they explain each batch."""
    arguments = _parse_arguments()
    job = {
        "model": arguments.model or default_model(),
        "num_threads": arguments.threads,
        "num_kv_tokens": NUM_KV_TOKENS,
    }
    _, manager = ours.make(job)
    try:
        times, lines = measure(manager, arguments.batches, arguments.tokens, arguments.rounds)
    finally:
        manager.stop(block=True)
    print(report.machine())
    print(f"Command: python -m benchmarks.step_times {' '.join(sys.argv[1:])}".rstrip())
    print("step_s: {:.6f}, request_s: {:.6f}, token_s: {:.7f}".format(*times))
    print("\n| what | steps | seconds | by the fit |\n|---|---|---|---|")
    print("\n".join(lines))


def measure(manager: Any, batches: list[int], num_new: int, num_rounds: int) -> tuple[Any, list[str]]:
    """Gives the times that fit all batches, and a line of a table for each."""
    best: dict[str, tuple[tuple[int, int, int], float]] = {}
    ours.generate_all(manager, [[1] * PROMPT_TOKENS] * 4, 8)
    for number in range(num_rounds):
        jobs = [
            (f"{batch} requests", [_prompt(PROMPT_TOKENS, number, one) for one in range(batch)], num_new)
            for batch in batches
        ]
        jobs += [(f"a prompt of {length}", [_prompt(length, number, 0)], 1) for length in LONG_PROMPTS]
        for title, prompts, num_tokens in jobs:
            before = _settled(manager)
            ours.generate_all(manager, prompts, num_tokens)
            after = _settled(manager)
            steps = after.steps_total - before.steps_total
            # The first token of a request comes from the step that computes the end of its prompt.
            generated = after.generated_tokens_total - before.generated_tokens_total - len(prompts)
            prefilled = sum(map(len, prompts)) - (after.cached_tokens_total - before.cached_tokens_total)
            taken = after.step_seconds_total - before.step_seconds_total
            print(f"{title}: {steps} steps in {taken:.3f} s", file=sys.stderr, flush=True)
            # The fastest of all rounds: what takes longer was held up by others.
            if title not in best or taken < best[title][1]:
                best[title] = (steps, generated, prefilled), taken
    rows, seconds = zip(*best.values(), strict=True)
    counts, measured = np.array(rows, dtype=float), np.array(seconds)
    # Relative errors count, so that a short batch says as much as a long one.
    times = np.linalg.lstsq(counts / measured[:, None], np.ones(len(measured)))[0]
    fitted = counts @ times
    lines = [
        f"| {title} | {row[0]} | {own:.3f} | {fit:.3f} |"
        for title, row, own, fit in zip(best, rows, seconds, fitted, strict=True)
    ]
    return times, lines


def _prompt(length: int, *seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng([length, *seed]).integers(1000, 40_000, length).tolist()
    return ids


def _settled(manager: Any) -> Any:
    """Gives the counters once nothing runs any more."""
    deadline = time.monotonic() + 30
    while True:
        stats = manager.stats()
        if not stats.num_running and not stats.num_waiting:
            return stats
        assert time.monotonic() < deadline, "the engine does not come to rest"
        time.sleep(0.02)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_times", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", help="a folder or hub id; the default model when not given")
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8, 16, 32]
    )
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each request")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
