"""The base of every body, and the types that several of them share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_LABEL_LENGTH = 1024
"""Characters of user, session_id and cache_salt, kept while a request lives, and of what the history keeps."""
MAX_STOP_LENGTH = 256
"""Characters of a stop string or a bad word. The end of the text is compared with every stop string at each token."""

Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_LENGTH)]
ShortText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class RequestModel(BaseModel):
    """A body or a part of one: unknown names and other JSON types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
