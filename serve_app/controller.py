"""WeightController: the deployment that decides which weights the fleet serves; `fleet_weights` holds its logic."""

import asyncio
from typing import Any

from ray import serve

from serve_app.broadcast import call_all
from serve_app.fleet_weights import FleetWeights
from serve_app.messages import (
    CommittedWeights,
    FleetStatus,
    ReplicaReport,
    RollbackRequest,
    SwapRequest,
    SwapResult,
)
from serve_app.settings import AppSettings
from serve_app.uninterrupted import run_uninterrupted
from serve_app.weight_history import WeightHistory

ENGINE_DEPLOYMENT = "EngineReplica"


@serve.deployment(name="WeightController")
class WeightController:
    """FleetWeights behind Ray Serve. One replica; restarted, it asks manifest and fleet for the version."""

    def __init__(self, settings: AppSettings) -> None:
        """Raises ManifestError, which keeps the application from starting, for a manifest that cannot be trusted."""
        history = WeightHistory(
            application=serve.get_replica_context().app_name,
            model=settings.model,
            folder=settings.weights.folder,
            num_earlier=settings.weights.history_versions,
        )
        self._weights = FleetWeights(
            settings.weights, history, call_all=_call_engines, count_running=_count_running_engines
        )

    async def swap(self, request: SwapRequest) -> SwapResult:
        """Brings new weights to every replica, or to none; goes on to its end when the caller goes away."""
        return await run_uninterrupted(self._weights.swap(request))

    async def rollback(self, request: RollbackRequest) -> SwapResult:
        """Brings an earlier version's weights to every replica, or to none, as a swap does."""
        return await run_uninterrupted(self._weights.rollback(request))

    async def status(self) -> FleetStatus:
        """Gives the committed version, each replica's version and state, and the swap under way."""
        return await self._weights.status()

    async def committed(self) -> CommittedWeights:
        """Gives what a replica has to serve."""
        return await self._weights.committed()

    async def heartbeat(self, report: ReplicaReport) -> CommittedWeights:
        """Takes a replica's report and gives what it has to serve."""
        return await self._weights.heartbeat(report)

    async def start_failed(self, replica_id: str, error: str) -> None:
        """Takes from a replica that is about to give up why it cannot serve what is committed."""
        await self._weights.start_failed(replica_id, error)

    async def metrics(self) -> str:
        """Gives the controller's numbers as Prometheus text."""
        return await self._weights.metrics()


async def _call_engines(method: str, argument: object, *, timeout_s: float) -> list[Any]:
    # Looked up here, because the engine's deployment is bound with a handle to this one.
    handle = serve.get_deployment_handle(ENGINE_DEPLOYMENT, serve.get_replica_context().app_name)
    return await call_all(handle, method, argument, timeout_s=timeout_s)


async def _count_running_engines() -> int:
    status = await asyncio.to_thread(serve.status)
    application = status.applications.get(serve.get_replica_context().app_name)
    deployment = application.deployments.get(ENGINE_DEPLOYMENT) if application else None
    return sum(count for state, count in deployment.replica_states.items() if state == "RUNNING") if deployment else 0
