"""Which replica takes a request: `score`, a pure function, and the Ray Serve policy that asks it.

The policy counts what it sent itself at once and corrects that with the replicas' reports, which lag behind bursts.
Ray Serve's request routers are an alpha API; this is the one module that uses it. Nothing here may raise or block: an
exception in `choose_replicas` would leave the request waiting for ever, a blocking call would stall the whole process.
"""

import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app import routing_state
from serve_app.messages import GenerateRequest

logger = logging.getLogger(__name__)

DEFAULT_EXPECTED_TOKENS = 256
"""Tokens expected of a request that says nothing; about the mean answer of a chat model."""
UNKNOWN_PREFILL_TOKENS_PER_S = 500.0
UNKNOWN_DECODE_TOKENS_PER_S = 100.0
"""Speeds while no replica has measured itself; equal for all, so only their ratio matters."""
SPEED_FLOOR = 0.5
"""A replica that has only run small batches measures slow; it is taken to be at least this share of the fastest."""
REPORT_MARGIN_S = 0.05
"""Work sent this long before a report may not be in it yet; counting it twice for a moment does no harm."""


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens to compute: of prompts, and to generate."""

    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica still has to do and how fast it is; speeds in tokens a second, 0 while unknown."""

    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    is_fenced: bool = False


def score(loads: Sequence[ReplicaLoad], work: Work) -> list[float]:
    """Gives, for each replica, the estimated seconds until it has done `work` after all it has to do already.

    A fenced replica scores infinity. Order of the result is the order of `loads`.
    """
    prefill_speeds = _speeds([load.prefill_tokens_per_s for load in loads], UNKNOWN_PREFILL_TOKENS_PER_S)
    decode_speeds = _speeds([load.decode_tokens_per_s for load in loads], UNKNOWN_DECODE_TOKENS_PER_S)
    return [
        float("inf")
        if load.is_fenced
        else (load.prefill_tokens + work.prefill_tokens) / prefill_speed
        + (load.decode_tokens + work.decode_tokens) / decode_speed
        for load, prefill_speed, decode_speed in zip(loads, prefill_speeds, decode_speeds, strict=True)
    ]


def expected_work(request: GenerateRequest) -> Work:
    """Gives the work of one request: its prompt, and its hint, else its limit, else what is usual."""
    hints, limit = request.hints, request.sampling.max_new_tokens
    expected = hints.expected_generated_length or limit or hints.max_generated_length or DEFAULT_EXPECTED_TOKENS
    num_sequences = request.sampling.num_return_sequences or 1
    return Work(len(request.prompt_ids), num_sequences * (expected if limit is None else min(expected, limit)))


class WorkRouter(FIFOMixin, RequestRouter):
    """Offers replicas in the order of their score; equal scores in random order.

    FIFOMixin, because calls made within one request share Ray's internal id and would wait for each other without it.
    """

    def initialize_state(self, **_: Any) -> None:
        self._sent: dict[ReplicaID, dict[object, tuple[float, Work]]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        try:
            if pending_request is None:
                return [candidate_replicas]
            # Without it Ray retries in a busy loop whenever no replica has room.
            pending_request.routing_context.should_backoff = True
            return self._ranked(candidate_replicas, _request_of(pending_request))
        except Exception:
            routing_state.COUNTS.failed += 1
            logger.exception("event=routing_failed fallback=all_replicas")
            return [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        try:
            request = _request_of(pending_request)
            if request is None:
                return
            work = expected_work(request)
            token, loop = object(), self._event_loop
            self._sent.setdefault(replica_id, {})[token] = (time.time(), work)
            # Called on one of Ray's threads, maybe at once; keyed by a token of our own, as Ray's ids are shared.
            result.add_done_callback(lambda _: loop.call_soon_threadsafe(self._forget, replica_id, token))
        except Exception:
            routing_state.COUNTS.failed += 1
            logger.exception("event=routing_accounting_failed")

    def _ranked(self, candidates: list[RunningReplica], request: GenerateRequest | None) -> list[list[RunningReplica]]:
        loads = [self._load_of(replica) for replica in candidates]
        # Calls that generate nothing (model_info and the like) weigh nothing.
        scored = zip(score(loads, expected_work(request) if request else Work()), candidates, strict=True)
        ranked = sorted((seconds, random.random(), index) for index, (seconds, _) in enumerate(scored))
        chosen = [candidates[index] for seconds, _, index in ranked if seconds < float("inf")]
        if chosen:
            routing_state.COUNTS.decided += 1
        else:
            routing_state.COUNTS.waited += 1
        return [[replica] for replica in _fitting(chosen, request)]

    def _load_of(self, replica: RunningReplica) -> ReplicaLoad:
        stats: Mapping[str, Any] = replica.routing_stats or {}
        since = float(stats.get("reported_at", 0.0)) - REPORT_MARGIN_S
        sent = [work for sent_at, work in self._sent.get(replica.replica_id, {}).values() if sent_at > since]
        return ReplicaLoad(
            prefill_tokens=float(stats.get("prefill_tokens", 0)) + sum(work.prefill_tokens for work in sent),
            decode_tokens=float(stats.get("decode_tokens", 0)) + sum(work.decode_tokens for work in sent),
            prefill_tokens_per_s=float(stats.get("prefill_tokens_per_s", 0.0)),
            decode_tokens_per_s=float(stats.get("decode_tokens_per_s", 0.0)),
            is_fenced=bool(stats.get("is_fenced", False)),
        )

    def _forget(self, replica_id: ReplicaID, token: object) -> None:
        sent = self._sent.get(replica_id, {})
        sent.pop(token, None)
        if not sent:
            self._sent.pop(replica_id, None)


def _request_of(pending_request: PendingRequest) -> GenerateRequest | None:
    """Gives the request of a call; None where the call generates nothing."""
    for argument in (*pending_request.args, *pending_request.kwargs.values()):
        if isinstance(argument, GenerateRequest):
            return argument
    return None


def _fitting(replicas: list[RunningReplica], request: GenerateRequest | None) -> list[RunningReplica]:
    """Gives those whose weights the request accepts, as far as reports tell; where none does, all of them.

    A replica that does not fit refuses, which ends the wait of whoever asked; offering none would make it hang.
    """
    if request is None:
        return replicas
    return [replica for replica in replicas if request.accepts(_version_of(replica))] or replicas


def _version_of(replica: RunningReplica) -> int:
    return int((replica.routing_stats or {}).get("weight_version", 0))


def _speeds(measured: Sequence[float], unknown: float) -> list[float]:
    fastest = max(measured, default=0.0) or unknown
    return [max(speed, SPEED_FLOOR * fastest) if speed > 0 else fastest for speed in measured]
