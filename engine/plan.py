"""A step as a message: what the scheduler asks of the runner, and what comes back."""

from dataclasses import dataclass, field
from typing import Protocol

from engine.active_request import ActiveRequest
from engine.block_pool import BlockCopy
from engine.request import TopLogprobs


@dataclass(slots=True)
class PlannedRow:
    """Compute tokens `start` to `end` (exclusive) of one request; `samples` draws the token after them.

    `scored` are positions of it whose logits are compared with the tokens that follow them in the prompt. With
    `is_ahead` its one token is the one that the step before samples, and what `token_ids` has is a stand-in.
    Never written to; not frozen, because that would double what a step spends on making its rows.
    """

    request: ActiveRequest
    start: int
    token_ids: list[int]
    block_tables: list[list[int]]
    samples: bool
    is_ahead: bool = False
    scored: range = range(0)
    num_tokens: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.token_ids)
        self.end = self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its rows, in no order that matters, and the copies to make before it, by block group and in order."""

    rows: list[PlannedRow]
    copies: list[list[BlockCopy]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_decoding(self) -> int:
        """Rows of one token that samples: decode steps, and the last token of a prompt."""
        return sum(row.num_tokens == 1 and row.samples for row in self.rows)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the tokens that follow a row's scored positions, and of the most likely ones there."""

    logprobs: list[float]
    top: list[TopLogprobs]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What a step drew for one request; `stops` ends it with this token, `error` ends it FAILED and no other.

    Of a row that scores and does not sample there are `scores` and no token.
    """

    token: int
    logprob: float | None = None
    error: str | None = None
    stops: bool = False
    top: TopLogprobs = ()
    scores: PromptScores | None = None


class StepHandle(Protocol):
    """A step that was launched. Handles are waited for in the order of their launches, each once."""

    def wait(self) -> dict[str, SampledToken]:
        """Gives, by request id, what each row that samples or scores has, once the step has run; raises EngineDead."""
        ...


class StepRunner(Protocol):
    """What computes steps, in the order of their launches."""

    def launch(self, plan: StepPlan) -> StepHandle: ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a step that had run when its launch returned."""

    samples: dict[str, SampledToken]

    def wait(self) -> dict[str, SampledToken]:
        return self.samples
