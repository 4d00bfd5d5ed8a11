"""From what a caller asks to a request that can run: every check happens here, before a request joins any queue."""

import operator
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import inf
from time import perf_counter
from typing import Any

from engine.active_request import ActiveRequest
from engine.config import ResolvedConfig
from engine.constraint import TokenConstraint
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.generation_defaults import GenerationDefaults, as_token_ids
from engine.request import SamplingParams, WorkloadHints
from engine.sampling_fields import MAX_SEED, PROCESSOR_OFF_VALUES, WARPER_OFF_VALUES

PROCESSOR_KEYWORDS = frozenset(
    {"temperature", "top_k", "top_p", "max_time", "stop_strings", *PROCESSOR_OFF_VALUES, *WARPER_OFF_VALUES}
)
"""What `add_request(**logit_processor_kwargs)` takes."""
SEED_STRIDE = 0x9E3779B97F4A7C15
"""The golden ratio in 64 bits: seeds of samples of one prompt are as far apart as they can be."""


class RequestFactory:
    """Thread-safe. Numbers requests without an id and draws seeds for those without one, from the config's seed.

    defaults: what fills unset sampling fields. Raises InvalidRequest for ids in them that the model does not have.
    """

    def __init__(self, config: ResolvedConfig, *, defaults: GenerationDefaults, accepts_keywords: bool) -> None:
        check_vocabulary(defaults.sampling, config.vocab_size)
        self._config = config
        self._defaults = defaults
        self._accepts_keywords = accepts_keywords
        self._lock = threading.Lock()
        self._seeds = random.Random(config.seed)
        self._numbers = count()

    def make(
        self,
        input_ids: Sequence[int],
        *,
        request_id: str | None,
        sampling: SamplingParams,
        cache_salt: str | None = None,
        hints: WorkloadHints | None = None,
        has_tokenizer: bool = False,
        constraint: TokenConstraint | None = None,
        pinned_version: int | None = None,
    ) -> ActiveRequest:
        """Gives a request, with the children that sample its prompt too. Raises InvalidRequest and its kinds.

        has_tokenizer: a tokenizer comes with it, so that the model's own stop strings apply. pinned_version: the one
        weight version that may sample its tokens and its children's.
        """
        prompt_ids = self.checked_ids(input_ids)
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise InvalidRequest(f"cache_salt is {cache_salt!r}; it must be a string", param="cache_salt")
        if constraint is not None and not isinstance(constraint, TokenConstraint):
            raise InvalidRequest(
                f"constraint is a {type(constraint).__name__}; it must be a TokenConstraint", param="constraint"
            )
        hints = hints or WorkloadHints()
        parent = ActiveRequest(
            request_id=self._checked_id(request_id),
            prompt_ids=prompt_ids,
            sampling=self._filled(sampling, len(prompt_ids), has_tokenizer),
            created_time=perf_counter(),
            cache_salt=cache_salt,
            tenant=hints.tenant,
            priority=hints.priority,
            waited_s=_checked_wait(hints.waited_s),
            constraint=constraint,
            pinned_version=pinned_version,
        )
        names = sequence_ids(parent.request_id, parent.sampling.num_return_sequences or 1)
        parent.children = [_child(parent, index, name) for index, name in enumerate(names[:-1])]
        return parent

    def resume(self, request: ActiveRequest, resumed: Sequence[Sequence[int] | None]) -> list[ActiveRequest]:
        """Gives those outputs of a request just made that have not ended, each with the tokens it has already.

        resumed: its own first, then its children's; None has ended. They share nothing but what the cache has of them.
        """
        outputs = [request, *request.children]
        request.children = []
        if not isinstance(resumed, list | tuple) or len(resumed) != len(outputs):
            raise InvalidRequest(
                f"resumed must be a list of the tokens of each output, and there are {len(outputs)}", param="resumed"
            )
        going_on = []
        for output, token_ids in zip(outputs, resumed, strict=True):
            if token_ids is not None:
                self._resume(output, token_ids)
                going_on.append(output)
        if not going_on:
            raise InvalidRequest("resumed says that every output has ended; there is nothing to go on", "resumed")
        return going_on

    def _resume(self, output: ActiveRequest, token_ids: Sequence[int]) -> None:
        if not len(token_ids):
            return
        ids = self.checked_ids(token_ids, param="resumed")
        if len(ids) >= output.max_new_tokens:
            raise InvalidRequest(
                f"resumed has {len(ids)} tokens of an output of at most {output.max_new_tokens}, so it has ended",
                "resumed",
            )
        if ids[-1] in (output.sampling.eos_token_ids or ()):
            raise InvalidRequest(f"resumed ends with {ids[-1]}, which ends an output; nothing can follow", "resumed")
        if output.sampling.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs come with the first token, and the request is resumed after it; leave them out",
                "prompt_logprobs",
            )
        if output.constraint is not None:
            try:
                output.constraint.advance(ids)
            except Exception as error:  # it may raise anything, and it is this request's own
                raise InvalidRequest(
                    f"resumed does not follow the constraint: {type(error).__name__}: {error}", "resumed"
                ) from error
            if output.constraint.is_finished:
                raise InvalidRequest("resumed completes what its constraint asks for, so it has ended", "resumed")
        output.resume(ids)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends a request that names no end tokens itself."""
        return self._defaults.sampling.eos_token_ids or ()

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
        return replace(sampling, **extra) if extra else sampling

    def checked_ids(self, input_ids: Sequence[int], *, param: str = "input_ids") -> list[int]:
        """Gives the ids of a prompt as a list. Raises InvalidRequest when it is empty or the model lacks one.

        param: what they are called.
        """
        try:
            values = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
        except TypeError:
            raise InvalidRequest(f"{param} is a {type(input_ids).__name__}; it must be a list of ids", param) from None
        if not isinstance(values, list) or not values:
            raise InvalidRequest("the prompt is empty; it must hold at least one token id", param=param)
        vocab_size = self._config.vocab_size
        for index, value in enumerate(values):
            if type(value) is not int:
                values[index] = value = _as_token_id(value, index, param)
            if not 0 <= value < vocab_size:
                raise InvalidRequest(
                    f"{param}[{index}] is {value}; ids of this model are 0 to {vocab_size - 1}", param=param
                )
        return values

    def checked_prompt(self, input_ids: Sequence[int]) -> list[int]:
        """Gives the ids of a prompt that is only read; also raises ContextLengthExceeded when it is too long."""
        ids = self.checked_ids(input_ids)
        limit = self._config.max_model_len
        if len(ids) > limit:
            raise ContextLengthExceeded(
                f"the prompt has {len(ids)} tokens, and {limit} fit{self._why_no_more(limit)}; shorten it",
                "input_ids",
            )
        return ids

    def _why_no_more(self, limit: int) -> str:
        """Gives what a refusal says where the limit is the model's, and less than it was made for."""
        if not self._config.is_cut_short or limit < self._config.max_model_len:
            return ""
        return " (beyond, the model's rotary embedding would follow the longest request of each step)"

    def new_id(self) -> str:
        """Gives the next id for a request that brings none."""
        return f"req_{next(self._numbers)}"

    def _checked_id(self, request_id: str | None) -> str:
        if request_id is None:
            return self.new_id()
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

    def _filled(self, given: SamplingParams, prompt_length: int, has_tokenizer: bool) -> SamplingParams:
        """Fills what the request leaves open; refuses what cannot be done together or can never fit."""
        check_vocabulary(given, self._config.vocab_size)
        max_new_tokens = given.max_new_tokens
        if max_new_tokens is None:
            max_new_tokens = self._defaults.sampling.max_new_tokens
        least = 1 if max_new_tokens is None else max_new_tokens
        limit = self._config.max_model_len
        if max_new_tokens is None:
            limit = min(limit, self._defaults.max_length or limit)
        if prompt_length + least > limit:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_length} tokens and {least} new ones are asked for, together more"
                f" than the {limit} that fit{self._why_no_more(limit)}; shorten one of them",
                param="max_new_tokens" if prompt_length < limit else "input_ids",
            )
        with self._lock:
            seed = self._seeds.getrandbits(63)
        here = SamplingParams(
            max_new_tokens=limit - prompt_length if max_new_tokens is None else max_new_tokens,
            seed=seed,
            logprobs=self._config.return_logprobs,
            stop_strings=(self._defaults.model_stop_strings or None) if has_tokenizer else None,
        )
        filled = given.filled_from(here).filled_from(self._defaults.sampling)
        if filled.stop_token_ids:
            filled = replace(filled, eos_token_ids=(*(filled.eos_token_ids or ()), *filled.stop_token_ids))
        if filled.needs_processors:
            check_together(filled)
        return filled


def check_vocabulary(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest for a parameter that names a token the model does not have."""
    for name in (
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_eos_token_id",
        "stop_token_ids",
        "allowed_token_ids",
    ):
        _check_ids(name, getattr(sampling, name) or (), vocab_size)
    _check_ids("forced_bos_token_id", (sampling.forced_bos_token_id or 0,), vocab_size)
    for ids in sampling.bad_words_ids or ():
        _check_ids("bad_words_ids", ids, vocab_size)
    biases: Any = sampling.sequence_bias or ()
    for ids, _ in biases:
        _check_ids("sequence_bias", ids, vocab_size)


def check_together(sampling: SamplingParams) -> None:
    """Raises InvalidRequest for parameters that leave each other nothing to do."""
    eos = sampling.eos_token_ids or ()
    if sampling.exponential_decay_length_penalty not in (None, (0, 1.0)) and not eos:
        raise InvalidRequest(
            "exponential_decay_length_penalty raises the score of the end token, and eos_token_ids names none",
            param="exponential_decay_length_penalty",
        )
    if sampling.bad_words_ids and all(len(ids) == 1 and ids[0] in eos for ids in sampling.bad_words_ids):
        raise InvalidRequest("bad_words_ids holds end tokens only, which are never bad words", param="bad_words_ids")
    forced_bos = {sampling.forced_bos_token_id} - {None, -1}
    forced_eos: Any = sampling.forced_eos_token_id
    for name, forced in (("forced_bos_token_id", forced_bos), ("forced_eos_token_id", set(forced_eos or ()))):
        if forced and forced <= set(sampling.suppress_tokens or ()):
            raise InvalidRequest(f"{name} is {sorted(forced)}, which suppress_tokens rules out", param=name)


def sequence_ids(request_id: str, num_sequences: int) -> list[str]:
    """Gives the ids of all outputs of a request, its own last."""
    return [*(f"{request_id}__child#{index}" for index in range(num_sequences - 1)), request_id]


def _child(parent: ActiveRequest, index: int, request_id: str) -> ActiveRequest:
    """Gives one more sample of the parent's prompt, which the parent alone scores, for both of them."""
    assert parent.sampling.seed is not None
    seed = (parent.sampling.seed + (index + 1) * SEED_STRIDE) % MAX_SEED
    return ActiveRequest(
        request_id=request_id,
        prompt_ids=parent.prompt_ids,
        sampling=replace(parent.sampling, seed=seed, prompt_logprobs=None),
        created_time=parent.created_time,
        cache_salt=parent.cache_salt,
        tenant=parent.tenant,
        priority=parent.priority,
        waited_s=parent.waited_s,
        parent_id=parent.request_id,
        constraint=None if parent.constraint is None else parent.constraint.fork(),
        prompt_logprobs=parent.prompt_logprobs,
        prompt_top_logprobs=parent.prompt_top_logprobs,
        pinned_version=parent.pinned_version,
    )


def _checked_wait(waited_s: object) -> float:
    if not isinstance(waited_s, float | int) or not 0 <= waited_s < inf:
        raise InvalidRequest(f"hints.waited_s is {waited_s!r}; it must be a number of seconds, 0 or more", "hints")
    return float(waited_s)


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise InvalidRequest(f"{name} holds {token}; ids of this model are 0 to {vocab_size - 1}", param=name)


def _as_token_id(value: object, index: int, param: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # whatever it is: TypeError when it is no integer
    except TypeError:
        raise InvalidRequest(f"{param}[{index}] is {value!r}; it must be an integer", param=param) from None
