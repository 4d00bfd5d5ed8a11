"""The Python side of a running application: `connect("pitstop")`, and `connect_sync` for code without an event loop.

    pitstop = connect("pitstop")
    async for event in pitstop.generate("The race starts"):
        print(event.text, event.token_ids, event.weight_versions)

Every error is one of the project's (`engine.errors`, `serve_app.protocol.errors`), never one of Ray's.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from engine import PitstopError, QueueFull, SamplingParams, WeightSpan, WorkloadHints
from serve_app.messages import FleetStatus, SwapResult, TokenEvent
from serve_app.protocol.errors import NoReplica
from serve_app.router.handle_stream import HandleStream, call
from serve_app.router.service import Prompt

T = TypeVar("T")

TIMEOUT_S = 3600.0
"""The router's own limit of a request is shorter; this one ends the wait for a router that is gone."""
MAX_CONCURRENT = 128
"""Prompts of a batch in flight at once: enough to fill an engine's batch, below what its queue refuses."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0
"""A batch that meets a full queue tries again, doubling its wait between these."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished prompt of a batch. weight_versions are spans over token_ids, in order and without gaps."""

    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: tuple[WeightSpan, ...] = ()
    finish_reason: str | None = None
    num_cached_tokens: int = 0


def connect(name: str = "pitstop", *, timeout_s: float = TIMEOUT_S) -> "Pitstop":
    """Gives the application of this name in the running cluster, joining the cluster if this process has not yet.

    Raises NoReplica where no cluster or no such application runs.
    """
    try:
        if not ray.is_initialized():
            # "auto" joins a cluster and never starts one.
            ray.init(address="auto", log_to_driver=False)
        return Pitstop(serve.get_app_handle(name), timeout_s=timeout_s)
    except (ConnectionError, RayServeException) as error:
        raise NoReplica(f"the application {name!r} is not running: {error}") from error


def connect_sync(name: str = "pitstop", *, timeout_s: float = TIMEOUT_S) -> "SyncPitstop":
    """Gives the same for code without an event loop."""
    return SyncPitstop(connect(name, timeout_s=timeout_s))


class Pitstop:
    """An application, from any event loop. Prompts are text, token ids, or the messages of a chat."""

    def __init__(self, handle: DeploymentHandle[Any], *, timeout_s: float = TIMEOUT_S) -> None:
        # The methods of a handle are made at run time, so types end here and begin again at what each call returns.
        self._handle: Any = handle
        self._stream_handle: Any = handle.options(stream=True)
        self._timeout_s = timeout_s

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        hints: WorkloadHints | None = None,
        *,
        stop: str | Sequence[str] = (),
        cache_salt: str | None = None,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Gives token events as they come; the first has the prompt's ids, the last, alone, a finish reason.

        Closing the generator (leaving the loop, `aclose`) ends the request in the engine.
        """
        response = self._stream_handle.generate.remote(prompt, sampling, hints, stop=stop, cache_salt=cache_salt)
        stream = HandleStream(response, timeout_s=self._timeout_s)
        try:
            async for event in stream:
                yield event
        finally:
            stream.close()

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        max_concurrent: int = MAX_CONCURRENT,
    ) -> list[Completion | PitstopError]:
        """Gives one output for each prompt, in their order; a prompt that fails gives its own error.

        sampling is one for all, or one for each. A full queue is waited for, up to the timeout of this object.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is one text; give a list of prompts")
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"sampling has {len(each)} items for {len(prompts)} prompts; give one, or one for each")
        places = asyncio.Semaphore(max_concurrent)

        async def complete(prompt: Prompt, params: SamplingParams | None) -> Completion | PitstopError:
            async with places:
                try:
                    return await self._complete(prompt, params, stop)
                except PitstopError as error:
                    return error

        return await asyncio.gather(*(complete(prompt, params) for prompt, params in zip(prompts, each, strict=True)))

    async def swap_weights(
        self,
        path: str,
        *,
        in_flight: str = "keep",
        cast: bool = False,
        label: str = "",
        idempotency_key: str | None = None,
    ) -> SwapResult:
        """Replaces the weights of the whole fleet by those in a folder that every replica can read.

        Raises WeightsSourceError, WeightsInvalid and SwapConflict; the old weights then go on serving. Sent again with
        the idempotency_key of a swap that was committed, it gives that one's result and changes nothing.
        """
        response = self._handle.swap_weights.remote(path, in_flight, cast, label, idempotency_key)
        return await call(response, timeout_s=self._timeout_s, whom="the router")

    async def rollback(
        self, version: int | None = None, *, in_flight: str = "keep", idempotency_key: str | None = None
    ) -> SwapResult:
        """Brings an earlier version's weights back under a new number; by default those before the committed ones.

        Raises VersionUnavailable where the history does not hold the version or its folder is gone. Without a version,
        a second rollback goes back to what the first one left.
        """
        response = self._handle.rollback.remote(version, in_flight, idempotency_key)
        return await call(response, timeout_s=self._timeout_s, whom="the router")

    async def status(self) -> FleetStatus:
        """Gives the committed weights and what every replica reports."""
        return await call(self._handle.status.remote(), timeout_s=self._timeout_s, whom="the router")

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Gives the ids of a prompt, chat template included."""
        return await call(self._handle.tokenize.remote(prompt), timeout_s=self._timeout_s, whom="the router")

    async def _complete(self, prompt: Prompt, sampling: SamplingParams | None, stop: str | Sequence[str]) -> Completion:
        retry_s = FIRST_RETRY_S
        give_up_at = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            try:
                return _joined([event async for event in self.generate(prompt, sampling, stop=stop)])
            except QueueFull:
                if asyncio.get_running_loop().time() + retry_s > give_up_at:
                    raise
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)


class SyncPitstop:
    """The same application without an event loop; usable from several threads. Close it, or use it in a `with`."""

    def __init__(self, pitstop: Pitstop) -> None:
        self._pitstop = pitstop
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pitstop-client", daemon=True)
        self._thread.start()

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        hints: WorkloadHints | None = None,
        *,
        stop: str | Sequence[str] = (),
        cache_salt: str | None = None,
    ) -> Iterator[TokenEvent]:
        """Gives token events as `Pitstop.generate` does; leaving the loop ends the request in the engine."""
        events = self._pitstop.generate(prompt, sampling, hints, stop=stop, cache_salt=cache_salt)
        try:
            while (event := self._wait(_next(events))) is not None:
                yield event
        finally:
            self._wait(events.aclose())

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        max_concurrent: int = MAX_CONCURRENT,
    ) -> list[Completion | PitstopError]:
        return self._wait(self._pitstop.generate_batch(prompts, sampling, stop=stop, max_concurrent=max_concurrent))

    def swap_weights(
        self,
        path: str,
        *,
        in_flight: str = "keep",
        cast: bool = False,
        label: str = "",
        idempotency_key: str | None = None,
    ) -> SwapResult:
        swap = self._pitstop.swap_weights(
            path, in_flight=in_flight, cast=cast, label=label, idempotency_key=idempotency_key
        )
        return self._wait(swap)

    def rollback(
        self, version: int | None = None, *, in_flight: str = "keep", idempotency_key: str | None = None
    ) -> SwapResult:
        return self._wait(self._pitstop.rollback(version, in_flight=in_flight, idempotency_key=idempotency_key))

    def status(self) -> FleetStatus:
        return self._wait(self._pitstop.status())

    def tokenize(self, prompt: Prompt) -> list[int]:
        return self._wait(self._pitstop.tokenize(prompt))

    def close(self) -> None:
        """Ends the thread; the application runs on."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _next(events: AsyncGenerator[TokenEvent, None]) -> TokenEvent | None:
    return await anext(events, None)


def _joined(events: Sequence[TokenEvent]) -> Completion:
    spans: list[WeightSpan] = []
    for span in (span for event in events for span in event.weight_versions):
        is_same = bool(spans) and spans[-1].version == span.version
        spans.append(replace(spans.pop(), end=span.end) if is_same else span)
    return Completion(
        text="".join(event.text for event in events),
        prompt_ids=events[0].prompt_ids,
        token_ids=[token_id for event in events for token_id in event.token_ids],
        logprobs=[logprob for event in events for logprob in event.logprobs],
        weight_versions=tuple(spans),
        finish_reason=events[-1].finish_reason,
        num_cached_tokens=max(event.num_cached_tokens for event in events),
    )
