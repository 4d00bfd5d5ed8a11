"""Stands in for CUDA graphs on the CPU: a replay calls the captured work again, over the same tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class FakeGraph:
    output: Tensor
    work: Callable[[], Tensor]
    owner: "FakeGraphs"

    def replay(self) -> None:
        self.owner.num_replays += 1
        fresh = self.work()
        assert fresh.shape == self.output.shape, "a graph cannot change its shapes"
        self.output.copy_(fresh)


@dataclass(slots=True)
class FakeGraphs:
    """Counts what it is asked for. error: what a capture raises."""

    error: Exception | None = None
    num_replays: int = 0
    captured: list[torch.Size] = field(default_factory=list)
    """Of the output of each captured work."""

    def capture(self, work: Callable[[], Tensor]) -> FakeGraph:
        if self.error is not None:
            raise self.error
        output = work()
        self.captured.append(output.shape)
        return FakeGraph(output, work, self)
