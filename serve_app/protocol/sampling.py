"""The fields that say how tokens are chosen and where an answer ends: the same for chats and for completions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from engine import InvalidRequest, SamplingParams
from serve_app.protocol.parsing import shorten
from serve_app.protocol.strict import FIRST_ONLY, Items, RequestModel, ShortText, TokenId

MAX_BIAS = 100
"""Of one token, either way: OpenAI's limit; the score of a token that is never drawn."""
MAX_TEMPERATURE = 2
"""OpenAI's limit."""
MAX_TOP_LOGPROBS = 20
"""OpenAI's limit."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _by_token(value: Any) -> Any:
    """Gives OpenAI's object of biases, whose names are token ids, with integers for names."""
    if not isinstance(value, dict):
        return value
    for name in value:
        if not (isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10):
            raise InvalidRequest(f"names {shorten(name)}; a name must be a token id")
    return {int(name): bias for name, bias in value.items()}


Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
SIGNED_64 = Field(ge=-(2**63), lt=2**63)


class SamplingFields(RequestModel, ABC):
    """How tokens are chosen and where an answer ends. null means the default, as clients expect.

    n: answers to each prompt, which is computed once; the first is that of n=1 with the same seed.
    OpenAI's: n, temperature, top_p, seed, frequency_penalty, presence_penalty, logit_bias, stop. vLLM's: the others.
    top_k: 0 or -1 keeps all. stop, stop_token_ids: neither string nor token is part of the text, nor is the model's end
    token that ends it, unless include_stop_str_in_output. min_tokens: no end token, stop token or stop string ends the
    answer before.
    """

    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, SIGNED_64] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[int, Bias], FIRST_ONLY, BeforeValidator(_by_token)] | None = None
    bad_words: Items[ShortText] | None = None
    allowed_token_ids: Annotated[Items[TokenId], Field(min_length=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop: Annotated[Items[ShortText], BeforeValidator(_as_list)] | None = None
    stop_token_ids: Items[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: NumTop | None = None

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool:
        """True where the log-probability of each token is asked for."""

    @property
    @abstractmethod
    def num_top_logprobs(self) -> int:
        """How many of the most likely tokens of each place are asked for too."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt's places; None does not score the prompt."""
        return self.prompt_logprobs

    @property
    @abstractmethod
    def max_new_tokens(self) -> int | None:
        """None goes on up to the model's length."""

    def sampling(self, bad_words_ids: Sequence[Sequence[int]] = ()) -> SamplingParams:
        """Gives how tokens are to be chosen: OpenAI's defaults, not those of the model's own generation config.

        bad_words_ids: the tokens of `bad_words`.
        """
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            sequence_bias={(token,): bias for token, bias in (self.logit_bias or {}).items()} or None,
            bad_words_ids=bad_words_ids or None,
            allowed_token_ids=self.allowed_token_ids,
            min_new_tokens=self.min_tokens or 0,
            max_new_tokens=self.max_new_tokens,
            eos_token_ids=() if self.ignore_eos else None,
            stop_token_ids=self.stop_token_ids or None,
            logprobs=self.wants_logprobs,
            top_logprobs=self.num_top_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            num_return_sequences=self.n or 1,
        )
