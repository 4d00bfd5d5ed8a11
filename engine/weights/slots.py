"""The places of a model that new weights go to: one for each storage, whatever number of names it has."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.weights.cutting import Cut, cut_of, part_of
from engine.weights.digests import digest_of


@dataclass(slots=True)
class Slot:
    """One storage of the model: the tensors that hold it, with their names (several where tied).

    Of a parameter that is cut over ranks, `shape` is the whole one's; the holders are the part here.
    """

    shape: torch.Size
    cut: Cut | None
    holders: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    is_optional: bool = False
    """No source has to hold it, as the model makes it itself; it has no digest either."""

    @property
    def current(self) -> Tensor:
        return self.holders[0]


def slots_of(model: PreTrainedModel) -> dict[str, Slot]:
    """Gives the slot of every name in the model's state dict; tied names have the same one."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    optional = matcher(model._keys_to_ignore_on_load_missing)
    by_storage: dict[object, Slot] = {}
    slots = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        part = part_of(tensor)
        slot = by_storage.setdefault(_storage_of(part), Slot(tensor.shape, cut_of(name, tensor)))
        if not any(part is holder for holder in slot.holders):
            slot.holders.append(part)
        slot.names.append(name)
        slot.is_optional = name not in parameters and optional.search(name) is not None
        slots[name] = slot
    return slots


def distinct(slots: Mapping[str, Slot]) -> Iterable[Slot]:
    """Gives each slot once."""
    return {id(slot): slot for slot in slots.values()}.values()


def matcher(patterns: Iterable[str] | None) -> re.Pattern[str]:
    """Matches what any of transformers' ignore patterns matches; nothing when there is none."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) if patterns else r"(?!)")


def served_digests(model: PreTrainedModel) -> dict[str, str]:
    """Gives the digest of every parameter that the model holds, on this rank; reads all of them."""
    digests = {}
    for slot in distinct(slots_of(model)):
        if not slot.is_optional:
            digests.update(dict.fromkeys(slot.names, digest_of(slot.current)))
    return digests


def _storage_of(tensor: Tensor) -> object:
    if tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
