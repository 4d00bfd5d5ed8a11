"""The bodies of the admin routes: `/admin/weights`, `/admin/pause` and `/admin/resume`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine import InvalidRequest
from serve_app.messages import MAX_WAIT_S, PauseRequest, Probes, RollbackRequest, SwapRequest, WeightSource
from serve_app.protocol.strict import Items, Label, RequestModel, TokenId

FolderPath = Annotated[str, Field(min_length=1, max_length=4096)]
WaitSeconds = Annotated[float, Field(ge=0, le=MAX_WAIT_S)]
SomeSeconds = Annotated[float, Field(gt=0, le=MAX_WAIT_S)]
HubName = Annotated[str, Field(min_length=1, max_length=256)]


class SourceBody(RequestModel):
    """One of: path, a Hugging Face folder of safetensors that every replica can read; layers, several, of which later
    ones override earlier ones; hub, a model there, at a revision.
    """

    path: FolderPath | None = None
    layers: Items[FolderPath] | None = None
    hub: HubName | None = None
    revision: HubName | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if sum(given is not None for given in (self.path, self.layers, self.hub)) != 1:
            raise InvalidRequest("must hold one of path, layers and hub")
        if self.revision is not None and self.hub is None:
            raise InvalidRequest(f"revision is {self.revision!r}; only a hub has revisions", "revision")
        return self

    def source(self) -> WeightSource:
        return WeightSource(self.path or "", tuple(self.layers or ()), hub=self.hub, revision=self.revision)


class ProbesBody(RequestModel):
    """prompts: of token ids. reference: for each the log-probabilities of its ids after the first; null checks only
    that all are finite. max_abs_difference: between the two.
    """

    prompts: Items[Items[TokenId]]
    reference: Items[Items[float]] | None = None
    max_abs_difference: Annotated[float, Field(ge=0)] = 0.0


class OptionsBody(RequestModel):
    """What swaps and rollbacks have in common.

    in_flight: what becomes of running requests: keep their cache, recompute it, finish them first, or abort them.
    pinned: requests pinned to a version are finished first, or ended.
    finish_timeout_s: how long to wait for requests that finish first; null is the setting.
    strategy: synchronous (no two versions ever generate at once) or rolling (max_paused replicas at a time).
    on_failure: of a replica in a rolling swap: continue (it is replaced) or rollback (all return).
    verify: read the weights back on every replica afterwards.
    wait_s: seconds to wait for a swap that is under way; 0 refuses at once.
    idempotency_key: the same weights (source, partial and cast; or version) asked for again with it give the first
    one's result, and others are refused.
    """

    in_flight: Literal["keep", "recompute", "finish", "abort"] = "keep"
    pinned: Literal["finish", "end"] = "finish"
    finish_timeout_s: SomeSeconds | None = None
    strategy: Literal["synchronous", "rolling"] = "synchronous"
    max_paused: Annotated[int, Field(ge=1)] = 1
    on_failure: Literal["continue", "rollback"] = "continue"
    verify: bool = False
    wait_s: WaitSeconds = 0.0
    idempotency_key: Label | None = None


class SwapBody(OptionsBody):
    """The body of `POST /admin/weights`.

    partial: tensors that the source leaves out keep their values.
    cast: convert tensors of another dtype instead of refusing them.
    label: for people; shown in the history.
    """

    source: SourceBody
    partial: bool = False
    cast: bool = False
    probes: ProbesBody | None = None
    label: Label | None = None

    def request(self, *, requested_by: str) -> SwapRequest:
        """Gives what the controller is asked for."""
        return SwapRequest(
            self.source.source(),
            partial=self.partial,
            cast=self.cast,
            probes=None if self.probes is None else Probes(**self.probes.model_dump()),
            label=self.label or "",
            requested_by=requested_by,
            **self.model_dump(include=OPTIONS),
        )


class RollbackBody(OptionsBody):
    """The body of `POST /admin/weights/rollback`.

    version: one of the history; null is the one before the committed, but none whose swap has failed and none of the
    same weights.
    """

    version: Annotated[int, Field(ge=1)] | None = None

    def request(self, *, requested_by: str) -> RollbackRequest:
        """Gives what the controller is asked for."""
        return RollbackRequest(self.version, requested_by=requested_by, **self.model_dump(include=OPTIONS))


class PauseBody(RequestModel):
    """The body of `POST /admin/pause`. lease_s: after it, without a renewal, the fleet generates again.

    in_flight: running requests keep their place, or are finished first.
    """

    lease_s: SomeSeconds
    in_flight: Literal["keep", "finish"] = "keep"

    def request(self, *, requested_by: str) -> PauseRequest:
        """Gives what the controller is asked for."""
        return PauseRequest(self.lease_s, self.in_flight, requested_by)


class RenewBody(RequestModel):
    """The body of `POST /admin/pause/{id}/renew`. lease_s: from now; null is the length the pause had."""

    lease_s: SomeSeconds | None = None


class ResumeBody(RequestModel):
    """The body of `POST /admin/resume`. lease_id: the pause to end; null ends all."""

    lease_id: Label | None = None


OPTIONS = set(OptionsBody.model_fields)
