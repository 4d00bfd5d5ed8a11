"""The CPU's kernel computes what the reference backend does, whatever the shape of the model and the rows."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.active_request import ActiveRequest
from engine.attention import sdpa
from engine.attention.cpu import CpuKernel, find_cpu_kernel
from engine.attention.sdpa import LayerRules
from engine.attention.step import LayerView
from engine.batch import build_batch
from engine.config import ResolvedConfig
from engine.jit import exponential
from engine.kv_cache import KVCache, LayerShape
from engine.plan import PlannedRow
from engine.request import SamplingParams

CPU = torch.device("cpu")
PAGE = 64
ROWS = [1, 2, 31, 32, 33, 64, 65, 200, 301]
"""Lengths of single-token rows, on both sides of every border of a chunk and a page."""
PROMPTS = [(0, 40), (50, 90), (300, 303)]


def kernel() -> CpuKernel:
    found = find_cpu_kernel(torch.float32, CPU)
    assert found is not None
    return found


def views_of(shape: LayerShape) -> tuple[LayerView, LayerView, KVCache]:
    """Gives one step as the reference and as the kernel see it, over one cache; what no request wrote is NaN."""
    num_blocks = sum(-(-end // PAGE) for end in ROWS) + sum(-(-end // PAGE) for _, end in PROMPTS)
    config = ResolvedConfig(
        page_size=PAGE, num_blocks=num_blocks, max_batch_tokens=512, max_requests_per_batch=64,
        max_model_len=4_096, vocab_size=10, allow_block_sharing=True, safety_margin=0, max_queue_size=0,
        target_step_s=None, seed=0, return_logprobs=False, windows=(shape.window,),
    )  # fmt: skip
    cache = KVCache([shape], config, dtype=torch.float32, device=CPU)
    for store in cache.chunks(0):
        store.fill_(float("nan"))
    blocks = iter(np.random.default_rng(0).permutation(num_blocks).tolist())
    rows = []
    for start, end in [*((end - 1, end) for end in ROWS), *PROMPTS]:
        table = [next(blocks) for _ in range(-(-end // PAGE))]
        cache.clear(0, torch.tensor([block * cache.chunks_per_block + i for block in table for i in range(2)]))
        slots_T = torch.tensor([table[at // PAGE] * PAGE + at % PAGE for at in range(start)], dtype=torch.long)
        cache.write(0, *new_tokens(shape, start), slots_T)
        request = ActiveRequest("r", [1], SamplingParams(), created_time=0.0)
        rows.append(PlannedRow(request, start, [1] * (end - start), [table], samples=True))
    reference, in_place = (
        build_batch(rows, cache, (shape.window,), CPU, reads_in_place=flag).step.views[0] for flag in (False, True)
    )
    assert isinstance(reference, LayerView)
    assert isinstance(in_place, LayerView)
    return reference, in_place, cache


def new_tokens(shape: LayerShape, number: int) -> tuple[Tensor, Tensor]:
    widths = (shape.key_width, shape.value_width)
    key, value = (torch.randn(shape.num_kv_heads, number, width) for width in widths)
    return key, value


SHAPES: list[tuple[LayerShape, int, dict[str, Any]]] = [
    (LayerShape(2, 16, 16), 1, {}),
    (LayerShape(3, 64, 64), 3, {}),
    (LayerShape(1, 80, 72, window=70), 2, {}),
    (LayerShape(1, 40, 24), 8, {}),
    (LayerShape(2, 16, 16, window=1), 2, {}),
    (LayerShape(2, 16, 16, window=50), 2, {}),
    (LayerShape(2, 16, 16, window=50), 2, {"softcap": 2.0, "sinks": torch.tensor([0.5, -3.0, 9.0, 0.0])}),
    (LayerShape(2, 7, 5), 3, {"softcap": 30.0}),
    (LayerShape(1, 16, 16), 2, {"sinks": torch.tensor([1.0, float("-inf")])}),
]
"""With how many query heads share a kv head, and the rules of the layer."""


@pytest.mark.parametrize(("shape", "num_groups", "rules"), SHAPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_kernel_gives_what_the_reference_gives(
    shape: LayerShape, num_groups: int, rules: dict[str, Any], num_threads: int
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    reference, in_place, cache = views_of(shape)
    num_tokens = len(reference.slots_T)
    new_HTD = new_tokens(shape, num_tokens)
    query_HGTD = torch.randn(shape.num_kv_heads, num_groups, num_tokens, shape.key_width)
    layer_rules = LayerRules(layer=0, scale=shape.key_width**-0.5, **rules)
    expected = sdpa.attend(reference, query_HGTD, *new_HTD, layer_rules)
    for view in cache.chunks(0):
        view[view == 0] = float("nan")  # nothing relies on what is behind the end of a row
    found = kernel().attend(in_place, query_HGTD, *new_HTD, layer_rules)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    assert torch.get_num_threads() == num_threads


def test_a_key_that_is_nan_shows_in_its_own_row_alone() -> None:
    shape = LayerShape(2, 16, 16)
    torch.manual_seed(0)
    _, view, cache = views_of(shape)
    new_HTD = new_tokens(shape, len(view.slots_T))
    query_HGTD = torch.randn(2, 2, len(view.slots_T), 16)
    row = ROWS.index(200)
    chunk = view.groups[0].chunk_ids.view(len(ROWS), -1)[row, 1]
    cache.chunks(0)[0][:, chunk, 5] = float("nan")
    found_TA = kernel().attend(view, query_HGTD, *new_HTD, LayerRules(layer=0, scale=0.25))
    assert found_TA[row].isnan().all()
    assert not torch.cat([found_TA[:row], found_TA[row + 1 :]]).isnan().any()


def test_the_exponential_is_that_of_the_library() -> None:
    points = np.concatenate([np.linspace(-90, 0, 20_001), [-1e30, -np.inf]]).astype(np.float32)
    found = np.array([exponential(point) for point in points])
    # What rounding x itself does to e^x is in the bound: weights that small count for nothing.
    expected, distance = np.exp(points.astype(np.float64)), np.abs(np.maximum(points, -90))
    assert (np.abs(found - expected) <= expected * (3e-7 + 1e-7 * distance) + 2e-38).all()
    assert np.isnan(exponential(np.float32("nan")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_take_the_reference(dtype: torch.dtype) -> None:
    assert find_cpu_kernel(dtype, CPU) is None
