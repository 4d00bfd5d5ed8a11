"""Finds the keys of a Ray Serve config that Ray's own schema would ignore without a word."""

import typing
from typing import Any

from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema


def unknown_keys(config: dict[str, Any], model: type[BaseModel] = ServeDeploySchema, path: str = "") -> list[str]:
    """The path of each unknown key. The content of `args` belongs to the application and is not looked at."""
    unknown = []
    for key, value in config.items():
        if key not in model.model_fields:
            unknown.append(f"{path}{key}")
            continue
        nested = _nested_model(model.model_fields[key].annotation)
        if nested is None:
            continue
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, dict):
                unknown += unknown_keys(item, nested, f"{path}{key}[{index}].")
    return unknown


def _nested_model(annotation: object) -> type[BaseModel] | None:
    """The pydantic model in an annotation such as `list[Model] | None`."""
    for outer in (annotation, *typing.get_args(annotation)):
        for candidate in (outer, *typing.get_args(outer)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                return candidate
    return None
