"""What router, replica and controller exchange: frozen dataclasses, pickled by Ray."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from engine import SamplingParams, TopLogprobs, WeightSpan, WorkloadHints


class GrammarKind(StrEnum):
    """How a grammar is written. CHOICE is a JSON list of texts, EBNF is GBNF or Lark."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to follow, as it was asked for; a replica compiles it. param: where it came from."""

    kind: GrammarKind
    text: str
    param: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt for one replica. `cache_salt` keeps tenants' prefixes apart.

    min_weight_version: the least version whose weights may sample its tokens. weight_version: the only one that may.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    hints: WorkloadHints = field(default_factory=WorkloadHints)
    cache_salt: str | None = None
    grammar: Grammar | None = None
    min_weight_version: int | None = None
    weight_version: int | None = None

    def accepts(self, version: int) -> bool:
        """Gives whether these weights may answer it."""
        is_pinned_elsewhere = self.weight_version is not None and self.weight_version != version
        return not is_pinned_elsewhere and version >= (self.min_weight_version or 0)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """All that is new in one request since the event before it.

    token_ids may be empty in the last event, which alone has a finish_reason (stop, length, cancelled or failed).
    logprobs is aligned with token_ids where asked for, else empty. weight_versions covers token_ids: spans whose
    positions count from the start of the request's output.
    top_logprobs has the most likely tokens of each place where asked for. prompt_logprobs and prompt_top_logprobs, of
    the prompt's tokens but the first, come in the first event. queued_s is how long the request waited for a place.
    index says which sequence of the prompt it is of, where several were asked for; `more` has what the others have new
    since the same event, each at most once.
    text and prompt_ids are the router's: what is new as text, which lags behind the tokens by unfinished characters and
    possible stop strings, and in the first event the ids of the prompt.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    weight_versions: tuple[WeightSpan, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    replica_id: str = ""
    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[float] = field(default_factory=list)
    prompt_top_logprobs: Sequence[TopLogprobs] = field(default_factory=list)
    queued_s: float = 0.0
    index: int = 0
    more: list["TokenEvent"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where new weights come from. path: a Hugging Face folder of safetensors that every replica can read.

    hub, revision: a model of the hub; the controller fetches it once and puts the folder into path.
    """

    path: str = ""
    hub: str | None = None
    revision: str | None = None

    @property
    def as_asked(self) -> "WeightSource":
        """What was asked for, without what the controller found out."""
        return replace(self, path="") if self.hub is not None else self

    def __str__(self) -> str:
        return self.hub + (f" at {self.revision}" if self.revision else "") if self.hub is not None else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOptions:
    """How weights are to be brought to the fleet.

    in_flight: what becomes of running requests. wait_s: how long to wait for a swap that is under way. A request with
    the idempotency_key of a committed one gets that one's result and changes nothing. requested_by says where the
    request came from.
    """

    in_flight: str = "keep"
    wait_s: float = 0.0
    idempotency_key: str | None = None
    requested_by: str = ""


@dataclass(frozen=True, slots=True)
class SwapRequest(SwapOptions):
    """New weights for the fleet, as somebody asks the controller for them. label is for people."""

    source: WeightSource
    cast: bool = field(default=False, kw_only=True)
    label: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class RollbackRequest(SwapOptions):
    """An earlier version's weights for the fleet, under a new number. version None is the one before the committed."""

    version: int | None = None


@dataclass(frozen=True, slots=True)
class SwapOrder:
    """One swap, as the controller sends it to every replica."""

    swap_id: str
    version: int
    source: WeightSource | None
    """None is the model the application was started with."""
    in_flight: str = "keep"
    cast: bool = False


@dataclass(frozen=True, slots=True)
class SwapReply:
    """A replica's answer to stage, commit or abort. error is one sentence, error_type its class in engine.errors."""

    replica_id: str
    version: int
    ok: bool
    error: str | None = None
    error_type: str | None = None
    tensor: str | None = None
    staged_s: float = 0.0
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SwapResult:
    """What became of a swap: the committed version, and the longest time a replica stood still."""

    version: int
    previous_version: int
    replicas: list[str]
    staged_s: float
    paused_s: float
    total_s: float
    swap_id: str = ""
    lagging: list[str] = field(default_factory=list)
    """Replicas that have not confirmed the version yet: out of routing until they have caught up."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A swap whose tensors are yet to come, in buckets. The source of `swap` is the session's to find.

    session_id: made by the caller, so that asking twice opens one. lease_s: the session is aborted after so long
    without a word from its owner.
    """

    session_id: str
    swap: SwapRequest
    lease_s: float = 60.0


@dataclass(frozen=True, slots=True)
class SessionState:
    """How far a session is. result: what its idempotency key has brought before, and nothing is to be sent."""

    session_id: str
    next_sequence: int = 0
    size_bytes: int = 0
    result: SwapResult | None = None


@dataclass(frozen=True, slots=True)
class CommittedVersion:
    """A line of the history: a version that was committed, from where, when, and who asked for it."""

    version: int
    source: WeightSource | None = None
    """None is the model the application was started with."""
    cast: bool = False
    label: str = ""
    swap_id: str | None = None
    committed_at: str = ""
    """UTC, ISO 8601; empty for the model the application was started with."""
    requested_by: str = ""
    idempotency_key: str | None = None
    rollback_to: int | None = None
    """The version whose weights these are, where a rollback brought them."""
    result: SwapResult | None = None
    """What became of the swap, as far as it was known when this was written."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica tells the controller about once a second."""

    replica_id: str
    version: int
    state: str
    """loading, ready, staging, staged, paused, lagging or unhealthy."""
    source: WeightSource | None = None
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    age_s: float = 0.0
    error: str | None = None
    """Why the replica has not caught up with the committed version yet, after an attempt that failed."""
    num_ranks: int = 1
    """Processes that the model is cut over."""


@dataclass(frozen=True, slots=True)
class CommittedWeights:
    """What every replica has to serve. source None is the model the application was started with."""

    version: int
    source: WeightSource | None = None
    cast: bool = False
    swap_id: str | None = None
    """The swap that brought this version; None where it is not known any more."""
    swap_in_progress: str | None = None
    """The swap whose staged weights are still wanted; a replica drops those of any other."""


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """Where weights that came as tensors are kept. is_durable: it was configured, and is no temporary folder."""

    folder: str
    is_durable: bool
    size_bytes: int
    open_sessions: int


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """GET /admin/weights and `pitstop status`."""

    committed: CommittedWeights
    replicas: list[ReplicaReport]
    swap_in_progress: str | None = None
    phase: str | None = None
    """What the swap under way is doing: fetch, stage, commit or abort."""
    history: list[CommittedVersion] = field(default_factory=list)
    """Newest first; the first one is the committed version."""
    problem: str | None = None
    """Why the latest replica that wanted to start could not take the committed weights."""
    store: StoreStatus | None = None
