"""The HTTP side over a real engine in one process, without Ray: a live server on a free port of loopback."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvicorn
from transformers import AutoTokenizer

from engine import NOTHING_LEFT, ContinuousBatchingManager, FinishReason
from serve_app.messages import CommittedWeights, FleetStatus, GenerateRequest, ReplicaReport, TokenEvent
from serve_app.metrics import ROUTER_METRICS, Recorder
from serve_app.protocol.errors import WeightVersionUnavailable
from serve_app.ranks import start_engine
from serve_app.router.asgi import build_asgi
from serve_app.router.fleet import ModelLimits
from serve_app.router.numbers import RouterNumbers
from serve_app.router.request_observer import RequestObserver
from serve_app.router.resuming_stream import ResumeMeter
from serve_app.router.service import GenerationService
from serve_app.router.version_meter import VersionMeter
from serve_app.router.version_watch import LOOK_INTERVAL_S, FleetVersions
from serve_app.settings import AppSettings
from serve_app.streams import TokenStream
from serve_app.text.grammar import GrammarCompiler
from serve_app.text.tokenizer import Tokenizer

DEADLINE_S = 60.0


class LocalFleet:
    """One engine, asked as the router asks replicas: closing a stream ends its request."""

    def __init__(self, manager: ContinuousBatchingManager, grammars: GrammarCompiler) -> None:
        self.manager = manager
        self.grammars = grammars
        self.newest_version = 1
        self.state = "ready"

    def generate(
        self,
        request: GenerateRequest,
        *,
        asked_at: float | None = None,  # noqa: ARG002  # the interface of a fleet
    ) -> "LocalStream":
        return LocalStream(self.manager, request, self.grammars)

    def routing(self) -> None:
        """One engine needs none."""

    async def end_sequence(self, sequence_id: str) -> None:
        self.manager.cancel_request(sequence_id, alone=True)

    async def limits(self) -> ModelLimits:
        config = self.manager.config
        return ModelLimits(config.max_model_len, config.vocab_size, frozenset(self.manager.eos_token_ids))

    async def versions(self) -> FleetVersions:
        # Those who wait for a version ask in turns, and nobody else would get one.
        await asyncio.sleep(LOOK_INTERVAL_S)
        version = self.manager.weight_version
        return FleetVersions(version, frozenset({version}))

    async def probe_patiently(self) -> int:
        return self.manager.weight_version

    async def reason_unhealthy(self) -> str | None:
        return None if self.state == "ready" else "the loop is dead"

    async def abort(self, *_: str) -> int:
        return 0

    async def reason_not_ready(self) -> str | None:
        return None

    async def status(self) -> FleetStatus:
        return FleetStatus(CommittedWeights(1), [ReplicaReport("local", 1, self.state)])

    async def metrics(self) -> list[str]:
        return []


class LocalStream:
    """The token events of one request."""

    def __init__(self, manager: ContinuousBatchingManager, request: GenerateRequest, grammars: GrammarCompiler) -> None:
        self._manager = manager
        self._grammars = grammars
        self._request = request
        self._events: AsyncGenerator[TokenEvent, None] | None = None

    async def __anext__(self) -> TokenEvent:
        if self._events is None:
            self._events = self._generate()
        return await anext(self._events)

    def close(self) -> None:
        self._manager.cancel_request(self._request.request_id)

    async def _generate(self) -> AsyncGenerator[TokenEvent, None]:
        request = self._request
        version = self._manager.weight_version
        if version < (request.min_weight_version or 0):
            raise WeightVersionUnavailable(f"this engine serves weight version {version}")
        grammar = request.grammar
        constraint = None if grammar is None else await self._grammars.constraint(grammar)
        stream = TokenStream(request, replica_id="local")
        for sequence_id in stream.open_ids:
            self._manager.register_result_handler(sequence_id, stream.deliver)
        try:
            self._manager.add_request(
                request.prompt_ids,
                request.request_id,
                streaming=True,
                sampling=request.sampling,
                cache_salt=request.cache_salt,
                hints=request.hints,
                weight_version=request.weight_version,
                constraint=constraint,
                resumed=request.resumed,
            )
        except Exception:
            for sequence_id in stream.open_ids:
                self._manager.forget_result_handler(sequence_id)
            raise
        while not stream.is_over():
            event = await stream.read()
            failures = {each.error for each in (event, *event.more) if each.finish_reason == FinishReason.FAILED}
            # That one is the fault of who asked.
            assert failures <= {NOTHING_LEFT}, failures
            yield event


@dataclass(frozen=True)
class LocalApp:
    """A running server."""

    url: str
    fleet: LocalFleet
    service: GenerationService

    @property
    def manager(self) -> ContinuousBatchingManager:
        return self.fleet.manager

    def is_idle(self) -> bool:
        """True when the engine holds nothing and the router waits for nothing."""
        stats = self.manager.stats()
        gauges = (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.pending_decode_tokens)
        return not any(gauges) and self.service.admission.num_waiting == 0


@contextmanager
def local_app(settings: AppSettings) -> Iterator[LocalApp]:
    """Starts engine and server, and ends both."""
    engine = replace(settings.engine, max_queue_size=settings.limits.max_queued_requests)
    # One thread: several wait for each other in every layer, which a busy machine makes long.
    replicas = settings.replicas.model_copy(update={"torch_threads": 1})
    manager = start_engine(settings.model_copy(update={"engine": engine, "replicas": replicas}), settings.model)
    grammars = GrammarCompiler(
        partial(AutoTokenizer.from_pretrained, settings.model),
        vocab_size=manager.config.vocab_size,
        end_ids=manager.eos_token_ids,
    )
    fleet: Any = LocalFleet(manager, grammars)
    recorder = Recorder(ROUTER_METRICS)
    service = GenerationService(
        settings,
        tokenizer=Tokenizer.load(settings.model),
        fleet=fleet,
        meter=VersionMeter(recorder, fleet),
        observer=RequestObserver(recorder, routing=lambda: None),
        resumes=ResumeMeter(recorder),
    )
    app = build_asgi(service, settings, recorder=recorder, numbers=RouterNumbers(recorder, service.admission))
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start"
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield LocalApp(f"http://127.0.0.1:{port}", fleet, service)
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        manager.stop(hard_stop=True, timeout=DEADLINE_S)
