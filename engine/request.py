"""What a caller asks of the engine and what it gets back.

Standard library only: these objects cross process borders by pickle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from math import isfinite
from typing import Any, overload

from engine.errors import InvalidRequest

MAX_SEED = 2**63
MAX_SEQUENCES = 1024
"""Of one request; more is a typing error or an attack."""


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


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. `None` means: as the generation config of the model says.

    temperature: 0 is greedy, else the scores are divided by it.
    top_k: keep the k best tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches it; in (0, 1].
    seed: token i of the output depends on (seed, position) and the scores alone; None draws one at random.
    max_new_tokens: at most so many tokens; None means up to the length limit of the model.
    eos_token_ids: ids that end the request (and are part of its output); None means the model's, () means none.
    logprobs: also give the log-probability of each token, of the scores it was sampled from.
    num_return_sequences: how many outputs of the prompt to sample, each with a seed of its own.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    logprobs: bool | None = None
    num_return_sequences: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, minimum=0.0, maximum=100.0)
        _check_number("top_p", self.top_p, minimum=0.0, maximum=1.0)
        if self.top_p == 0:
            raise InvalidRequest("top_p is 0; it must be above 0 and at most 1", param="top_p")
        _check_integer("top_k", self.top_k, minimum=0)
        _check_integer("seed", self.seed, minimum=-MAX_SEED, maximum=MAX_SEED - 1)
        _check_integer("max_new_tokens", self.max_new_tokens, minimum=1)
        _check_integer("num_return_sequences", self.num_return_sequences, minimum=1, maximum=MAX_SEQUENCES)
        if self.eos_token_ids is not None:
            for token in self.eos_token_ids:
                _check_integer("eos_token_ids", token, minimum=-1)

    def filled_from(self, defaults: "SamplingParams") -> "SamplingParams":
        """Gives a copy in which every None is replaced by the value of `defaults`."""
        missing = {name: getattr(defaults, name) for name in self.__slots__ if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass(frozen=True, slots=True)
class WorkloadHints:
    """What is known beforehand of a workload (it then sizes a manager) or of one request (it then routes it).

    Lengths are in tokens. `max_generated_length` is `max_new_tokens` and `num_requests` is `n` for a single request.
    0 and None mean: not known.
    """

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0
    expected_generated_length: int = 0
    session_id: str | None = None
    tenant: str | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start` to `end` (exclusive, counted in the output) were sampled under weight version `version`."""

    version: int
    start: int
    end: int


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
    logprobs: one per generated token where asked for, else empty.
    created_time, lifespan, timestamps: `time.perf_counter()` seconds; lifespan is (first scheduled, ended), -1 unset.
    weight_versions: spans over generated_tokens, in order, without gaps.
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

    def is_finished(self) -> bool:
        """True for the one terminal output of a request: finished, failed or cancelled."""
        return self.status.is_terminal


def _check_number(name: str, value: float | None, *, minimum: float, maximum: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InvalidRequest(f"{name} is {value!r}; it must be a finite number", param=name)
    if not minimum <= value <= maximum:
        raise InvalidRequest(
            f"{name} is {value}; it must be between {minimum:g} and {maximum:g}",
            param=name,
        )


def _check_integer(name: str, value: int | None, *, minimum: int, maximum: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {value!r}; it must be an integer", param=name)
    if value < minimum or (maximum is not None and value > maximum):
        bound = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise InvalidRequest(f"{name} is {value}; it must be {bound}", param=name)
