"""Router: the ingress deployment. HTTP and the Python handle, both on one generation service."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from engine import SamplingParams, WorkloadHints
from serve_app.messages import (
    DrainRequest,
    DrainResult,
    FleetStatus,
    PauseLease,
    PauseRequest,
    RollbackRequest,
    SwapRequest,
    SwapResult,
    TokenEvent,
    WeightSource,
)
from serve_app.metrics import ROUTER_METRICS, Recorder
from serve_app.model_store import resolve_model
from serve_app.protocol.parsing import validate
from serve_app.protocol.structure import StructuredOutputs
from serve_app.ray_agent import start_mirror
from serve_app.resume_point import ResumePoint, check_some_go_on
from serve_app.router.answer import TextRules
from serve_app.router.asgi import build_asgi
from serve_app.router.fleet import Fleet
from serve_app.router.generation import Generation
from serve_app.router.numbers import RouterNumbers
from serve_app.router.request_observer import RequestObserver
from serve_app.router.resuming_stream import ResumeMeter
from serve_app.router.service import Ask, GenerationService, Prompt
from serve_app.router.version_meter import VersionMeter
from serve_app.settings import AppSettings
from serve_app.text.tokenizer import Tokenizer

MAX_ONGOING_REQUESTS = 10_000
"""Serve's own queue polls with back-off, so it must never fill; `limits.max_queued_requests` refuses long before."""

REQUESTED_BY = "Python handle"
"""In the history of the weights."""


@serve.deployment(name="Router", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=MAX_ONGOING_REQUESTS)
@serve.ingress()
class Router:
    """The one door of an application.

    The methods without an underscore are the handle API (`serve.get_app_handle(...)`); `serve_app.client` wraps them.
    They trust the cluster: no key is asked for.
    """

    def __init__(self, settings: AppSettings, engine: DeploymentHandle[Any], controller: DeploymentHandle[Any]) -> None:
        self._settings = settings
        context = serve.get_replica_context()
        self._recorder = Recorder(
            ROUTER_METRICS, constant={"router": str(context.rank.rank)}, buckets=settings.metrics.buckets
        )
        self._fleet = Fleet(
            settings,
            engine=engine,
            controller=controller,
            routers=lambda: serve.get_deployment_handle(context.deployment, context.app_name),
        )
        tokenizer = Tokenizer.load(resolve_model(settings.model), trust_remote_code=settings.trust_remote_code)
        meter = VersionMeter(self._recorder, self._fleet)
        observer = RequestObserver(self._recorder, routing=self._fleet.routing)
        self._service = GenerationService(
            settings,
            tokenizer=tokenizer,
            fleet=self._fleet,
            meter=meter,
            observer=observer,
            resumes=ResumeMeter(self._recorder),
        )
        self._numbers = RouterNumbers(self._recorder, self._service.admission, routing=self._fleet.routing)
        start_mirror(self._recorder.expose, settings.metrics)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Gives the HTTP side; Ray Serve calls this in the replica, after the constructor."""
        return build_asgi(self._service, self._settings, recorder=self._recorder, numbers=self._numbers)

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        hints: WorkloadHints | None = None,
        *,
        stop: str | Sequence[str] = (),
        cache_salt: str | None = None,
        structured: Mapping[str, Any] | None = None,
        min_weight_version: int | None = None,
        weight_version: int | None = None,
        resume: ResumePoint | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Gives the token events of one prompt: text, ids, or the messages of a chat.

        The first event has the ids of the prompt; the last one, alone, has a finish reason; with `num_return_sequences`
        that holds for each sequence, told apart by `index`. Cancelling the stream ends the request. structured: what
        answers have to follow, as vLLM's structured_outputs. resume: where the stream of this same request was cut;
        what comes goes on from there. timeout_s: until the last token; what cannot make it is refused at once. Raises
        the refusals of the engine before the first event, QueueFull and its kinds, WeightVersionUnavailable, NoReplica,
        ReplicaLost, DeadlineExceeded, and GenerationFailed after the tokens that came before.
        """
        arrived_at = time.perf_counter()
        most = (await self._service.fleet.limits()).max_model_len
        ask = Ask(
            prompt_ids=await self._service.prompt_ids(prompt, max_tokens=most),
            sampling=sampling or SamplingParams(),
            hints=hints or WorkloadHints(),
            rules=TextRules(
                (stop,) if isinstance(stop, str) else tuple(stop),
                continues_prompt=isinstance(prompt, str) or not any(isinstance(item, Mapping) for item in prompt),
            ),
            cache_salt=cache_salt,
            grammar=None if structured is None else validate(StructuredOutputs, dict(structured)).grammar(),
            min_weight_version=min_weight_version,
            weight_version=weight_version,
            resume=resume,
            timeout_s=timeout_s,
            arrived_at=arrived_at,
        )
        if ask.resume is not None:
            check_some_go_on([ask.resume])
        generation = await self._service.open(ask)
        try:
            await self._service.prime(generation)
            async for event in _token_events(generation):
                yield event
        finally:
            generation.close()

    async def swap_weights(
        self,
        path: str,
        in_flight: str = "keep",
        cast: bool = False,
        label: str = "",
        idempotency_key: str | None = None,
    ) -> SwapResult:
        """Replaces the weights of the whole fleet by those in a folder; raises WeightsError when the old ones stay."""
        request = SwapRequest(
            WeightSource(path),
            in_flight=in_flight,
            cast=cast,
            label=label,
            idempotency_key=idempotency_key,
            requested_by=REQUESTED_BY,
        )
        return await self._fleet.swap(request)

    async def swap(self, request: SwapRequest) -> SwapResult:
        """Replaces the weights of the whole fleet as this request says."""
        return await self._fleet.swap(replace(request, requested_by=request.requested_by or REQUESTED_BY))

    async def roll_back(self, request: RollbackRequest) -> SwapResult:
        """Brings an earlier version's weights back as this request says."""
        return await self._fleet.rollback(replace(request, requested_by=request.requested_by or REQUESTED_BY))

    async def pause(self, lease_s: float, in_flight: str = "keep") -> PauseLease:
        """Has the whole fleet stand still for a lease."""
        return await self._fleet.pause(PauseRequest(lease_s, in_flight, REQUESTED_BY))

    async def renew_pause(self, lease_id: str, lease_s: float | None = None) -> PauseLease:
        """Prolongs a pause; raises LeaseGone once it is over."""
        return await self._fleet.renew_pause(lease_id, lease_s)

    async def resume(self, lease_id: str | None = None) -> list[str]:
        """Ends one pause, or all of them."""
        return await self._fleet.resume(lease_id)

    async def drain(self, request: DrainRequest) -> DrainResult:
        """Has replicas hand their requests over and take no others."""
        return await self._fleet.drain(request)

    async def undrain(self, request: DrainRequest) -> DrainResult:
        """Has drained replicas take requests again."""
        return await self._fleet.undrain(request)

    async def rollback(
        self, version: int | None = None, in_flight: str = "keep", idempotency_key: str | None = None
    ) -> SwapResult:
        """Brings an earlier version's weights back under a new number; raises VersionUnavailable where it cannot."""
        return await self._fleet.rollback(
            RollbackRequest(version, in_flight=in_flight, idempotency_key=idempotency_key, requested_by=REQUESTED_BY)
        )

    async def status(self) -> FleetStatus:
        """Gives the committed weights and what every replica reports."""
        return await self._fleet.status()

    async def metrics(self) -> str:
        """Gives the numbers of this router alone as Prometheus text."""
        return self._numbers.exposition()

    async def abort_request(self, request_id: str, owner: str) -> int:
        """Aborts the owner's requests of this id that came to this router, and gives how many there were."""
        return self._service.in_flight.abort(request_id, owner)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Gives the ids of a prompt, chat template included."""
        return await self._service.prompt_ids(prompt)


async def _token_events(generation: Generation) -> AsyncGenerator[TokenEvent, None]:
    starts = [answer.num_tokens for answer in generation.answers]
    async for pieces in generation:
        latest = generation.latest_event
        assert latest is not None
        events = {event.index: event for event in (latest, *latest.more)}
        for piece in pieces:
            event, start = events[piece.index], starts[piece.index]
            end = starts[piece.index] = start + len(piece.token_ids)
            # A stop string may have cut the event short.
            spans = tuple(
                replace(span, end=min(span.end, end))
                for span in event.weight_versions
                if span.start < end or span.end == 0
            )
            yield replace(
                event,
                token_ids=piece.token_ids,
                logprobs=piece.logprobs,
                top_logprobs=piece.top_logprobs,
                weight_versions=spans,
                finish_reason=piece.finish_reason,
                text=piece.text,
                prompt_ids=list(generation.prompt_ids) if start == 0 else [],
                seed=generation.trail.seed if start == 0 else None,
                more=[],
            )
