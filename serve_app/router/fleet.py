"""The deployments behind the router, as it calls them."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from engine import PitstopError
from serve_app.broadcast import ask_each, call_all
from serve_app.messages import (
    CommittedWeights,
    DrainRequest,
    DrainResult,
    FleetStatus,
    GenerateRequest,
    PauseLease,
    PauseRequest,
    RollbackRequest,
    SwapOptions,
    SwapRequest,
    SwapResult,
)
from serve_app.protocol.errors import NoReplica, SwapUnfinished
from serve_app.router.handle_stream import HandleStream, call
from serve_app.router.version_watch import FleetVersions, VersionWatch
from serve_app.routing.request_routing import RequestRouting
from serve_app.routing.state import find_routing
from serve_app.settings import AppSettings
from serve_app.weights.swap_checks import check_drain, check_pause, check_rollback, check_swap

logger = logging.getLogger("ray.serve.pitstop")

ANSWER_TIMEOUT_S = 5.0
"""For a call that needs no step of the engine; ten times the longest step."""
READY_TIMEOUT_S = 1.0
"""For the controller's word on readiness where an older one is at hand; probes give up after a few seconds."""
METRICS_TIMEOUT_S = 2.0
"""Half of the shortest scrape_timeout we ship: a page without who is silent is worth more than no page."""
SWAP_MARGIN_S = 30.0
"""What a swap may take beside its two deadlines: the controller's own waits."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the router knows of the model without a replica; lengths in tokens. end_ids: its own end tokens."""

    max_model_len: int
    vocab_size: int
    end_ids: frozenset[int] = frozenset()


class Fleet:
    """Engine replicas and weight controller. Every call has a deadline and raises errors of the project only.

    Deadlines are reckoned from what a caller asks for, which is checked here first: over a handle anything may come.
    """

    def __init__(
        self,
        settings: AppSettings,
        *,
        engine: DeploymentHandle[Any],
        controller: DeploymentHandle[Any],
        routers: Callable[[], DeploymentHandle[Any]],
    ) -> None:
        """routers: gives a handle to all routers of the application, this one included."""
        # The methods of a handle are made at run time, so types end here and begin again at what each call returns.
        self._engine: Any = engine
        self._stream_engine: Any = engine.options(stream=True)
        self._controller: Any = controller
        self._routers = routers
        self._request_timeout_s = settings.limits.request_timeout_s
        self._weights = settings.weights
        self._max_replicas = settings.replicas.max
        self._may_sleep = settings.replicas.min == 0
        self._wake_timeout_s = settings.autoscaling.wake_timeout_s
        self._app_name = engine.app_name
        self._limits: ModelLimits | None = None
        self._last_committed: CommittedWeights | None = None
        self._version_watch = VersionWatch(self.status)
        self.newest_version = 0
        """The highest committed version heard of, as news; asking is `committed`."""

    def routing(self) -> RequestRouting | None:
        """Gives what chooses replicas in this process; None before the first call."""
        return find_routing(self._app_name)

    def generate(self, request: GenerateRequest, *, asked_at: float | None = None) -> HandleStream:
        """Opens the stream of a request at the replica that routing chooses; its time counts from asked_at, or now."""
        return HandleStream(
            self._stream_engine.generate.remote(request),
            timeout_s=self._request_timeout_s if request.timeout_s is None else request.timeout_s,
            opened_at=asked_at,
            num_sequences=request.num_sequences,
        )

    async def end_sequence(self, sequence_id: str) -> None:
        """Ends one output of a prompt whose others go on, wherever it runs."""
        try:
            await call_all(self._engine, "end_sequence", sequence_id, timeout_s=ANSWER_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  # Ray raises many kinds; it then ends by its own length
            logger.warning("event=end_sequence_failed error=%r", error)

    async def versions(self) -> FleetVersions:
        """Gives the weight versions that are served; those who ask together share one question."""
        return await self._version_watch.look()

    async def probe_patiently(self) -> int:
        """As `probe`, but asks a second time: a replica that stands still is avoided by then."""
        try:
            return await self.probe()
        except NoReplica:
            if await self._is_asleep():
                raise
            return await self.probe()

    async def probe(self) -> int:
        """Gives the weight version of some engine replica; raises NoReplica when none answers.

        A fleet without replicas, where that may be, is woken and waited for.
        """
        if await self._is_asleep():
            timeout_s, whom = self._wake_timeout_s, "a replica of the fleet, which had none and starts one,"
        else:
            timeout_s, whom = ANSWER_TIMEOUT_S, "an engine replica"
        info = await call(self._engine.model_info.remote(), timeout_s=timeout_s, whom=whom)
        # New weights have the shapes of the old ones, so what was learned once stays true.
        self._limits = ModelLimits(info["max_model_len"], info["vocab_size"], frozenset(info.get("end_ids", ())))
        return int(info["weight_version"])

    async def limits(self) -> ModelLimits:
        """Gives the limits of the model, asking a replica the first time."""
        if self._limits is None:
            await self.probe_patiently()
        assert self._limits is not None
        return self._limits

    async def reason_unhealthy(self) -> str | None:
        """Gives one sentence where every generation loop that is heard of is hung or dead, else None.

        A fleet that is busy, or whose controller restarts, is healthy; so is one that has lost some of its loops, which
        are replaced.
        """
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                replicas = (await self.status()).replicas
        except (PitstopError, TimeoutError):
            return None
        if replicas and all(replica.state == "unhealthy" for replica in replicas):
            return f"the generation loop of every engine replica ({len(replicas)}) is hung or dead"
        return None

    async def abort(self, request_id: str, owner: str) -> int:
        """Aborts the owner's requests of this id at all routers that answer and gives how many there were."""
        answers = await ask_each(self._routers(), "abort_request", request_id, owner, timeout_s=ANSWER_TIMEOUT_S)
        return sum(answer for answer in answers if isinstance(answer, int))

    async def reason_not_ready(self) -> str | None:
        """Gives None when an engine replica answers with the committed weights, else one sentence.

        A fleet that sleeps is ready: its first request wakes it, which this question must not.
        """
        if await self._is_asleep():
            return None
        try:
            version = await self.probe()
            committed = await self._committed_or_last()
        except PitstopError as error:
            return await self._with_problem(str(error))
        if version != committed.version:
            return f"an engine replica serves weight version {version}, committed is {committed.version}"
        return None

    async def _is_asleep(self) -> bool:
        """Gives whether the fleet is known to have no replica that serves."""
        if not self._may_sleep:
            return False
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                replicas = (await self.status()).replicas
        except (PitstopError, TimeoutError):
            return False
        return all(replica.state == "loading" for replica in replicas)

    async def _with_problem(self, reason: str) -> str:
        """Adds why replicas do not start, where the controller knows it."""
        try:
            response = self._controller.status.remote()
            status: FleetStatus = await call(response, timeout_s=READY_TIMEOUT_S, whom="the weight controller")
        except PitstopError:
            return reason
        return f"{reason}; {status.problem}" if status.problem is not None else reason

    async def committed(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> CommittedWeights:
        """Gives what every replica has to serve."""
        committed: CommittedWeights = await call(
            self._controller.committed.remote(), timeout_s=timeout_s, whom="the weight controller"
        )
        self._last_committed = committed
        self._note(committed.version)
        return committed

    async def _committed_or_last(self) -> CommittedWeights:
        """Gives the last version heard of while the controller restarts: replicas go on serving it meanwhile."""
        if self._last_committed is None:
            return await self.committed()
        try:
            return await self.committed(timeout_s=READY_TIMEOUT_S)
        except PitstopError:
            return self._last_committed

    async def status(self) -> FleetStatus:
        """Gives the committed weights and what every replica reports."""
        status: FleetStatus = await call(
            self._controller.status.remote(), timeout_s=ANSWER_TIMEOUT_S, whom="the weight controller"
        )
        self._note(status.committed.version)
        return status

    async def swap(self, request: SwapRequest) -> SwapResult:
        """Replaces the weights of the whole fleet; raises WeightsError and its kinds when the old ones stay.

        Raises SwapUnfinished where it goes on for longer than its deadlines allow.
        """
        check_swap(request)
        return await self._changed(self._controller.swap.remote(request), request)

    async def rollback(self, request: RollbackRequest) -> SwapResult:
        """Brings an earlier version's weights back; raises as `swap`, and VersionUnavailable."""
        check_rollback(request)
        return await self._changed(self._controller.rollback.remote(request), request)

    async def _changed(self, response: Any, options: SwapOptions) -> SwapResult:
        timeout_s = self._swap_timeout_s(options)
        clock = asyncio.timeout(timeout_s)
        try:
            async with clock:
                # With its own deadline beyond this one, which says more.
                result: SwapResult = await call(response, timeout_s=2 * timeout_s, whom="the weight controller")
        except TimeoutError:
            raise SwapUnfinished(
                f"the swap is still under way after {timeout_s:g} s and goes on; GET /admin/weights says what becomes "
                "of it"
            ) from None
        self._note(result.version)
        return result

    def _note(self, version: int) -> None:
        self.newest_version = max(self.newest_version, version)

    async def pause(self, request: PauseRequest) -> PauseLease:
        """Has every replica stand still for a lease; raises WeightsError, with nobody paused, where one cannot."""
        check_pause(request)
        timeout_s = request.lease_s + SWAP_MARGIN_S
        return await call(self._controller.pause.remote(request), timeout_s=timeout_s, whom="the weight controller")

    async def renew_pause(self, lease_id: str, lease_s: float | None = None) -> PauseLease:
        """Prolongs a pause; raises LeaseGone."""
        response = self._controller.renew_pause.remote(lease_id, lease_s)
        return await call(response, timeout_s=SWAP_MARGIN_S, whom="the weight controller")

    async def resume(self, lease_id: str | None = None) -> list[str]:
        """Ends one pause, or all, and gives which; raises LeaseGone."""
        response = self._controller.resume.remote(lease_id)
        return await call(response, timeout_s=SWAP_MARGIN_S, whom="the weight controller")

    async def drain(self, request: DrainRequest) -> DrainResult:
        """Has replicas hand their requests over and take no others; raises InvalidRequest for what cannot be."""
        check_drain(request)
        timeout_s = request.timeout_s + SWAP_MARGIN_S
        return await call(self._controller.drain.remote(request), timeout_s=timeout_s, whom="the weight controller")

    async def undrain(self, request: DrainRequest) -> DrainResult:
        """Has drained replicas take requests again."""
        return await call(
            self._controller.undrain.remote(request), timeout_s=SWAP_MARGIN_S, whom="the weight controller"
        )

    def _swap_timeout_s(self, options: SwapOptions) -> float:
        """Gives what a swap may take by its own deadlines, each replica after the other where it is rolling.

        That is once more where it may have to go back, and with the hub's time where a hub is asked.
        """
        weights = self._weights
        finish_s = options.finish_timeout_s or weights.finish_timeout_s
        turns = self._max_replicas if options.strategy == "rolling" else 1
        read_s = weights.stage_timeout_s * (2 if options.verify else 1)
        # Aborting, voting, committing and resuming have the same deadline.
        run_s = read_s + turns * (finish_s + 4 * weights.commit_timeout_s)
        num_runs = 2 if options.on_failure == "rollback" else 1
        is_of_hub = isinstance(options, SwapRequest) and options.source.hub is not None
        fetch_s = weights.fetch_timeout_s if is_of_hub else 0.0
        return num_runs * run_s + fetch_s + options.wait_s + SWAP_MARGIN_S

    async def metrics(self) -> list[str]:
        """Gives the expositions of all routers, all replicas and the controller, of each that answers in time."""
        answers = await asyncio.gather(
            *(
                ask_each(handle, "metrics", timeout_s=METRICS_TIMEOUT_S)
                for handle in (self._routers(), self._engine, self._controller)
            ),
            return_exceptions=True,
        )
        found = [answer for answer in answers if isinstance(answer, list)]
        return [text for group in found for text in group if isinstance(text, str)]
