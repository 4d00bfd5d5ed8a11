"""The bodies and answers of `/tokenize`, `/detokenize` and `/v1/abort`; the first two are vLLM's."""

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from engine import InvalidRequest
from serve_app.protocol.chat_template import ChatTemplateFields
from serve_app.protocol.requests import Messages
from serve_app.protocol.strict import Items, Label, RequestModel, TokenId


class TokenizeBody(ChatTemplateFields):
    """A text, or a chat as its template writes it. The model is the one that is served, if it is named."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        return self

    @model_validator(mode="after")
    def _check_belongs(self) -> Self:
        if self.prompt is not None:
            for name in ChatTemplateFields.model_fields:
                if getattr(self, name) is not None:
                    raise InvalidRequest(f"{name} goes with messages, and a prompt has no template; leave it out", name)
        elif self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens goes with a prompt; those of messages are written by the chat template",
                "add_special_tokens",
            )
        return self


class Tokenized(BaseModel):
    """What `/tokenize` answers."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(RequestModel):
    """Ids of the model's vocabulary."""

    model: str | None = None
    tokens: Annotated[Items[TokenId], Field(max_length=1_000_000)]


class Detokenized(BaseModel):
    """What `/detokenize` answers: the text with its special tokens."""

    prompt: str


class AbortBody(RequestModel):
    """request_id: the `x-request-id` of a request, or the id of its answer."""

    request_id: Label


class Aborted(BaseModel):
    """How many requests of this id were under way and are ended."""

    num_aborted: int


class Health(BaseModel):
    """What probes are told."""

    status: str
