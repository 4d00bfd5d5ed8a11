"""Parts of an answer that are JSON already, so that long ones are written once, and a little at a time."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Written:
    """JSON text that `write` puts in as it is; only `write` can. No dataclass: pydantic would take that apart."""

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.is_instance_schema(cls)

    @classmethod
    def array(cls, items: Iterable[object]) -> "Written":
        """Gives a list, written item by item: a thread that writes at once keeps all others from running."""
        return cls(f"[{','.join(map(_dumps, items))}]")

    @classmethod
    def lists(cls, model: BaseModel) -> "Written":
        """Gives an object whose fields are lists or null, written the same way."""
        fields = ((name, getattr(model, name)) for name in type(model).model_fields)
        texts = (f"{_dumps(name)}:{'null' if items is None else cls.array(items).text}" for name, items in fields)
        return cls("{" + ",".join(texts) + "}")


def write(answer: BaseModel) -> bytes:
    """Gives the JSON of an answer, with what of it is `Written`."""
    return _text(answer.model_dump()).encode()


def _text(value: object) -> str:
    if isinstance(value, Written):
        return value.text
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_dumps(str(name))}:{_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(_text, value)) + "]"
    return _dumps(value)
