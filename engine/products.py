"""Two ways of multiplying rows with a linear layer's weights on a CPU in float32, each with a layout of its own."""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.attention.cpu import load_kernels

ONE_DNN_MAX_ROWS = 256
"""With more rows than this torch's plain product is as fast as oneDNN's packed one."""
ONE_DNN_MAX_ROWS_OF_ONE_THREAD = 32
"""Likewise where one thread computes it: the plain product suffers most from being divided."""
WIDE = 8
"""A layer that widens its input so much, a vocabulary's, gains with one thread too."""

Empty = Callable[[Sequence[int], torch.dtype], Tensor]
"""Gives a tensor on the CPU of any values."""


class Products(Protocol):
    """A way of multiplying. What `pack` gives, the other methods take; it does not change with the weight."""

    def pack(self, weight_NK: Tensor, empty: Empty) -> Any:
        """Gives a second copy of the weight, of about the same size. empty: makes room for it."""

    def multiply(self, rows: Tensor, layer: nn.Linear, packed: Any) -> Tensor:
        """Gives what the layer computes."""

    def multiply_gated(self, rows: Tensor, gate: Any, up: Any, num_columns: int) -> Tensor | None:
        """Gives SiLU of the product with the gate, times that with `up`; None where there is no such way."""


class PanelProducts:
    """Our own: the weights lie in panels of as many columns as a tile of the kernel has."""

    def __init__(self) -> None:
        """Compiles the kernels; the first time on a machine takes some seconds."""
        self._kernels = load_kernels("engine.matrix_kernels")
        self._no_bias = torch.empty(0).numpy()

    def pack(self, weight_NK: Tensor, empty: Empty) -> Any:
        panel: int = self._kernels.PANEL
        columns, width = weight_NK.shape
        panels_PKL = empty(((columns + panel - 1) // panel, width, panel), weight_NK.dtype).numpy()
        self._kernels.pack(weight_NK.contiguous().numpy(), panels_PKL)
        return panels_PKL

    def multiply(self, rows: Tensor, layer: nn.Linear, packed: Any) -> Tensor:
        if rows.dtype != torch.float32:
            return functional.linear(rows, layer.weight, layer.bias)
        rows_MK, out = _matrix(rows), rows.new_empty(*rows.shape[:-1], layer.out_features)
        bias = self._no_bias if layer.bias is None else layer.bias.detach().numpy()
        self._kernels.multiply(rows_MK, packed, bias, _matrix(out), torch.get_num_threads())
        return out

    def multiply_gated(self, rows: Tensor, gate: Any, up: Any, num_columns: int) -> Tensor | None:
        if rows.dtype != torch.float32:
            return None
        out = rows.new_empty(*rows.shape[:-1], num_columns)
        self._kernels.multiply_gated(_matrix(rows), gate, up, _matrix(out), torch.get_num_threads())
        return out


class OneDnnProducts:
    """Those of torch's own library, which gain where rows are few."""

    def pack(self, weight_NK: Tensor, empty: Empty) -> Any:  # noqa: ARG002
        return torch.ops.mkldnn._reorder_linear_weight(weight_NK, ONE_DNN_MAX_ROWS)

    def multiply(self, rows: Tensor, layer: nn.Linear, packed: Any) -> Tensor:
        is_wide = layer.out_features >= WIDE * layer.in_features
        has_helpers = torch.get_num_threads() > 1
        max_rows = ONE_DNN_MAX_ROWS if is_wide or has_helpers else ONE_DNN_MAX_ROWS_OF_ONE_THREAD
        if rows.numel() > max_rows * rows.shape[-1]:
            return functional.linear(rows, layer.weight, layer.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, layer.bias, "none", [], "")
        return out

    def multiply_gated(self, rows: Tensor, gate: Any, up: Any, num_columns: int) -> Tensor | None:  # noqa: ARG002
        return None


@cache
def find_products() -> Products | None:
    """Gives the faster way that this processor and this build of torch have, or None."""
    if importlib.import_module("engine.matrix_tiles").IS_SUPPORTED:
        return PanelProducts()
    has_one_dnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return OneDnnProducts() if has_one_dnn else None


def _matrix(rows: Tensor) -> Any:
    return rows.reshape(-1, rows.shape[-1]).contiguous().numpy()
