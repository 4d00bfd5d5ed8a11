"""The engine beside transformers' own continuous batching: the same prompts, model, threads and memory, in one run.

    python -m benchmarks.engine

Each contestant runs in a process of its own, one after the other; transformers gets the best of several step sizes.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

SHORTEST_PROMPT, LONGEST_PROMPT = 32, 256
BASELINE_STEPS = (512, 1024, 2048)
PAGE_SIZE, NUM_BLOCKS = 256, 128
"""32,768 tokens for both: all 64 requests fit, so that nobody pays for preemption."""
NO_EOS = -1
RESULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who runs; max_batch_tokens None is the engine's own choice."""

    engine: str
    max_batch_tokens: int | None

    @property
    def title(self) -> str:
        return self.engine if self.max_batch_tokens is None else f"{self.engine}, {self.max_batch_tokens} tokens a step"


@dataclass(frozen=True, slots=True)
class Workload:
    """What both generate; prompts are random ids, and an end token does not end them."""

    model: str
    num_prompts: int
    num_new_tokens: int
    num_threads: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Gives prompts of lengths spread evenly between the shortest and the longest, in shuffled order."""
        import torch

        generator = torch.Generator().manual_seed(0)
        lengths = torch.linspace(SHORTEST_PROMPT, LONGEST_PROMPT, self.num_prompts).round().long()
        order = torch.randperm(self.num_prompts, generator=generator)
        return [torch.randint(vocab_size, (int(n),), generator=generator).tolist() for n in lengths[order]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """cpu_s is over all threads; peak_mib is of the whole process, model included."""

    seconds: float
    cpu_s: float
    num_tokens: int
    peak_mib: float
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def main() -> None:
    """Runs every contestant, prints the table."""
    arguments = _parse_arguments()
    if arguments.worker:
        contestant, workload = (json.loads(part) for part in arguments.worker)
        print(json.dumps(asdict(_measure(Contestant(**contestant), Workload(**workload)))))
        return
    workload = Workload(arguments.model or _default_model(), arguments.prompts, arguments.tokens, arguments.threads)
    contestants = [Contestant("pitstop", None), *(Contestant("transformers", steps) for steps in BASELINE_STEPS)]
    best: dict[Contestant, Measurement] = {}
    for _ in range(arguments.rounds):
        for contestant in contestants:
            measured = _measure_apart(contestant, workload)
            print(f"{contestant.title}: {measured.tokens_per_s:.1f} tokens/s", file=sys.stderr)
            if contestant not in best or measured.seconds < best[contestant].seconds:
                best[contestant] = measured
    print(_report(best, workload, arguments.rounds))
    if arguments.growth:
        # In a process of its own, as every contestant is.
        subprocess.run([sys.executable, "-m", "benchmarks.growth", "--model", workload.model], check=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub id; the default model when not given")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens for each prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="the best of so many counts, for each contestant")
    parser.add_argument("--growth", action="store_true", help="also print the table of benchmarks.growth")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _default_model() -> str:
    from serve_app.model_store import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL.name)


def _measure_apart(contestant: Contestant, workload: Workload) -> Measurement:
    worker = [json.dumps(asdict(contestant)), json.dumps(asdict(workload))]
    command = [sys.executable, "-m", "benchmarks.engine", "--worker", *worker]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Measurement(**json.loads(finished.stdout.splitlines()[-1]))


def _measure(contestant: Contestant, workload: Workload) -> Measurement:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(workload.num_threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
    model = loaded.eval()
    make_manager = _pitstop_manager if contestant.engine == "pitstop" else _transformers_manager
    prompts = workload.prompts(model.config.vocab_size)
    with torch.inference_mode():
        manager = make_manager(model, contestant.max_batch_tokens)
        manager.start()
        _generate(manager, [prompt[:SHORTEST_PROMPT] for prompt in prompts[:4]], 8)
        started, cpu_started = perf_counter(), process_time()
        outputs = _generate(manager, prompts, workload.num_new_tokens)
        seconds, cpu_s = perf_counter() - started, process_time() - cpu_started
        manager.stop(block=True)
    num_tokens = sum(len(output) for output in outputs)
    assert num_tokens == workload.num_prompts * workload.num_new_tokens, "a request ended early"
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measurement(seconds=seconds, cpu_s=cpu_s, num_tokens=num_tokens, peak_mib=peak_mib, outputs=outputs)


def _pitstop_manager(model: Any, max_batch_tokens: int | None) -> Any:
    from transformers import GenerationConfig

    from engine import ContinuousBatchingConfig, init_continuous_batching

    config = ContinuousBatchingConfig(page_size=PAGE_SIZE, num_blocks=NUM_BLOCKS, max_batch_tokens=max_batch_tokens)
    return init_continuous_batching(model, GenerationConfig(do_sample=False), config)


def _transformers_manager(model: Any, max_batch_tokens: int | None) -> Any:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = ContinuousBatchingConfig(page_size=PAGE_SIZE, num_blocks=NUM_BLOCKS, max_batch_tokens=max_batch_tokens)
    generation_config = GenerationConfig(do_sample=False, eos_token_id=NO_EOS)
    return model.init_continuous_batching(generation_config, continuous_batching_config=config)


def _generate(manager: Any, prompts: Sequence[list[int]], num_new_tokens: int) -> list[list[int]]:
    """Submits all prompts at once; both managers have the same methods."""
    add: Callable[..., str] = manager.add_request
    ids = [add(prompt, max_new_tokens=num_new_tokens, eos_token_id=NO_EOS) for prompt in prompts]
    outputs: dict[str, list[int]] = {}
    while len(outputs) < len(ids):
        output = manager.get_result(timeout=RESULT_TIMEOUT_S)
        assert output is not None, "no result came"
        assert output.error is None, output.error
        outputs[output.request_id] = list(output.generated_tokens)
    return [outputs[request_id] for request_id in ids]


def _report(best: dict[Contestant, Measurement], workload: Workload, num_rounds: int) -> str:
    ours = next(iter(best.values()))
    baseline = max((measured for contestant, measured in list(best.items())[1:]), key=lambda one: one.tokens_per_s)
    lines = [
        f"{workload.num_prompts} prompts of {SHORTEST_PROMPT} to {LONGEST_PROMPT} tokens, {workload.num_new_tokens} new"
        f" tokens each, greedy, float32, {workload.num_threads} threads, best of {num_rounds}",
        f"Machine: {_processor()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, Python {platform.python_version()},"
        f" torch {version('torch')}, transformers {version('transformers')}",
        f"Command: python -m benchmarks.engine {' '.join(sys.argv[1:])}".rstrip(),
        "",
        "| engine | tokens/s | to transformers' best | seconds | CPU seconds | peak memory | same outputs as ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for contestant, measured in best.items():
        same = sum(mine == theirs for mine, theirs in zip(ours.outputs, measured.outputs, strict=True))
        lines.append(
            f"| {contestant.title} | {measured.tokens_per_s:.1f}"
            f" | {measured.tokens_per_s / baseline.tokens_per_s:.2f}x | {measured.seconds:.1f} | {measured.cpu_s:.1f}"
            f" | {measured.peak_mib:.0f} MiB | {same} of {workload.num_prompts} |"
        )
    return "\n".join(lines)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


if __name__ == "__main__":
    if not __package__:
        # As a script this file would hide the package of the same name.
        raise SystemExit("run it as: python -m benchmarks.engine")
    main()
