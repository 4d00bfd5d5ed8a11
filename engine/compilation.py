"""The model's forward pass through torch.compile, with attention as one opaque operator in it.

The compiler sees tensors go into attention and come out; the step, the cache and the backend stay Python's. The
operator finds them by a number: nothing but numbers and tensors can be given to one.
Shapes: T tokens of the step, L rows whose logits are wanted, A query heads, H kv heads, D width.
"""

import functools
import importlib
import importlib.util
import itertools
import logging
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CompileConfig

from engine.attention.interface import StepFunction, no_attention
from engine.config import ContinuousBatchingConfig
from engine.errors import InvalidRequest

MAX_CODES = 1024
"""Compiled codes of one function: one for each padded size of a step where sizes are fixed, else one or two a manager.
Torch's own limit of 8 would end in code that is not compiled."""
LEAST = 2
"""A size of 1 would be compiled for itself."""
CAPTURES_ITSELF = ("reduce-overhead", "max-autotune")
"""Modes that capture CUDA graphs of tensors that are others in each step."""

ForwardPass = Callable[[Tensor, Tensor, Tensor, StepFunction], Tensor]
"""(input ids 1 x T, positions 1 x T, wanted rows L, attention) -> logits L x V."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How steps of any rows, and steps of single tokens, are compiled; None is not."""

    packed: CompileConfig | None
    decode: CompileConfig | None


def compile_options(
    config: ContinuousBatchingConfig, device: torch.device, *, fallback: CompileConfig | None = None
) -> CompileOptions | None:
    """Gives what is to be compiled, None for nothing. Raises InvalidRequest for what cannot be had on this machine.

    fallback: the `compile_config` of the generation config, for what the batching config leaves open.
    """
    level, default = config.compile_level, fallback
    if level > 0:
        mode = "max-autotune-no-cudagraphs" if level > 1 else "default"
        default = CompileConfig(mode=mode, dynamic=level < 3, fullgraph=False)
    packed, decode = (
        _checked(name, getattr(config, name) or default, device)
        for name in ("varlen_compile_config", "decode_compile_config")
    )
    if packed is None and decode is None:
        return None
    missing = _missing_tool(device)
    if missing is not None:
        raise InvalidRequest(
            f"torch.compile needs {missing}, which this machine lacks; install it, or leave default_compile_level at 0"
            " and the compile configs at None",
            "default_compile_level",
        )
    return CompileOptions(packed, decode)


class CompiledForward:
    """A forward pass, compiled at its first call of each kind. One thread at a time.

    Code for fixed sizes gets steps padded to multiples of `interval`; attention does not see the padding.
    """

    def __init__(self, forward: ForwardPass, options: CompileOptions, *, interval: int) -> None:
        self._forward = forward
        self._interval = interval
        self._boundary = _Boundary()
        self._wanted = {True: options.decode, False: options.packed}
        self._compiled: dict[bool, ForwardPass] = {}

    def __call__(
        self, ids_1T: Tensor, positions_1T: Tensor, last_L: Tensor, attention: StepFunction, *, is_decode: bool
    ) -> Tensor:
        """Gives the logits of the rows `last_L` as L x V; where the compiler fails, from then on without it."""
        config = self._wanted[is_decode]
        if config is None:
            return self._forward(ids_1T, positions_1T, last_L, attention)
        if is_decode not in self._compiled:
            self._prepare(config, is_decode, ids_1T.device)
            return self(ids_1T, positions_1T, last_L, attention, is_decode=is_decode)
        try:
            return self._run(is_decode, (ids_1T, positions_1T, last_L), attention)
        except _compiler_error() as error:
            self._wanted[is_decode] = None
            logger.warning("model cannot be compiled, steps run as they are is_decode=%s error=%s", is_decode, error)
            return self._forward(ids_1T, positions_1T, last_L, attention)

    def warm_up(self, device: torch.device) -> None:
        """Compiles what the first steps would otherwise have to, but for sizes that are fixed and not yet known."""
        for is_decode, config in self._wanted.items():
            if config is not None and is_decode not in self._compiled:
                self._prepare(config, is_decode, device)

    def _prepare(self, config: CompileConfig, is_decode: bool, device: torch.device) -> None:
        options = {name: value for name, value in config.to_dict().items() if value is not None}
        self._compiled[is_decode] = torch.compile(self._forward, **options)
        # Of different sizes, or the compiler takes the one for the other for ever.
        ids_1T, last_L = (torch.zeros(size, dtype=torch.long, device=device) for size in ((1, 4 * LEAST), (LEAST,)))
        self(ids_1T, torch.arange(ids_1T.shape[1], device=device)[None], last_L, no_attention, is_decode=is_decode)

    def _run(self, is_decode: bool, inputs: tuple[Tensor, Tensor, Tensor], attention: StepFunction) -> Tensor:
        ids_1T, positions_1T, last_L = inputs
        config = self._wanted[is_decode]
        interval = self._interval if config is not None and config.dynamic is False else 1
        num_tokens, num_logits = (
            max(LEAST, -(-size // interval) * interval) for size in (ids_1T.shape[1], last_L.shape[0])
        )
        with self._boundary.around(attention, ids_1T.shape[1]), _many_codes():
            logits_LV = self._compiled[is_decode](
                functional.pad(ids_1T, (0, num_tokens - ids_1T.shape[1])),
                functional.pad(positions_1T, (0, num_tokens - ids_1T.shape[1])),
                functional.pad(last_L, (0, num_logits - last_L.shape[0])),
                self._boundary.attention,
            )
        return logits_LV[: last_L.shape[0]]


class _Boundary:
    """Where compiled code calls the attention of the present step, behind an operator."""

    def __init__(self) -> None:
        self.number = next(_NUMBERS)
        self.step_function: StepFunction = no_attention
        self.num_tokens = 0
        _BOUNDARIES[self.number] = self
        operator, number = _operator(), self.number

        def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: dict[str, Any]) -> Tensor:
            numbers = (rules["scaling"], rules["softcap"], rules["sliding_window"], module.layer_idx)
            out: Tensor = operator(query, key, value, rules["s_aux"], *numbers, number)
            return out

        self.attention: StepFunction = attention

    @contextmanager
    def around(self, step_function: StepFunction, num_tokens: int) -> Iterator[None]:
        """While inside, attention is this; behind num_tokens there is padding."""
        self.step_function, self.num_tokens = step_function, num_tokens
        try:
            yield
        finally:
            self.step_function = no_attention

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: dict[str, Any]) -> Tensor:
        """Gives the attention of the step's tokens as T x A x D, and zeros for padding."""
        tokens = slice(self.num_tokens)
        out = self.step_function(_Layer(layer), query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], rules)
        return functional.pad(out, (0, 0, 0, 0, 0, query.shape[2] - self.num_tokens))


class _Layer(nn.Module):
    """All that attention asks of a layer."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


_NUMBERS = itertools.count()
_BOUNDARIES: weakref.WeakValueDictionary[int, _Boundary] = weakref.WeakValueDictionary()


@functools.cache
def _operator() -> Callable[..., Any]:
    """Defines the operator at its first use."""

    @torch.library.custom_op("pitstop::attention", mutates_args=())
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scaling: float | None,
        softcap: float | None,
        window: int | None,
        layer: int,
        boundary: int,
    ) -> Tensor:
        rules = {"scaling": scaling, "softcap": softcap, "sliding_window": window, "s_aux": sinks}
        return _BOUNDARIES[boundary].attend(layer, query, key, value, rules)

    @attention.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:  # noqa: ARG001  # the operator's own
        return query.new_empty(query.shape[2], query.shape[1], value.shape[3])

    return attention


def _checked(name: str, config: object, device: torch.device) -> CompileConfig | None:
    if config is None:
        return None
    if isinstance(config, dict):
        try:
            config = CompileConfig(**config)
        except TypeError as error:
            raise InvalidRequest(f"{name} is {config!r}, which CompileConfig does not take: {error}", name) from error
    if not isinstance(config, CompileConfig):
        raise InvalidRequest(f"{name} is {config!r}; it must be a CompileConfig of transformers or its fields", name)
    if device.type == "cuda" and config.mode in CAPTURES_ITSELF:
        raise InvalidRequest(
            f"{name} has mode {config.mode!r}, which captures CUDA graphs of its own; use 'default' or"
            " 'max-autotune-no-cudagraphs' and leave the graphs to use_cuda_graph",
            name,
        )
    return config


def _missing_tool(device: torch.device) -> str | None:
    """What the compiler needs to make machine code and does not find."""
    if device.type == "cuda":
        return None if importlib.util.find_spec("triton") else "triton"
    builder = importlib.import_module("torch._inductor.cpp_builder")  # no public way tells which compiler torch takes
    try:
        found = shutil.which(builder.get_cpp_compiler())
    except Exception:  # noqa: BLE001  # it raises a kind of its own where none works
        found = None
    return None if found else "a C++ compiler such as g++"


def _compiler_error() -> type[Exception]:
    kind: type[Exception] = importlib.import_module("torch._dynamo.exc").TorchDynamoException
    return kind


def _many_codes() -> AbstractContextManager[None]:
    config: Any = importlib.import_module("torch._dynamo.config")
    patch: AbstractContextManager[None] = config.patch(recompile_limit=MAX_CODES, accumulated_recompile_limit=MAX_CODES)
    return patch
