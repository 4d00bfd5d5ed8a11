"""From what a caller asks to a request that can run: every check happens here, before a request joins any queue."""

import operator
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any

from engine.active_request import ActiveRequest
from engine.config import ResolvedConfig
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.generation_defaults import as_token_ids
from engine.request import SamplingParams

PROCESSOR_KEYWORDS = ("temperature", "top_k", "top_p")


class RequestFactory:
    """Thread-safe. Numbers requests without an id and draws seeds for those without one, from the config's seed.

    defaults: what fills unset sampling fields. max_length: prompt plus output, where a generation config bounds it.
    """

    def __init__(
        self, config: ResolvedConfig, *, defaults: SamplingParams, max_length: int | None, accepts_keywords: bool
    ) -> None:
        self._config = config
        self._defaults = defaults
        self._max_length = max_length
        self._accepts_keywords = accepts_keywords
        self._lock = threading.Lock()
        self._seeds = random.Random(config.seed)
        self._numbers = count()

    def make(
        self, input_ids: Sequence[int], *, request_id: str | None, sampling: SamplingParams, cache_salt: str | None
    ) -> ActiveRequest:
        """Gives a request with nothing left open. Raises InvalidRequest and its kinds."""
        prompt_ids = self._checked_ids(input_ids)
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise InvalidRequest(f"cache_salt is {cache_salt!r}; it must be a string", param="cache_salt")
        return ActiveRequest(
            request_id=self._checked_id(request_id),
            prompt_ids=prompt_ids,
            sampling=self._filled(sampling, len(prompt_ids)),
            created_time=perf_counter(),
            cache_salt=cache_salt,
        )

    def merge(
        self,
        sampling: SamplingParams | None,
        max_new_tokens: int | None,
        eos_token_id: int | list[int] | None,
        keywords: dict[str, Any],
    ) -> SamplingParams:
        """Gives one set of parameters from the three ways to give them; the same one twice is refused."""
        if sampling is None:
            sampling = SamplingParams()
        elif not isinstance(sampling, SamplingParams):
            raise InvalidRequest(f"sampling is a {type(sampling).__name__}; it must be SamplingParams", "sampling")
        extra = self._checked_keywords(keywords)
        if max_new_tokens is not None:
            extra["max_new_tokens"] = max_new_tokens
        if eos_token_id is not None:
            extra["eos_token_ids"] = as_token_ids(eos_token_id)
        for name in extra:
            if getattr(sampling, name) is not None:
                raise InvalidRequest(f"{name} is given twice, in sampling and beside it; give it once", param=name)
        return replace(sampling, **extra)

    def _checked_ids(self, input_ids: Sequence[int]) -> list[int]:
        try:
            values = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
        except TypeError:
            raise InvalidRequest(
                f"input_ids is a {type(input_ids).__name__}; it must be a list of ids", "input_ids"
            ) from None
        if not isinstance(values, list) or not values:
            raise InvalidRequest("the prompt is empty; it must hold at least one token id", param="input_ids")
        vocab_size = self._config.vocab_size
        for index, value in enumerate(values):
            if type(value) is not int:
                values[index] = value = _as_token_id(value, index)
            if not 0 <= value < vocab_size:
                raise InvalidRequest(
                    f"input_ids[{index}] is {value}; ids of this model are 0 to {vocab_size - 1}", param="input_ids"
                )
        return values

    def _checked_id(self, request_id: str | None) -> str:
        if request_id is None:
            return f"req_{next(self._numbers)}"
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequest(f"request_id is {request_id!r}; it must be a non-empty string", param="request_id")
        return request_id

    def _checked_keywords(self, keywords: dict[str, Any]) -> dict[str, Any]:
        for name in keywords:
            if name not in PROCESSOR_KEYWORDS:
                raise InvalidRequest(f"{name} is not a parameter of add_request; see SamplingParams", param=name)
            if not self._accepts_keywords:
                raise InvalidRequest(
                    f"{name} needs per_request_processors=True, or give it in sampling=SamplingParams(...)", param=name
                )
        return dict(keywords)

    def _filled(self, given: SamplingParams, prompt_length: int) -> SamplingParams:
        """Fills what the request leaves open; refuses what can never fit the model or the whole cache."""
        limit = self._config.max_model_len
        room = min(limit, self._max_length or limit) - prompt_length
        max_new_tokens = given.max_new_tokens or self._defaults.max_new_tokens
        if prompt_length + (max_new_tokens or 1) > limit or room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_length} tokens and {max_new_tokens or 1} new ones are asked for, together more"
                f" than the {min(limit, self._max_length or limit)} that fit; shorten one of them",
                param="max_new_tokens" if prompt_length < limit else "input_ids",
            )
        with self._lock:
            seed = self._seeds.getrandbits(63)
        here = SamplingParams(max_new_tokens=max_new_tokens or room, seed=seed, logprobs=self._config.return_logprobs)
        return given.filled_from(here).filled_from(self._defaults)


def _as_token_id(value: object, index: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # whatever it is: TypeError when it is no integer
    except TypeError:
        raise InvalidRequest(f"input_ids[{index}] is {value!r}; it must be an integer", param="input_ids") from None
