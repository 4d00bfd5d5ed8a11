import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers.ours import generate_all
from benchmarks.profile import (
    ATTENTION,
    BATCH,
    CACHE_WRITE,
    LAYERS,
    MODEL,
    REST,
    SAMPLING,
    STEP,
    VOCABULARY,
    Clocks,
    Shape,
    count_flops,
    report,
    shape_of,
    split,
)
from engine import ContinuousBatchingConfig, continuous_batching_context_manager
from engine.matrix_tiles import IS_SUPPORTED


def tiny_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).eval()


def test_products_are_counted_as_torch_counts_them() -> None:
    """One new token: the prompt's forward with one row of logits, whose attention torch counts without the mask."""
    model, length = tiny_model(), 7
    model.config._attn_implementation = "eager"
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long), logits_to_keep=1)
    counted = count_flops(shape_of(model), [length], 1)
    all_pairs, seen_pairs = length * length, length * (length + 1) // 2
    attention = counted[ATTENTION] * all_pairs / seen_pairs
    positions = counter.get_total_flops() - (sum(counted.values()) - counted[ATTENTION] + attention)
    # What is left is the product that makes the rotary angles.
    assert 0 <= positions <= 2 * length * 8


def test_the_last_token_of_a_request_is_not_computed() -> None:
    shape = Shape(num_layers=1, layer_weights=10, num_heads=1, head_dim=1, hidden_size=1, vocab_size=1)
    assert count_flops(shape, [5, 5], 3)[LAYERS] == 2 * 10 * 2 * 7


def test_parts_add_up_to_the_whole() -> None:
    spent = {STEP: 9.0, MODEL: 8.0, ATTENTION: 2.0, LAYERS: 5.0}
    parts = split(spent, 10.0)
    assert sum(parts.values()) == pytest.approx(10.0)
    assert parts[REST] == pytest.approx(1.0)


def test_a_part_that_no_clock_saw_is_told() -> None:
    table = report({LAYERS: 0.0, ATTENTION: 2.0}, {LAYERS: 1e9, ATTENTION: 4e9}, 4e9)
    assert "| matrix products of the layers | 0.00 | 0.0 % | 1 | not seen | not seen |" in table
    assert "| attention | 2.00 | 100.0 % | 4 | 2.0 | 50 % |" in table


def test_every_part_of_the_engine_has_its_clock() -> None:
    """Or a part that was moved would be reported as free."""
    model, clocks = tiny_model(), Clocks()
    config = ContinuousBatchingConfig(page_size=16, num_blocks=8)
    # The manager stops last: its thread is then done with the last step's clock.
    with (
        continuous_batching_context_manager(model, continuous_batching_config=config) as manager,
        clocks.on_engine(model),
    ):
        generate_all(manager, [[1, 2, 3], [4, 5]], 4)
    steps = clocks.counts[MODEL]
    assert steps > 0
    assert clocks.counts[STEP] == clocks.counts[BATCH] == clocks.counts[VOCABULARY] == clocks.counts[SAMPLING] == steps
    # One call before attention and one behind it, where a layer is computed at once: the first writes the cache.
    assert clocks.counts[LAYERS] == 2 * (2 if IS_SUPPORTED else 7) * steps
    assert clocks.counts[ATTENTION] == 2 * steps
    assert clocks.counts[CACHE_WRITE] == (0 if IS_SUPPORTED else 2 * steps)
    assert all(seconds >= 0 for seconds in split(clocks.spent, clocks.spent[STEP]).values())
