"""Second copies of a model's linear weights on a CPU, in the layout that oneDNN multiplies fewer rows with fastest.

A product of few rows reads the weights once and spends as much on bringing them into the kernel's order as on the
product itself: packed beforehand, 16 rows take two thirds of the time and the vocabulary's product half of it.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from engine.errors import InvalidRequest
from engine.stand_ins import StandIn, has_own_forward

MAX_ROWS = 256
"""With more rows than this the plain product is as fast."""
MAX_ROWS_OF_ONE_THREAD = 32
"""Likewise where one thread computes it: the plain product suffers most from being divided."""
WIDE = 8
"""A layer that widens its input so much, a vocabulary's, gains with one thread too."""
FREE_SHARE = 0.25
"""Of free memory, what the copies may take unasked. A swap holds them twice for its length, as it holds the weights."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Packed:
    """source is held so that its address cannot become another tensor's while this copy is there."""

    source: Tensor
    weight: Tensor


class PackedWeights:
    """The linear layers of one model and their packed weights.

    A copy is found by the address of the weight it was made of: a layer that has been given another tensor computes
    with that, plainly, until `refresh`. Only values changed in place need to be told, by `refresh(all_of_them=True)`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Packs nothing yet: `refresh` does."""
        self._layers = [module for module in model.modules() if isinstance(module, nn.Linear) and _can_pack(module)]
        self._packed: dict[int, _Packed] = {}
        self._lock = threading.Lock()
        """Held while `_packed` is exchanged for another: it is read without."""

    @property
    def size_bytes(self) -> int:
        """What the copies take: layouts are about as large as what they are made of."""
        weights = {layer.weight.data_ptr(): layer.weight for layer in self._layers}
        return sum(weight.numel() * weight.element_size() for weight in weights.values())

    def refresh(self, *, all_of_them: bool = False) -> object:
        """Packs what the layers hold and has no copy, or all of it anew; forgets what no layer holds.

        Gives what it forgot, for the caller to drop when nobody waits: freeing half a gigabyte takes 25 ms.
        """
        started = perf_counter()
        with self._lock:
            before = self._packed
            known = {} if all_of_them else before
            packed: dict[int, _Packed] = {}
            for layer in self._layers:
                address = layer.weight.data_ptr()
                if address not in packed:
                    packed[address] = known.get(address) or _pack(layer.weight)
            self._packed = packed
        logger.debug("weights packed layers=%d took_s=%.3f", len(self._layers), perf_counter() - started)
        return before

    def prepare(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Packs tensors that are about to stand in for weights; pairs of the weight held and the new one.

        May run beside generation, and the exchange then costs a pause nothing.
        """
        weights = {id(layer.weight) for layer in self._layers}
        spares = {spare.data_ptr(): spare for held, spare in pairs if id(held) in weights}
        fresh = {address: _pack(spare) for address, spare in spares.items() if address not in self._packed}
        with self._lock:
            self._packed = self._packed | fresh

    def stand_ins(self) -> list[StandIn]:
        """Gives what the layers are to compute with."""
        return [(layer, self._forward_of(layer)) for layer in self._layers]

    def _forward_of(self, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        is_wide = layer.out_features >= WIDE * layer.in_features
        max_rows = MAX_ROWS if is_wide or torch.get_num_threads() > 1 else MAX_ROWS_OF_ONE_THREAD

        def forward(rows: Tensor) -> Tensor:
            packed = self._packed.get(layer.weight.data_ptr())
            if packed is None or rows.numel() > max_rows * rows.shape[-1]:
                return functional.linear(rows, layer.weight, layer.bias)
            out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed.weight, layer.bias, "none", [], "")
            return out

        return forward


def pack_weights(
    model: PreTrainedModel, *, wanted: bool | None, free_bytes: int, is_compiled: bool = False
) -> PackedWeights | None:
    """Gives the packed weights of a model on a CPU in float32, or None where there are to be none.

    wanted: None leaves it to memory. Raises InvalidRequest when they are wanted and cannot be had.
    """
    if wanted is False:
        return None
    obstacle = None
    if model.device.type != "cpu" or model.dtype != torch.float32:
        obstacle = f"it is for float32 on a CPU, and this model is {model.dtype} on {model.device.type}"
    elif not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        obstacle = "this build of torch has no oneDNN"
    elif is_compiled:
        obstacle = "torch.compile compiles the layers that it would replace"
    elif getattr(model, "tp_size", None):
        obstacle = "the model is cut over tensor parallel ranks"
    if obstacle is None:
        packed = PackedWeights(model)
        return packed if wanted or packed.size_bytes <= free_bytes * FREE_SHARE else None
    if wanted:
        raise InvalidRequest(f"pack_weights=True cannot be had: {obstacle}; leave it at None", "pack_weights")
    return None


def _can_pack(layer: nn.Linear) -> bool:
    # A subclass may compute something else, and a layer whose own forward was replaced does.
    return type(layer) is nn.Linear and not has_own_forward(layer) and layer.weight.dtype == torch.float32


def _pack(weight: Tensor) -> _Packed:
    with torch.inference_mode():
        source = weight.detach()
        return _Packed(source, torch.ops.mkldnn._reorder_linear_weight(source, MAX_ROWS))
