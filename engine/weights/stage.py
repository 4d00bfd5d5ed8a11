"""Reads new weights and checks everything about them before the model sees any."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.errors import WeightsInvalid
from engine.weights.cutting import Cut, cut_of, part_of
from engine.weights.folder import StoredTensor, files_behind, open_folder
from engine.weights.naming import Recipe, plan_recipes
from engine.weights.staged import StagedWeights

_NUM_NAMES_SHOWN = 3


@dataclass(slots=True)
class _Slot:
    """One storage of the model: the tensors that hold it with their names (several where tied), and the new one.

    Of a parameter that is cut over ranks, `shape` is the whole one's; the holders and the new one are the part here.
    """

    shape: torch.Size
    cut: Cut | None
    holders: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    is_optional: bool = False
    staged: Tensor | None = None
    staged_name: str = ""

    @property
    def current(self) -> Tensor:
        return self.holders[0]


class _Problems:
    """What does not fit, by kind; raised all at once, so that a caller sees missing and extra names side by side."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._found: dict[str, list[tuple[str, str]]] = {}

    def add(self, kind: str, name: str, detail: str = "") -> None:
        self._found.setdefault(kind, []).append((name, f"{name} ({detail})" if detail else name))

    def raise_if_any(self) -> None:
        if not self._found:
            return
        parts = []
        for kind, tensors in self._found.items():
            shown = ", ".join(text for _, text in tensors[:_NUM_NAMES_SHOWN])
            more = f" and {len(tensors) - _NUM_NAMES_SHOWN} more" if len(tensors) > _NUM_NAMES_SHOWN else ""
            parts.append(f"{len(tensors)} {kind}: {shown}{more}")
        first_name = next(iter(self._found.values()))[0][0]
        raise WeightsInvalid(f"the weights in {self._path} do not fit the model; {'; '.join(parts)}", tensor=first_name)


def stage_weights(model: PreTrainedModel, path: str, *, cast: bool = False) -> StagedWeights:
    """Gives the weights in a folder of safetensors, ready to be committed to `model`, on its device.

    Blocks while it reads and may run beside generation: it changes neither the model nor any global state. Holds the
    new weights in memory beside the old ones. Names are mapped as `from_pretrained` maps them; of tied weights one is
    enough. cast: convert tensors of another dtype instead of refusing them.
    Raises WeightsSourceError when the folder cannot be read and WeightsInvalid, which names the first few tensors of a
    kind, when one is missing, extra, of another shape or dtype, or not finite.
    """
    if getattr(model, "tp_size", None):
        raise WeightsInvalid(
            "the model is cut over tensor parallel ranks, which take new weights together; call stage_weights() of the"
            " driver's manager"
        )
    return StagedWeights(read_part(model, path, cast=cast).pairs)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has read. pairs: of a tensor that lies on it and the new one; source: which files they are from."""

    pairs: list[tuple[Tensor, Tensor]]
    source: str


def read_part(model: PreTrainedModel, path: str, *, cast: bool = False) -> Part:
    """Gives what `stage_weights` stages, and of a model that is cut over ranks the part of this one.

    Every rank reads and checks the whole folder.
    """
    if getattr(model, "is_quantized", False):
        raise WeightsInvalid("the model is quantized, and its weights cannot be replaced; load it unquantized")
    slots = _slots_of(model)
    problems = _Problems(path)
    with open_folder(path) as stored, torch.no_grad():
        recipes, extra = plan_recipes(model, stored, slots)
        _check_names(model, recipes, extra, slots, problems)
        for recipe in recipes:
            _check_metadata(recipe, stored, slots, problems, cast=cast)
        problems.raise_if_any()
        for recipe in recipes:
            _read(model, recipe, stored, slots, problems)
        problems.raise_if_any()
        source = files_behind(stored.values())
    staged = ((slot, slot.staged) for slot in _distinct(slots) if slot.staged is not None)
    return Part([(holder, tensor) for slot, tensor in staged for holder in slot.holders], source)


def _slots_of(model: PreTrainedModel) -> dict[str, _Slot]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    optional = _matcher(model._keys_to_ignore_on_load_missing)
    by_storage: dict[object, _Slot] = {}
    slots = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        part = part_of(tensor)
        key = (part.data_ptr(), part.shape, part.stride(), part.dtype) if part.numel() else id(part)
        slot = by_storage.setdefault(key, _Slot(tensor.shape, cut_of(name, tensor)))
        if not any(part is holder for holder in slot.holders):
            slot.holders.append(part)
        slot.names.append(name)
        slot.is_optional = name not in parameters and optional.search(name) is not None
        slots[name] = slot
    return slots


def _distinct(slots: Mapping[str, _Slot]) -> Iterable[_Slot]:
    return {id(slot): slot for slot in slots.values()}.values()


def _matcher(patterns: Iterable[str] | None) -> re.Pattern[str]:
    """Matches what any of transformers' ignore patterns matches; nothing when there is none."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) if patterns else r"(?!)")


def _check_names(
    model: PreTrainedModel,
    recipes: Iterable[Recipe],
    extra: Iterable[str],
    slots: Mapping[str, _Slot],
    problems: _Problems,
) -> None:
    made = {target for recipe in recipes for target in recipe.targets}
    for slot in _distinct(slots):
        if not slot.is_optional and made.isdisjoint(slot.names):
            problems.add("missing", slot.names[0])
    ignored = _matcher(model._keys_to_ignore_on_load_unexpected)
    for name in extra:
        if not ignored.search(name):
            problems.add("unknown to the model", name)


def _check_metadata(
    recipe: Recipe, stored: Mapping[str, StoredTensor], slots: Mapping[str, _Slot], problems: _Problems, *, cast: bool
) -> None:
    slot = slots[recipe.targets[0]]
    for name in recipe.source_names:
        if not cast and stored[name].dtype != slot.current.dtype:
            problems.add("of another dtype", name, f"{stored[name].dtype}, must be {slot.current.dtype}")
        if recipe.converter is None and stored[name].shape != slot.shape:
            problems.add("of another shape", name, f"{list(stored[name].shape)}, must be {list(slot.shape)}")


def _read(
    model: PreTrainedModel,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
    slots: Mapping[str, _Slot],
    problems: _Problems,
) -> None:
    dtype = slots[recipe.targets[0]].current.dtype
    tensors = {name: stored[name].read().to(dtype) for name in recipe.source_names}
    for name, tensor in recipe.convert(model, tensors).items():
        slot = slots[name]
        if tensor.shape != slot.shape:
            problems.add("of another shape", name, f"{list(tensor.shape)}, must be {list(slot.shape)}")
            continue
        if not _is_finite(tensor):
            problems.add("not finite", name)
            continue
        part = (tensor.contiguous() if slot.cut is None else slot.cut.take(tensor)).to(slot.current.device)
        if slot.staged is None:
            slot.staged, slot.staged_name = part, name
        elif not torch.equal(slot.staged, part):
            problems.add("tied in the model and different here", name, f"tied to {slot.staged_name}")


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    # One pass without a mask of the tensor's size; both ends are NaN where any entry is.
    lowest, highest = torch.aminmax(wide)
    return bool(torch.isfinite(lowest) & torch.isfinite(highest))
