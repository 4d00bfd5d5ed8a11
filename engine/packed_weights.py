"""Second copies of a model's linear weights on a CPU, in the layout that products read them in.

A product of few rows reads the weights once and spends as much on bringing them into the kernel's order as on the
product itself: packed beforehand, 16 rows take half of the time.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from engine.errors import InvalidRequest
from engine.products import PanelProducts, Products, find_products
from engine.room import Filling, Room
from engine.stand_ins import StandIn, has_own_forward

FREE_SHARE = 0.25
"""Of free memory, what the copies may take unasked. A swap holds them twice for its length, as it holds the weights."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Packed:
    """One copy. source is held so that its address cannot become another tensor's while this copy is there."""

    source: Tensor
    weight: Any


class PackedWeights:
    """The linear layers of one model, or of a part of it, and their packed weights.

    A copy is found by the address of the weight it was made of: a layer that has been given another tensor computes
    with that, plainly, until `refresh`. Only values changed in place need to be told, by `refresh(all_of_them=True)`.
    """

    def __init__(self, model: nn.Module, products: Products) -> None:
        """Packs nothing yet: `refresh` does."""
        self._products = products
        self.find_layers(model)
        self._packed: dict[int, Packed] = {}
        self._made: tuple[dict[int, Packed], dict[object, Any]] = ({}, {})
        """What is made of copies, and of which."""
        self._room = Room()
        self._lock = threading.Lock()
        """Held while `_packed` is exchanged for another: it is read without."""

    def find_layers(self, model: nn.Module) -> None:
        """Looks for the layers anew, where modules were replaced or changed; `refresh` then packs them."""
        self._layers = [module for module in model.modules() if isinstance(module, nn.Linear) and _can_pack(module)]
        self._ids = set(map(id, self._layers))

    @property
    def size_bytes(self) -> int:
        """What the copies take: layouts are about as large as what they are made of."""
        weights = {layer.weight.data_ptr(): layer.weight for layer in self._layers}
        return sum(weight.numel() * weight.element_size() for weight in weights.values())

    def refresh(self, prepared: Mapping[int, Packed] | None = None, *, all_of_them: bool = False) -> object:
        """Packs what the layers hold and has no copy, here or in `prepared`, or all of it anew; forgets what no layer
        holds.

        Gives what it forgot, for the caller to drop when nobody waits: freeing half a gigabyte takes 25 ms.
        """
        started, filling = perf_counter(), self._room.filling()
        with self._lock:
            before = self._packed
            known = {} if all_of_them else before | dict(prepared or {})
            packed: dict[int, Packed] = {}
            for layer in self._layers:
                address = layer.weight.data_ptr()
                if address not in packed:
                    packed[address] = known.get(address) or self._pack(layer.weight, filling)
            self._packed, self._made = packed, ({}, {})
        logger.debug("weights packed layers=%d took_s=%.3f", len(self._layers), perf_counter() - started)
        return before

    def of(self, part: nn.Module) -> "PackedWeights":
        """Gives the packed weights of other modules, which are multiplied in the same way."""
        packed = PackedWeights(part, self._products)
        packed.refresh()
        return packed

    def forget(self) -> None:
        """Drops all copies at once, so that memory holds one set while they are made anew."""
        with self._lock:
            self._packed, self._made = {}, ({}, {})

    def prepare(
        self, pairs: Iterable[tuple[Tensor, Tensor]], *, rest: Callable[[], None] = lambda: None
    ) -> dict[int, Packed]:
        """Gives copies of tensors that are to stand in for weights, for `refresh`; pairs of the weight held and the new
        one.

        May run beside generation, and the exchange then costs a pause nothing. rest: called after each.
        """
        weights = {id(layer.weight) for layer in self._layers}
        spares = {spare.data_ptr(): spare for held, spare in pairs if id(held) in weights}
        prepared, filling = {}, self._room.filling()
        for address, spare in spares.items():
            prepared[address] = self._pack(spare, filling)
            rest()
        return prepared

    def stand_ins(self) -> list[StandIn]:
        """Gives what the layers are to compute with."""
        return [(layer, self._forward_of(layer)) for layer in self._layers]

    def gated(self, rows: Tensor, gate: nn.Module, up: nn.Module) -> Tensor | None:
        """Gives SiLU of what one layer computes times what the other does, in one pass; None where that cannot be."""
        both = [self._bare(layer) for layer in (gate, up)]
        if both[0] is None or both[1] is None:
            return None
        return self._products.multiply_gated(rows, both[0].weight, both[1].weight, len(both[0].source))

    def panels_of(self, weight: Tensor) -> Any | None:
        """Gives the copy of a weight as `PanelProducts` made it, where there is one."""
        found = self._packed.get(weight.data_ptr())
        return None if found is None or not self.in_panels else found.weight

    def made_of_them(self) -> dict[object, Any]:
        """Gives room for what the generation thread makes of copies: it is empty again when any of them changes.

        So nobody else need hold a copy, which would outlive its weight.
        """
        packed = self._packed
        if self._made[0] is not packed:
            self._made = packed, {}
        return self._made[1]

    @property
    def in_panels(self) -> bool:
        """Whether copies are those of `PanelProducts`."""
        return isinstance(self._products, PanelProducts)

    def knows(self, layer: nn.Module) -> bool:
        """Whether a layer is one of those that are packed: a linear one that computes what torch's does."""
        return id(layer) in self._ids

    def _bare(self, layer: Any) -> Packed | None:
        """The copy of a layer that is its weight and nothing else, and that nobody listens to."""
        if id(layer) not in self._ids or layer.bias is not None:
            return None
        has_hooks = layer._forward_hooks or layer._forward_pre_hooks
        return None if has_hooks else self._packed.get(layer.weight.data_ptr())

    def _forward_of(self, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(rows: Tensor) -> Tensor:
            packed = self._packed.get(layer.weight.data_ptr())
            if packed is None:
                return functional.linear(rows, layer.weight, layer.bias)
            return self._products.multiply(rows, layer, packed.weight)

        return forward

    def _pack(self, weight: Tensor, filling: Filling) -> Packed:
        with torch.inference_mode():
            source = weight.detach()
            return Packed(source, self._products.pack(source, filling.empty))


def pack_weights(
    model: PreTrainedModel, *, wanted: bool | None, free_bytes: int, is_compiled: bool = False
) -> PackedWeights | None:
    """Gives the packed weights of a model on a CPU in float32, or None where there are to be none.

    wanted: None leaves it to memory. Raises InvalidRequest when they are wanted and cannot be had.
    """
    if wanted is False:
        return None
    obstacle, products = None, None
    if model.device.type != "cpu" or model.dtype != torch.float32:
        obstacle = f"it is for float32 on a CPU, and this model is {model.dtype} on {model.device.type}"
    elif is_compiled:
        obstacle = "torch.compile compiles the layers that it would replace"
    elif getattr(model, "tp_size", None):
        obstacle = "the model is cut over tensor parallel ranks"
    elif (products := find_products()) is None:
        obstacle = "this build of torch has no oneDNN, and this processor no AVX2"
    if obstacle is None and products is not None:
        packed = PackedWeights(model, products)
        return packed if wanted or packed.size_bytes <= free_bytes * FREE_SHARE else None
    if wanted:
        raise InvalidRequest(f"pack_weights=True cannot be had: {obstacle}; leave it at None", "pack_weights")
    return None


def _can_pack(layer: nn.Linear) -> bool:
    # A subclass may compute something else, and a layer whose own forward was replaced does. One that computes its
    # weight in each call has no parameter of that name.
    is_plain = type(layer) is nn.Linear and not has_own_forward(layer) and "weight" in layer._parameters
    return is_plain and layer.weight.dtype == torch.float32
