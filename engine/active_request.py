"""A request inside the engine: its tokens, its progress, its blocks. Only the scheduler writes to it."""

from dataclasses import dataclass, field

from engine.constraint import TokenConstraint
from engine.request import (
    FinishReason,
    GenerationOutput,
    RequestStatus,
    SamplingParams,
    TokenView,
    TopLogprobs,
    WeightSpan,
)

Arrival = tuple[float, int]
"""When a request came, here or where it waited before; of two at once, who was taken first."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ActiveRequest:
    """One request from submission to its terminal output.

    Invariant: 0 <= num_computed <= num_tokens + num_pending, and when the steps in flight have run, the blocks hold
    keys and values of the first num_computed tokens, as far as later tokens can see them.
    `sampling` is filled from the generation config; what is None there is off. Prefill, prefix hits, preemption and
    resumption are all num_computed catching up with num_tokens.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    created_time: float
    streaming: bool = False
    record_timestamps: bool = False
    cache_salt: str | None = None
    tenant: str | None = None
    priority: int = 0
    waited_s: float = 0.0
    """Before it came here."""
    parent_id: str | None = None
    constraint: TokenConstraint | None = None
    """What its tokens have to follow; it knows those that were appended."""
    pinned_version: int | None = None
    """The one weight version that may sample its tokens; None takes any."""
    children: list["ActiveRequest"] = field(default_factory=list)
    """Further samples of the same prompt; they join when the prompt is computed, and share its blocks."""

    needs_processors: bool = field(init=False)
    """More than temperature, top_k and top_p acts on its scores; asked in every step, so kept."""
    arrival: Arrival = (0.0, 0)
    """Its place among all requests of one scheduler; set when it takes this one."""
    num_overtaken: int = 0
    is_begun: bool = False
    """It or its parent has run; a request that was sent back to the line still counts as running for a swap."""
    token_ids: list[int] = field(init=False)
    """Prompt and output; the prompt's own list until there is output, so that a long line costs its ids once."""
    output_ids: list[int] = field(default_factory=list)
    num_resumed: int = 0
    """Leading tokens of the output that came with it; they were delivered elsewhere, and have no log-probabilities."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    num_scored: int = 0
    """Leading tokens of the prompt whose logits steps have scored or, in flight, are scoring."""
    timestamps: list[float] = field(default_factory=list)
    num_computed: int = 0
    """Tokens that steps have computed or, in flight, are computing."""
    num_pending: int = 0
    """Tokens that steps in flight will sample: they have their place, and no name yet."""
    num_in_flight: int = 0
    """Rows of steps in flight."""
    block_tables: list[list[int]] = field(default_factory=list)
    """By block group, the blocks that hold its tokens."""
    digests: list[bytes] = field(default_factory=list)
    """Names of the full blocks so far."""
    chain_version: int | None = None
    """The weight version that all its blocks were filled under; None when they mix versions and may not be shared."""

    status: RequestStatus = RequestStatus.PENDING
    finish_reason: FinishReason | None = None
    error: str | None = None
    spans: list[WeightSpan] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    first_scheduled_time: float = -1.0
    ended_time: float = -1.0
    num_delivered: int = 0

    def __post_init__(self) -> None:
        self.token_ids = self.prompt_ids
        self.needs_processors = self.sampling.needs_processors

    @property
    def needs_last_token(self) -> bool:
        """Its next token cannot be drawn before the one that is on its way has a name."""
        return self.needs_processors or self.constraint is not None

    @property
    def family(self) -> str:
        """The id that cancels it together with the other samples of its prompt."""
        return self.parent_id or self.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def max_new_tokens(self) -> int:
        assert self.sampling.max_new_tokens is not None
        return self.sampling.max_new_tokens

    @property
    def num_to_generate(self) -> int:
        return self.max_new_tokens - len(self.output_ids)

    @property
    def num_to_score(self) -> int:
        """Tokens of the prompt whose logits are still wanted: each says how likely the next one is."""
        if self.sampling.prompt_logprobs is None:
            return 0
        return max(0, len(self.prompt_ids) - 1 - self.num_scored)

    def is_overdue(self, now: float) -> bool:
        """True once `max_time` seconds have passed since its submission."""
        max_time = self.sampling.max_time
        return max_time is not None and now - self.created_time > max_time

    def resume(self, token_ids: list[int]) -> None:
        """Has it go on from tokens that were generated before it was submitted."""
        self.output_ids = list(token_ids)
        self.token_ids = [*self.prompt_ids, *token_ids]
        self.num_resumed = self.num_delivered = len(token_ids)
        # A swap that lets those finish that have begun waits for it too.
        self.is_begun = True

    def append(self, token: int) -> None:
        """Adds a generated token."""
        if not self.output_ids:
            self.token_ids = list(self.prompt_ids)
        self.token_ids.append(token)
        self.output_ids.append(token)

    def take_output(self) -> GenerationOutput:
        """Gives the state of this moment, with everything since the last call as new."""
        start, self.num_delivered = self.num_delivered, len(self.output_ids)
        scored = start - self.num_resumed
        is_last = self.status.is_terminal
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            generated_tokens=self.output_ids if is_last else TokenView(self.output_ids),
            logprobs=self.logprobs if is_last else TokenView(self.logprobs),
            error=self.error,
            status=self.status,
            created_time=self.created_time,
            lifespan=(self.first_scheduled_time, self.ended_time),
            timestamps=self._timestamps(is_last),
            new_tokens=self.output_ids[start:],
            new_logprobs=self.logprobs[scored:],
            finish_reason=self.finish_reason,
            weight_versions=tuple(self.spans),
            num_cached_tokens=self.num_cached_tokens or 0,
            top_logprobs=self.top_logprobs if is_last else TokenView(self.top_logprobs),
            new_top_logprobs=self.top_logprobs[scored:],
            prompt_logprobs=self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
        )

    def _timestamps(self, is_last: bool) -> list[float] | TokenView | None:
        if not self.record_timestamps:
            return None
        return self.timestamps if is_last else TokenView(self.timestamps)
