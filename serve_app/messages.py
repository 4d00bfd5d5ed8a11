"""What router, replica and controller exchange: frozen dataclasses, pickled by Ray."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from engine import SamplingParams, TopLogprobs, WeightSpan, WorkloadHints
from serve_app.scaling_report import ScalingReport

MAX_WAIT_S = 3600.0
"""For a swap that is under way; longer than any client keeps its connection."""
SwapPhase = Literal["stage", "finish", "park", "vote", "commit", "resume", "verify", "abort"]
"""What a swap is doing, in this order; `finish` where requests are to finish first, `abort` where it has failed."""


class GrammarKind(StrEnum):
    """How a grammar is written. CHOICE is a JSON list of texts, EBNF is GBNF or Lark, whatever a client sends."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to follow, as it was asked for; a replica compiles it.

    param: where it came from. schemas: what a refusal calls each JSON schema that has a line of a Lark text to itself.
    """

    kind: GrammarKind
    text: str
    param: str
    schemas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt for one replica. `cache_salt` keeps tenants' prefixes apart.

    min_weight_version: the least version whose weights may sample its tokens. weight_version: the only one that may.
    A request that goes on after another replica has answered part of it: resumed has the tokens of each output so far,
    its own first, None for one that has ended; resume_version is the version that drew the latest of them, and the one
    that has to take it. excluded: replicas that have failed it, for others to be tried first. is_alone: replicas have
    died of it, maybe, so that it has to be alone on the one that takes it.
    timeout_s: how long it may take from here on; None is as long as any request may.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    hints: WorkloadHints = field(default_factory=WorkloadHints)
    cache_salt: str | None = None
    grammar: Grammar | None = None
    min_weight_version: int | None = None
    weight_version: int | None = None
    resumed: tuple[tuple[int, ...] | None, ...] | None = None
    resume_version: int | None = None
    excluded: frozenset[str] = frozenset()
    is_alone: bool = False
    timeout_s: float | None = None

    def accepts(self, version: int) -> bool:
        """Gives whether these weights may answer it."""
        is_wanted = all(pin in (None, version) for pin in (self.weight_version, self.resume_version))
        return is_wanted and version >= (self.min_weight_version or 0)

    @property
    def num_sequences(self) -> int:
        """Outputs that are still to come."""
        if self.resumed is not None:
            return sum(ids is not None for ids in self.resumed)
        return self.sampling.num_return_sequences or 1

    @property
    def num_resumed_tokens(self) -> int:
        return sum(len(ids or ()) for ids in self.resumed or ())


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """All that is new in one request since the event before it.

    token_ids may be empty in the last event, which alone has a finish_reason (stop, length, cancelled or failed).
    logprobs is aligned with token_ids where asked for, else empty. weight_versions covers token_ids: spans whose
    positions count from the start of the request's output.
    top_logprobs has the most likely tokens of each place where asked for. prompt_logprobs and prompt_top_logprobs, of
    the prompt's tokens but the first, come in the first event. queued_s is how long the request waited for a place at
    its replica; computed_s, in the first event, how long ago its first step was; None where it had none.
    index says which sequence of the prompt it is of, where several were asked for; `more` has what the others have new
    since the same event, each at most once.
    text, prompt_ids and seed are the router's: what is new as text, which lags behind the tokens by unfinished
    characters and possible stop strings; and in the first event the ids of the prompt and the seed that draws.
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
    computed_s: float | None = None
    index: int = 0
    more: list["TokenEvent"] = field(default_factory=list)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where new weights come from: a folder of safetensors that every replica can read, or several.

    path: the one folder. layers: several, of which a later one overrides the tensors of an earlier one; path is then
    empty. on_model: they lie over the model that the application was started with, which has what they leave out.
    hub, revision: a model of the hub; the controller fetches it once and puts the folder into path.
    """

    path: str = ""
    layers: tuple[str, ...] = ()
    on_model: bool = False
    hub: str | None = None
    revision: str | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        return self.layers or ((self.path,) if self.path else ())

    @property
    def as_asked(self) -> "WeightSource":
        """What was asked for, without what the controller found out."""
        return replace(self, path="") if self.hub is not None else self

    def __str__(self) -> str:
        if self.hub is not None:
            return f"{self.hub} at {self.revision}" if self.revision else self.hub
        under = ("the configured model",) if self.on_model else ()
        return " under ".join((*under, *self.folders))


@dataclass(frozen=True, slots=True)
class Probes:
    """Prompts, as ids, of which staged weights are to give the log-probabilities before they are committed.

    Each has one for every id after the first. They must be finite and, where a reference of the same shape is given,
    nowhere further from it than max_abs_difference.
    """

    prompts: list[list[int]]
    reference: list[list[float]] | None = None
    max_abs_difference: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOptions:
    """How weights are to be brought to the fleet.

    in_flight: what becomes of running requests: keep, recompute, finish or abort. pinned: of those pinned to a version:
    finish them first, or end them. finish_timeout_s: how long to wait for those that finish; None is the setting.
    strategy: synchronous (no two versions ever generate at once) or rolling, max_paused replicas at a time, and then
    on_failure: continue (a replica that fails is replaced) or rollback. verify: read the weights back afterwards.
    wait_s: how long to wait for a swap that is under way. A request with the idempotency_key of a committed one for
    the same weights gets that one's result and changes nothing. requested_by says where the request came from.
    """

    in_flight: str = "keep"
    pinned: str = "finish"
    finish_timeout_s: float | None = None
    strategy: str = "synchronous"
    max_paused: int = 1
    on_failure: str = "continue"
    verify: bool = False
    wait_s: float = 0.0
    idempotency_key: str | None = None
    requested_by: str = ""


@dataclass(frozen=True, slots=True)
class SwapRequest(SwapOptions):
    """New weights for the fleet, as somebody asks the controller for them.

    partial: tensors that the source leaves out keep their values. cast: convert tensors of another dtype instead of
    refusing them. label is for people. base_version: the version that must be served when its turn comes.
    """

    source: WeightSource
    partial: bool = field(default=False, kw_only=True)
    cast: bool = field(default=False, kw_only=True)
    probes: Probes | None = field(default=None, kw_only=True)
    label: str = field(default="", kw_only=True)
    base_version: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class RollbackRequest(SwapOptions):
    """An earlier version's weights for the fleet, under a new number.

    version None is the one before the committed, but none whose swap has failed and none of the same weights.
    """

    version: int | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """A partial update: folders of what changes in the weights of version `base`."""

    folders: tuple[str, ...]
    base: int
    cast: bool = False


@dataclass(frozen=True, slots=True)
class SwapOrder:
    """One swap, as the controller sends it to every replica, for each of its phases.

    changes: enough for a replica that serves the version it is based on; source is always the whole.
    finish_timeout_s: for requests that finish first. lease_s: after it a parked replica that has not voted resumes by
    itself. targets: the replicas that are meant; None is all.
    """

    swap_id: str
    version: int
    source: WeightSource | None
    """None is the model the application was started with."""
    in_flight: str = "keep"
    cast: bool = False
    changes: Changes | None = None
    probes: Probes | None = None
    pinned: str = "finish"
    finish_timeout_s: float = 300.0
    lease_s: float = 10.0
    digest: str | None = None
    """What these weights have to be, where it is known."""
    targets: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class PauseOrder:
    """A leased pause, as the controller tells replicas of it; the same id again puts its end further away."""

    lease_id: str
    remaining_s: float
    in_flight: str = "keep"
    finish_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """Replicas to be drained or undrained: those named, and all of a node, by its address.

    timeout_s: how long to wait for them to be empty. is_replaced: then end them, so that others start. is_forced:
    even where no other replica serves; requests wait then.
    """

    replica_ids: tuple[str, ...] = ()
    node: str | None = None
    timeout_s: float = 30.0
    is_replaced: bool = False
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class DrainResult:
    """The replicas drained or undrained. requests_left: those that still have some, which are not replaced."""

    replicas: list[str]
    requests_left: dict[str, int] = field(default_factory=dict)
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """Replicas that are to hand their requests over and take no others, or to take some again."""

    replica_ids: frozenset[str]
    is_drained: bool = True


@dataclass(frozen=True, slots=True)
class SwapReply:
    """A replica's answer to one phase of a swap, or to a pause, whose lease then is the swap_id.

    error is one sentence, error_type its class in engine.errors. paused_s: from parked to running.
    """

    replica_id: str
    version: int
    ok: bool
    error: str | None = None
    error_type: str | None = None
    tensor: str | None = None
    staged_s: float = 0.0
    paused_s: float = 0.0
    swap_id: str = ""
    phase: str = ""
    digest: str = ""
    num_bytes: int = 0
    is_streamed: bool = False


@dataclass(frozen=True, slots=True)
class StagedDetails:
    """What one replica has staged, tensor by tensor: digests by name, and the names that a partial source leaves."""

    digests: dict[str, str] = field(default_factory=dict)
    unchanged: list[str] = field(default_factory=list)


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
    """Replicas that have not confirmed the version yet: out of routing until they have caught up, or replaced."""
    strategy: str = "synchronous"
    digest: str = ""
    num_bytes: int = 0
    """Read by each replica."""
    is_streamed: bool = False
    """Whether a replica had too little memory to stage beside the old weights, and read them inside the pause."""
    unchanged: list[str] = field(default_factory=list)
    """The tensors that a partial source left as they were."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Duration of each phase, in seconds."""
    verified: list[str] = field(default_factory=list)
    """Replicas whose weights were read back and are those that were staged."""
    replaced: list[str] = field(default_factory=list)
    """Replicas that failed after the commit and were ended, so that Serve starts others at this version."""


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
    digest: str = ""
    """Over all tensors; empty where it is not known."""
    layout: str = ""
    """How replicas held the weights when the digest was made: of another layout it cannot be compared."""
    record_sha256: str = ""
    """Of the file with the digest of each tensor."""
    asked: WeightSource | None = None
    """What a partial swap asked for; source is what it lies over, with it."""
    is_cast_asked: bool = False
    """Whether the partial swap asked for a cast itself; `cast` is also for what it lies over."""
    has_failed: bool = False
    """Whether its rolling swap failed, so that all went back to the weights of before."""


@dataclass(frozen=True, slots=True)
class SwapFailure:
    """A swap or rollback that was not committed. at: UTC, ISO 8601. reason: the kind of what failed, as in the metrics.

    was_rolled_back: replicas had its weights, and went back to those before.
    """

    at: str
    reason: str
    error: str
    label: str = ""
    requested_by: str = ""
    was_rolled_back: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica tells the controller about once a second."""

    replica_id: str
    version: int
    state: str
    """loading, ready, drained, staging, staged, paused, draining, lagging or unhealthy."""
    source: WeightSource | None = None
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    generated_tokens: int = 0
    """Since it started."""
    age_s: float = 0.0
    error: str | None = None
    """Why the replica has not caught up with the committed version yet, after an attempt that failed."""
    num_ranks: int = 1
    """Processes that the model is cut over."""
    swap_id: str | None = None
    """The swap that brought its version."""
    reply: SwapReply | None = None
    """To the latest phase of a swap, in case its answer was lost."""
    leases: tuple[PauseOrder, ...] = ()
    """The leased pauses it stands in."""
    node: str = ""
    """The address of its machine."""
    cast: bool = False
    """Whether its weights were converted, where they are of another dtype, and so have to be to be read again."""
    number: int | None = None
    """The label `replica` of its metrics."""


@dataclass(frozen=True, slots=True)
class CommittedWeights:
    """What every replica has to serve. source None is the model the application was started with."""

    version: int
    source: WeightSource | None = None
    cast: bool = False
    swap_id: str | None = None
    """The swap that brought this version; None where it is not known any more."""
    swap_in_progress: str | None = None
    """The swap that the controller drives; a replica ends by itself what is left of any other."""
    digest: str | None = None
    pauses: tuple[PauseOrder, ...] = ()
    """The pauses that the replica has to stand in; it leaves them when their time is up."""
    ended_pauses: tuple[str, ...] = ()
    """Those that ended lately, by their ids."""


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """A pause of the whole fleet, until lease_s have passed without a renewal."""

    lease_s: float
    in_flight: str = "keep"
    requested_by: str = ""


@dataclass(frozen=True, slots=True)
class PauseLease:
    """A pause of the whole fleet that somebody holds; it ends by itself after remaining_s."""

    lease_id: str
    lease_s: float
    remaining_s: float
    in_flight: str = "keep"
    requested_by: str = ""
    replicas: list[str] = field(default_factory=list)
    """Those that stood still when it was given."""


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
    phase: SwapPhase | None = None
    """What the swap under way is doing."""
    history: list[CommittedVersion] = field(default_factory=list)
    """Newest first; the first one is the committed version."""
    problem: str | None = None
    """Why the latest replica that wanted to start could not take the committed weights."""
    pauses: list[PauseLease] = field(default_factory=list)
    store: StoreStatus | None = None
    failures: list[SwapFailure] = field(default_factory=list)
    """The last swaps that were not committed, newest first, while this controller has run."""
    scaling: ScalingReport | None = None
    """What the autoscaling policy has decided lately; None where the number of replicas is fixed, or not heard yet."""
