"""The errors of the application, and the one table from any error of the project to HTTP.

PitstopError                        engine.errors draws the engine's part of the tree
├── Unauthorized                    the key is missing or wrong
├── AdminDisabled                   no admin key is configured
├── UnknownModel                    another model is asked for than the one served
├── BodyTooLarge                    the body is over `limits.max_body_bytes`
├── InvalidRequest                  engine.errors
│   ├── ContradictorySettings       what the request asks for leaves no token to choose
│   └── DeadlineTooShort            not even an idle fleet would be done in the time that the request has
├── QueueFull                       engine.errors
│   ├── LineFull                    too many tokens or requests wait at the router
│   ├── TooLate                     the turn of the request would come after its timeout
│   └── TenantLimit                 the tenant has as much under way as it may have
├── NoReplica                       no engine replica answers
├── ReplicaLost                     the replica died while it answered
│   ├── ReplicaSilent               the replica has sent neither tokens nor heartbeats for too long
│   └── ReplicaDraining             the replica hands its requests over to others
├── PoisonRequest                   replicas die of this request
├── GenerationFailed                the engine gave this one request up
├── DeadlineExceeded                the request took longer than `limits.request_timeout_s`
├── SwapUnfinished                  the swap takes longer than its deadlines, and goes on
├── WeightVersionUnavailable        the least weight version asked for is not served yet
└── WeightsError                    engine.errors
    ├── LeaseGone                   the pause to renew or end is over
    ├── ReplicaGone                 a replica went away, or was silent, before it had answered to a swap or a pause
    ├── RollingFailed               a replica failed in a rolling swap, and all went back
    ├── VersionUnavailable          the version to go back to is not in the history, or its weights are gone
    ├── SwapSessionGone             the swap session has ended, or its lease has
    └── ManifestError               the manifest of committed versions cannot be read or written
        └── ManifestTaken           another controller has taken the manifest over
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from engine import (
    ContextLengthExceeded,
    DuplicateRequest,
    EngineDead,
    EngineStopped,
    InvalidRequest,
    NotFinished,
    PitstopError,
    QueueFull,
    SwapConflict,
    UnsupportedModel,
    WeightsError,
    WeightsInvalid,
    WeightsLost,
    WeightsSourceError,
    WeightVersionGone,
)


class Unauthorized(PitstopError):
    """The bearer key is missing or wrong."""


class AdminDisabled(PitstopError):
    """Admin routes answer nobody while no admin key is configured."""


class UnknownModel(PitstopError):
    """The request names a model that is not served here."""


class BodyTooLarge(PitstopError):
    """The body of the request is over the limit."""


class DeadlineTooShort(InvalidRequest):
    """Not even an idle fleet would be done in time; the message says how long it takes."""


class ContradictorySettings(InvalidRequest):
    """The settings of the request rule out every token; this may show after some tokens only."""


class LineFull(QueueFull):
    """Too much waits at the router already; retry_after_s: whole seconds after which there should be room."""

    def __init__(self, message: str, num_waiting: int = 0, *, retry_after_s: int = 1) -> None:
        super().__init__(message, num_waiting)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), retry_after_s=self.retry_after_s), (str(self), self.num_waiting)


class TooLate(LineFull):
    """The turn of this request would come after its timeout, so it was not taken at all."""


class TenantLimit(QueueFull):
    """The tenant of this request has as much under way as it may have."""


class NoReplica(PitstopError):
    """No engine replica answers; the message says what was waited for."""


class ReplicaLost(PitstopError):
    """The replica went away before the answer was complete."""


class ReplicaSilent(ReplicaLost):
    """Neither tokens nor heartbeats have come from the replica for too long."""


class ReplicaDraining(ReplicaLost):
    """The replica takes no requests, and those it has go on elsewhere."""


class PoisonRequest(PitstopError):
    """Replicas died again and again while they answered this request, at last with no other one on them."""


class GenerationFailed(PitstopError):
    """The engine gave up this one request; the message says why."""


class DeadlineExceeded(PitstopError):
    """The request was cancelled because it took too long."""


class SwapUnfinished(PitstopError):
    """The swap takes longer than all its deadlines, and goes on; what becomes of it is not known here."""


class WeightVersionUnavailable(PitstopError):
    """The least weight version that the request accepts is not served yet; the message says which one is."""


class LeaseGone(WeightsError):
    """The pause that was to be renewed or ended is over, so the fleet generates."""


class ReplicaGone(WeightsError):
    """A replica went away or was silent before it had answered to a swap or a pause; nothing has changed, try again."""


class RollingFailed(WeightsError):
    """A replica failed in a rolling swap that was to be rolled back then; the message says which, why and what is."""


class VersionUnavailable(WeightsError):
    """There is no going back to this version; the message says why."""


class SwapSessionGone(WeightsError):
    """The swap session has ended, or nobody here knows it; the message says why."""


class ManifestError(WeightsError):
    """The manifest cannot be read or written; the message names the file and the remedy."""


class ManifestTaken(ManifestError):
    """Another controller has taken the manifest over, so this one commits nothing any more."""


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """How one class of errors looks over HTTP. type and code are the fields of OpenAI's error object."""

    status: int
    type: str
    code: str


ERROR_RULES: dict[type[PitstopError], ErrorRule] = {
    PitstopError: ErrorRule(500, "server_error", "internal_error"),
    InvalidRequest: ErrorRule(400, "invalid_request_error", "invalid_request"),
    ContextLengthExceeded: ErrorRule(400, "invalid_request_error", "context_length_exceeded"),
    DuplicateRequest: ErrorRule(409, "invalid_request_error", "duplicate_request"),
    WeightVersionGone: ErrorRule(409, "invalid_request_error", "weight_version_gone"),
    QueueFull: ErrorRule(429, "overloaded_error", "queue_full"),
    LineFull: ErrorRule(429, "overloaded_error", "queue_full"),
    TooLate: ErrorRule(429, "overloaded_error", "too_late"),
    ContradictorySettings: ErrorRule(400, "invalid_request_error", "contradictory_settings"),
    DeadlineTooShort: ErrorRule(400, "invalid_request_error", "deadline_too_short"),
    TenantLimit: ErrorRule(429, "rate_limit_error", "tenant_limit"),
    EngineStopped: ErrorRule(503, "server_error", "engine_stopped"),
    EngineDead: ErrorRule(503, "server_error", "engine_dead"),
    UnsupportedModel: ErrorRule(500, "server_error", "unsupported_model"),
    WeightsError: ErrorRule(500, "server_error", "weights_error"),
    WeightsSourceError: ErrorRule(400, "invalid_request_error", "weights_source_error"),
    WeightsInvalid: ErrorRule(400, "invalid_request_error", "weights_invalid"),
    WeightsLost: ErrorRule(503, "server_error", "weights_lost"),
    NotFinished: ErrorRule(409, "invalid_request_error", "not_finished"),
    SwapConflict: ErrorRule(409, "invalid_request_error", "swap_conflict"),
    Unauthorized: ErrorRule(401, "authentication_error", "invalid_api_key"),
    AdminDisabled: ErrorRule(403, "permission_error", "admin_disabled"),
    UnknownModel: ErrorRule(404, "invalid_request_error", "model_not_found"),
    BodyTooLarge: ErrorRule(413, "invalid_request_error", "body_too_large"),
    NoReplica: ErrorRule(503, "server_error", "no_replica"),
    ReplicaLost: ErrorRule(503, "server_error", "replica_lost"),
    ReplicaSilent: ErrorRule(503, "server_error", "replica_silent"),
    ReplicaDraining: ErrorRule(503, "server_error", "replica_draining"),
    PoisonRequest: ErrorRule(500, "server_error", "poison_request"),
    GenerationFailed: ErrorRule(500, "server_error", "generation_failed"),
    DeadlineExceeded: ErrorRule(504, "server_error", "deadline_exceeded"),
    SwapUnfinished: ErrorRule(504, "server_error", "swap_unfinished"),
    WeightVersionUnavailable: ErrorRule(409, "invalid_request_error", "weight_version_unavailable"),
    VersionUnavailable: ErrorRule(409, "invalid_request_error", "version_unavailable"),
    SwapSessionGone: ErrorRule(409, "invalid_request_error", "swap_session_gone"),
    LeaseGone: ErrorRule(409, "invalid_request_error", "lease_gone"),
    ReplicaGone: ErrorRule(503, "server_error", "replica_gone"),
    RollingFailed: ErrorRule(500, "server_error", "rolling_failed"),
    ManifestError: ErrorRule(500, "server_error", "manifest_error"),
    ManifestTaken: ErrorRule(409, "invalid_request_error", "manifest_taken"),
}

INTERNAL_ERROR_MESSAGE = "internal error; the log of the router has the details"
"""What a client sees of an error nobody expected: its text may hold what a client must not see."""


class ErrorDetail(BaseModel):
    """OpenAI's error object. param names the offending field, or the offending tensor of refused weights."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success, and the data of an SSE error event."""

    error: ErrorDetail
    resume: str | None = None
    """Of a stream of completions: the token to go on with, in the body's `resume`; none beyond what is read again."""

    @model_serializer(mode="wrap")
    def _leave_out_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        values: dict[str, object] = handler(self)
        return {name: value for name, value in values.items() if value is not None or name != "resume"}


def rule_of(error: PitstopError) -> ErrorRule:
    """Gives the rule of the nearest class of the table."""
    return next(ERROR_RULES[cls] for cls in type(error).__mro__ if cls in ERROR_RULES)


def error_body(error: PitstopError) -> ErrorBody:
    """Gives OpenAI's shape of an error."""
    rule = rule_of(error)
    param = getattr(error, "param", None) or getattr(error, "tensor", None)
    return ErrorBody(error=ErrorDetail(message=str(error), type=rule.type, param=param, code=rule.code))
