"""A stand-in computes what the module computes, or there is none."""

from typing import Any

import pytest
import torch
from tiny_models import SUPPORTED, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from engine.fused_layers import fuse_layers
from engine.stand_ins import in_use


def logits_of(model: PreTrainedModel) -> Tensor:
    ids_1T = torch.arange(40)[None] % model.config.vocab_size
    with torch.inference_mode():
        logits: Tensor = model(ids_1T).logits
    return logits


def kinds(model: PreTrainedModel) -> list[str]:
    return sorted({type(module).__name__ for module, _ in fuse_layers(model)})


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_family_computes_the_same(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    stand_ins = fuse_layers(model)
    expected = logits_of(model)
    with in_use(stand_ins):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=2e-4)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_the_common_families_are_fused_throughout(family: str) -> None:
    model = tiny_model(family)
    found = fuse_layers(model)
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    gates = sum(type(module).__name__.endswith("MLP") for module in model.modules())
    assert len(found) == norms + gates + model.config.num_hidden_layers


def test_norms_that_add_one_to_their_weight_are_told_from_those_that_do_not() -> None:
    assert "Gemma3RMSNorm" in kinds(tiny_model("gemma3"))
    assert "Gemma3MLP" not in kinds(tiny_model("gemma3")), "its gate is not this one"


class TwiceRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


class OtherMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))  # the other way round


class CappedMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-5, 5)  # shows for large input alone


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        normed = super().forward(hidden_states)
        return normed if gate is None else normed * gate


class BiasedRMSNorm(LlamaRMSNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = nn.Parameter(torch.zeros(width))  # today it changes nothing

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + self.bias


class BufferedRMSNorm(LlamaRMSNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("gain", torch.ones(1))  # nor does this

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * self.gain


class ScaledMLP(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.share = nn.Parameter(torch.ones(1))  # nor this

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.share


IMPOSTORS = [TwiceRMSNorm, OtherMLP, CappedMLP, GatedRMSNorm, BiasedRMSNorm, BufferedRMSNorm, ScaledMLP]


@pytest.mark.parametrize("impostor", IMPOSTORS)
def test_a_module_that_computes_something_else_keeps_its_own_way(impostor: Any) -> None:
    model: Any = tiny_model("llama")
    layer = model.model.layers[0]
    name = "mlp" if issubclass(impostor, LlamaMLP) else "input_layernorm"
    replaced = impostor(model.config) if name == "mlp" else impostor(64)
    setattr(layer, name, replaced)
    assert all(module is not replaced for module, _ in fuse_layers(model))


class TunedRMSNorm(LlamaRMSNorm):
    gain = 1.0

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.gain * super().forward(hidden_states)


def test_modules_of_one_class_that_are_set_otherwise_are_told_apart() -> None:
    model: Any = tiny_model("llama")
    plain, tuned = TunedRMSNorm(64), TunedRMSNorm(64)
    tuned.gain = 3.0
    model.model.layers[0].input_layernorm, model.model.layers[1].input_layernorm = plain, tuned
    fused = [module for module, _ in fuse_layers(model)]
    assert any(module is plain for module in fused)
    assert all(module is not tuned for module in fused)


def test_a_forward_that_was_replaced_is_left_alone() -> None:
    model: Any = tiny_model("llama")
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda rows: rows
    stand_ins = fuse_layers(model)
    assert all(module is not norm for module, _ in stand_ins)
    with in_use(stand_ins):
        logits_of(model)
    assert "forward" in vars(norm)


def test_a_module_with_a_buffer_is_told_from_one_without() -> None:
    model: Any = tiny_model("llama")
    buffered = LlamaRMSNorm(64)
    buffered.register_buffer("gain", torch.ones(1))
    model.model.layers[1].input_layernorm = buffered
    fused = [module for module, _ in fuse_layers(model)]
    assert all(module is not buffered for module in fused)
    assert any(module is model.model.layers[0].input_layernorm for module in fused)


ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid", "mish", "linear"]


@pytest.mark.parametrize("zeroed", ["gate_proj", "up_proj", "down_proj", "o_proj", "norm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_that_hide_an_activation_do_not_choose_a_stand_in(activation: str, zeroed: str) -> None:
    model = tiny_model("llama", hidden_act=activation)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if zeroed in name:
                parameter.zero_()
    stand_ins = fuse_layers(model)
    model.load_state_dict(weights)
    expected = logits_of(model)
    with in_use(stand_ins):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=3e-4)


def test_trying_a_module_out_leaves_its_weights() -> None:
    model = tiny_model("llama")
    held = {name: (tensor.data_ptr(), tensor._version) for name, tensor in model.named_parameters()}
    fuse_layers(model)
    assert held == {name: (tensor.data_ptr(), tensor._version) for name, tensor in model.named_parameters()}


def test_a_stand_in_follows_the_weights() -> None:
    model = tiny_model("llama")
    stand_ins = fuse_layers(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
    expected = logits_of(model)
    with in_use(stand_ins):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e20, -1e20])
def test_extreme_rows_come_out_as_the_module_has_them(value: float) -> None:
    model: Any = tiny_model("llama")
    stand_ins = {id(module): forward for module, forward in fuse_layers(model)}
    rows = torch.randn(1, 4, 64)
    rows[0, 1] = value
    modules: list[nn.Module] = [model.model.layers[0].mlp, model.model.norm]
    with torch.inference_mode():
        for module in modules:
            wanted, found = module(rows), stand_ins[id(module)](rows)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_other_dtypes_have_none() -> None:
    assert fuse_layers(tiny_model("llama").to(torch.bfloat16)) == []
