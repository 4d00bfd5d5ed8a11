"""The policy that Ray Serve asks for a replica; what it knows and how it chooses is in `request_routing`.

Ray Serve's request routers are an alpha API; this is the one module that uses it. Nothing here may raise or block: an
exception in `choose_replicas` would leave the request waiting for ever, a blocking call would stall the whole process.
"""

import logging
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.messages import GenerateRequest
from serve_app.routing import signals as routing_signals
from serve_app.routing import state as routing_state

logger = logging.getLogger(__name__)


class WorkRouter(FIFOMixin, RequestRouter):
    """Offers replicas in the order of `RequestRouting`, one after the other.

    FIFOMixin, because calls made within one request share Ray's internal id and would wait for each other without it.
    """

    def initialize_state(self, *, policy: str = "prefix", **_: Any) -> None:
        self._routing = routing_state.share_routing(self.app_name, policy)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        # One that Serve stops is no longer among them, and its streams learn it here (`fleet_watch`).
        routing_signals.set_candidates(frozenset(_name(replica.replica_id) for replica in replicas))
        try:
            self._routing.update({_name(replica.replica_id): replica.routing_stats or {} for replica in replicas})
        except Exception:
            self._routing.reasons["fallback"] += 1
            logger.exception("event=report_failed fallback=older_report")

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        try:
            self._routing.note_count(_name(replica_id), num_ongoing_requests)
        except Exception:
            self._routing.reasons["fallback"] += 1
            logger.exception("event=routing_accounting_failed")

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        try:
            if pending_request is None:
                return [candidate_replicas]
            # Without it Ray retries in a busy loop whenever no replica has room.
            pending_request.routing_context.should_backoff = True
            named = {_name(replica.replica_id): replica for replica in candidate_replicas}
            replicas = {name: replica for name, replica in named.items() if not routing_signals.is_avoided(name)}
            request = _request_of(pending_request)
            names = self._routing.choose(request, replicas)
            if request is not None and names:
                # One that stands still does not even say that it took it.
                routing_signals.note_place(request.request_id, names[0])
            return [[replicas[name]] for name in names]
        except Exception:
            self._routing.reasons["fallback"] += 1
            logger.exception("event=routing_failed fallback=all_replicas")
            return [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        try:
            request = _request_of(pending_request)
            if request is not None:
                routing_signals.note_place(request.request_id, _name(replica_id))
            token = None if request is None else self._routing.sent(request, _name(replica_id))
            if token is not None:
                # Called on one of Ray's threads, maybe at once; keyed by a token of our own, as Ray's ids are shared.
                result.add_done_callback(lambda _: self._routing.done(token))
        except Exception:
            self._routing.reasons["fallback"] += 1
            logger.exception("event=routing_accounting_failed")


def _name(replica_id: ReplicaID) -> str:
    """Gives the name under which a replica knows itself."""
    return str(replica_id.unique_id)


def _request_of(pending_request: PendingRequest) -> GenerateRequest | None:
    """Gives the request of a call; None where the call generates nothing."""
    for argument in (*pending_request.args, *pending_request.kwargs.values()):
        if isinstance(argument, GenerateRequest):
            return argument
    return None
