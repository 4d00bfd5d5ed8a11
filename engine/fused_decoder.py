"""Whole decoder layers of a model on a CPU, of the kind that Llama has, in three compiled calls instead of fifteen.

Rows are normed, multiplied, turned and stored; attention reads them; they are multiplied, normed, gated and multiplied.
As with single modules nothing is taken for granted from a name: a layer gets a stand-in only where both give the same
for random input. Whatever a call holds that the stand-in does not know, the layer computes in its own way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.cpu import CpuKernel, find_cpu_kernel, load_kernels
from engine.attention.interface import HARMLESS_ARGUMENTS, STEP_ARGUMENT, StepAttention, use_step
from engine.attention.step import AttentionStep, LayerView, PromptChunk
from engine.fused_layers import MLP_PARTS, is_close, likeness, norm_numbers, with_random_weights
from engine.packed_weights import PackedWeights
from engine.stand_ins import StandIn, has_own_forward

NORMS, ATTENTION, MLP = ("input_layernorm", "post_attention_layernorm"), "self_attn", "mlp"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
TRIAL_TOKENS, TRIAL_CHUNK = 5, 8
TRIAL_SCALES = (1e-2, 1.0, 30.0)
TRIAL_POSITIONS = (0, 1, 10**3, 10**6, 10**9)
"""Far apart, and beyond any model's length: a layer that looks at them by itself shows here."""
NO_BIAS = np.empty(0, np.float32)

Numbers = tuple[np.float32, np.float32]
"""Of a norm: what is added to its weight, and its epsilon."""
FindPanels = Callable[[Tensor], Any]
"""Gives the packed copy of a weight, or None."""


def fuse_decoder_layers(model: PreTrainedModel, packed: PackedWeights) -> list[StandIn]:
    """Gives the stand-ins for a model's decoder layers; `packed` is what its linear layers compute with.

    Where one of them falls back, the modules in the layer compute with stand-ins of their own.
    """
    attention = find_cpu_kernel(model.dtype, model.device)
    if attention is None or not packed.in_panels or getattr(model, "tp_size", None):
        return []
    tools = _Tools(load_kernels("engine.decoder_kernels"), load_kernels("engine.fused_kernels"), attention)
    shapes: dict[object, _Shape | None] = {}
    stand_ins: list[StandIn] = []
    with torch.inference_mode():
        for layer in model.modules():
            if not _has_the_parts(layer, packed):
                continue
            kind = likeness(layer)
            if kind not in shapes:
                shapes[kind] = _probed(layer, packed, tools)
            shape = shapes[kind]
            if shape is not None:
                stand_ins.append((layer, FusedLayer(layer, shape, packed, tools)))
    return stand_ins


@dataclass(frozen=True, slots=True)
class _Tools:
    """Modules of compiled functions: numba has no types."""

    kernels: Any
    norms: Any
    attention: CpuKernel


@dataclass(frozen=True)
class _Shape:
    """What layers of one kind have in common, and their room to compute in: one of them computes at a time."""

    norms: tuple[Numbers, Numbers]
    scale: float
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_gate_columns: int
    room: "_Room"


class _Room:
    """Memory that grows: new memory for each layer costs page faults."""

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}

    def take(self, name: str, *shape: int) -> np.ndarray:
        """Gives memory that is the caller's until the next call with the same name."""
        size = prod(shape)
        held = self._memory.get(name)
        if held is None or len(held) < size:
            held = self._memory[name] = np.empty(size + size // 4, np.float32)
        return held[:size].reshape(shape)


class FusedLayer:
    """The forward of one decoder layer."""

    def __init__(self, layer: nn.Module, shape: _Shape, packed: PackedWeights, tools: _Tools) -> None:
        """Looks at the layer's tensors anew in each call: any of them may have been replaced."""
        self._layer, self._shape, self._packed, self._tools = layer, shape, packed, tools
        parts: Any = layer
        self._index: int = parts.self_attn.layer_idx
        self._norms = [parts.input_layernorm, parts.post_attention_layernorm]
        self._linear = [getattr(parts.self_attn, name) for name in PROJECTIONS]
        self._linear += [parts.mlp.gate_proj, parts.mlp.up_proj, parts.mlp.down_proj]
        # Looked up here once: a module's own way to an attribute takes longer than what is done with it.
        self._tensors = [
            (module._parameters, name)
            for module in [*self._norms, *self._linear]
            for name, tensor in module._parameters.items()
            if tensor is not None
        ]
        inner = [module for module in layer.modules() if module is not layer]
        self._hooks = [hooks for part in inner for hooks in (part._forward_hooks, part._forward_pre_hooks)]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Gives what the layer gives, in its own way where the call does not fit."""
        found = self.compute(*arguments, **named) if len(arguments) == 1 else None
        return type(self._layer).forward(self._layer, *arguments, **named) if found is None else found

    def compute(self, rows_1MD: Tensor, **named: Any) -> Tensor | None:
        """Gives what the layer gives, or None where the call does not fit."""
        attention, turns = named.pop(STEP_ARGUMENT, None), named.pop("position_embeddings", None)
        if any(value is not None and name not in HARMLESS_ARGUMENTS for name, value in named.items()):
            return None
        weights = self._weights()
        if weights is None or not _is_in_place(attention) or not self._fits(rows_1MD, turns):
            return None
        view = attention.step.view(self._index)
        keys_HNCE, values_HNCE = view.cache.chunks(self._index)
        cache_HNCE = keys_HNCE.numpy(), values_HNCE.numpy()
        query_MAE = self.begin(rows_1MD, weights, turns, view, cache_HNCE)
        attended_MAE = self._shape.room.take("attended", *query_MAE.shape)
        self._tools.attention.attend_stored(view, query_MAE, cache_HNCE, self._shape.scale, attended_MAE)
        return self.finish(rows_1MD, weights, attended_MAE)

    def begin(self, rows_1MD: Tensor, weights: "_Weights", turns: Any, view: LayerView, cache_HNCE: Any) -> np.ndarray:
        """Gives the query, and writes keys and values."""
        room, num_rows = self._shape.room, rows_1MD.shape[1]
        heads, kv_heads = (
            (self._shape.num_heads, self._shape.head_dim),
            (self._shape.num_kv_heads, self._shape.head_dim),
        )
        turned_MAE = room.take("turned", num_rows, *heads)
        self._tools.kernels.begin(
            rows_1MD.numpy()[0],
            weights.norms[0],
            weights.products[:3],
            (turns[0].numpy()[0], turns[1].numpy()[0]),
            view.slots_T.numpy(),
            cache_HNCE,
            (
                room.take("normed", torch.get_num_threads(), num_rows, self._shape.width),
                room.take("query", num_rows, *heads),
                room.take("keys", num_rows, *kv_heads),
                room.take("values", num_rows, *kv_heads),
                turned_MAE,
            ),
            torch.get_num_threads(),
        )
        return turned_MAE

    def finish(self, rows_1MD: Tensor, weights: "_Weights", attended_MAE: np.ndarray) -> Tensor:
        """Gives the output of the layer."""
        room, num_rows = self._shape.room, rows_1MD.shape[1]
        out_1MD = torch.empty_like(rows_1MD)
        self._tools.kernels.finish(
            attended_MAE.reshape(num_rows, -1),
            rows_1MD.numpy()[0],
            weights.products[3],
            weights.norms[1],
            weights.gates,
            weights.down,
            (
                room.take("normed", torch.get_num_threads(), num_rows, self._shape.width),
                room.take("gated", num_rows, self._shape.num_gate_columns),
            ),
            out_1MD.numpy()[0],
            torch.get_num_threads(),
        )
        return out_1MD

    def _weights(self) -> "_Weights | None":
        """None where one of them has no copy, or somebody listens to a part or trains it."""
        if self._layer.training or any(self._hooks):
            return None
        addresses = [tensors[name].data_ptr() for tensors, name in self._tensors]
        made = self._packed.made_of_them()
        known = made.get(self)
        if known is None or known.addresses != addresses:
            known = _weights(self._norms, self._linear, self._shape.norms, self._packed.panels_of, addresses)
            made[self] = known
        return known if known.is_whole else None

    def _fits(self, rows_1MD: Tensor, turns: Any) -> bool:
        if not isinstance(turns, tuple) or torch.is_grad_enabled():
            return False
        wanted = (1, rows_1MD.shape[1], self._shape.head_dim)
        return (
            rows_1MD.dtype == torch.float32
            and rows_1MD.ndim == 3
            and len(rows_1MD) == 1
            and rows_1MD.is_contiguous()
            and all(turn.shape == wanted and turn.dtype == torch.float32 and turn.is_contiguous() for turn in turns)
        )


@dataclass(frozen=True, slots=True)
class _Weights:
    """As the kernels take them: a norm is weight, offset, epsilon; a product panels and bias."""

    norms: Any
    products: Any
    gates: Any
    down: Any
    addresses: list[int]
    is_whole: bool
    """False where a weight has no copy."""


def _weights(
    norms: list[Any], linear: list[Any], numbers: tuple[Numbers, Numbers], find_panels: FindPanels, addresses: list[int]
) -> _Weights:
    products = [
        (find_panels(layer.weight), NO_BIAS if layer.bias is None else layer.bias.detach().numpy()) for layer in linear
    ]
    gate, up, down = products[4:]
    return _Weights(
        norms=tuple((norm.weight.detach().numpy(), *pair) for norm, pair in zip(norms, numbers, strict=True)),
        products=tuple(products[:4]),
        gates=(gate[0], up[0]),
        down=down,
        addresses=addresses,
        is_whole=all(panels is not None for panels, _ in products),
    )


def _is_in_place(attention: Any) -> bool:
    return isinstance(attention, StepAttention) and attention.kernel is not None


def _has_the_parts(layer: Any, packed: PackedWeights) -> bool:
    """True for a layer of these modules and no tensors of its own, each of which computes what its class does."""
    if {name for name, _ in layer.named_children()} != {*NORMS, ATTENTION, MLP}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if {name for name, _ in attention.named_children()} != set(PROJECTIONS):
        return False
    if {name for name, _ in mlp.named_children()} != MLP_PARTS:
        return False
    linear = [getattr(attention, name) for name in PROJECTIONS] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    has_tensors = any(
        list(part.parameters(recurse=False)) + list(part.buffers(recurse=False)) for part in (layer, attention, mlp)
    )
    return (
        all(packed.knows(one) for one in linear)
        and mlp.gate_proj.bias is None
        and mlp.up_proj.bias is None
        and not has_tensors
        and not any(map(has_own_forward, layer.modules()))
        and isinstance(getattr(attention, "layer_idx", None), int)
        and isinstance(getattr(attention, "head_dim", None), int)
    )


def _probed(layer: Any, packed: PackedWeights, tools: _Tools) -> _Shape | None:
    """Gives what layers like this one need, where its own way and the fused one agree for random weights."""
    norms = [norm_numbers(getattr(layer, name), tools.norms) for name in NORMS]
    attention, head_dim = layer.self_attn, layer.self_attn.head_dim
    heads = [getattr(attention, name).out_features / head_dim for name in PROJECTIONS[:3]]
    if norms[0] is None or norms[1] is None or heads[1] != heads[2] or any(one % 1 for one in heads):
        return None
    trial = with_random_weights(layer)
    if trial is None:
        return None
    own = _Own(trial, int(heads[1]), head_dim, tools)
    try:
        wanted = [own.compute(scale) for scale in TRIAL_SCALES]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # it is called in another way
        return None
    if not own.is_plain or own.scale is None:
        return None
    shape = _Shape(
        norms=(norms[0], norms[1]),
        scale=own.scale,
        width=attention.q_proj.in_features,
        num_heads=int(heads[0]),
        num_kv_heads=int(heads[1]),
        head_dim=head_dim,
        num_gate_columns=layer.mlp.gate_proj.out_features,
        room=_Room(),
    )
    fused = FusedLayer(trial, shape, packed.of(trial), tools)
    found = [own.compute(scale, fused.compute) for scale in TRIAL_SCALES]
    pairs = zip(wanted, found, strict=True)
    return shape if all(_all_close(one, other) for one, other in pairs) else None


class _Own:
    """Calls a layer the way a model does, on a few tokens of one request."""

    def __init__(self, layer: Any, num_kv_heads: int, head_dim: int, tools: _Tools) -> None:
        self._layer, self._shape, self._tools = layer, (num_kv_heads, 1, TRIAL_CHUNK, head_dim), tools
        self.is_plain = True
        self.scale: float | None = None

    def compute(self, magnitude: float, forward: Callable[..., Any] | None = None) -> Sequence[Any]:
        """Gives the output, the keys and the values."""
        generator = torch.Generator().manual_seed(0)
        width, head_dim = self._layer.self_attn.q_proj.in_features, self._shape[-1]
        rows_1MD = torch.randn(1, TRIAL_TOKENS, width, generator=generator) * magnitude
        # Unlike a real model's, all angles differ: so another order of the halves shows.
        angles_1ME = torch.randn(1, TRIAL_TOKENS, head_dim, generator=generator)
        cache = _TrialCache(torch.zeros(self._shape), torch.zeros(self._shape))
        chunk = PromptChunk(0, TRIAL_TOKENS, 0, 0, None)
        view: Any = LayerView(cache, None, torch.arange(TRIAL_TOKENS), [], [chunk])  # type: ignore[arg-type]
        index = self._layer.self_attn.layer_idx
        step = StepAttention(AttentionStep([view], [0] * (index + 1)), self._tools.attention)
        with use_step([self._layer.self_attn.config]):
            output = (forward or self._layer)(
                rows_1MD,
                attention_mask=None,
                position_embeddings=(angles_1ME.cos(), angles_1ME.sin()),
                position_ids=torch.tensor([TRIAL_POSITIONS]),
                use_cache=False,
                **{STEP_ARGUMENT: step if forward else self._listening(step)},
            )
        return output, *cache.chunks(0)

    def _listening(self, step: StepAttention) -> Callable[..., Tensor]:
        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: dict[str, Any]) -> Tensor:
            self.is_plain = self.is_plain and rules["softcap"] is None and rules["s_aux"] is None
            self.scale = rules["scaling"]
            return step(module, query, key, value, rules)

        return attend


@dataclass(frozen=True, slots=True)
class _TrialCache:
    keys: Tensor
    values: Tensor
    chunk_tokens: int = TRIAL_CHUNK

    def chunks(self, layer: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002  # as the cache of all layers
        return self.keys, self.values


def _all_close(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    pairs = zip(wanted, found, strict=True)
    return all(isinstance(one, Tensor) and isinstance(other, Tensor) and is_close(one, other) for one, other in pairs)
