"""What a caller asks of the engine and what it gets back.

Standard library only: these objects cross process borders by pickle.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, overload

from engine.sampling_fields import CHECKS, PROCESSOR_OFF_VALUES, WARPER_OFF_VALUES

TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens of one place and their log-probabilities, the likeliest first; none of probability 0."""


class RequestStatus(IntEnum):
    """Where a request is. The first five are the reference page's; CANCELLED is ours."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5

    @property
    def is_terminal(self) -> bool:
        return self >= RequestStatus.FINISHED


NOTHING_LEFT = "no token is left to choose: the request's own settings rule out all of them"
"""The error of a request whose settings contradict each other; its caller's fault, other than what else may fail."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    WEIGHT_VERSION_GONE = "weight_version_gone"
    """The weight version that it was pinned to is served no more."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. `None` means: as the generation config says.

    Names, ranges and meanings are those of transformers' `GenerationConfig` where it has the name. Lists may be given
    for tuples and a dict for pairs; they are stored as tuples.

    temperature: 0 is greedy, else the scores are divided by it.
    top_k: keep the k best tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches it; in (0, 1].
    seed: token i of the output depends on (seed, position) and the scores alone; None draws one at random.
    max_new_tokens: at most so many tokens; None means up to the length limit of the model; 0 computes the prompt alone.
    eos_token_ids: ids that end the request (and are part of its output); None means the model's, () means none.
    stop_token_ids: further ids that end it, whatever eos_token_ids says; what acts on end tokens acts on these too.
    logprobs: also give the log-probability of each token, of the scores it was sampled from.
    top_logprobs: with logprobs, those of so many most likely tokens of each place too.
    prompt_logprobs: also give the log-probability of each token of the prompt but the first, of the model's own scores,
        and those of so many most likely tokens of each place; 0 gives the token's alone. Once for all sequences.
    num_return_sequences: how many outputs of the prompt to sample, each with a seed of its own.

    Where the temperature is above 0, after top_p and in this order (top_h before top_k): min_p (0 is off), top_h (0 is
    off), typical_p (1 is off), epsilon_cutoff (0 is off), eta_cutoff (0 is off).
    Penalties: repetition_penalty over prompt and output (1 is off), presence_penalty and frequency_penalty over the
    output as OpenAI defines them (0 is off), encoder_repetition_penalty over the prompt (1 is off),
    no_repeat_ngram_size and encoder_no_repeat_ngram_size (0 is off).
    Lengths: min_length of prompt and output, min_new_tokens of the output, exponential_decay_length_penalty (start,
    factor), max_time in seconds from the submission on, which ends the request with the token that exceeds it.
    Tokens: allowed_token_ids (no other is ever drawn; () allows all), bad_words_ids, sequence_bias, suppress_tokens,
    begin_suppress_tokens, forced_eos_token_id (() is none),
    forced_bos_token_id (-1 is none), stop_strings (() is none; needs a tokenizer beside the request).
    Scores: renormalize_logits, remove_invalid_values, watermarking_config (fields of transformers'
    `WatermarkingConfig` or `SynthIDTextWatermarkingConfig`; {} is off).
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    logprobs: bool | None = None
    num_return_sequences: int | None = None
    min_p: float | None = None
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    encoder_repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    max_time: float | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[tuple[Sequence[int], float]] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    renormalize_logits: bool | None = None
    remove_invalid_values: bool | None = None
    watermarking_config: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None
    stop_token_ids: Sequence[int] | None = None
    allowed_token_ids: Sequence[int] | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))

    def filled_from(self, defaults: "SamplingParams") -> "SamplingParams":
        """Gives a copy in which every None is replaced by the value of `defaults`."""
        # Both were checked when they were made; checking again would be most of the cost of a submission.
        filled = object.__new__(SamplingParams)
        for name in self.__slots__:
            value = getattr(self, name)
            object.__setattr__(filled, name, getattr(defaults, name) if value is None else value)
        return filled

    @property
    def needs_processors(self) -> bool:
        """True when more than temperature, top_k and top_p acts on the scores."""
        if any(_is_on(getattr(self, name), off) for name, off in PROCESSOR_OFF_VALUES.items()):
            return True
        return bool(self.temperature) and any(
            _is_on(getattr(self, name), off) for name, off in WARPER_OFF_VALUES.items()
        )


@dataclass(frozen=True, slots=True)
class WorkloadHints:
    """What is known beforehand of a workload (it then sizes a manager) or of one request (it then routes it).

    Lengths are in tokens. `max_generated_length` is `max_new_tokens` and `num_requests` is `n` for a single request.
    0 and None mean: not known. waited_s: seconds for which a request has waited elsewhere, as one does whose engine was
    lost; it gets the place in line that it would have had.
    """

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0
    expected_generated_length: int = 0
    session_id: str | None = None
    tenant: str | None = None
    priority: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start` to `end` (exclusive, counted in the output) were sampled under weight version `version`.

    is_recomputed: keys and values of all tokens before `start` were then computed anew by these weights, though earlier
    ones had drawn some of them; the engine never says so, whoever resumes a request knows it.
    """

    version: int
    start: int
    end: int
    is_recomputed: bool = False


class TokenView(Sequence[Any]):
    """The first `length` items of a list that only grows: read-only, and O(1) to make. Pickles as a plain list."""

    __slots__ = ("_items", "_length")

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._length = len(items)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._items[i] for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} out of range for {self._length} tokens")
        return self._items[index % self._length]

    def __iter__(self) -> Iterator[Any]:
        return (self._items[i] for i in range(self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which are unhashable too

    def __repr__(self) -> str:
        return repr(self[:])

    def __reduce__(self) -> tuple[type, tuple[list[Any]]]:
        return list, (self[:],)


@dataclass(slots=True)
class GenerationOutput:
    """The state of one request at one moment; the last one of a request `is_finished()`.

    prompt_ids: the prompt, the same object in every output of a request.
    generated_tokens: all tokens so far: a shared view while streaming, a plain list in the last output.
    new_tokens: those since the output before this one; a callback may carry several.
    logprobs, top_logprobs: one per generated token where asked for, else empty; of a resumed request, for its new ones.
    prompt_logprobs, prompt_top_logprobs: one per token of the prompt but the first where asked for, else empty; whole
        from the first generated token on, the same object in every output.
    created_time, lifespan, timestamps: `time.perf_counter()` seconds; lifespan is (first scheduled, ended), -1 unset.
    weight_versions: spans over generated_tokens, in order, without gaps; an empty one where the prompt was computed
        alone. Of a resumed request they begin at its new tokens.
    num_cached_tokens: prompt tokens taken from the prefix cache when the request was first scheduled.
    """

    request_id: str
    prompt_ids: Sequence[int] = field(default_factory=list)
    generated_tokens: Sequence[int] = field(default_factory=list)
    logprobs: Sequence[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = 0.0
    lifespan: tuple[float, float] = (-1.0, -1.0)
    timestamps: Sequence[float] | None = None
    new_tokens: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    weight_versions: tuple[WeightSpan, ...] = ()
    num_cached_tokens: int = 0
    top_logprobs: Sequence[TopLogprobs] = field(default_factory=list)
    new_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[float] = field(default_factory=list)
    prompt_top_logprobs: Sequence[TopLogprobs] = field(default_factory=list)

    def is_finished(self) -> bool:
        """True for the one terminal output of a request: finished, failed or cancelled."""
        return self.status.is_terminal


def _is_on(value: object, off: object) -> bool:
    return value is not None and value != off
