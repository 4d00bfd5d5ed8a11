"""What new weights cost one engine: staging beside generation, the pause, and checking what is served.

    python -m benchmarks.swap

Models of random weights, of 0.5 and 2 GB, with up to 1,000 tensors; requests are generating whenever weights change.
Needs 12 GB of memory and 3 GB of disk; `--sizes` takes less.
"""

import argparse
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.report import machine
from engine import ContinuousBatchingConfig, ContinuousBatchingManager, SamplingParams, init_continuous_batching
from engine.weights import StagedWeights, stage_weights

GB = 1e9
TENSORS_OF_LAYER = 9
TENSORS_BESIDE_LAYERS = 3
VOCAB_SIZE = 1024
NUM_STREAMS = 4
STREAM_WINDOW_S = 6.0
"""How long a running stream is counted, alone and beside staging."""
PUBLISHED = (
    ("checkpoint-engine, GLM-4.5-Air to Kimi-K2, 8 to 256 GPUs", "0.013-0.017", "broadcast between GPUs"),
    ("verl, Qwen3-30B-A3B, 32 H100", "0.12-0.19", "gathered and sent over NCCL or NIXL"),
    ("slime, GLM-4.5 355B", "0.07", "gathered and broadcast"),
)
"""From their READMEs and blogs: system, seconds per GB, what is in them."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model to measure with."""

    gigabytes: float
    num_tensors: int

    @property
    def title(self) -> str:
        return f"{self.gigabytes:g} GB, {self.num_tensors} tensors"

    def config(self) -> LlamaConfig:
        """Gives a Llama with about so many bytes in float32, in so many tensors."""
        num_layers = (self.num_tensors - TENSORS_BESIDE_LAYERS) // TENSORS_OF_LAYER
        values = self.gigabytes * GB / 4 / num_layers
        hidden = max(64, int((values / 12) ** 0.5) // 64 * 64)
        intermediate = max(64, int((values - 4 * hidden**2) / (3 * hidden)))
        return LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


@dataclass(slots=True)
class Figures:
    """Of one size, in seconds and bytes."""

    title: str
    num_bytes: int
    first_s: float
    """Of staging into memory that is new to the process."""
    stage_s: float
    wait_s: list[float]
    step_s: float
    commit_s: list[float]
    in_place_s: float
    copy_s: float
    inside_s: float
    digest_s: float
    probe_s: float


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="0.5:219,0.5:993,2:993", help="gigabytes:tensors, separated by commas")
    parser.add_argument("--commits", type=int, default=6, help="of each size")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", help="where the weights are written; a temporary one when not given")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{machine()}\nLoad of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    found, slowdowns = [], list[str]()
    for text in arguments.sizes.split(","):
        gigabytes, num_tensors = text.split(":")
        size = Size(float(gigabytes), int(num_tensors))
        with TemporaryDirectory(dir=arguments.folder) as folder:
            figures, slowdown = measure(size, Path(folder), num_commits=arguments.commits)
        found.append(figures)
        slowdowns.append(slowdown)
        gc.collect()
    print_tables(found, slowdowns)


def measure(size: Size, folder: Path, *, num_commits: int) -> tuple[Figures, str]:
    """Gives the figures of one size, and a line about streams beside staging."""
    model = make_model(size)
    save(model, folder / "first", scale=1.0)
    save(model, folder / "second", scale=0.5)
    with running(model) as manager:
        first_s = timed(lambda: manager.stage_weights(folder / "second").discard())
        slowdown = stream_line(manager, folder, size.title)
        started = perf_counter()
        staged = manager.stage_weights(folder / "second")
        stage_s = perf_counter() - started
        started = perf_counter()
        manager.probe_weights(staged, [[7 * place % VOCAB_SIZE for place in range(64)]])
        probe_s = perf_counter() - started
        num_bytes = staged.num_bytes
        wait_s, commit_s, step_s = time_commits(manager, folder, staged, num_commits)
        started = perf_counter()
        manager.weight_digests()
        digest_s = perf_counter() - started
        inside_s = time_inside(manager, folder)
    in_place_s, copy_s = time_in_place(model, folder)
    return (
        Figures(
            size.title,
            num_bytes,
            first_s,
            stage_s,
            wait_s,
            step_s,
            commit_s,
            in_place_s,
            copy_s,
            inside_s,
            digest_s,
            probe_s,
        ),
        slowdown,
    )


def make_model(size: Size) -> PreTrainedModel:
    """Gives a model whose weights cost no time to draw: what they are makes no difference."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(size.config(), dtype=torch.float32)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.uniform_(-0.02, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0 + index / 1e4)
    rotary = model.model.rotary_emb
    rotary.inv_freq, rotary.attention_scaling = rotary.compute_default_rope_parameters(model.config)
    rotary.original_inv_freq = rotary.inv_freq
    torch.nn.Module.eval(model.requires_grad_(False))
    return model


def save(model: PreTrainedModel, folder: Path, *, scale: float) -> None:
    """Writes the weights, times a number."""
    folder.mkdir()
    save_file({name: tensor * scale for name, tensor in model.state_dict().items()}, folder / "model.safetensors")


@contextmanager
def running(model: PreTrainedModel) -> Iterator[ContinuousBatchingManager]:
    """Runs a manager with streams that generate until the end."""
    config = ContinuousBatchingConfig(page_size=32, num_blocks=600, max_batch_tokens=256)
    manager = init_continuous_batching(model, continuous_batching_config=config)
    manager.start()
    sampling = SamplingParams(temperature=0.0, max_new_tokens=4000, eos_token_ids=())
    for number in range(NUM_STREAMS):
        manager.add_request([number + 1, 2, 3], sampling=sampling)
    while manager.stats().steps_total < 4:
        sleep(0.01)
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True)


def time_commits(
    manager: ContinuousBatchingManager, folder: Path, staged: StagedWeights, num_commits: int
) -> tuple[list[float], list[float], float]:
    """Gives seconds until the loop was parked, seconds from parked to running, and of the longest step seen."""
    waits, commits, steps = [], [], []
    for number in range(num_commits):
        steps.append(manager.stats().last_step_s)
        started = perf_counter()
        parked = manager.park(pinned="end")
        waits.append(perf_counter() - started)
        steps.append(manager.stats().last_step_s)
        parked.commit(staged)
        commits.append(parked.resume())
        staged.discard()
        staged = manager.stage_weights(folder / ("first" if number % 2 == 0 else "second"))
    staged.discard()
    return waits, commits, max(steps)


def time_inside(manager: ContinuousBatchingManager, folder: Path) -> float:
    """Gives the seconds of a pause in which weights are streamed."""
    staged = manager.stage_weights(folder / "first", memory="inside", undo_folder=folder)
    parked = manager.park(pinned="end")
    parked.commit(staged)
    return parked.resume()


def time_in_place(model: PreTrainedModel, folder: Path) -> tuple[float, float]:
    """Gives seconds of an exchange that leaves the tensors where they are, and of torch copying the same bytes."""
    staged = stage_weights(model, folder / "second")
    pairs = staged.pairs
    # Once unmeasured: the first copy finds pages that nobody has touched.
    copy_all(pairs)
    staged.keep_old()
    copies, commits = [], []
    for _ in range(5):
        copies.append(timed(lambda: copy_all(pairs)))
        commits.append(timed(lambda: staged.commit(in_place=True)))
        staged.rollback()
    # The best of each: both are bound by the memory, and whatever else runs only adds.
    return min(commits), min(copies)


def copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """What an exchange in place cannot do without."""
    with torch.no_grad():
        for held, spare in pairs:
            held.copy_(spare)


def timed(action: Callable[[], None]) -> float:
    """Gives how long it took."""
    started = perf_counter()
    action()
    return perf_counter() - started


def stream_line(manager: ContinuousBatchingManager, folder: Path, title: str) -> str:
    """Counts the tokens of running streams alone, beside staging, and alone again."""
    before = tokens_per_s(manager)
    stop, read = threading.Event(), [0, 0.0]

    def stage() -> None:
        while not stop.is_set():
            started = perf_counter()
            staged = manager.stage_weights(folder / "second")
            read[0] += staged.num_bytes
            read[1] += perf_counter() - started
            staged.discard()

    thread = threading.Thread(target=stage)
    thread.start()
    beside = tokens_per_s(manager)
    stop.set()
    thread.join()
    after = tokens_per_s(manager)
    alone = (before + after) / 2
    return (
        f"| {title} | {alone:.1f} | {beside:.1f} | {1 - beside / alone:.0%} | {read[0] / GB / read[1]:.2f} GB/s |"
        f" {torch.get_num_threads()} |"
    )


def tokens_per_s(manager: ContinuousBatchingManager) -> float:
    """Gives the speed of what runs."""
    tokens, started = manager.stats().generated_tokens_total, perf_counter()
    sleep(STREAM_WINDOW_S)
    return (manager.stats().generated_tokens_total - tokens) / (perf_counter() - started)


def print_tables(found: list[Figures], slowdowns: list[str]) -> None:
    """Prints the figures beside the published ones."""
    print("\n| weights | staged first | staged again | wait | longest step | commit | longest of them |")
    print("|---|---|---|---|---|---|---|")
    for one in found:
        print(
            f"| {one.title} | {one.first_s:.2f} s | {one.stage_s:.2f} s, {one.num_bytes / GB / one.stage_s:.2f} GB/s |"
            f" {max(one.wait_s) * 1e3:.0f} ms | {one.step_s * 1e3:.0f} ms | {median(one.commit_s) * 1e3:.1f} ms |"
            f" {max(one.commit_s) * 1e3:.1f} ms |"
        )
    print("\n| weights | in place | torch's `copy_` | ratio | inside the pause | digests of what is served | probe |")
    print("|---|---|---|---|---|---|---|")
    for one in found:
        size = one.num_bytes / GB
        print(
            f"| {one.title} | {one.in_place_s * 1e3:.0f} ms | {one.copy_s * 1e3:.0f} ms |"
            f" {one.in_place_s / one.copy_s:.2f}x | {one.inside_s:.2f} s | {one.digest_s:.2f} s,"
            f" {size / one.digest_s:.1f} GB/s | {one.probe_s:.2f} s |"
        )
    print("\n| weights | streams alone, tokens/s | beside staging | slower by | staging meanwhile | threads |")
    print("|---|---|---|---|---|---|")
    print("\n".join(slowdowns))
    largest = found[-1]
    size = largest.num_bytes / GB
    print("\n| system | s/GB | what is in it |\n|---|---|---|")
    for name, seconds, what in PUBLISHED:
        print(f"| {name} | {seconds} | {what}, published |")
    for name, seconds, what in (
        ("pitstop, staging", largest.stage_s, "read, checked, digested and packed, beside generation"),
        ("pitstop, pause", median(largest.commit_s), "the exchange; generation stands still for this alone"),
        (
            "pitstop, pause, memory short",
            largest.inside_s,
            "read, checked and copied inside it, the old values to disk",
        ),
    ):
        print(f"| {name} | {seconds / size:.4f} | {what} |")


if __name__ == "__main__":
    if not __package__:
        sys.exit("run it as: python -m benchmarks.swap")
    main()
