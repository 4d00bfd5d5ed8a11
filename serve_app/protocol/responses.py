"""What `/v1` answers: OpenAI's objects, with ours marked as extensions.

Extensions: `weight_versions` (spans over the choice's tokens; a stream gives all so far with the first token, at each
new version, and in the last chunk of the choice), `token_ids` and `prompt_token_ids` (where `return_token_ids` is asked
for; a stream gives the prompt's in its first chunk), `stop_reason` (the stop string or the id of the stop token that
ended the choice), `prompt_logprobs` and `timings` (where asked for; in a stream with its first chunk and with the
last one that ends a choice), `reasoning_content` (what the model thought before it answered), `resume` (where asked for
in a stream of completions: with its first chunk, what it takes to go on with it elsewhere). `system_fingerprint` is
the model and the weight version that drew the latest token.
"""

from typing import Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer
from pydantic.json_schema import SkipJsonSchema

from serve_app.protocol.written import Written

EXTENSIONS = frozenset(
    {
        "weight_versions",
        "token_ids",
        "prompt_token_ids",
        "stop_reason",
        "prompt_logprobs",
        "timings",
        "reasoning_content",
        "tool_calls",
        "is_recomputed",
        "resume",
    }
)


class ResponseModel(BaseModel):
    """Part of an answer. Extensions that hold nothing are left out, OpenAI's own fields are null."""

    @model_serializer(mode="wrap")
    def _leave_out_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        values: dict[str, object] = handler(self)
        return {name: value for name, value in values.items() if value is not None or name not in EXTENSIONS}


class VersionSpan(ResponseModel):
    """Tokens start to end (exclusive) of the choice were sampled under this version of the weights.

    is_recomputed: true where the answer went on at another replica, which computed anew what came before under this
    version, though an earlier one had drawn some of it.
    """

    version: int
    start: int
    end: int
    is_recomputed: bool | None = None


class PromptTokensDetails(BaseModel):
    """cached_tokens: tokens of the prompt that the prefix cache gave."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Tokens counted, of the prompt and of the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(BaseModel):
    """One of the most likely tokens of a place."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(BaseModel):
    """One token of a chat answer. bytes is null for a token that holds only a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class PromptLogprob(BaseModel):
    """vLLM's: one token at one place of the prompt. rank counts the most likely ones from 1; null is further down."""

    logprob: float
    rank: int | None = None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None] | SkipJsonSchema[Written]
"""For each token of the prompt, by token id; the first has none."""


class Timings(BaseModel):
    """Seconds: waiting for a place in the engine, from the request to its first token, and to its last."""

    queued_s: float
    first_token_s: float
    total_s: float


class ChatLogprobs(BaseModel):
    """One entry for each token of the choice, or of the chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Four lists of equal length; top_logprobs is null where none are asked for. text_offset counts characters of the
    choice's text. The first token of an echoed prompt follows nothing, so its entries are null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None] | None = None


class SparseModel(BaseModel):
    """Part of an answer without the fields that hold nothing."""

    @model_serializer(mode="wrap")
    def _leave_out_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        values: dict[str, object] = handler(self)
        return {name: value for name, value in values.items() if value is not None}


class FunctionDelta(SparseModel):
    """The name comes once; arguments is JSON text, or a piece of it."""

    name: str | None = None
    arguments: str = ""


class CallDelta(SparseModel):
    """A call of a tool; in a stream a piece of the call `index`, of which id and type come once."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class AssistantMessage(ResponseModel):
    """The answer of a chat. content is null where there are only calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChoice(ResponseModel):
    """One answer, complete."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    weight_versions: list[VersionSpan] | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
    """What `/v1/chat/completions` answers without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    timings: Timings | None = None


class Delta(SparseModel):
    """What is new in a chat; the role comes in the first chunk only."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(ResponseModel):
    """What is new in one answer; the finish reason comes in the last chunk only."""

    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionSpan] | None = None
    token_ids: list[int] | None = None


class ChatChunk(ResponseModel):
    """One event of a chat stream; a usage chunk has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    timings: Timings | None = None


class CompletionChoice(ResponseModel):
    """Also the choice of a chunk, where finish_reason is null until the last."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | SkipJsonSchema[Written] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionSpan] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(ResponseModel):
    """Also the chunk of a stream, where usage is null until the last."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None
    resume: str | None = None


class ModelCard(BaseModel):
    """max_model_len is an extension: tokens of prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pitstop"
    max_model_len: int | None = None


class ModelList(BaseModel):
    """What `GET /v1/models` answers."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
