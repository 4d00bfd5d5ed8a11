"""EngineReplica: the deployment that owns one model and one persistent generation loop.

Nothing that takes long runs on the event loop: loading, staging and committing are sent to threads, and the engine
generates in a thread of its own.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from transformers import AutoTokenizer

from engine import (
    ContextLengthExceeded,
    DuplicateRequest,
    EngineDead,
    EngineStopped,
    FinishReason,
    PitstopError,
    SamplingParams,
    TokenConstraint,
)
from serve_app.door import Door
from serve_app.drains import IN_SERVICE
from serve_app.load_meter import LoadMeter
from serve_app.messages import (
    DrainOrder,
    GenerateRequest,
    PauseOrder,
    ReplicaReport,
    StagedDetails,
    SwapOrder,
    SwapReply,
    TokenEvent,
)
from serve_app.metrics import REPLICA_METRICS, Recorder, expose_engine
from serve_app.model_store import resolve_model
from serve_app.protocol.errors import WeightVersionUnavailable
from serve_app.ranks import RankCrew, start_engine
from serve_app.ray_agent import start_mirror
from serve_app.request_timer import RequestTimer
from serve_app.settings import AppSettings
from serve_app.streams import TokenStream
from serve_app.text.grammar import GrammarCompiler
from serve_app.weights.fleet_member import CannotJoin, ControllerCalls, FleetMember
from serve_app.weights.follower import WeightFollower
from serve_app.weights.leased_pauses import LeasedPauses
from serve_app.weights.manifest import FILE_NAME as MANIFEST_NAME

logger = logging.getLogger("ray.serve.pitstop")

STOP_TIMEOUT_S = 5.0
"""For the step in progress; the streams have ended by then or are cut."""


@serve.deployment(name="EngineReplica")
class EngineReplica:
    """One engine behind Ray Serve. Ready only once it serves the weights that the controller has committed."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, so that loading does not block the event loop
        self, settings: AppSettings, controller: DeploymentHandle[Any]
    ) -> None:
        self._settings = settings
        self._controller = controller
        self._replica_id = serve.get_replica_context().replica_tag
        self._streams: dict[str, TokenStream] = {}
        self._door = Door(self._streams, replica_id=self._replica_id)
        self._is_ending = False
        self._node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # untyped upstream
        self._recorder = Recorder(REPLICA_METRICS, buckets=settings.metrics.buckets)
        self._is_unhealthy = False
        self._hears_controller = True
        path = await asyncio.to_thread(resolve_model, settings.model)
        await self._start_engine(path)
        self._grammars = GrammarCompiler(
            partial(AutoTokenizer.from_pretrained, path, trust_remote_code=settings.trust_remote_code),
            vocab_size=self._manager.config.vocab_size,
            end_ids=self._manager.eos_token_ids,
        )
        self._meter = LoadMeter(settings.autoscaling)
        self._pauses = LeasedPauses(self._manager, replica_id=self._replica_id)
        self._follower = WeightFollower(
            self._manager,
            self._pauses,
            replica_id=self._replica_id,
            base_path=path,
            undo_folder=settings.weights.undo_folder,
        )
        calls = _calls_of(controller, self._replica_id)
        self._member = FleetMember(self._follower, self._pauses, controller=calls, report=self.report)
        await self._join()
        # From zero, so that the first one is a rise.
        self._recorder.count("pitstop_heartbeat_failures_total", self._number, amount=0)
        self._set_gauges()
        start_mirror(self._exposition, settings.metrics)
        self._heartbeat_task = asyncio.get_running_loop().create_task(self._send_heartbeats())
        logger.info("event=replica_ready replica=%s version=%d", self._replica_id, self._follower.version)

    # Requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Gives the tokens of one request as they come; leaving the generator ends the request in the engine.

        Raises InvalidRequest and its kinds, QueueFull and WeightVersionUnavailable before the first event, and at any
        time what has the router go on elsewhere: ReplicaDraining, EngineStopped and EngineDead. Whatever else fails
        later is the last event.
        """
        await self._member.confirm()
        self._check_version(request)
        self._door.enter(request)
        if request.request_id in self._streams:
            raise DuplicateRequest(f"request {request.request_id} is in flight already", param="request_id")
        stream = TokenStream(request, replica_id=self._replica_id)
        self._streams[request.request_id] = stream
        self._meter.note_arrival(stream, self._manager.stats())
        try:
            self._submit(request, stream, await self._constraint(request))
            async for event in self._events(stream):
                yield event
        finally:
            self._streams.pop(request.request_id, None)
            self._door.leave(request.request_id)
            # Does nothing once the request has ended.
            self._manager.cancel_request(request.request_id)

    def end_sequence(self, sequence_id: str) -> None:
        """Ends one output of a prompt whose others go on; ignores what is not in flight here."""
        self._manager.cancel_request(sequence_id, alone=True)

    def model_info(self) -> dict[str, int | tuple[int, ...]]:
        """Gives what a router has to know of the model; lengths in tokens."""
        config = self._manager.config
        return {
            "max_model_len": self._max_model_len,
            "vocab_size": config.vocab_size,
            "end_ids": self._manager.eos_token_ids,
            "weight_version": self._follower.version,
        }

    async def set_drained(self, order: DrainOrder) -> str | None:
        """Closes or opens the door where this replica is meant; gives its id then."""
        if self._replica_id not in order.replica_ids:
            return None
        if order.is_drained:
            self._door.drain()
        else:
            self._door.undrain()
        logger.info("event=replica_drained replica=%s is_drained=%s", self._replica_id, order.is_drained)
        return self._replica_id

    async def takes_requests_beside(self, meant: frozenset[str]) -> str | None:
        """Gives its id where it takes requests and is none of these."""
        if self._replica_id in meant or self._door.is_drained or self._state not in IN_SERVICE:
            return None
        return self._replica_id

    # Weights

    async def stage(self, order: SwapOrder) -> SwapReply:
        """Reads and verifies new weights beside the serving ones."""
        return await self._follower.stage(order)

    async def details(self, order: SwapOrder) -> StagedDetails | None:
        """Gives what is staged for a swap, tensor by tensor."""
        return await self._follower.details(order)

    async def finish(self, order: SwapOrder) -> SwapReply:
        """Lets requests finish that are to before a swap."""
        return await self._follower.finish(order)

    async def park(self, order: SwapOrder) -> SwapReply:
        """Stands still between two steps."""
        return await self._follower.park(order)

    async def vote(self, order: SwapOrder) -> SwapReply:
        """Promises to stand still until the controller says what became of the swap."""
        return await self._follower.vote(order)

    async def drain(self, order: SwapOrder) -> SwapReply:
        """Takes no new requests until the swap has ended here."""
        return await self._follower.drain(order)

    async def commit(self, order: SwapOrder) -> SwapReply:
        """Exchanges the serving weights for the staged ones between two steps."""
        return await self._follower.commit(order)

    async def resume(self, order: SwapOrder) -> SwapReply:
        """Generates again after a commit."""
        return await self._follower.resume(order)

    async def abort(self, order: SwapOrder) -> SwapReply:
        """Drops what was staged for a swap, and generates again."""
        return await self._follower.abort(order)

    async def verify(self, order: SwapOrder) -> SwapReply:
        """Reads the serving weights back."""
        return await self._follower.verify(order)

    async def pause(self, order: PauseOrder) -> SwapReply:
        """Stands still while somebody leases it."""
        return await self._pauses.pause(order)

    async def end_pauses(self, lease_ids: tuple[str, ...]) -> None:
        """Ends leased pauses before their time."""
        await self._pauses.end(lease_ids)

    async def report(self) -> ReplicaReport:
        """Gives what this replica serves and how busy it is."""
        stats = self._manager.stats()
        return ReplicaReport(
            replica_id=self._replica_id,
            version=self._follower.version,
            state=self._state,
            source=self._follower.source,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_usage=stats.kv_usage,
            generated_tokens=stats.generated_tokens_total,
            error=self._follower.error,
            num_ranks=self._settings.replicas.tensor_parallel_size,
            swap_id=self._follower.swap_id,
            reply=self._follower.reply,
            leases=self._pauses.orders,
            node=self._node,
            cast=self._follower.cast,
            number=self._member.number,
        )

    # Numbers

    async def metrics(self) -> str:
        """Gives this replica's numbers as Prometheus text."""
        self._set_gauges()
        return self._exposition()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Gives Serve the load of this replica for its routers."""
        stats = self._manager.stats()
        return self._meter.routing_stats(
            self._meter.load(stats, self._streams.values()),
            replace(stats, weight_version=self._follower.version),
            prefixes=self._manager.cached_prefixes(self._settings.routing.max_told_prefixes),
            is_fenced=self._is_unhealthy or self._follower.is_fenced or self._door.is_closed,
            is_avoided=stats.is_paused,
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Gives Serve the work of this replica for the autoscaling policy."""
        stats = self._manager.stats()
        return self._meter.autoscaling_stats(self._meter.load(stats, self._streams.values()), stats)

    # Life

    async def check_health(self) -> None:
        """Raises EngineDead when the generation loop or the heartbeat is no more; Serve then replaces the replica."""
        if self._heartbeat_task.done():
            raise EngineDead("the heartbeat of this replica has ended")
        self._manager.check_health()

    def __del__(self) -> None:
        """Ends the engine; Serve calls it after the streams have ended or their time is up."""
        self._is_ending = True
        # Also called where the constructor has failed half-way.
        if (heartbeat := getattr(self, "_heartbeat_task", None)) is not None:
            heartbeat.cancel()
        crew = getattr(self, "_crew", None)
        if crew is not None:
            crew.release()
        if (manager := getattr(self, "_manager", None)) is not None:
            manager.stop(block=True, timeout=STOP_TIMEOUT_S, hard_stop=True)
        if crew is not None:
            crew.end()

    # Inside

    async def _start_engine(self, path: str) -> None:
        self._crew: RankCrew | None = None
        if self._settings.replicas.tensor_parallel_size == 1:
            self._manager = await asyncio.to_thread(start_engine, self._settings, path)
            return
        self._crew = crew = RankCrew(self._settings, path)
        await crew.arrive()
        self._manager = await crew.unless_lost(
            asyncio.to_thread(start_engine, self._settings, path, crew.place, crew.meeting)
        )
        crew.watch(self._leave)

    def _leave(self, reason: str) -> None:
        """Ends this process, and so all ranks: Serve starts a new replica, and its router calls the streams lost.

        Nothing gentler does, as the engine may wait in a collective for a rank that is gone.
        """
        logger.error("event=rank_lost replica=%s reason=%r", self._replica_id, reason)
        logging.shutdown()
        os._exit(1)

    @property
    def _state(self) -> str:
        if self._is_unhealthy:
            return "unhealthy"
        state = self._follower.state
        if state == "ready" and self._pauses.is_parked:
            return "paused"
        return "drained" if state == "ready" and self._door.is_drained else state

    @property
    def _number(self) -> str:
        return str(self._member.number)

    @property
    def _max_model_len(self) -> int:
        return min(
            self._manager.config.max_model_len, self._settings.max_model_len or self._manager.config.max_model_len
        )

    def _check_version(self, request: GenerateRequest) -> None:
        """Looks again at what the router chose this replica for; versions only grow, so what fits now will fit on.

        The engine looks at a pinned version itself, when it takes the request and at every swap.
        """
        version = self._follower.version
        if request.resume_version not in (None, version):
            raise WeightVersionUnavailable(
                f"the answer so far is of weight version {request.resume_version}; this replica serves {version}"
            )
        if version < (request.min_weight_version or 0):
            raise WeightVersionUnavailable(
                f"min_weight_version is {request.min_weight_version}; this replica serves weight version {version}"
            )

    async def _constraint(self, request: GenerateRequest) -> TokenConstraint | None:
        if request.grammar is None:
            return None
        sampling = request.sampling
        return await self._grammars.constraint(
            request.grammar, end_ids=sampling.eos_token_ids, stop_token_ids=sampling.stop_token_ids or ()
        )

    def _submit(self, request: GenerateRequest, stream: TokenStream, constraint: TokenConstraint | None) -> None:
        sampling = self._limited(request.sampling, len(request.prompt_ids))
        try:
            for sequence_id in stream.open_ids:
                self._manager.register_result_handler(sequence_id, stream.deliver)
            self._manager.add_request(
                request.prompt_ids,
                request.request_id,
                streaming=True,
                sampling=sampling,
                cache_salt=request.cache_salt,
                hints=request.hints,
                weight_version=request.weight_version,
                constraint=constraint,
                resumed=request.resumed,
            )
        except PitstopError:
            for sequence_id in stream.open_ids:
                self._manager.forget_result_handler(sequence_id)
            raise

    def _limited(self, sampling: SamplingParams, prompt_length: int) -> SamplingParams:
        """Applies the application's own length limit; the engine knows only the model's and the cache's."""
        limit = self._settings.max_model_len
        if limit is None:
            return sampling
        wanted = 1 if sampling.max_new_tokens is None else sampling.max_new_tokens
        if prompt_length + wanted > limit:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_length} tokens and {wanted} new ones are asked for, together more than"
                f" max_model_len, which is {limit}; shorten one of them",
                param="max_new_tokens" if prompt_length < limit else "input_ids",
            )
        return (
            sampling if sampling.max_new_tokens is not None else replace(sampling, max_new_tokens=limit - prompt_length)
        )

    async def _events(self, stream: TokenStream) -> AsyncGenerator[TokenEvent, None]:
        timer = RequestTimer(self._recorder, stream, replica=self._number)
        while not stream.is_over():
            event = await stream.read(apart_s=self._apart_s())
            if any(each.finish_reason == FinishReason.FAILED for each in (event, *event.more)):
                # Alone, or with the whole engine? Then it goes on elsewhere.
                self._check_engine()
                if self._is_ending:
                    raise EngineStopped(f"replica {self._replica_id} ends")
                self._manager.check_health()
            timer.take(event)
            yield event

    def _apart_s(self) -> float:
        """Seconds between two events of a stream, at least: no more than so many leave this replica."""
        most = self._settings.replicas.max_events_per_s
        return 0.0 if most is None else len(self._streams) / most

    def _exposition(self) -> str:
        """Gives the numbers as they are; for any thread."""
        return expose_engine(self._manager.stats(), replica=self._number) + self._recorder.expose()

    def _set_gauges(self) -> None:
        stats = self._manager.stats()
        work_s = self._meter.work_s(self._meter.load(stats, self._streams.values()), stats)
        self._recorder.set_gauge("pitstop_work_seconds", self._number, value=work_s)
        target_s = self._settings.autoscaling.target_work_s
        self._recorder.set_gauge("pitstop_work_target_seconds", self._number, value=target_s)

    async def _join(self) -> None:
        """Brings a new replica to the committed version; raises when it cannot, so that it never gets ready."""
        try:
            await self._member.join()
        except CannotJoin as error:
            raise RuntimeError(f"{error}{self._way_out}") from error

    @property
    def _way_out(self) -> str:
        folder = self._settings.weights.folder
        forget = f", or delete {folder}/{MANIFEST_NAME} to begin anew at the configured model" if folder else ""
        return f"; bring these weights back{forget}"

    async def _send_heartbeats(self) -> None:
        interval_s = self._settings.weights.heartbeat_interval_s
        while True:
            self._check_engine()
            try:
                await self._member.beat()
                self._set_gauges()
                self._hears_controller = True
            except Exception:
                # Ray raises many kinds while the controller is away; serving goes on, and the next beat tries again.
                self._recorder.count("pitstop_heartbeat_failures_total", self._number)
                if self._hears_controller:
                    logger.exception("event=heartbeat_failed replica=%s", self._replica_id)
                self._hears_controller = False
            await asyncio.sleep(interval_s)

    def _check_engine(self) -> None:
        """Ends every open stream when the engine can no longer do so itself."""
        try:
            self._manager.check_health()
            self._is_unhealthy = False
        except EngineDead as error:
            if self._crew is not None:
                self._leave(str(error))
            self._is_unhealthy = True
            for stream in self._streams.values():
                stream.fail(str(error))


def _calls_of(controller: DeploymentHandle[Any], replica_id: str) -> ControllerCalls:
    handle: Any = controller
    return ControllerCalls(
        heartbeat=lambda report: _result(handle.heartbeat.remote(report)),
        committed=lambda: _result(handle.committed.remote()),
        digests=lambda version: _result(handle.digests.remote(version)),
        start_failed=lambda reason: _result(handle.start_failed.remote(replica_id, reason)),
        number=lambda: _result(handle.number.remote(replica_id)),
    )


async def _result(response: Any) -> Any:
    # A Ray Serve response is awaitable but no coroutine, which wait_for wants.
    return await response
