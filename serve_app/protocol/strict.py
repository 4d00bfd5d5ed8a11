"""The base of every body, and the types that several of them share."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine import InvalidRequest

Item = TypeVar("Item")

MAX_LABEL_LENGTH = 1024
"""Characters of user, session_id and cache_salt, kept while a request lives, and of what the history keeps."""
MAX_STOP_LENGTH = 256
"""Characters of a stop string or a bad word. The end of the text is compared with every stop string at each token."""
MAX_NAMES = 128
"""Of one object, which knows 50 at most. Each unknown name is an error, and a body has room for a million."""

Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_LENGTH)]
ShortText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]

# The first bad entry is told and the others are not looked for: a million of them take 15 s and a gigabyte.
FIRST_ONLY = Field(fail_fast=True)
Items = Annotated[list[Item], FIRST_ONLY]
"""A list as every body has it."""


class RequestModel(BaseModel):
    """A body or a part of one: unknown names and other JSON types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_names(cls, values: Any) -> Any:
        if isinstance(values, dict) and len(values) > MAX_NAMES:
            raise InvalidRequest(f"has {len(values)} names, and none has so many; send {MAX_NAMES} at most")
        return values
