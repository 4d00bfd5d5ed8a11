"""Norms, gates and rotations of a model on a CPU, computed in one pass each where that gives what the model gives.

Nothing is taken for granted from a name: a module gets a stand-in only where both give the same for random input.
"""

import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.cpu import load_kernels
from engine.packed_weights import PackedWeights
from engine.stand_ins import StandIn, has_hooks, has_own_forward

ROTATION = "apply_rotary_pos_emb"
"""What most families of transformers call in the forward of their attention; it is a global of their module."""
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
PROBE_SCALES = (1e-3, 1.0, 30.0)
TOLERANCE = 2e-5
"""Of the largest value; one order above what float32 sums in another order come to, and far below another formula."""

NUM_DRAWN = 65_537
"""Random numbers for one parameter, over and over, as drawing all takes seconds. A prime: so rows are unlike."""

Kernels = Any
"""The module `fused_kernels`: numba has no types."""
Maker = Callable[[nn.Module], Callable[..., Any]]
"""Gives the stand-in of a module."""


def fuse_layers(model: PreTrainedModel, packed: PackedWeights | None = None) -> list[StandIn]:
    """Gives the stand-ins for a model's modules; none unless it is float32 on a CPU, and whole.

    packed: what the model's linear layers compute with, where there is something.

    The first time on a machine takes some seconds, for compiling.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32 or getattr(model, "tp_size", None):
        return []
    kernels = load_kernels("engine.fused_kernels")
    makers: dict[object, Maker | None] = {}
    stand_ins = []
    with torch.inference_mode():
        for module in model.modules():
            if has_own_forward(module) or _is_listened_to_inside(module):
                continue
            # The layers of a model are alike, so one of each kind is tried.
            kind = likeness(module)
            if kind not in makers:
                makers[kind] = _maker(module, kernels, packed)
            maker = makers[kind]
            if maker is not None:
                stand_ins.append((module, maker(module)))
    return stand_ins


def likeness(module: nn.Module) -> object:
    """Gives what modules that compute the same have in common, weights apart."""
    settings = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors)
    children = tuple((name, likeness(child)) for name, child in module.named_children())
    # The number of a layer is no setting.
    return type(module), tuple(sorted((settings | {"layer_idx": None}).items())), shapes, children


def with_random_weights(module: nn.Module) -> nn.Module | None:
    """Gives a twin to try out: the same modules with random parameters, in memory of their own.

    The weights of today may hide a difference: behind zeros everything agrees. None for a module with buffers, of whose
    values nobody knows which make sense.
    """
    if any(True for _ in module.buffers()):
        return None
    return _twin(module, torch.Generator().manual_seed(1))


def _twin(module: nn.Module, generator: torch.Generator) -> nn.Module:
    twin = nn.Module.__new__(type(module))
    vars(twin).update(vars(module))
    parameters = {name: _random_like(tensor, generator) for name, tensor in module._parameters.items()}
    modules = {name: child if child is None else _twin(child, generator) for name, child in module._modules.items()}
    vars(twin).update(_parameters=parameters, _modules=modules)
    return twin


def _random_like(parameter: nn.Parameter | None, generator: torch.Generator) -> nn.Parameter | None:
    if parameter is None:
        return None
    # So that a product is as large as what it is made of.
    scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
    drawn = torch.randn(min(NUM_DRAWN, parameter.numel()), generator=generator) * scale
    repeated = drawn.repeat(-(-parameter.numel() // max(1, len(drawn))))[: parameter.numel()]
    return nn.Parameter(repeated.view(parameter.shape), requires_grad=False)


def _is_listened_to_inside(module: nn.Module) -> bool:
    """True for an activation with a hook, which a fused gate would not call."""
    return {name for name, _ in module.named_children()} == MLP_PARTS and has_hooks(module.act_fn)  # type: ignore[arg-type]


def _maker(module: nn.Module, kernels: Kernels, packed: PackedWeights | None) -> Maker | None:
    own = _without_deprecation(type(module).forward)
    if type(module).__name__.endswith("RMSNorm"):
        return _norm(module, kernels)
    if {name for name, _ in module.named_children()} == MLP_PARTS:
        return _gated(module, kernels, packed)
    if inspect.isfunction(own) and own.__closure__ is None and ROTATION in own.__code__.co_names:
        return _rotating(own, kernels)
    return None


def _norm(module: Any, kernels: Kernels) -> Maker | None:
    found = norm_numbers(module, kernels)
    if found is None:
        return None

    def normalize(its: Any, rows: Tensor) -> Tensor:
        return _normalized(rows, its.weight, found, kernels)

    return partial(partial, normalize)


def norm_numbers(module: Any, kernels: Kernels) -> tuple[np.float32, np.float32] | None:
    """Gives what a norm by the root mean square adds to its weight, and its epsilon; None for another module."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(epsilon, float):
        return None
    trial: Any = with_random_weights(module)
    if trial is None or not _takes_rows_alone(module):
        return None
    for offset in (0.0, 1.0):  # some families store what is to be added to one
        numbers = np.float32(offset), np.float32(epsilon)
        if _agree(trial, partial(_normalized, weight_D=trial.weight, numbers=numbers, kernels=kernels), len(weight)):
            return numbers
    return None


def _normalized(rows: Tensor, weight_D: Tensor, numbers: tuple[np.float32, np.float32], kernels: Kernels) -> Tensor:
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    kernels.normalize(_matrix(rows), weight_D.detach().numpy(), *numbers, _matrix(out))
    return out


def _gated(module: Any, kernels: Kernels, packed: PackedWeights | None) -> Maker | None:
    if not isinstance(module.gate_proj, nn.Linear):
        return None

    def forward(its: Any, rows: Tensor, packed: PackedWeights | None = packed) -> Tensor:
        gated = None if packed is None else packed.gated(rows, its.gate_proj, its.up_proj)
        if gated is None:
            gated = its.gate_proj(rows)
            kernels.gate(_matrix(gated), _matrix(its.up_proj(rows)))
        out: Tensor = its.down_proj(gated)
        return out

    trial: Any = with_random_weights(module)
    if trial is None or not _takes_rows_alone(module):
        return None
    tried = [None] if packed is None else [None, packed.of(trial)]
    is_same = all(_agree(trial, partial(forward, trial, packed=one), trial.gate_proj.in_features) for one in tried)
    return partial(partial, forward) if is_same else None


def _rotating(own: types.FunctionType, kernels: Kernels) -> Maker | None:
    """The module's own forward, which finds another function under the name of the rotation."""
    original: Any = own.__globals__.get(ROTATION)
    if not inspect.isfunction(original):
        return None

    def rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, *rest: Any, **named: Any) -> Any:
        fits = all(_fits(heads, turn) for heads in (query, key) for turn in (cosine, sine))
        if rest or named or not fits:
            return original(query, key, cosine, sine, *rest, **named)
        return tuple(_rotated(heads, cosine[0], sine[0], kernels) for heads in (query, key))

    if not _rotations_agree(original, rotate):
        return None
    twin = types.FunctionType(own.__code__, {**own.__globals__, ROTATION: rotate}, own.__name__, own.__defaults__)
    twin.__kwdefaults__ = own.__kwdefaults__
    return partial(types.MethodType, twin)


def _without_deprecation(forward: Any) -> Any:
    """Takes off what only tells callers of renamed arguments; the model itself does not use old names."""
    while getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
        forward = forward.__wrapped__
    return forward


def _fits(heads_1ATD: Tensor, turn_1TD: Tensor) -> bool:
    """True where the kernel can take both as they lie in memory."""
    return (
        heads_1ATD.ndim == 4
        and turn_1TD.shape == (1, *heads_1ATD.shape[2:])
        and turn_1TD.is_contiguous()
        and heads_1ATD.transpose(1, 2).is_contiguous()
    )


def _rotated(heads_1ATD: Tensor, cosine_TD: Tensor, sine_TD: Tensor, kernels: Kernels) -> Tensor:
    rows_TAD = heads_1ATD[0].transpose(0, 1)
    out_TAD = torch.empty_like(rows_TAD)
    kernels.rotate(rows_TAD.numpy(), cosine_TD.numpy(), sine_TD.numpy(), out_TAD.numpy())
    return out_TAD.transpose(0, 1)[None]


def _matrix(rows: Tensor) -> np.ndarray:
    array: np.ndarray = rows.view(-1, rows.shape[-1]).numpy()
    return array


def _takes_rows_alone(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _agree(own: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], width: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    trials = (torch.randn(1, 3, width, generator=generator) * scale for scale in PROBE_SCALES)
    return all(is_close(own(rows), other(rows)) for rows in trials)


def _rotations_agree(original: Callable[..., Any], rotate: Callable[..., Any]) -> bool:
    if list(inspect.signature(original).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return False
    generator = torch.Generator().manual_seed(0)
    query_1TAD, key_1TAD, angle_1T1D = (torch.randn(1, 5, heads, 8, generator=generator) for heads in (4, 2, 1))
    # Unlike a real model's, all angles differ: so another order of the halves shows.
    turns = angle_1T1D[:, :, 0].cos(), angle_1T1D[:, :, 0].sin()
    arguments = query_1TAD.transpose(1, 2), key_1TAD.transpose(1, 2), *turns
    try:
        return all(map(is_close, original(*arguments), rotate(*arguments)))
    except (RuntimeError, TypeError, ValueError):  # it takes other shapes
        return False


def is_close(wanted: Tensor, found: Tensor) -> bool:
    """Whether both are the same but for the order of their sums; zeros alone tell nothing."""
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return False
    largest = wanted.abs().max()
    return bool(largest > 0) and bool((wanted - found).abs().max() <= TOLERANCE * largest)
