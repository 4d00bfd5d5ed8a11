"""A step as a message: what the scheduler asks of the runner, and what comes back."""

from dataclasses import dataclass, field

from engine.active_request import ActiveRequest
from engine.block_pool import BlockCopy


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Compute tokens `start` to `start + len(token_ids)` of one request; `samples` draws the token after them."""

    request: ActiveRequest
    start: int
    token_ids: list[int]
    block_tables: list[list[int]]
    samples: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its rows, in no order that matters, and the copies to make before it, by block group and in order."""

    rows: list[PlannedRow]
    copies: list[list[BlockCopy]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_decoding(self) -> int:
        """Rows of one token that samples: decode steps, and the last token of a prompt."""
        return sum(len(row.token_ids) == 1 and row.samples for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What a step drew for one request; `stops` ends it with this token, `error` ends it FAILED and no other."""

    token: int
    logprob: float | None = None
    error: str | None = None
    stops: bool = False
