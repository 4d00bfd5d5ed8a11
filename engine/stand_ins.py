"""Other forwards for some modules of a model, for as long as a forward pass takes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

StandIn = tuple[nn.Module, Callable[..., Any]]
"""A module and what it computes with while the engine runs it."""


def has_own_forward(module: nn.Module) -> bool:
    """True for a module whose forward somebody has replaced: what it computes is theirs to say."""
    return "forward" in vars(module)


@contextmanager
def in_use(stand_ins: Sequence[StandIn]) -> Iterator[None]:
    """While inside, the modules compute with their stand-ins; outside, the model is as its owner made it."""
    try:
        for module, forward in stand_ins:
            vars(module)["forward"] = forward
        yield
    finally:
        for module, _ in stand_ins:
            vars(module).pop("forward", None)
