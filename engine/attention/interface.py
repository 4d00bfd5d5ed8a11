"""The function that transformers' models call for attention while the engine runs them.

`use_step` switches a model to it for one forward pass and back, so that outside of it (a training step inside
`pause()`, plain `generate`) the model is as its owner made it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from engine.attention import flash, sdpa
from engine.attention.cpu import CpuKernel
from engine.attention.flash import FlashView
from engine.attention.sdpa import LayerRules
from engine.attention.step import AttentionStep, LayerView
from engine.errors import InvalidRequest, UnsupportedModel

IMPLEMENTATION = "pitstop"
STEP_ARGUMENT = "pitstop_step"
"""The keyword under which the step travels through the model's forward to its attention layers."""

HARMLESS_ARGUMENTS = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
    | {"is_causal", "head_mask", "return_dict", "layer_head_mask"}
)
"""Keywords that models pass along and that change nothing for a causal decoder run without their own cache."""

StepFunction = Callable[[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]
"""(layer module, query 1xAxTxD, key 1xHxTxD, value 1xHxTxD, rules) -> output T x A x D."""


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """Gives the config objects that attention layers may look at: each module that holds one, without repeats."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return list(configs.values())


@contextmanager
def use_step(configs: list[Any]) -> Iterator[None]:
    """While inside, the attention layers that look at these configs call `_forward_attention`.

    Several threads may be inside: models may share a config object, and the last to leave restores it.
    """
    AttentionInterface.register(IMPLEMENTATION, _forward_attention)
    with _SWITCHING:
        for config in configs:
            inside, found = _SWITCHED.get(id(config), (0, config._attn_implementation))
            _SWITCHED[id(config)] = inside + 1, found
            config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        with _SWITCHING:
            for config in configs:
                inside, found = _SWITCHED.pop(id(config))
                if inside > 1:
                    _SWITCHED[id(config)] = inside - 1, found
                else:
                    config._attn_implementation = found


_SWITCHING = threading.Lock()
_SWITCHED: dict[int, tuple[int, str]] = {}
"""By the id of a config, how many are inside `use_step` with it, and what it had before the first."""


@dataclass(frozen=True, slots=True)
class StepAttention:
    """A step function; who computes a whole layer at once takes the step itself."""

    step: AttentionStep[LayerView] | AttentionStep[FlashView]
    kernel: CpuKernel | None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rules: dict[str, Any],
    ) -> Tensor:
        num_kv_heads = key.shape[1]
        query_HGTD = query[0].view(num_kv_heads, -1, *query.shape[2:])
        layer_rules = LayerRules(
            layer=module.layer_idx,  # type: ignore[arg-type]  # every attention layer of transformers has an int here
            scale=rules["scaling"] if rules["scaling"] is not None else query.shape[-1] ** -0.5,
            softcap=rules["softcap"],
            sinks=rules["s_aux"],
        )
        view = self.step.view(layer_rules.layer)
        if isinstance(view, FlashView):
            return flash.attend(view, query_HGTD, key[0], value[0], layer_rules)
        if self.kernel is not None:
            return self.kernel.attend(view, query_HGTD, key[0], value[0], layer_rules)
        return sdpa.attend(view, query_HGTD, key[0], value[0], layer_rules)


def run_attention(
    step: AttentionStep[LayerView] | AttentionStep[FlashView], kernel: CpuKernel | None = None
) -> StepAttention:
    """Gives the step function that reads and writes the paged cache; kernel: the CPU's, None takes torch's."""
    return StepAttention(step, kernel)


def no_attention(
    module: nn.Module,  # noqa: ARG001  # it is a step function
    query: Tensor,
    key: Tensor,  # noqa: ARG001
    value: Tensor,
    rules: dict[str, Any],  # noqa: ARG001
) -> Tensor:
    """Stands in where there is no step: gives zeros."""
    return query.new_zeros(query.shape[2], query.shape[1], value.shape[3])


def _forward_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,  # what the model family passes: checked below, not ignored
) -> tuple[Tensor, None]:
    step_function: StepFunction | None = arguments.pop(STEP_ARGUMENT, None)
    if step_function is None:
        raise InvalidRequest(
            f"{type(module).__name__} was called while a manager makes a step with its model; call the model inside"
            " pause(), or after stop()"
        )
    rules = {name: arguments.pop(name, None) for name in ("scaling", "sliding_window", "softcap", "s_aux")}
    arguments.pop("dropout", None)
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in HARMLESS_ARGUMENTS)
    if unknown or attention_mask is not None:
        what = f"{', '.join(unknown)}" if unknown else "its own attention mask"
        raise UnsupportedModel(f"{type(module).__name__} wants attention with {what}, which the engine does not know")
    return step_function(module, query, key, value, rules)[None], None
