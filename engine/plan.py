"""A step as a message: what the scheduler asks of the runner, and what comes back."""

from dataclasses import dataclass

from engine.active_request import ActiveRequest


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Compute tokens `start` to `start + len(token_ids)` of one request; `samples` draws the token after them."""

    request: ActiveRequest
    start: int
    token_ids: list[int]
    block_ids: list[int]
    samples: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its rows, in no order that matters."""

    rows: list[PlannedRow]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_decoding(self) -> int:
        """Rows of one token that samples: decode steps, and the last token of a prompt."""
        return sum(len(row.token_ids) == 1 and row.samples for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What a step drew for one request; `error` ends that request and no other."""

    token: int
    logprob: float | None = None
    error: str | None = None
