"""Several sources one upon the other: which tensor of which layer makes which parameter."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike, fspath

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from engine.errors import WeightsSourceError
from engine.weights.folder import StoredTensor, open_folder
from engine.weights.naming import Recipe, plan_recipes
from engine.weights.slots import Slot

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
"""A folder (or single file) of safetensors, or several of them, of which a later one overrides the earlier ones."""
Layer = Mapping[str, StoredTensor]


@dataclass(slots=True)
class Piece:
    """A recipe with the tensors it takes, and the parameters that it is to give: the others come from a later layer."""

    recipe: Recipe
    stored: dict[str, StoredTensor]
    targets: list[str]

    @property
    def is_plain(self) -> bool:
        """Whether the one tensor it takes is the parameter, but for its type."""
        return self.recipe.converter is None

    def make(self, model: PreTrainedModel, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
        """Reads, converts and casts. Raises WeightsInvalid and WeightsSourceError."""
        dtype = slots[self.recipe.targets[0]].current.dtype
        tensors = {name: self.stored[name].read().to(dtype) for name in self.recipe.source_names}
        made = self.recipe.convert(model, tensors)
        return {name: tensor for name, tensor in made.items() if name in self.targets}


def path_list(paths: Paths) -> list[str]:
    """Gives the layers as a list of strings. Raises WeightsSourceError when there is none."""
    if isinstance(paths, (str, PathLike)):
        return [fspath(paths)]
    if not paths:
        raise WeightsSourceError("no folder of weights is given; name at least one")
    return [fspath(path) for path in paths]


@contextmanager
def open_layers(paths: Sequence[str]) -> Iterator[list[Layer]]:
    """Gives the tensors of each layer by their names; as `open_folder` does, it raises WeightsSourceError."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_folder(path)) for path in paths]


def plan_pieces(
    model: PreTrainedModel, layers: Sequence[Layer], slots: Mapping[str, Slot]
) -> tuple[list[Piece], list[str]]:
    """Gives how to make the parameters in `slots`, each from the last layer that has it, and the names that fit
    nowhere.
    """
    plans = [plan_recipes(model, layer, slots) for layer in layers]
    last_of: dict[int, int] = {}
    for index, (recipes, _) in enumerate(plans):
        for target in (target for recipe in recipes for target in recipe.targets if target in slots):
            last_of[id(slots[target])] = index
    converted: dict[str, Piece] = {}
    pieces = []
    for index, (recipes, _) in enumerate(plans):
        for recipe in recipes:
            mine = [name for name in recipe.targets if name in slots and last_of[id(slots[name])] == index]
            piece = Piece(recipe, {name: layers[index][name] for name in recipe.source_names}, mine)
            if recipe.converter is not None:
                # Of experts, say, a layer may bring some; the others are those of the layers before.
                _complete(piece, converted.get(recipe.targets[0]))
                converted[recipe.targets[0]] = piece
            if mine:
                pieces.append(piece)
    return pieces, [name for _, extra in plans for name in extra]


def _complete(piece: Piece, before: Piece | None) -> None:
    if before is None:
        return
    recipes = before.recipe, piece.recipe
    pattern_of = {name: pattern for one in recipes for pattern, names in one.sources.items() for name in names}
    piece.recipe.sources = {}
    for name in sorted(pattern_of, key=dot_natural_key):
        piece.recipe.sources.setdefault(pattern_of[name], []).append(name)
    piece.stored = before.stored | piece.stored
