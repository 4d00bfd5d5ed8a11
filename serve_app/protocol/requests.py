"""The bodies of `/v1/chat/completions` and `/v1/completions`.

Every field is honoured; what cannot be is refused by name (see `neutral`). Numbers keep their JSON type: "0.5" is not
a temperature.
"""

from abc import ABC
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine import InvalidRequest, WorkloadHints
from serve_app.protocol import neutral
from serve_app.protocol.chat_template import ChatTemplateFields
from serve_app.protocol.parsing import shorten
from serve_app.protocol.sampling import NumTop, SamplingFields
from serve_app.protocol.strict import Items, Label, RequestModel, TokenId
from serve_app.protocol.structure import StructureFields
from serve_app.protocol.tools import ToolCall, ToolFields
from serve_app.resume_point import MAX_TOKEN_BYTES

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`; a chat goes on up to the model's length."""
MAX_PROMPTS = 1024
"""The most that the application can be told to take; how many it does is its limit of choices."""
MAX_TIMEOUT_S = 7 * 24 * 3600.0
"""Of what is a timeout at all; how long a request may take is a limit of the application."""


def _one_prompt(value: Any) -> Any:
    if not isinstance(value, str) and not (isinstance(value, list) and all(type(token) is int for token in value)):
        raise InvalidRequest(f"is {shorten(value)}; it must be text, a list of token ids, or a list of such prompts")
    if not value:
        raise InvalidRequest("is empty; it must hold at least one token")
    return value


def _prompts(value: Any) -> Any:
    """Gives the list of prompts in any of OpenAI's forms: one or several, each text or ids."""
    is_several = isinstance(value, list) and bool(value) and all(isinstance(item, str | list) for item in value)
    if is_several and len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"has {len(value)} prompts; a request may have {MAX_PROMPTS} at most, send several")
    return [_one_prompt(item) for item in (value if is_several else [value])]


WeightVersion = Annotated[int, Field(ge=1, lt=2**63)]
Prompts = Annotated[Items[str | Items[int]], BeforeValidator(_prompts)]


class TextPart(RequestModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(RequestModel):
    """One turn of a chat. Text parts are joined by line breaks.

    tool_calls, reasoning_content: of an answer. tool_call_id, name: of what a tool gave.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    tool_calls: Items[ToolCall] | None = None
    reasoning_content: str | None = None
    tool_call_id: Label | None = None
    name: Label | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        role = values.get("role") if isinstance(values, dict) else None
        return neutral.drop_neutral(values, neutral.OF_ROLE.get(str(role), neutral.MESSAGE))

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for name, role in _ROLE_OF_FIELD.items():
            if getattr(self, name) is not None and self.role != role:
                raise InvalidRequest(f"{name} goes with the role {role!r}, not {self.role!r}", name)
        if self.content is None and not self.tool_calls:
            raise InvalidRequest("content is missing", "content")
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequest("tool_call_id is missing", "tool_call_id")
        return self

    def for_template(self) -> dict[str, Any]:
        """Gives the message as chat templates take it; raises InvalidRequest for arguments that are no JSON object."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or ()]
        plain: dict[str, Any] = {"role": self.role, "content": "\n".join(parts)}
        if self.tool_calls:
            plain["tool_calls"] = [call.for_template() for call in self.tool_calls]
        given = {name: getattr(self, name) for name in ("reasoning_content", "tool_call_id", "name")}
        return plain | {name: value for name, value in given.items() if value is not None}


_ROLE_OF_FIELD = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool", "name": "tool"}
Messages = Annotated[Items[Message], Field(min_length=1)]


class Conversation(RequestModel):
    """A chat as the Python handle takes it: its messages alone."""

    messages: Messages


class StreamOptions(RequestModel):
    """What a stream carries besides its deltas. include_resume: of completions, the token to go on with in `resume`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_resume: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        return neutral.drop_neutral(values, {"include_obfuscation": (False,)})


def _not_zero(value: int) -> int:
    if value == 0:
        raise InvalidRequest("is 0; it must be a number of tokens, or -1 for as many as fit")
    return value


class Hints(RequestModel):
    """What the client knows of its request. expected_output_tokens: of each answer; routing and scaling count on it."""

    expected_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class GenerationRequest(SamplingFields, StructureFields, ABC):
    """What chat and completions have in common. null means the default, as clients expect.

    Extensions: those of `SamplingFields`, structured_outputs, return_token_ids, cache_salt, session_id,
    min_weight_version (the least version of the weights that may answer), weight_version (the only one), priority
    (smaller goes first), hints, timeout (seconds until the last token; what cannot make it is refused at once),
    truncate_prompt_tokens (keeps so many of its last tokens; -1 as many as fit). user is the tenant.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_timings: bool | None = None
    cache_salt: Label | None = None
    session_id: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    hints: Hints | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), AfterValidator(_not_zero)] | None = None
    min_weight_version: WeightVersion | None = None
    weight_version: WeightVersion | None = None
    user: Label | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed together with stream=true", "stream_options")
        return self

    @model_validator(mode="after")
    def _check_asks_for_something(self) -> Self:
        if self.max_new_tokens == 0 and self.num_prompt_logprobs is None and not self.echoes:
            raise InvalidRequest("max_tokens is 0, which gives nothing without echo or prompt_logprobs", "max_tokens")
        return self

    @property
    def echoes(self) -> bool:
        """True where the prompt stands before its answers."""
        return False

    @property
    def shows_tokens(self) -> bool:
        """True where a chunk is worth sending for its tokens, before they are text."""
        return bool(self.return_token_ids or self.wants_logprobs)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def workload_hints(self) -> WorkloadHints:
        """Gives what the body says about the work; the router adds the lengths."""
        return WorkloadHints(
            session_id=self.session_id,
            tenant=self.user,
            priority=self.priority or 0,
            expected_generated_length=(self.hints.expected_output_tokens if self.hints else None) or 0,
        )


class ChatRequest(GenerationRequest, ChatTemplateFields, ToolFields):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        return neutral.drop_neutral(values, neutral.CHAT)

    @model_validator(mode="after")
    def _check_resume(self) -> Self:
        if self.stream_options is not None and self.stream_options.include_resume:
            raise InvalidRequest(
                "stream_options.include_resume is true; chats cannot be resumed, ask /v1/completions with its text"
                " or leave it out",
                "stream_options.include_resume",
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; "
                "they mean the same, give one",
                "max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(f"top_logprobs is {self.top_logprobs}; it needs logprobs=true", "top_logprobs")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def num_top_logprobs(self) -> int:
        return self.top_logprobs or 0

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ResumeBody(RequestModel):
    """Where the stream of this same request was cut.

    token: what that stream gave, in its first chunk or with its error. token_ids: of each choice, those that came after
    the token was given, null for one that has ended; they count as drawn by the weights that answered then.
    """

    token: Annotated[str, Field(min_length=1, max_length=MAX_TOKEN_BYTES)]
    token_ids: Items[Items[TokenId] | None] | None = None


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`. prompt is text, ids, or a list of prompts, each of them one or the other.

    logprobs: of each token, and of so many most likely ones beside it. echo: the prompt stands before each answer, with
    its own log-probabilities where these are asked for; with max_tokens=0 it stands alone. resume: the stream goes on
    where an earlier one of the same request was cut, with the same tokens where they are greedy or seeded.
    """

    prompt: Prompts
    logprobs: NumTop | None = None
    echo: bool | None = None
    resume: ResumeBody | None = None

    @model_validator(mode="after")
    def _check_resume(self) -> Self:
        if self.resume is not None and not self.stream:
            raise InvalidRequest("resume goes on with a stream; send it with stream=true", "resume")
        return self

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        return neutral.drop_neutral(values, neutral.COMPLETIONS)

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs or 0

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def max_new_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
