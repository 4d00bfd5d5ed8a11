"""Where the engine's time goes on the benchmark's workload, against what the processor can multiply.

    python -m benchmarks.profile
    python -m benchmarks.profile --prompts 16 --threads 1

The first pass runs the engine as it is. The second runs it with clocks around its parts: the parts are found by their
role in the engine (linear modules, the attention call, the cache, the sampler), not by the operators they call.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from benchmarks.peers import ours
from benchmarks.report import machine
from benchmarks.workload import Workload, default_model, draw_prompts

WARM_UP_LENGTH = 32
MATRIX_SIZE, NUM_TRIALS = 2048, 10
"""17 GFLOP a product: large enough to run at full speed, small enough for 16 MiB a matrix."""

LAYERS, VOCABULARY, ATTENTION = "matrix products of the layers", "product with the vocabulary", "attention"
CACHE_READ, CACHE_WRITE = "KV gather", "KV write"
ELEMENTWISE = "norms, rotary, activations, sums, calls of modules"
BATCH, SAMPLING, SCHEDULING, REST = "building the batch", "sampling", "the rest of a step", "between the steps"
MODEL, STEP = "the model", "a step"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the number of multiplications depends on. layer_weights: of the matrices of all layers together."""

    num_layers: int
    layer_weights: int
    num_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int


def main() -> None:
    """Prints the limit, the plain pass and the table of the second."""
    arguments = _parse_arguments()
    import torch

    torch.set_num_threads(arguments.threads)
    limit_flops = measure_limit()
    job = Workload(arguments.model or default_model(), [], arguments.tokens, arguments.threads).job({})
    generate, manager = ours.make(job)
    model = manager.model
    prompts = draw_prompts(arguments.prompts, model.config.get_text_config().vocab_size)
    generate([prompt[:WARM_UP_LENGTH] for prompt in prompts], 2)
    plain_s = _seconds(generate, prompts, arguments.tokens)
    clocks = Clocks()
    with clocks.on_engine(model):
        clocked_s = _seconds(generate, prompts, arguments.tokens)
    flops = count_flops(shape_of(model), list(map(len, prompts)), arguments.tokens)
    num_tokens, total = arguments.prompts * arguments.tokens, sum(flops.values())
    print(machine())
    print(f"Command: python -m benchmarks.profile {' '.join(sys.argv[1:])}".rstrip())
    print(f"A product of {MATRIX_SIZE} x {MATRIX_SIZE}, float32, {arguments.threads} threads: ", end="")
    print(f"{limit_flops / 1e9:.0f} GFLOP/s")
    print(f"The workload: {total / 1e9:.0f} GFLOP, at that speed {total / limit_flops:.1f} s,", end=" ")
    print(f"{num_tokens * limit_flops / total:.0f} tokens/s")
    print(f"The engine: {plain_s:.1f} s, {num_tokens / plain_s:.1f} tokens/s, {clocks.counts[STEP]} steps;", end=" ")
    print(f"with clocks {clocked_s:.1f} s\n")
    print(report(split(clocks.spent, clocked_s), flops, limit_flops))


def measure_limit() -> float:
    """Gives the floating-point operations a second of a large float32 product, the best of several."""
    import torch

    one, other = torch.rand(MATRIX_SIZE, MATRIX_SIZE), torch.rand(MATRIX_SIZE, MATRIX_SIZE)
    out = torch.empty(MATRIX_SIZE, MATRIX_SIZE)
    return max(2.0 * MATRIX_SIZE**3 / _seconds(torch.mm, one, other, out=out) for _ in range(NUM_TRIALS))


def shape_of(model: Any) -> Shape:
    """Reads the shape off the model's modules."""
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    return Shape(
        num_layers=config.num_hidden_layers,
        layer_weights=sum(layer.weight.numel() for layer in _linear_layers(model)),
        num_heads=num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def count_flops(shape: Shape, prompt_lengths: Sequence[int], num_new_tokens: int) -> dict[str, float]:
    """Gives floating-point operations by kind, two for a multiplication and its sum.

    The vocabulary is multiplied for rows that sample alone, and attention looks at the keys that a token may see.
    """
    # The last token is sampled and never computed.
    ends = [length + num_new_tokens - 1 for length in prompt_lengths]
    num_keys = sum(end * (end + 1) // 2 for end in ends)
    return {
        LAYERS: 2.0 * shape.layer_weights * sum(ends),
        VOCABULARY: 2.0 * shape.vocab_size * shape.hidden_size * num_new_tokens * len(prompt_lengths),
        ATTENTION: 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * num_keys,
    }


def split(spent: dict[str, float], total_s: float) -> dict[str, float]:
    """Gives exclusive seconds by kind from the inclusive ones of nested clocks; they add up to `total_s`."""
    known = (LAYERS, VOCABULARY, CACHE_READ, CACHE_WRITE, BATCH, SAMPLING)
    parts = {kind: spent.get(kind, 0.0) for kind in known}
    parts[ATTENTION] = spent.get(ATTENTION, 0.0) - parts[CACHE_READ] - parts[CACHE_WRITE]
    inside = parts[LAYERS] + parts[VOCABULARY] + spent.get(ATTENTION, 0.0)
    parts[ELEMENTWISE] = spent.get(MODEL, 0.0) - inside
    parts[SCHEDULING] = spent.get(STEP, 0.0) - spent.get(MODEL, 0.0) - parts[BATCH] - parts[SAMPLING]
    parts[REST] = total_s - spent.get(STEP, 0.0)
    return parts


def report(parts: dict[str, float], flops: dict[str, float], limit_flops: float) -> str:
    """Gives the table; limit_flops is what a large product reaches a second."""
    total_s = sum(parts.values())
    lines = ["| part | seconds | share | GFLOP | GFLOP/s | of a large product's |", "|---|---|---|---|---|---|"]
    for kind, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        cells = [kind, f"{seconds:.2f}", f"{100 * seconds / total_s:.1f} %"]
        lines.append(f"| {' | '.join(cells + _speed(flops.get(kind), seconds, limit_flops))} |")
    cells = ["all", f"{total_s:.2f}", "100 %"]
    lines.append(f"| {' | '.join(cells + _speed(sum(flops.values()), total_s, limit_flops))} |")
    return "\n".join(lines)


def _speed(flops: float | None, seconds: float, limit_flops: float) -> list[str]:
    if not flops:
        return ["", "", ""]
    if seconds <= 0:
        return [f"{flops / 1e9:.0f}", "not seen", "not seen"]
    return [f"{flops / 1e9:.0f}", f"{flops / seconds / 1e9:.1f}", f"{100 * flops / seconds / limit_flops:.0f} %"]


class Clocks:
    """Inclusive seconds and calls by kind. They run on the engine's one thread."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)

    @contextmanager
    def on_engine(self, model: Any) -> Iterator[None]:
        """While inside, every part of the engine that runs `model` is clocked."""
        import engine.model_runner
        from engine.attention.cpu import CpuKernel
        from engine.attention.interface import StepAttention
        from engine.fused_decoder import FusedLayer
        from engine.kv_cache import KVCache
        from engine.loop import GenerationLoop
        from engine.packed_weights import PackedWeights
        from engine.sampling import RowSampler

        with ExitStack() as stack:
            stack.enter_context(self._around_module(model, MODEL))
            stack.enter_context(self._around_module(model.get_output_embeddings(), VOCABULARY))
            fused = _multiplied_together(model) | _computed_at_once(model)
            for layer in _linear_layers(model):
                if id(layer) not in fused:
                    stack.enter_context(self._around_module(layer, LAYERS))
            stack.enter_context(self._around(PackedWeights, "gated", LAYERS))
            stack.enter_context(self._around(FusedLayer, "begin", LAYERS))
            stack.enter_context(self._around(FusedLayer, "finish", LAYERS))
            stack.enter_context(self._around(GenerationLoop, "_step", STEP))
            stack.enter_context(self._around(engine.model_runner, "build_batch", BATCH))
            stack.enter_context(self._around(StepAttention, "__call__", ATTENTION))
            stack.enter_context(self._around(CpuKernel, "attend_stored", ATTENTION))
            stack.enter_context(self._around(KVCache, "read", CACHE_READ))
            stack.enter_context(self._around(KVCache, "write", CACHE_WRITE))
            stack.enter_context(self._around(CpuKernel, "_store", CACHE_WRITE))
            stack.enter_context(self._around(RowSampler, "draw", SAMPLING))
            yield

    @contextmanager
    def _around(self, owner: Any, name: str, kind: str) -> Iterator[None]:
        """Clocks `owner.name`."""
        original = getattr(owner, name)
        setattr(owner, name, self._clocked(kind, original))
        try:
            yield
        finally:
            setattr(owner, name, original)

    @contextmanager
    def _around_module(self, module: Any, kind: str) -> Iterator[None]:
        """By hooks, which hold whatever the engine puts in the place of the module's own forward."""
        started: list[float] = []

        def end(*_: Any) -> None:
            self._count(kind, perf_counter() - started.pop())

        hooks = [
            module.register_forward_pre_hook(lambda *_: started.append(perf_counter())),
            module.register_forward_hook(end),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _clocked(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            started = perf_counter()
            result = function(*arguments, **keywords)
            self._count(kind, perf_counter() - started)
            return result

        return call

    def _count(self, kind: str, seconds: float) -> None:
        self.spent[kind] += seconds
        self.counts[kind] += 1


def _linear_layers(model: Any) -> list[Any]:
    """The layers' own: without the product with the vocabulary."""
    from torch import nn

    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]


def _multiplied_together(model: Any) -> set[int]:
    """Gates and their partners, where one call computes both: a clock on one of them would part them."""
    from engine.products import PanelProducts, find_products

    if not isinstance(find_products(), PanelProducts):
        return set()
    return {
        id(getattr(module, name))
        for module in model.modules()
        for name in ("gate_proj", "up_proj")
        if hasattr(module, "gate_proj") and hasattr(module, "up_proj")
    }


def _computed_at_once(model: Any) -> set[int]:
    """The linear modules of layers that are computed whole: a clock on one of them would have its layer fall back."""
    from torch import nn

    from engine.fused_decoder import fuse_decoder_layers
    from engine.packed_weights import PackedWeights
    from engine.products import find_products

    products = find_products()
    if products is None:
        return set()
    layers = [layer for layer, _ in fuse_decoder_layers(model, PackedWeights(model, products))]
    return {id(module) for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)}


def _seconds(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> float:
    started = perf_counter()
    function(*arguments, **keywords)
    return perf_counter() - started


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a folder or hub id; the default model when not given")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens for each prompt")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    if not __package__:
        sys.exit("run it as: python -m benchmarks.profile")
    main()
