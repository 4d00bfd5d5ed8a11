"""A decoder layer computed at once is the layer, or the layer computes in its own way."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_models import SUPPORTED, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from engine.active_request import ActiveRequest
from engine.attention.cpu import CpuKernel, find_cpu_kernel
from engine.attention.interface import STEP_ARGUMENT, attention_configs, no_attention, run_attention, use_step
from engine.batch import build_batch
from engine.config import ResolvedConfig
from engine.decoder_kernels import BLOCK, MIN_ROWS_OF_A_THREAD
from engine.fused_decoder import FusedLayer, fuse_decoder_layers
from engine.kv_cache import KVCache
from engine.matrix_tiles import IS_SUPPORTED
from engine.model_runner import probe_layers, stand_ins_for
from engine.packed_weights import PackedWeights
from engine.plan import PlannedRow
from engine.products import OneDnnProducts, PanelProducts
from engine.request import SamplingParams
from engine.stand_ins import StandIn, in_use

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="this processor has no products of ours")

CPU = torch.device("cpu")
PAGE, NUM_BLOCKS = 16, 24
STEPS = [[(0, 0, 37)], [(0, 37, 38), (1, 0, 20)], [(0, 38, 39), (1, 20, 21)]]
"""Of each row the request, its first position and its end: a prompt alone, one beside a single token, two of these."""


def kernel() -> CpuKernel:
    found = find_cpu_kernel(torch.float32, CPU)
    assert found is not None
    return found


def packed_of(model: PreTrainedModel) -> PackedWeights:
    packed = PackedWeights(model, PanelProducts())
    packed.refresh()
    return packed


def logits_of(
    model: PreTrainedModel,
    stand_ins: Sequence[StandIn],
    attention: CpuKernel | None = None,
    *,
    steps: Sequence[Sequence[tuple[int, int, int]]] = STEPS,
    **named: Any,
) -> Tensor:
    """Gives what the model computes in the steps; without a kernel attention is that of torch."""
    layers = probe_layers(model)
    windows = tuple(dict.fromkeys(layer.window for layer in layers))
    cache = KVCache(layers, config_of(windows), dtype=torch.float32, device=CPU)
    found = []
    for step in steps:
        rows = [planned_row(*row, num_groups=len(windows)) for row in step]
        batch = build_batch(rows, cache, windows, CPU, reads_in_place=attention is not None)
        named_step = {STEP_ARGUMENT: run_attention(batch.step, attention)}
        with torch.inference_mode(), use_step(attention_configs(model)), in_use(stand_ins):
            ids, places = batch.input_ids_1T, batch.position_ids_1T
            output = model(input_ids=ids, position_ids=places, use_cache=False, **named_step, **named)
        found.append(output.logits[0])
    return torch.cat(found)


def config_of(windows: tuple[int | None, ...]) -> ResolvedConfig:
    return ResolvedConfig(
        page_size=PAGE, num_blocks=NUM_BLOCKS, max_batch_tokens=512, max_requests_per_batch=64, max_model_len=512,
        vocab_size=256, allow_block_sharing=True, safety_margin=0, max_queue_size=0, target_step_s=None, seed=0,
        return_logprobs=False, windows=windows,
    )  # fmt: skip


def planned_row(number: int, start: int, end: int, *, num_groups: int) -> PlannedRow:
    request = ActiveRequest(str(number), [1], SamplingParams(), created_time=0.0)
    table = list(range(5 * number, 5 * number + -(-end // PAGE)))
    tokens = [(7 * at + 3 * number) % 256 for at in range(start, end)]
    return PlannedRow(request, start, tokens, [table] * num_groups, samples=True)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[FusedLayer]:
    """The layers that were computed at once, call by call."""
    calls: list[FusedLayer] = []
    finish = FusedLayer.finish

    def counted(layer: FusedLayer, *arguments: Any) -> Tensor:
        calls.append(layer)
        return finish(layer, *arguments)

    monkeypatch.setattr(FusedLayer, "finish", counted)
    return calls


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_family_computes_the_same(family: str) -> None:
    model = tiny_model(family)
    expected = logits_of(model, [])
    found = logits_of(model, stand_ins_for(model, packed_of(model)), kernel())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "mistral", "qwen2"])
def test_the_common_families_are_computed_a_layer_at_once(family: str, fused_calls: list[FusedLayer]) -> None:
    model: Any = tiny_model(family)
    stand_ins = stand_ins_for(model, packed_of(model))
    fused_calls.clear()  # those of the trial
    logits_of(model, stand_ins, kernel())
    assert len(fused_calls) == len(STEPS) * len(model.model.layers)


@pytest.mark.parametrize("overrides", [{"attention_bias": True}, {"hidden_size": 72, "intermediate_size": 90}])
def test_biases_and_widths_beside_the_panels_go(overrides: dict[str, Any], fused_calls: list[FusedLayer]) -> None:
    model = tiny_model("llama", **overrides)
    stand_ins = stand_ins_for(model, packed_of(model))
    fused_calls.clear()
    found = logits_of(model, stand_ins, kernel())
    assert fused_calls
    torch.testing.assert_close(found, logits_of(model, []), rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [MIN_ROWS_OF_A_THREAD - 1, MIN_ROWS_OF_A_THREAD, 2 * BLOCK + 3, 2 * BLOCK + 70])
@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "hidden_size": 72, "intermediate_size": 90}])
def test_many_rows_are_divided_over_the_threads(overrides: dict[str, Any], num_rows: int, num_threads: int) -> None:
    model = tiny_model("llama", **overrides)
    steps = [[(0, 0, num_rows)], [(0, num_rows, num_rows + 1)]]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        attention = kernel()
        attention.use_threads()
        found = logits_of(model, stand_ins_for(model, packed_of(model)), attention, steps=steps)
    finally:
        torch.set_num_threads(before)
        kernel().use_threads()
    torch.testing.assert_close(found, logits_of(model, [], steps=steps), rtol=1e-4, atol=3e-4)


class DoublingLayer(LlamaDecoderLayer):
    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        doubled: Tensor = 2 * super().forward(*arguments, **named)
        return doubled


class LateNormLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=hidden_states, **named)
        hidden_states = hidden_states + self.input_layernorm(attended)
        return hidden_states + self.post_attention_layernorm(self.mlp(hidden_states))


class ScaledAttention(LlamaAttention):
    def forward(self, hidden_states: Tensor, **named: Any) -> Any:
        attended, weights = super().forward(hidden_states, **named)
        return 0.5 * attended, weights


class FarAttention(LlamaAttention):
    first = 0

    def forward(self, hidden_states: Tensor, **named: Any) -> Any:
        attended, weights = super().forward(hidden_states, **named)
        is_far_1T1 = (named["position_ids"] >= self.first)[..., None]
        return torch.where(is_far_1T1, 0.5 * attended, attended), weights


class AttentionFarFromTheStart(FarAttention):
    first = 100


class AttentionBeyondAMillion(FarAttention):
    first = 5_000_000


class TabledAttention(LlamaAttention):
    def forward(self, hidden_states: Tensor, **named: Any) -> Any:
        scales_N = torch.linspace(1, 2, 64)  # for the positions that this model has
        attended, weights = super().forward(hidden_states, **named)
        return scales_N[named["position_ids"]][..., None] * attended, weights


class GatedLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.share = nn.Parameter(torch.ones(1))  # today it changes nothing


def other_layer(kind: type[LlamaDecoderLayer]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        layer = kind(model.config, 0)
        layer.load_state_dict(model.model.layers[0].state_dict(), strict=False)
        model.model.layers[0] = layer.eval()

    return change


def other_attention(kind: type[LlamaAttention]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        attention = kind(model.config, 0)
        attention.load_state_dict(model.model.layers[0].self_attn.state_dict())
        model.model.layers[0].self_attn = attention

    return change


def other_forward(model: Any) -> None:
    model.model.layers[0].mlp.act_fn.forward = torch.relu


def other_gate(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def biased_gate(model: Any) -> None:
    model.model.layers[0].mlp.gate_proj = nn.Linear(64, 96)


CHANGES = [
    *map(other_layer, (DoublingLayer, LateNormLayer, GatedLayer)),
    *map(other_attention, (ScaledAttention, AttentionFarFromTheStart, AttentionBeyondAMillion, TabledAttention)),
    other_forward,
    other_gate,
    biased_gate,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_computes_something_else_keeps_its_own_way(change: Callable[[Any], None]) -> None:
    model: Any = tiny_model("llama")
    change(model)
    packed = packed_of(model)
    assert [module for module, _ in fuse_decoder_layers(model, packed)] == [model.model.layers[1]]
    found = logits_of(model, stand_ins_for(model, packed), kernel())
    torch.testing.assert_close(found, logits_of(model, []), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("zeroed", ["gate_proj", "up_proj", "down_proj", "q_proj", "o_proj", "norm"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_weights_that_hide_a_difference_do_not_choose_a_way(activation: str, zeroed: str) -> None:
    model = tiny_model("llama", hidden_act=activation)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if zeroed in name:
                parameter.zero_()
    packed = packed_of(model)
    fused = fuse_decoder_layers(model, packed)
    assert len(fused) == (2 if activation == "silu" else 0)
    stand_ins = stand_ins_for(model, packed)
    model.load_state_dict(weights)
    packed.refresh(all_of_them=True)
    torch.testing.assert_close(logits_of(model, stand_ins, kernel()), logits_of(model, []), rtol=1e-4, atol=3e-4)


def test_other_dtypes_products_and_cut_models_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    packed = packed_of(model)
    assert fuse_decoder_layers(tiny_model("llama").to(torch.bfloat16), packed) == []
    assert fuse_decoder_layers(model, PackedWeights(model, OneDnnProducts())) == []
    monkeypatch.setattr(type(model), "tp_size", 2, raising=False)
    assert fuse_decoder_layers(model, packed) == []


def test_somebody_who_listens_to_a_part_hears_it(fused_calls: list[FusedLayer]) -> None:
    model: Any = tiny_model("llama")
    stand_ins = stand_ins_for(model, packed_of(model))
    fused_calls.clear()
    heard: list[Tensor] = []
    hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *told: heard.append(told[-1]))
    found = logits_of(model, stand_ins, kernel())
    assert len(heard) == len(STEPS) + 1, "the steps, and the look at the layers before"
    assert len(fused_calls) == len(STEPS), "the other layer"
    hook.remove()
    torch.testing.assert_close(found, logits_of(model, []), rtol=1e-4, atol=3e-4)


def test_attention_of_torch_keeps_the_layers_own_way(fused_calls: list[FusedLayer]) -> None:
    model = tiny_model("llama")
    stand_ins = stand_ins_for(model, packed_of(model))
    fused_calls.clear()
    found = logits_of(model, stand_ins, None)
    assert not fused_calls
    torch.testing.assert_close(found, logits_of(model, []), rtol=1e-4, atol=3e-4)


MISFITS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "a mask": lambda rows, named: named.update(attention_mask=torch.zeros(1, 1, 3, 3)) or rows,
    "an argument nobody knows": lambda rows, named: named.update(token_types=torch.zeros(1, 3)) or rows,
    "another dtype": lambda rows, _: rows.double(),
    "a batch of two": lambda rows, _: torch.cat([rows, rows]),
    "rows apart": lambda rows, _: torch.cat([rows, rows], dim=-1)[..., :64],
    "no angles": lambda rows, named: named.update(position_embeddings=None) or rows,
    "angles of half a head": lambda rows, named: (
        named.update(position_embeddings=tuple(turn[..., :8].contiguous() for turn in named["position_embeddings"]))
        or rows
    ),
    "no step": lambda rows, named: named.pop(STEP_ARGUMENT) and rows,
    "another step function": lambda rows, named: named.update({STEP_ARGUMENT: no_attention}) or rows,
}


def fitting_call(layer: int = 0) -> tuple[FusedLayer, Tensor, dict[str, Any]]:
    model = tiny_model("llama")
    shapes = probe_layers(model)
    cache = KVCache(shapes, config_of((None,)), dtype=torch.float32, device=CPU)
    batch = build_batch([planned_row(0, 0, 3, num_groups=1)], cache, (None,), CPU, reads_in_place=True)
    fused = fuse_decoder_layers(model, packed_of(model))[layer][1]
    assert isinstance(fused, FusedLayer)
    turns = torch.ones(1, 3, 16), torch.zeros(1, 3, 16)
    named = {"position_embeddings": turns, "use_cache": False, STEP_ARGUMENT: run_attention(batch.step, kernel())}
    return fused, torch.randn(1, 3, 64), named


@pytest.mark.parametrize("what", MISFITS)
def test_a_call_that_does_not_fit_is_left_to_the_layer(what: str) -> None:
    fused, rows_1MD, named = fitting_call()
    with torch.inference_mode():
        assert fused.compute(rows_1MD, **named) is not None
        other_rows = MISFITS[what](rows_1MD, named)
        assert fused.compute(other_rows, **named) is None


def test_gradients_and_training_are_left_to_the_layer() -> None:
    fused, rows_1MD, named = fitting_call()
    assert fused.compute(rows_1MD, **named) is None, "gradients are wanted"
    with torch.inference_mode():
        assert fused.compute(rows_1MD, **named) is not None
        fused._layer.train()
        assert fused.compute(rows_1MD, **named) is None


def test_a_stand_in_follows_the_weights(fused_calls: list[FusedLayer]) -> None:
    model = tiny_model("llama")
    packed = packed_of(model)
    stand_ins = stand_ins_for(model, packed)
    logits_of(model, stand_ins, kernel())
    new, third = tiny_model("llama", seed=9), tiny_model("llama", seed=10)
    for held, spare in zip(model.parameters(), new.parameters(), strict=True):
        held.data = spare.data.clone()
    fused_calls.clear()
    torch.testing.assert_close(logits_of(model, stand_ins, kernel()), logits_of(new, []), rtol=1e-4, atol=3e-4)
    assert not fused_calls, "there is no copy of the new weights yet"
    packed.refresh()
    torch.testing.assert_close(logits_of(model, stand_ins, kernel()), logits_of(new, []), rtol=1e-4, atol=3e-4)
    assert fused_calls
    with torch.no_grad():
        for held, spare in zip(model.parameters(), third.parameters(), strict=True):
            held.copy_(spare)
    packed.refresh(all_of_them=True)
    torch.testing.assert_close(logits_of(model, stand_ins, kernel()), logits_of(third, []), rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("drop", [PackedWeights.forget, lambda packed: packed.refresh(all_of_them=True)])
def test_copies_that_are_given_up_are_held_by_nobody(drop: Callable[[PackedWeights], object]) -> None:
    model: Any = tiny_model("llama")
    packed = packed_of(model)
    logits_of(model, stand_ins_for(model, packed), kernel())
    copy = weakref.ref(packed.panels_of(model.model.layers[0].self_attn.q_proj.weight))
    assert copy() is not None
    drop(packed)
    gc.collect()
    assert copy() is None
