"""WeightController: the deployment that decides which weights the fleet serves; `fleet_weights` holds its logic."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve

from engine import InvalidRequest, PitstopError, WeightsError
from serve_app.broadcast import call_all, kill_replica
from serve_app.drains import Drains
from serve_app.messages import (
    CommittedWeights,
    DrainRequest,
    DrainResult,
    FleetStatus,
    PauseLease,
    PauseRequest,
    ReplicaReport,
    RollbackRequest,
    SessionRequest,
    SessionState,
    StoreStatus,
    SwapRequest,
    SwapResult,
)
from serve_app.metrics import CONTROLLER_METRICS, Recorder
from serve_app.model_store import resolve_model
from serve_app.ray_agent import start_mirror
from serve_app.scaling.meter import ScalingMeter
from serve_app.scaling_report import ScalingReport
from serve_app.settings import AppSettings
from serve_app.uninterrupted import run_uninterrupted
from serve_app.weights.buckets import load_bucket
from serve_app.weights.collective import Meeting, PieceHeader
from serve_app.weights.fleet_weights import FleetWeights
from serve_app.weights.history import WeightHistory
from serve_app.weights.receiver import ReceiverHandle
from serve_app.weights.source_check import CheckAlone
from serve_app.weights.store import WeightStore
from serve_app.weights.swap_sessions import SwapSessions

CONTROLLER_DEPLOYMENT = "WeightController"
ENGINE_DEPLOYMENT = "EngineReplica"
EXPIRY_INTERVAL_S = 1.0
"""Between two looks for leases that have run out; the shortest lease."""

COUNT_TIMEOUT_S = 10.0
"""For Ray Serve to say what runs; milliseconds, but where its own controller restarts."""


@serve.deployment(name=CONTROLLER_DEPLOYMENT)
class WeightController:
    """FleetWeights behind Ray Serve. One replica; restarted, it asks manifest and fleet for the version."""

    def __init__(self, settings: AppSettings) -> None:
        """Raises ManifestError, which keeps the application from starting, for a manifest that cannot be trusted."""
        application = serve.get_replica_context().app_name
        history = WeightHistory(
            application=application,
            model=settings.model,
            folder=settings.weights.folder,
            num_earlier=settings.weights.history_versions,
            layout=settings.weight_layout,
        )
        recorder = Recorder(CONTROLLER_METRICS, buckets=settings.metrics.buckets)
        self._weights = FleetWeights(
            settings.weights,
            history,
            call_all=_call_engines,
            count_running=_count_running_engines,
            recorder=recorder,
            check_alone=CheckAlone(settings, count_running=_count_running_engines),
            kill=_kill_engine,
        )
        self._drains = Drains(status=self._weights.status, call_all=_call_engines, kill=_kill_engine)
        self._scaling = ScalingMeter(recorder, num_replicas=settings.replicas.min)
        self._leaves_within_s = settings.replicas.graceful_shutdown_timeout_s
        self._is_store_durable = settings.weights.is_store_durable
        self._store = WeightStore(
            # A restarted controller finds it again: the session is that of the whole cluster, as long as it lives.
            settings.weights.store_folder(
                application, owner=history.line or ray.get_runtime_context().get_session_name()
            ),
            history_bytes=settings.weights.history_bytes,
            is_temporary=not self._is_store_durable,
        )
        self._sessions = SwapSessions(
            self._store,
            history,
            self._weights.swap,
            max_bytes=settings.weights.session_bytes,
            base_path=lambda: resolve_model(settings.model),
            ended=self._end_receiver,
        )
        self._receivers: dict[str, ReceiverHandle] = {}
        self._expiry: asyncio.Task[None] | None = None
        start_mirror(recorder.expose, settings.metrics)

    async def swap(self, request: SwapRequest) -> SwapResult:
        """Brings new weights to every replica, or to none; goes on to its end when the caller goes away."""
        return await run_uninterrupted(self._and_prune(self._weights.swap(request)))

    async def rollback(self, request: RollbackRequest) -> SwapResult:
        """Brings an earlier version's weights to every replica, or to none, as a swap does."""
        return await run_uninterrupted(self._and_prune(self._weights.rollback(request)))

    async def open_session(self, request: SessionRequest) -> SessionState:
        """Opens a swap session for weights that come as tensors; see `SwapSessions`."""
        if self._expiry is None or self._expiry.done():
            # In an empty context, as Serve ends what a request has started together with the request.
            self._expiry = asyncio.get_running_loop().create_task(self._expire_sessions(), context=Context())
        return await run_uninterrupted(self._sessions.open(request))

    async def put_bucket(self, session_id: str, sequence: int, box: list[Any]) -> SessionState:
        """Writes a bucket that lies in Ray's object store: pieces of tensors, or named tensors.

        box: its reference in a list, so that Serve hands on the reference.
        """
        return await run_uninterrupted(self._sessions.put(session_id, sequence, lambda: load_bucket(box[0])))

    async def start_receiver(self, session_id: str, backend: str) -> None:
        """Starts what receives a session's buckets over a process group."""
        await self._sessions.renew(session_id)
        self._end_receiver(session_id)
        self._receivers[session_id] = receiver = await asyncio.to_thread(ReceiverHandle, backend)
        try:
            await run_uninterrupted(asyncio.to_thread(receiver.wait))
            # Which may have ended meanwhile.
            await self._sessions.renew(session_id)
        except PitstopError:
            self._end_receiver(session_id)
            raise

    async def join_group(self, session_id: str, meeting: Meeting) -> None:
        """Has a session's receiver meet the trainer."""
        await run_uninterrupted(asyncio.to_thread(self._receiver(session_id).join, meeting))

    async def receive_bucket(self, session_id: str, sequence: int, headers: list[PieceHeader]) -> SessionState:
        """Writes a bucket that the trainer broadcasts."""
        await self._sessions.renew(session_id)
        receive = partial(self._receiver(session_id).receive, headers)
        return await run_uninterrupted(self._sessions.put(session_id, sequence, receive))

    async def commit_session(self, session_id: str) -> SwapResult:
        """Brings what a session has sent to every replica, or to none."""
        return await self._sessions.commit(session_id)

    async def abort_session(self, session_id: str) -> None:
        """Ends a session and removes what it sent."""
        # First, as it may be waiting for a bucket.
        self._end_receiver(session_id)
        await run_uninterrupted(self._sessions.abort(session_id))

    async def renew_session(self, session_id: str) -> SessionState:
        """Prolongs the lease of a session."""
        return await self._sessions.renew(session_id)

    async def status(self) -> FleetStatus:
        """Gives the committed version, each replica's version and state, and the swap under way."""
        size_bytes = await asyncio.to_thread(self._store.size_bytes)
        store = StoreStatus(
            str(self._store.folder), self._is_store_durable, size_bytes, open_sessions=self._sessions.num_open
        )
        return replace(await self._weights.status(), store=store, scaling=self._scaling.report)

    async def note_scaling(self, report: ScalingReport) -> None:
        """Takes what the autoscaling policy has decided."""
        for change in self._scaling.take(report):
            # A controller that was started anew is told of old ones, too.
            within_s = self._leaves_within_s - (time.time() - change.at)
            self._weights.expect_leaving(max(0, change.before - change.after), within_s=within_s)

    async def pause(self, request: PauseRequest) -> PauseLease:
        """Has the whole fleet stand still, for a lease; a caller that goes away before it has it ends it."""
        return await self._weights.pause(request)

    async def renew_pause(self, lease_id: str, lease_s: float | None = None) -> PauseLease:
        """Prolongs the lease of a pause."""
        return await self._weights.renew_pause(lease_id, lease_s)

    async def resume(self, lease_id: str | None = None) -> list[str]:
        """Ends one leased pause, or all of them."""
        return await self._weights.resume(lease_id)

    async def drain(self, request: DrainRequest) -> DrainResult:
        """Has replicas hand their requests over and take no others."""
        return await run_uninterrupted(self._drains.drain(request))

    async def undrain(self, request: DrainRequest) -> DrainResult:
        """Has drained replicas take requests again."""
        return await run_uninterrupted(self._drains.undrain(request))

    async def digests(self, version: int) -> Mapping[str, str]:
        """Gives the digest of each tensor of a committed version."""
        return await self._weights.digests(version)

    async def committed(self) -> CommittedWeights:
        """Gives what a replica has to serve."""
        return await self._weights.committed()

    async def heartbeat(self, report: ReplicaReport) -> CommittedWeights:
        """Takes a replica's report and gives what it has to serve."""
        return await self._weights.heartbeat(report)

    async def number(self, replica_id: str) -> int:
        """Gives a new replica the number that labels its metrics."""
        return await self._weights.number(replica_id)

    async def start_failed(self, replica_id: str, error: str) -> None:
        """Takes from a replica that is about to give up why it cannot serve what is committed."""
        await self._weights.start_failed(replica_id, error)

    async def metrics(self) -> str:
        """Gives the controller's numbers as Prometheus text."""
        return await self._weights.metrics()

    async def _and_prune(self, swap: Coroutine[Any, Any, SwapResult]) -> SwapResult:
        result = await swap
        await self._sessions.prune()
        return result

    def _end_receiver(self, session_id: str) -> None:
        if (receiver := self._receivers.pop(session_id, None)) is not None:
            receiver.end()

    def _receiver(self, session_id: str) -> ReceiverHandle:
        if session_id not in self._receivers:
            raise InvalidRequest(f"swap session {session_id} has no receiver; start one first", "session_id")
        return self._receivers[session_id]

    async def _expire_sessions(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            await self._sessions.expire()


async def _call_engines(method: str, argument: object, *, timeout_s: float) -> list[Any]:
    # Looked up here, because the engine's deployment is bound with a handle to this one.
    handle = serve.get_deployment_handle(ENGINE_DEPLOYMENT, serve.get_replica_context().app_name)
    return await call_all(handle, method, argument, timeout_s=timeout_s)


async def _kill_engine(replica_id: str) -> None:
    application = serve.get_replica_context().app_name
    await asyncio.to_thread(kill_replica, application, ENGINE_DEPLOYMENT, replica_id)


async def _count_running_engines() -> int:
    try:
        async with asyncio.timeout(COUNT_TIMEOUT_S):
            status = await asyncio.to_thread(serve.status)
    except TimeoutError:
        raise WeightsError(
            f"Ray Serve did not say within {COUNT_TIMEOUT_S:g} s how many replicas run; try again"
        ) from None
    application = status.applications.get(serve.get_replica_context().app_name)
    deployment = application.deployments.get(ENGINE_DEPLOYMENT) if application else None
    return sum(count for state, count in deployment.replica_states.items() if state == "RUNNING") if deployment else 0
