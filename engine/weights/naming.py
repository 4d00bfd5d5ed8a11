"""From the names in a checkpoint to the parameters of a model, as `from_pretrained` maps them.

The one place that knows transformers' conversion mappings. Its converters are copied before use, so nothing that
another thread sees is changed.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from engine.errors import WeightsInvalid


@dataclass(slots=True)
class Recipe:
    """One or several parameters of the model, and the checkpoint tensors they are made of.

    sources: by the pattern of the converter that took them; without a converter, one name.
    """

    targets: list[str]
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def source_names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    def convert(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gives the parameters from `tensors`, which holds every source by name. Raises WeightsInvalid."""
        if self.converter is None:
            return {self.targets[0]: tensors[self.source_names[0]]}
        for pattern, names in self.sources.items():
            self.converter.collected_tensors[pattern] = [tensors[name] for name in names]  # type: ignore[misc]
        try:
            made: dict[str, Any] = self.converter.convert(self.targets[0], model=model, config=model.config)
        except Exception as error:  # Whatever an operation on tensors that do not fit raises.
            message = f"{self.targets[0]} cannot be made from {', '.join(self.source_names[:3])}, ...: {error}"
            raise WeightsInvalid(message, tensor=self.targets[0]) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def plan_recipes(
    model: PreTrainedModel, source_names: Iterable[str], known: Mapping[str, Any]
) -> tuple[list[Recipe], list[str]]:
    """Gives how to make the parameters in `known` (names of the model's state dict) and the names that fit nowhere."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, meta = model.base_model_prefix, dict(known)
    recipes: dict[str, Recipe] = {}
    extra = []
    # The order in which experts are stacked.
    for name in sorted(source_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, meta)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, meta)
        is_second = pattern is None and target in recipes
        if target not in known or is_second:
            extra.append(name)
            continue
        if target not in recipes:
            recipes[target] = _begin(target, by_pattern[pattern] if pattern else None)
        recipes[target].sources.setdefault(pattern or name, []).append(name)
    return list(recipes.values()), extra


def _begin(target: str, converter: WeightConverter | None) -> Recipe:
    if converter is None:
        return Recipe([target], None)
    first, *others = converter.target_patterns
    return Recipe([target, *(target.replace(first, other) for other in others)], deepcopy(converter))
