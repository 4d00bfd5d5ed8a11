"""Other forwards for some modules of a model, for as long as a forward pass takes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as modules

StandIn = tuple[nn.Module, Callable[..., Any]]
"""A module and what it computes with while the engine runs it."""


def has_own_forward(module: nn.Module) -> bool:
    """True for a module whose forward somebody has replaced: what it computes is theirs to say."""
    return "forward" in vars(module)


def has_hooks(module: nn.Module) -> bool:
    """True for a module that somebody listens to, before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_global_hooks() -> bool:
    """True where somebody listens to all modules: what takes the place of several would be missed."""
    return bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)


def structure_of(model: nn.Module) -> list[object]:
    """Gives what stand-ins were chosen by, values of tensors apart: once it is another, they have to be chosen anew.

    Takes about 5 µs a module.
    """
    return [has_global_hooks(), *map(_traits, model.modules())]


@contextmanager
def in_use(stand_ins: Sequence[StandIn]) -> Iterator[None]:
    """While inside, the modules compute with their stand-ins; outside, the model is as its owner made it.

    A module whose forward somebody has replaced computes with that.
    """
    placed = []
    try:
        for module, forward in stand_ins:
            own = vars(module)
            if "forward" not in own:
                own["forward"] = forward
                placed.append((own, forward))
        yield
    finally:
        for own, forward in placed:
            if own.get("forward") is forward:
                del own["forward"]


def _traits(module: nn.Module) -> tuple[object, ...]:
    own = vars(module)
    # A training step in a pause leaves `training` as it likes, which each step sets again.
    settings = [
        (name, value)
        for name, value in own.items()
        if isinstance(value, (bool, int, float, str, type(None))) and name != "training"
    ]
    tensors = [
        (name, None if tensor is None else (tensor.shape, tensor.dtype))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    ]
    children = [(name, id(child)) for name, child in module._modules.items()]
    return type(module), id(module), settings, tensors, children, id(own.get("forward")), has_hooks(module)
